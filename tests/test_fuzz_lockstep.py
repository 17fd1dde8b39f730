"""The lockstep: each wrong target is caught as its story says, checks run in order, choices are adopted or refused."""

import itertools
from contextlib import suppress
from dataclasses import replace

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import Lockstep, TargetRaised
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.ops import (
    Abort,
    Alloc,
    AllocItem,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Peek,
    Release,
    Reset,
    Retract,
    Submit,
)
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.replay import run_ops
from kvlockstep.fuzz.targets import base, wrong
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.targets.wrong import WRONG
from kvlockstep.invariants import FULL, Violation
from kvlockstep.invariants.agreement import ChoiceIllegal, OutcomeDiffers, RequestsDiffer, TreeDiffers
from kvlockstep.invariants.content import ContentWrong, MatchedUncommitted
from kvlockstep.invariants.in_flight import InFlightDisturbed
from kvlockstep.invariants.ownership import PageLeaked
from kvlockstep.invariants.promises import AllocPromiseBroken, EvictReportWrong, RefusalChangedState
from kvlockstep.invariants.sizes import SizesDoNotRecount

CONFIG = CacheConfig(page_size=2, n_pages=6, n_rows=3, max_context_len=8)
LORA = ("lora", None, ())
CAUGHT = {cls: laws for cls, laws in WRONG.items() if laws}


def started(name, tokens, **submit):
    """Operations that bring a request to RUNNING with all its tokens computed."""
    return [
        Submit(name, tuple(tokens), **submit),
        Match(name),
        Alloc((AllocItem(name, len(tokens)),)),
        Commit(name, len(tokens)),
    ]


def raised_by(ops, factory, config=CONFIG):
    """Run a trace and return the violation that its last operation uncovers."""
    run = run_ops(config, ops, factory)
    assert run.violation is not None, "the trace ran without a violation"
    assert run.steps == len(ops), f"operation {run.steps - 1} already failed: {run.violation}"
    return run.violation


def run_all(lockstep, ops):
    return [lockstep.run(op).refused for op in ops]


TRACES = {
    wrong.WritesLate: started("r0", (1, 2)),
    wrong.WritesOneSlotMore: started("r0", (1, 2, 3)),
    wrong.FindsOtherNamespaces: [
        *started("r0", (1, 2, 3)),
        Release("r0"),
        Submit("r1", (1, 2, 3), LORA),
        Match("r1"),
    ],
    wrong.CountsOneSlotMore: [Submit("r0", (1,)), Match("r0")],
    wrong.LeaksOnAbort: [*started("r0", (1, 2, 3)), Abort("r0")],
    wrong.FreesPartialPageTwice: [*started("r0", (1, 2, 3)), Release("r0")],
    wrong.RaisesKeyError: [Submit("r0", (1,)), Match("r0"), Retract("r0")],
    wrong.BlamesPagesForRows: [
        *[op for i in range(3) for op in started(f"r{i}", (1,))],
        Submit("r3", (1,)),
        Match("r3"),
        Alloc((AllocItem("r3", 1),)),
    ],
}


class StopCase(BaseException):
    """Ends the cases at the first violation."""


class Cases:
    """Runs drawn operations on fresh targets and keeps the first violation."""

    config = None

    def __init__(self, factory):
        self.factory = factory
        self.capabilities = factory(CONFIG).capabilities
        self.violation = None
        self.n_done = 0

    def start(self, config):
        return Lockstep(config, self.factory(config))

    def run(self, lockstep, op):
        try:
            self.n_done += lockstep.run(op).refused is None
        except Violation as violation:
            self.violation = violation
            raise StopCase from violation

    def first_violation(self, seed, n_cases=150):
        """Draw cases in batches, as a worker does: within one batch Hypothesis keeps to what it drew first."""
        with suppress(StopCase):
            for batch in range(0, n_cases, 20):
                run_cases(self, (seed << 20) + batch, min(20, n_cases - batch), 60)
        return self.violation


# Wrong targets


@pytest.mark.parametrize("factory", CAUGHT, ids=lambda cls: cls.__name__)
def test_wrong_target_is_caught_by_a_short_trace_as_its_story_says(factory):
    assert type(raised_by(TRACES[factory], factory)) is CAUGHT[factory][0]


@pytest.mark.parametrize("factory", CAUGHT, ids=lambda cls: cls.__name__)
def test_short_trace_of_wrong_target_is_clean_on_the_honest_one(factory):
    run = run_ops(CONFIG, TRACES[factory], ReferenceTarget)

    assert run.violation is None


@pytest.mark.parametrize("factory", CAUGHT, ids=lambda cls: cls.__name__)
def test_wrong_target_is_found_from_three_seeds_as_its_story_says(factory):
    found = [type(Cases(factory).first_violation(seed)) for seed in (0, 1, 2)]

    assert set(found) <= set(CAUGHT[factory])


def test_legal_but_random_pages_break_no_law():
    cases = Cases(wrong.HandsOutRandomPages)

    assert cases.first_violation(0, n_cases=15) is None
    assert cases.n_done > 100


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_wrong_target_has_a_story_and_is_found_by_name(cls):
    make = factory_for(f"kvlockstep.fuzz.targets.wrong:{cls.__name__}")

    assert isinstance(make(CONFIG), cls)
    assert cls.__doc__ != ReferenceTarget.__doc__
    assert len(cls.__doc__.splitlines()) == 1


# Order of checks, and the text


class LeaksAndMiscounts(wrong.LeaksOnAbort):
    """Breaks law 1 and law 6 in one operation, and differs from the model."""

    def snapshot(self):
        snapshot = super().snapshot()
        if not snapshot.requests:
            snapshot.pools[FULL].evictable += 1
        return snapshot


def test_charter_law_is_named_before_other_laws_and_the_model():
    assert type(raised_by([Evict(1)], LeaksAndMiscounts)) is SizesDoNotRecount
    assert type(raised_by([*started("r0", (1, 2, 3)), Abort("r0")], LeaksAndMiscounts)) is PageLeaked


class RefusesWithRoom(ReferenceTarget):
    def alloc(self, batch):
        raise base.OutOfPages("no")


def test_promise_is_named_before_the_model_when_alloc_refuses_with_room():
    ops = [Submit("r0", (1,)), Match("r0"), Alloc((AllocItem("r0", 1),))]

    assert type(raised_by(ops, RefusesWithRoom)) is AllocPromiseBroken


@pytest.mark.parametrize(
    "batch",
    [(), (AllocItem("r9", 1),), (AllocItem("r0", 9),), (AllocItem("r0", 0),), (AllocItem("r0", 1),) * 2],
    ids=["empty", "unknown", "too many tokens", "no tokens", "twice"],
)
def test_wrong_reason_breaks_no_promise_when_alloc_was_refused_anyway(batch):
    violation = raised_by([Submit("r0", (1,)), Match("r0"), Alloc(batch)], RefusesWithRoom)

    assert type(violation) is OutcomeDiffers
    assert violation.roles[1] == "OutOfPages"


def test_message_gives_law_facts_step_and_config():
    violation = raised_by([*started("r0", (1, 2, 3)), Abort("r0")], wrong.LeaksOnAbort)

    lines = str(violation).splitlines()
    assert lines[0] == "PageLeaked: page 2 has 0 owners, expected 1"
    assert lines[1].startswith("  was       request r0")
    assert lines[-2:] == [
        "  step      4: abort r0",
        "  config    page_size=2 n_pages=6 n_rows=3 max_context_len=8 target=reference",
    ]


def test_operation_is_in_the_log_before_it_runs():
    written = []

    class Log:
        def write(self, op):
            written.append(op)

    ops = TRACES[wrong.RaisesKeyError]
    run_ops(CONFIG, ops, wrong.RaisesKeyError, log=Log())

    assert written == ops


# NEW requests are the model's alone


class Recording(ReferenceTarget):
    """Writes down the name of each operation that reaches it."""

    def __init__(self, config):
        super().__init__(config)
        self.calls = []

    def __getattribute__(self, name):
        if name in ("peek", "match", "alloc", "commit", "checkpoint", "release", "abort", "retract", "evict", "reset"):
            object.__getattribute__(self, "calls").append(name)
        return object.__getattribute__(self, name)


@pytest.mark.parametrize(
    ("op", "refused"),
    [
        (Submit("r0", (1,)), "WrongState"),
        (Submit("r1", ()), "BadArgument"),
        (Alloc((AllocItem("r0", 1),)), "WrongState"),
        (Alloc((AllocItem("r9", 1), AllocItem("r0", 1))), "UnknownRequest"),
        (Alloc((AllocItem("r0", 1), AllocItem("r0", 1))), "DuplicateInBatch"),
        (Commit("r0", 1), "WrongState"),
        (Checkpoint("r0"), "WrongState"),
        (Release("r0"), "WrongState"),
        (Retract("r0", True), "WrongState"),
        (Abort("r0"), None),
        (Peek("r9"), "UnknownRequest"),
        (Match("r9"), "UnknownRequest"),
    ],
    ids=repr,
)
def test_operation_on_new_request_is_settled_by_the_model_alone(op, refused):
    target = Recording(CONFIG)
    lockstep = Lockstep(CONFIG, target)
    lockstep.run(Submit("r0", (1, 2)))

    assert lockstep.run(op).refused == refused
    assert target.calls == []


@pytest.mark.parametrize(
    "op",
    [
        Peek("r0"),
        Match("r0"),
        Alloc(()),
        Evict(1),
        Reset(),
        Commit("r9", 1),
        Checkpoint("r9"),
        Release("r9"),
        Abort("r9"),
        Retract("r9"),
        Alloc((AllocItem("r9", 1),)),
    ],
    ids=repr,
)
def test_operation_that_a_cache_could_answer_reaches_the_target(op):
    target = Recording(CONFIG)
    lockstep = Lockstep(CONFIG, target)
    lockstep.run(Submit("r0", (1, 2)))
    lockstep.run(op)

    assert target.calls == [type(op).__name__.lower()]


class KeepsWhatItIsGiven(ReferenceTarget):
    """Keeps and changes the list of tokens that it was called with."""

    def match(self, request, tokens, namespace, priority, private):
        matched_len = super().match(request, tokens, namespace, priority, private)
        self.kept = tokens
        tokens.append(0)
        return matched_len


def test_target_does_not_see_the_lists_of_the_model():
    target = KeepsWhatItIsGiven(CONFIG)
    lockstep = Lockstep(CONFIG, target)
    run_all(lockstep, [*started("r0", (1, 2))[:3], Commit("r0", 2, (5,))])

    assert target.kept == [1, 2, 0]
    assert lockstep.model.requests["r0"].tokens == [1, 2, 5]


# In flight, refused, private


def test_pending_abort_keeps_everything_until_its_commit_lands():
    lockstep = Lockstep(CONFIG, ReferenceTarget(CONFIG))
    for op in started("r0", (1, 2, 3))[:3]:
        lockstep.run(op)
    held = lockstep.now.pools[FULL].free_pages

    for _ in range(2):
        assert lockstep.run(Abort("r0")).refused is None
        assert lockstep.now.pools[FULL].free_pages == held
        assert lockstep.now.requests[0].state == "IN_FLIGHT"
    assert lockstep.run(Submit("r0", (1,))).refused == "WrongState"
    assert lockstep.run(Commit("r0", 1)).refused == "BadArgument"
    assert lockstep.run(Commit("r0", 3, (4,))).refused is None
    assert lockstep.now.requests == lockstep.now.nodes == []
    assert len(lockstep.now.pools[FULL].free_pages) == 6
    assert lockstep.holds == {}


class AbortsAtOnce(ReferenceTarget):
    def abort(self, request):
        r = self.cache.requests.get(request)
        if r is not None and r.state == "IN_FLIGHT":
            r.state = "RUNNING"
        super().abort(request)


def test_abort_that_does_not_wait_disturbs_the_pass_in_flight():
    assert type(raised_by([*started("r0", (1, 2, 3))[:3], Abort("r0")], AbortsAtOnce)) is InFlightDisturbed


def test_refused_commit_does_not_end_what_a_pass_in_flight_holds():
    ops = [*started("r0", (1, 2, 3))[:3], Commit("r0", 9), Abort("r0")]

    assert type(raised_by(ops, AbortsAtOnce)) is InFlightDisturbed


class ShowsNoGenerations(ReferenceTarget):
    """Does not count how often a page came back, and loses the pages of a pass in flight."""

    def evict(self, n_slots):
        r = self.cache.requests["r0"]
        self.cache.rows.pages_of[r.row][0] = 5
        self.cache.pages.owners = {5: "r0", 2: "r0"}
        return []

    def snapshot(self):
        snapshot = super().snapshot()
        snapshot.pools[FULL].page_generations = None
        return snapshot


def test_pages_of_a_pass_in_flight_are_remembered_when_generations_are_not_shown():
    lockstep = Lockstep(CONFIG, ShowsNoGenerations(CONFIG))
    run_all(lockstep, started("r0", (1, 2, 3))[:3])

    assert sorted(lockstep.holds["r0"].page_generations) == [1, 2]
    with pytest.raises(InFlightDisturbed):
        lockstep.run(Evict(1))


class RaisesGenerationWhenRefusing(ReferenceTarget):
    def release(self, request):
        try:
            super().release(request)
        except base.Refused:
            self.cache.rows.generations[1] += 1
            raise


def test_refusal_with_a_side_effect_is_named_as_such():
    ops = [Submit("r0", (1,)), Match("r0"), Release("r0")]

    assert type(raised_by(ops, RaisesGenerationWhenRefusing)) is RefusalChangedState


class MatchesPrivate(ReferenceTarget):
    def match(self, request, tokens, namespace, priority, private):
        return super().match(request, tokens, namespace, priority, False)


def test_private_request_that_matches_reads_content_of_others():
    ops = [*started("r0", (1, 2, 3)), Release("r0"), Submit("r1", (1, 2, 3), private=True), Match("r1")]

    assert type(raised_by(ops, MatchesPrivate)) is MatchedUncommitted


@pytest.mark.parametrize(
    ("last", "law"),
    [(Checkpoint("r0"), RequestsDiffer), (Release("r0"), TreeDiffers), (Retract("r0", True), TreeDiffers)],
    ids=["checkpoint", "release", "retract"],
)
def test_private_request_that_publishes_differs_at_once(last, law):
    """Before anyone can read what it published; so no law about content comes into it."""
    ops = [*started("r0", (1, 2, 3), private=True), last]

    assert type(raised_by(ops, MatchesPrivate)) is law


# A target that raises, or returns something else


class Panic(BaseException):
    """As a panic in a Rust extension, it is no Exception."""


@pytest.mark.parametrize(
    ("method", "error"),
    [("alloc", KeyError), ("alloc", Panic)]
    + [
        (method, error)
        for method in ("snapshot", "write_kv", "read_kv", "read_slots")
        for error in (KeyError, Panic, base.OutOfPages)
    ],
)
def test_anything_a_target_raises_is_a_violation_with_its_type_as_role(method, error):
    target = ReferenceTarget(CONFIG)
    lockstep = Lockstep(CONFIG, target)

    def fail(*arguments):
        raise error("r0")

    setattr(target, method, fail)
    with pytest.raises(TargetRaised) as caught:
        run_all(lockstep, started("r0", (1,)))
    assert caught.value.roles == (error.__name__,)
    assert dict(caught.value.facts)["raised at"].endswith("in fail")


def test_snapshot_of_another_type_is_named_when_the_first_one_was_right():
    target = ReferenceTarget(CONFIG)
    lockstep = Lockstep(CONFIG, target)
    target.snapshot = dict

    with pytest.raises(OutcomeDiffers, match="snapshot returned no Snapshot"):
        run_all(lockstep, started("r0", (1,)))


def spoil(snapshot, *path, value):
    *parts, last = path
    for part in parts:
        snapshot = getattr(snapshot, part) if isinstance(part, str) else snapshot[part]
    if isinstance(last, str):
        setattr(snapshot, last, value)
    else:
        snapshot[last] = value


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("rows", 0), {}, "rows[0]: expected a view with row, got dict {}"),
        (("rows", 0, "slots"), (1, 2), "rows[0].slots: expected a list of int, got (1, 2)"),
        (("requests", 0, "state"), "running", "requests[0].state: expected one of MATCHED, RUNNING, IN_FLIGHT"),
        (("requests", 0, "state"), None, "requests[0].state: expected one of MATCHED, RUNNING, IN_FLIGHT, got None"),
        (("nodes", 0, "slots"), [2, 3], "nodes[0].slots: expected a dict of lists of int by pool, got [2, 3]"),
        (("nodes", 0, "lock_ref"), None, "nodes[0].lock_ref: expected an int, got None"),
        (("nodes", 0, "namespace"), "lora", "nodes[0].namespace: expected a tuple of three, got 'lora'"),
        (("row_generations",), [0], "row_generations: expected n_rows + 1 = 4 entries, got 1"),
        (("evictable_nodes",), ["a"], "evictable_nodes: expected a list of int, got list ['a']"),
    ],
)
def test_malformed_part_of_a_snapshot_is_named_as_the_targets(path, value, text):
    class Malformed(ReferenceTarget):
        def snapshot(self):
            snapshot = super().snapshot()
            if snapshot.nodes and snapshot.rows:
                spoil(snapshot, *path, value=value)
            return snapshot

    violation = raised_by([*started("r0", (1, 2, 3)), Checkpoint("r0")], Malformed)

    assert type(violation) is OutcomeDiffers
    assert violation.headline.startswith(f"snapshot is malformed: {text}")


@pytest.mark.parametrize("method", ["read_kv", "read_slots"])
def test_reading_of_another_type_is_named_as_the_targets(method):
    target = ReferenceTarget(CONFIG)
    lockstep = Lockstep(CONFIG, target)
    setattr(target, method, lambda *arguments: (1, 2))

    with pytest.raises(TargetRaised, match="returned tuple, expected a list of plain ints"):
        run_all(lockstep, started("r0", (1, 2)))


def test_crash_says_what_the_model_expected():
    class Raises(ReferenceTarget):
        def alloc(self, batch):
            raise RuntimeError("CUDA out of memory")

    facts = dict(raised_by(started("r0", (1, 2))[:3], Raises).facts)
    refused = dict(raised_by(started("r0", (1,) * 8)[:3], Raises, replace(CONFIG, n_pages=3)).facts)

    assert facts["expected"] == "done"
    assert refused["expected"] == "refused with OutOfPages"


class ReadsRowsOnly(ReferenceTarget):
    """Promises "kv" and has no way to read a slot that stands in no row."""

    @property
    def read_slots(self):
        raise AttributeError("read_slots")

    def read_kv(self, row, length):
        return [self.kv[slot] for slot in self.cache.rows.slots(row, 0, length)]


class ReadsRowsWrong(ReadsRowsOnly):
    def read_kv(self, row, length):
        return [value ^ 1 for value in super().read_kv(row, length)]


def test_pool_that_cannot_be_read_leaves_the_reads_through_rows():
    assert run_ops(CONFIG, started("r0", (1, 2)), ReadsRowsOnly).violation is None
    assert type(raised_by(started("r0", (1, 2)), ReadsRowsWrong)) is ContentWrong


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_during_an_operation_is_let_through(error):
    target = ReferenceTarget(CONFIG)
    lockstep = Lockstep(CONFIG, target)

    def fail(n):
        raise error

    target.evict = fail
    with pytest.raises(error):
        lockstep.run(Evict(1))


class Returns(ReferenceTarget):
    """Changes what an operation returns."""

    change = staticmethod(lambda result: result)

    def match(self, *arguments):
        return self.change(super().match(*arguments))

    def evict(self, n_slots):
        return self.change(super().evict(n_slots))

    def alloc(self, batch):
        return self.change(super().alloc(batch))


@pytest.mark.parametrize(
    ("ops", "change"),
    [
        ([Evict(1)], lambda result: None),
        ([Evict(1)], lambda result: ()),
        ([Evict(1)], lambda result: [(2, 3)]),
        ([Evict(1)], lambda result: [[2.0]]),
        (started("r0", (1,))[:2], lambda result: None),
        (started("r0", (1,))[:2], lambda result: False),
        (started("r0", (1,))[:3], lambda result: result.write_sets if result else result),
    ],
)
def test_result_of_another_type_is_named_before_any_law(ops, change):
    factory = type("Changed", (Returns,), {"change": staticmethod(change)})

    violation = raised_by(ops, factory)
    assert (type(violation), violation.roles) == (OutcomeDiffers, ("type",))


class WritesOnePositionLess(ReferenceTarget):
    """Consistent in itself: the row, the lengths and the write set are all one position short."""

    def alloc(self, batch):
        return super().alloc([AllocItem(item.request, max(1, item.n - 1), item.drafts) for item in batch])


@pytest.mark.parametrize("n", [2, 3])
def test_write_set_of_another_length_differs_when_no_law_is_broken(n):
    violation = raised_by(started("r0", (1, 2, 3)[:n])[:3], WritesOnePositionLess)

    assert type(violation) is OutcomeDiffers
    assert violation.headline == "alloc gave different positions to write"


# What a target does not show


def hiding(*parts, kv=True):
    """Return a reference target whose snapshots do not show some parts."""

    class Hiding(ReferenceTarget):
        def __init__(self, config):
            super().__init__(config)
            if not kv:
                self.capabilities -= {"kv"}

        def snapshot(self):
            snapshot = super().snapshot()
            places = [snapshot, *snapshot.pools.values(), *(snapshot.nodes or ()), *(snapshot.requests or ())]
            for place, part in itertools.product(places, parts):
                if hasattr(place, part):
                    setattr(place, part, None)
            return snapshot

    return Hiding


@pytest.fixture(scope="module")
def drawn_traces():
    """Configs with operations drawn for them on the honest target."""
    traces = []

    class Traces(Cases):
        def start(self, config):
            traces.append((config, []))
            return super().start(config)

        def run(self, lockstep, op):
            traces[-1][1].append(op)
            super().run(lockstep, op)

    assert Traces(ReferenceTarget).first_violation(3, n_cases=6) is None
    return traces


PARTS = [
    *(("rows",), ("free_rows",), ("row_generations",), ("requests",), ("nodes",), ("evictable_nodes",)),
    *(("root_lock_ref",), ("max_context_len",), ("free_pages",), ("page_generations",), ("available",)),
    *(("evictable",), ("protected",), ("stamp",), ("created",), ("hits",), ("priority",), ("children",), ("anchor",)),
    *(("rows", "requests"), ("requests", "nodes"), ("rows", "requests", "nodes", "free_rows", "row_generations")),
]


@pytest.mark.parametrize("parts", PARTS, ids=" ".join)
def test_part_that_is_not_shown_is_no_violation(drawn_traces, parts):
    for config, ops in drawn_traces:
        run = run_ops(config, ops, hiding(*parts))
        assert run.violation is None, str(run.violation)


def test_target_without_kv_is_no_violation_and_still_found_to_match_what_is_not_its_own(drawn_traces):
    for config, ops in drawn_traces:
        assert run_ops(config, ops, hiding(kv=False)).violation is None

    class WithoutKv(wrong.FindsOtherNamespaces):
        def __init__(self, config):
            super().__init__(config)
            self.capabilities -= {"kv"}

    assert type(raised_by(TRACES[wrong.FindsOtherNamespaces], WithoutKv)) is MatchedUncommitted


def test_later_request_of_a_name_has_its_own_content():
    ops = [
        Submit("r0", (1, 2, 3)),
        Peek("r0"),
        Abort("r0"),
        *started("r0", (2, 1)),
        Release("r0"),
        *started("r0", (3, 3)),
    ]

    assert run_ops(CONFIG, ops, ReferenceTarget).violation is None


# Conformance


class EvictsNewestFirst(ReferenceTarget):
    conformance = "legal"

    def __init__(self, config):
        super().__init__(replace(config, policy="mru"))


class EvictsNewestFirstAsExact(EvictsNewestFirst):
    conformance = "exact"


class EvictsAhead(ReferenceTarget):
    """Evicts all it can before it says that there is no room."""

    conformance = "legal"

    def alloc(self, batch):
        try:
            return super().alloc(batch)
        except base.OutOfPages as refused:
            raise base.OutOfPages(str(refused), self.cache.evict(1000)) from None


class EvictsAheadAsExact(EvictsAhead):
    conformance = "exact"


class EvictsAheadInSilence(EvictsAhead):
    def alloc(self, batch):
        try:
            return super().alloc(batch)
        except base.OutOfPages:
            raise base.OutOfPages("no") from None


TWO_LEAVES = [*started("r0", (1, 1, 1)), Release("r0"), *started("r1", (2, 2, 2)), Release("r1")]
NO_ROOM = [*TWO_LEAVES, *started("r2", (3,) * 8), Submit("r3", (4,) * 8), Match("r3"), Alloc((AllocItem("r3", 8),))]


@pytest.mark.parametrize("factory", [EvictsNewestFirst, EvictsAhead])
def test_other_choices_pass_when_the_target_promises_legal_ones_only(factory):
    cases = Cases(factory)
    assert cases.first_violation(0, n_cases=40) is None
    assert cases.n_done > 500

    assert run_ops(CONFIG, [*TWO_LEAVES, Evict(1), *NO_ROOM], factory).violation is None


def test_legal_target_evicts_ahead_of_the_refusal_in_the_trace_used_here():
    lockstep = Lockstep(CONFIG, EvictsAhead(CONFIG))

    assert run_all(lockstep, NO_ROOM)[-1] == "OutOfPages"
    assert lockstep.now.nodes == []


@pytest.mark.parametrize(
    ("factory", "ops", "expected"),
    [
        (EvictsNewestFirstAsExact, [*TWO_LEAVES, Evict(1)], (OutcomeDiffers, "evict gave different results")),
        (
            EvictsNewestFirstAsExact,
            [*TWO_LEAVES, Submit("r2", (3,) * 8), Match("r2"), Alloc((AllocItem("r2", 8),)), *started("r3", (4,))[:3]],
            (OutcomeDiffers, "alloc evicted other nodes"),
        ),
        (EvictsAheadAsExact, NO_ROOM, (OutcomeDiffers, "a refused operation evicted")),
    ],
    ids=["evict", "alloc", "refusal"],
)
def test_other_choices_differ_when_the_target_promises_exact_ones(factory, ops, expected):
    violation = raised_by(ops, factory)

    assert (type(violation), violation.headline) == expected


def test_eviction_ahead_of_a_refusal_must_be_reported():
    assert type(raised_by(NO_ROOM, EvictsAheadInSilence)) is EvictReportWrong


class ShowsNoHeldRow(ReferenceTarget):
    def snapshot(self):
        snapshot = super().snapshot()
        snapshot.requests, snapshot.free_rows, snapshot.rows = None, None, []
        return snapshot


def test_row_that_is_not_shown_is_no_legal_choice():
    assert type(raised_by(started("r0", (1,))[:3], ShowsNoHeldRow)) is ChoiceIllegal
