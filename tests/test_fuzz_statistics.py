"""Counts travel as JSON and add up; and a run's counts and reports give each exit code with its reason."""

import json

import pytest

from kvlockstep.fuzz.canary import Canary
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.crew import WorkerState, follow
from kvlockstep.fuzz.exits import BROKEN, CLEAN, CRASHED, UNKNOWN, USAGE, VIOLATION
from kvlockstep.fuzz.label_needs import NEEDED_CAPABILITIES
from kvlockstep.fuzz.labels import LABELS, Memory, name_of
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.ops import Alloc, AllocItem, Commit, Evict, Match, Release, Submit
from kvlockstep.fuzz.replay import run_ops
from kvlockstep.fuzz.statistics import CaseWatcher, Statistics
from kvlockstep.fuzz.target_check import CAPABILITIES as KNOWN
from kvlockstep.fuzz.target_check import defect_of
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.verdict import merged, remarks, shortfalls, verdict_of
from kvlockstep.fuzz.worker import Order, Worker
from kvlockstep.invariants import FULL, Observation

ONE_PAGE = CacheConfig(page_size=2, n_pages=1, n_rows=1, max_context_len=4)
FILLED = [Submit("r0", (1, 2)), Match("r0"), Alloc((AllocItem("r0", 2),)), Commit("r0", 2)]
NO_ROW = [*FILLED, Submit("r1", (3,)), Match("r1"), Alloc((AllocItem("r1", 1),))]


def good_statistics(done=20_000, cases=100):
    """Counts of a run that deserves to be called clean."""
    statistics = Statistics(cases=cases, cases_under_pressure=cases // 2, distinct_cases=cases)
    statistics.outcomes["alloc", "done"] = done
    statistics.outcomes["alloc", "OutOfPages"] = 7
    statistics.labels.update({name_of(label): done for label in LABELS})
    return statistics


CAPABILITIES = sorted({name for names in NEEDED_CAPABILITIES.values() for name in names})


FOUND = Canary("WriteSlotRepeated", 13, 0.1)


def worker(lane="torch", **known):
    order = Order("gpu_impl", lane, 60.0, 0, "out", lane or "worker")
    usual = {"statistics": good_statistics(), "ended": True, "capabilities": CAPABILITIES, "canary": FOUND}
    return WorkerState(order, lane, **{**usual, **known})


# Counting


def test_statistics_survive_json():
    statistics = run_ops(ONE_PAGE, NO_ROW, ReferenceTarget).statistics

    assert Statistics.from_json(json.loads(json.dumps(statistics.to_json()))) == statistics
    assert Statistics.from_json(Statistics().to_json()) == Statistics()


def test_statistics_add_up():
    one, other = run_ops(ONE_PAGE, NO_ROW, ReferenceTarget).statistics, good_statistics()
    total = Statistics()
    total.add(one)
    total.add(other)

    assert total.done == one.done + other.done == 6 + 20_000
    assert total.refused == one.refused + other.refused == 1 + 7
    assert total.outcomes["alloc", "done"] == 20_001
    assert total.labels["out of rows"] == one.labels["out of rows"] + 20_000 == 20_001
    assert (total.cases, total.cases_under_pressure, total.distinct_cases) == (101, 51, 100)


def test_adding_changes_only_the_total():
    one = good_statistics()
    before = one.to_json()
    Statistics().add(one)
    merged([worker(statistics=one), worker(statistics=one)])

    assert one.to_json() == before


def test_reading_a_count_that_is_not_there_adds_no_entry():
    statistics = Statistics()
    shortfalls([worker(statistics=statistics)], 60.0)

    assert statistics == Statistics()


@pytest.mark.parametrize(
    ("ops", "pressed"),
    [(FILLED, 0), (NO_ROW, 1), ([*FILLED, Release("r0"), Evict(1)], 1), ([*FILLED, Release("r0"), Evict(0)], 0)],
    ids=["roomy", "refused a row", "evicted", "refused for another reason"],
)
def test_case_is_under_pressure_when_it_evicts_or_is_refused_room(ops, pressed):
    statistics = run_ops(ONE_PAGE, ops, ReferenceTarget).statistics

    assert (statistics.cases, statistics.cases_under_pressure) == (1, pressed)


def test_case_under_pressure_twice_counts_once():
    statistics = run_ops(ONE_PAGE, [*NO_ROW, NO_ROW[-1], Release("r0"), Evict(1)], ReferenceTarget).statistics

    assert statistics.cases_under_pressure == 1
    assert statistics.outcomes["alloc", "OutOfRows"] == 2


def test_refused_operation_counts_by_its_reason():
    statistics = Statistics()
    watch = CaseWatcher(statistics, Memory(ONE_PAGE))
    snapshot = ReferenceTarget(ONE_PAGE).snapshot()
    watch(Match("r9"), Observation(0, "match", ["r9"], 0, "UnknownRequest", snapshot, snapshot))

    assert dict(statistics.outcomes) == {("match", "UnknownRequest"): 1}
    assert (statistics.done, statistics.refused) == (0, 1)


# Verdicts


def only_line(verdict):
    (line,) = verdict.lines
    return line


def test_clean_run_says_so():
    verdict = verdict_of([worker("torch"), worker("interpret")], 60.0)

    assert verdict.code == CLEAN == 0
    assert only_line(verdict).startswith("clean")


def test_violation_that_replays_decides_over_everything_else():
    found = worker(failure={"signature": "PageLeaked.abort"}, replays=True, statistics=Statistics())
    others = [
        worker(broken="could not write out: No space left on device"),
        worker(trouble="died with status -11"),
        worker(unusable="lane 'cuda': torch finds no GPU"),
        worker(failure={"signature": "PageLeaked.abort"}, replays=False),
    ]
    verdict = verdict_of([*others, found], 60.0)

    assert verdict.code == VIOLATION == 1
    assert "1 of 5 workers found a violation" in verdict.lines[0]


def test_unusable_target_is_wrong_usage_and_named_once():
    text = "target 'x:make': importing x failed"
    verdict = verdict_of([worker("torch", unusable=text), worker("interpret", unusable=text)], 60.0)

    assert verdict.code == USAGE == 2
    assert verdict.lines == [text]


def test_harness_that_failed_is_named_before_a_worker_that_died():
    verdict = verdict_of([worker(trouble="died"), worker(broken="could not write out: No space left on device")], 60.0)

    assert verdict.code == BROKEN == 12
    assert verdict.lines[0] == "could not write out: No space left on device"


def test_worker_that_died_is_named_with_what_happened():
    verdict = verdict_of([worker("torch"), worker("interpret", trouble="died with status -11")], 60.0)

    assert verdict.code == CRASHED == 11
    assert only_line(verdict) == "worker interpret died with status -11"


def test_violation_that_does_not_replay_is_no_violation_and_not_clean():
    verdict = verdict_of([worker(failure={"signature": "PageLeaked.abort"}, replays=False)], 60.0)

    assert verdict.code == UNKNOWN == 10
    assert "did not replay" in only_line(verdict)


@pytest.mark.parametrize(
    ("lane", "seconds", "floor"),
    [("torch", 60.0, 10_000), ("interpret", 60.0, 1_000), ("torch", 6.0, 1_000), (None, 60.0, 10_000)],
)
def test_too_few_operations_are_unknown(lane, seconds, floor):
    enough, too_few = good_statistics(floor), good_statistics(floor - 1)

    assert verdict_of([worker(lane, statistics=enough)], seconds).code == CLEAN
    verdict = verdict_of([worker(lane, statistics=too_few)], seconds)
    assert verdict.code == UNKNOWN
    assert f"{floor - 1} operations done, expected {floor}" in only_line(verdict)


def test_slow_lane_is_not_made_up_for_by_a_fast_one():
    slow = good_statistics(10)
    verdict = verdict_of([worker("torch"), worker("interpret", statistics=slow)], 60.0)

    assert verdict.code == UNKNOWN
    assert only_line(verdict).startswith("worker interpret: 10 operations done")


@pytest.mark.parametrize(("pressed", "code"), [(20, CLEAN), (19, UNKNOWN), (0, UNKNOWN)])
def test_too_little_pressure_is_unknown(pressed, code):
    statistics = good_statistics(cases=100)
    statistics.cases_under_pressure = pressed
    verdict = verdict_of([worker(statistics=statistics)], 60.0)

    assert verdict.code == code
    assert ("evicted or were refused room" in only_line(verdict)) == (code == UNKNOWN)


@pytest.mark.parametrize("label", LABELS, ids=lambda label: label.__name__)
def test_label_that_was_never_reached_is_unknown(label):
    statistics = good_statistics()
    del statistics.labels[name_of(label)]

    verdict = verdict_of([worker(statistics=statistics)], 60.0)
    assert verdict.code == UNKNOWN
    assert only_line(verdict) == f"never reached: {name_of(label)}"
    assert verdict_of([worker(statistics=statistics), worker("interpret")], 60.0).code == CLEAN


@pytest.mark.parametrize(
    ("label", "capability"),
    [(label, name) for label, names in NEEDED_CAPABILITIES.items() for name in names],
    ids=lambda item: getattr(item, "__name__", item),
)
def test_label_that_needs_what_the_target_lacks_is_not_required(label, capability):
    statistics = good_statistics()
    del statistics.labels[name_of(label)]
    others = sorted({*CAPABILITIES} - {capability})

    assert verdict_of([worker(statistics=statistics, capabilities=others)], 60.0).code == CLEAN


def test_run_without_a_single_case_is_unknown():
    verdict = verdict_of([worker(statistics=Statistics())], 60.0)

    assert verdict.code == UNKNOWN
    assert len(verdict.lines) == 2 + len(LABELS)


def test_charter_law_that_was_not_observed_is_unknown_unless_it_is_accepted():
    blind = worker(unobserved=[(2, "row_starts_with_canonical_slots", ["nodes"]), (8, "reads", ["reads"])])

    refused, accepted = verdict_of([blind], 60.0), verdict_of([blind], 60.0, accepted=(2,))
    assert refused.code == verdict_of([blind], 60.0, accepted=(8,)).code == UNKNOWN
    assert only_line(refused).startswith("law 2 was not observed")
    assert accepted.code == CLEAN
    assert any("law 2" in line for line in accepted.lines)


def test_accepting_a_law_makes_up_for_nothing_else():
    blind = worker(unobserved=[(2, "row_starts_with_canonical_slots", ["nodes"])], statistics=good_statistics(10))

    assert verdict_of([blind], 60.0, accepted=(2,)).code == UNKNOWN


# Reports of a worker


def test_reports_of_a_worker_move_its_state_on():
    state = WorkerState(Order("gpu_impl", "torch", 60.0, 0, "out", "torch"))
    stages = []
    for event in (
        {"event": "ready", "lane": "torch", "capabilities": ["drafts"]},
        {
            "event": "progress",
            "seconds": 1.5,
            "statistics": good_statistics(10).to_json(),
            "unobserved": [],
            "hidden": [],
        },
        {"event": "found", "signature": "PageLeaked.abort", "folder": "out/x", "seconds": 2.0, "operations": 10},
        {"event": "end", "seconds": 3.0, "statistics": good_statistics(11).to_json(), "unobserved": [], "hidden": []},
    ):
        follow(state, event)
        stages.append(state.stage)

    assert stages == ["running", "running", "minimizing", "ended"]
    assert (state.lane, state.seconds, state.statistics.done, state.ended) == ("torch", 3.0, 11, True)
    assert state.failure["signature"] == "PageLeaked.abort"


# Targets that show or promise less


def hiding(*parts):
    """Make a target that does not show some parts."""

    class Hiding(ReferenceTarget):
        def snapshot(self):
            snapshot = super().snapshot()
            for part in parts:
                setattr(snapshot.pools[FULL] if part == "free_pages" else snapshot, part, None)
            return snapshot

    return Hiding


def promising(*names):
    """Make a target that promises these capabilities and no other."""

    class Promising(ReferenceTarget):
        def __init__(self, config):
            super().__init__(config)
            self.capabilities = frozenset(names)

    return Promising


def state_of_run(factory, out, accepted, batches=10):
    """Run batches of cases as a worker does, until all is clean: how far that is depends on no clock."""
    order = Order("mine:make", None, 600.0, 0, str(out), "worker")
    work = Worker(order, factory, lambda event, **facts: None)
    state = WorkerState(order, canary=FOUND)
    follow(state, {"event": "ready", "lane": work.lane, "capabilities": sorted(work.capabilities)})
    for batch in range(batches):
        run_cases(work, batch, n_cases=20, steps=90)
        follow(state, json.loads(json.dumps({"event": "end", **work.facts()})))
        if verdict_of([state], 3.0, accepted).code == CLEAN:
            break
    return state


@pytest.mark.parametrize(
    ("factory", "laws"),
    [
        (hiding("rows"), (1, 2, 3)),
        (hiding("nodes"), (1, 2, 3)),
        (hiding("requests"), (1, 2, 3)),
        (hiding("free_pages"), (1, 3)),
        (promising("kv", "sharing", "policy:lru"), ()),
        (promising("kv", "no_sharing", "policy:lru"), ()),
    ],
    ids=["rows", "nodes", "requests", "free pages", "plain", "pure paged allocator"],
)
def test_target_is_clean_within_seconds_whatever_it_does_not_show_or_promise(tmp_path, factory, laws):
    state = state_of_run(factory, tmp_path, laws)

    assert verdict_of([state], 3.0, laws).lines == [
        "clean: no law was broken, and every required state was reached",
        *(f"clean but for law {law}: not observed, accepted by --accept-unobserved {law}" for law in laws),
    ]
    for law in laws:
        verdict = verdict_of([state], 3.0, set(laws) - {law})
        assert verdict.code == UNKNOWN
        assert only_line(verdict).startswith(f"law {law} was not observed")


def test_target_that_hides_rows_has_the_labels_named_that_are_told_from_rows(tmp_path):
    state = state_of_run(hiding("rows"), tmp_path, (1, 2, 3), batches=1)

    assert state.hidden == ["rows"]
    assert "label not observable: row reused (needs rows)" in remarks([state])


@pytest.mark.parametrize(
    ("names", "defect"),
    [
        (("sharing", "policy:lru"), None),
        (KNOWN, None),
        (("nosharing", "policy:lru"), "capabilities names 'nosharing', which is none: did you mean 'no_sharing'?"),
        (("sharing", "LRU"), "capabilities names 'LRU', which is none: did you mean 'policy:lru'?"),
        (("sharing", "policy:lruu"), "capabilities names 'policy:lruu', which is none: did you mean 'policy:lru'?"),
        (("sharing", "policy:lru", "?"), "capabilities names '?', which is none: expected some of kv, sharing, "),
        (("sharing",), "capabilities names no policy, expected one or more of policy:lru, policy:mru, "),
        (("kv", "policy:lru"), "capabilities names neither 'sharing' (it runs with prefix_sharing=True) nor 'no_sh"),
    ],
)
def test_capabilities_are_known_and_name_a_policy_and_whether_prefixes_are_shared(names, defect):
    config = CacheConfig()
    said = defect_of(promising(*names)(config), config)

    assert said == defect or (said and defect and said.startswith(defect))
