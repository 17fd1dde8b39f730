"""The minimizer: reaches the shortest trace, keeps the cause, saves only what fails, and stops in time."""

from contextlib import suppress
from dataclasses import replace

import pytest

from kvlockstep.fuzz import minimize
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import signature_of
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.minimize import Minimizer
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
    Retract,
    Submit,
    kind_of,
)
from kvlockstep.fuzz.registry import TargetUnusable
from kvlockstep.fuzz.replay import failing_signature
from kvlockstep.fuzz.targets import wrong
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.invariants import Violation

CONFIG = CacheConfig(page_size=2, n_pages=6, n_rows=3, max_context_len=12)
LORA = ("lora", "salt", ("image",))


def started(name, tokens, **submit):
    return [
        Submit(name, tuple(tokens), **submit),
        Match(name),
        Alloc((AllocItem(name, len(tokens)),)),
        Commit(name, len(tokens)),
    ]


class StopCase(BaseException):
    pass


class Finder:
    """Draws cases until one fails; then holds its config and operations."""

    config = None

    def __init__(self, factory):
        self.factory = factory
        self.capabilities = factory(CONFIG).capabilities
        self.signature = None

    def start(self, config):
        self.failing_config, self.ops = config, []
        return Lockstep(config, self.factory(config))

    def run(self, lockstep, op):
        self.ops.append(op)
        try:
            lockstep.run(op)
        except Violation as violation:
            self.signature = signature_of(violation, kind_of(op))
            raise StopCase from violation


def minimizer_of(ops, factory, config=CONFIG, *, seconds=100.0, save=None):
    signature, _ = failing_signature(config, ops, factory)
    assert signature is not None, "the trace to minimize fails"
    return Minimizer(config, tuple(ops), factory, signature, seconds=seconds, save=save)


def assert_fails_as_promised(search):
    """The result fails at its last operation with the signature that was asked for."""
    assert failing_signature(search.config, search.ops, search.factory) == (search.signature, len(search.ops))


SHORTEST = {
    wrong.WritesLate: 4,
    wrong.WritesOneSlotMore: 4,
    wrong.FindsOtherNamespaces: 7,
    wrong.LeaksOnAbort: 5,
    wrong.FreesPartialPageTwice: 5,
    wrong.RaisesKeyError: 3,
    wrong.BlamesPagesForRows: 5,
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("factory", SHORTEST, ids=lambda cls: cls.__name__)
def test_drawn_trace_is_minimized_to_the_shortest_length(factory, seed):
    finder = Finder(factory)
    batch = 0
    while finder.signature is None:
        with suppress(StopCase):
            run_cases(finder, 100 * seed + batch, 20, 60)
        batch += 1
    search = Minimizer(finder.failing_config, tuple(finder.ops), factory, finder.signature, seconds=100.0)

    assert search.run()
    assert len(search.ops) <= SHORTEST[factory]
    assert_fails_as_promised(search)


NOISY = [
    *started("r0", (5, 6, 7, 5, 6), namespace=LORA, priority=3),
    Peek("r0"),
    Checkpoint("r0"),
    *started("r1", (1, 2, 3)),
    Release("r0"),
    Evict(3),
    *started("r2", (9, 8, 7, 6, 5), namespace=LORA, priority=2),
    Match("r9"),
    Abort("r2"),
    Release("r1"),
]


def test_prompts_numbers_and_config_are_minimized_too():
    search = minimizer_of(NOISY, wrong.LeaksOnAbort)

    assert search.run()
    assert search.ops == (*started("r0", (1,))[:3], Commit("r0", 0), Abort("r0"))
    shape = search.config
    assert (shape.page_size, shape.n_pages, shape.n_rows, shape.max_context_len, shape.layers) == (1, 1, 1, 1, 1)


def test_result_has_no_operation_that_could_go():
    search = minimizer_of(NOISY, wrong.LeaksOnAbort)
    search.run()

    for i in range(len(search.ops)):
        without = search.ops[:i] + search.ops[i + 1 :]
        assert failing_signature(search.config, without, wrong.LeaksOnAbort)[0] != search.signature


def test_only_failing_and_ever_smaller_traces_are_saved():
    saved = []
    search = minimizer_of(NOISY, wrong.LeaksOnAbort, save=lambda *trace: saved.append(trace))
    search.run()

    assert saved[-1] == (search.config, search.ops)
    assert len(saved) == len(set(saved))
    for config, ops in saved:
        assert failing_signature(config, ops, wrong.LeaksOnAbort) == (search.signature, len(ops))
    lengths = [len(ops) for _, ops in saved]
    assert lengths == sorted(lengths, reverse=True)


class TwoBugs(wrong.LeaksOnAbort, wrong.RaisesKeyError):
    """With the first pass deleted from the trace below, the retraction fails instead, and earlier."""


LEAK_BEHIND_RETRACT = [*started("r0", (1, 2, 3)), Retract("r0"), *started("r0", (1, 2, 3))[1:], Abort("r0")]


def test_search_does_not_slide_to_a_bug_with_a_shorter_trace():
    assert failing_signature(CONFIG, [*LEAK_BEHIND_RETRACT[:2], Retract("r0")], TwoBugs)[0].startswith("TargetRaised")
    search = minimizer_of(LEAK_BEHIND_RETRACT, TwoBugs)

    assert search.signature.startswith("PageLeaked.abort")
    assert search.run()
    assert len(search.ops) == 5
    assert_fails_as_promised(search)


def test_trace_that_does_not_fail_as_named_is_left_alone():
    saved = []
    ops = tuple(NOISY)
    search = Minimizer(CONFIG, ops, ReferenceTarget, "PageLeaked.abort", seconds=100.0, save=lambda *t: saved.append(t))

    assert search.run() is False
    assert (search.config, search.ops, search.tried, saved) == (CONFIG, ops, 1, [])


class Clock:
    """Time that goes on by a second each time somebody looks."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_search_stops_in_time_and_a_later_one_goes_on_from_what_was_saved(monkeypatch):
    monkeypatch.setattr(minimize, "monotonic", Clock())
    saved = [(CONFIG, tuple(NOISY))]
    n_runs = 0
    finished = False
    while not finished and n_runs < 50:
        config, ops = saved[-1]
        search = minimizer_of(ops, wrong.LeaksOnAbort, config, seconds=30.0, save=lambda *trace: saved.append(trace))
        finished = search.run()
        n_runs += 1

        assert search.tried <= 30
        assert saved[-1] == (search.config, search.ops)
        assert_fails_as_promised(search)
        if saved[-1] == (config, ops):
            break  # another one would do the same

    assert n_runs > 2
    assert len(search.ops) == 5


def test_no_time_means_no_replay_and_the_trace_as_it_was():
    search = minimizer_of(NOISY, wrong.LeaksOnAbort, seconds=-1.0)

    assert search.run() is False
    assert (search.ops, search.tried) == (tuple(NOISY), 0)


def test_config_that_the_target_cannot_be_built_for_is_passed_over():
    def only_pages_of_2(config):
        if config.page_size != 2:
            raise TargetUnusable(f"page_size {config.page_size}: expected 2")
        return wrong.LeaksOnAbort(config)

    search = minimizer_of(NOISY, only_pages_of_2)

    assert search.run()
    assert (search.config.page_size, search.config.n_pages, len(search.ops)) == (2, 1, 5)


class EvictsNewest(ReferenceTarget):
    def __init__(self, config):
        super().__init__(config)
        self.cache.policy = "mru"


def test_minimizer_takes_pages_away_with_the_request_that_filled_them():
    """Without one of four prompts the pool is no longer full, and nothing is evicted, unless it shrinks too."""
    ops = [op for i in range(4) for op in [*started(f"r{i}", (i, i)), Release(f"r{i}")]]
    ops += started("r4", (9, 9))[:3]
    config = CacheConfig(page_size=2, n_pages=4, n_rows=1, max_context_len=4)
    signature, steps = failing_signature(config, ops, EvictsNewest)
    search = Minimizer(config, tuple(ops), EvictsNewest, signature, seconds=60)

    assert (signature, steps) == ("OutcomeDiffers.alloc.victims", len(ops))
    assert search.run()
    assert (len(search.ops), search.config.n_pages) == (13, 2)


def test_minimizer_names_requests_and_tokens_in_order_of_appearance():
    ops = [*started("r5", (9, 4, 9)), Release("r5"), *started("r2", (9, 7)), Abort("r2")]
    signature, _ = failing_signature(CONFIG, ops, wrong.LeaksOnAbort)
    search = Minimizer(CONFIG, tuple(ops), wrong.LeaksOnAbort, signature, seconds=60)

    assert search.run()
    assert search.ops == (Submit("r0", (1,)), Match("r0"), Alloc((AllocItem("r0", 1),)), Commit("r0", 0), Abort("r0"))


class SharesNothing(wrong.LeaksOnAbort):
    def __init__(self, config):
        super().__init__(config)
        self.capabilities = frozenset({"kv", "no_sharing", "policy:fifo"})


def test_minimizer_keeps_what_the_target_promises():
    config = replace(CONFIG, policy="fifo", prefix_sharing=False)
    ops = [*started("r0", (1, 2, 3)), Abort("r0")]
    signature, _ = failing_signature(config, ops, SharesNothing)
    search = Minimizer(config, tuple(ops), SharesNothing, signature, seconds=60)

    assert search.run()
    assert (search.config.policy, search.config.prefix_sharing) == ("fifo", False)


class FailsOnThird(ReferenceTarget):
    """Fails where more than two requests are in one batch."""

    def alloc(self, batch):
        allocated = super().alloc(batch)
        if len(batch) > 2:
            raise KeyError(batch[2].request)
        return allocated


class Recorder:
    """Keeps the operations of all cases."""

    config = CONFIG

    def __init__(self):
        self.capabilities = ReferenceTarget(CONFIG).capabilities
        self.ops = []

    def start(self, config):
        return Lockstep(config, ReferenceTarget(config))

    def run(self, lockstep, op):
        self.ops.append(op)
        lockstep.run(op)


def test_long_trace_is_minimized_in_few_replays_of_few_operations():
    recorder = Recorder()
    run_cases(recorder, 0, 12, 60)
    clean = [op for op in recorder.ops if not (isinstance(op, Alloc) and len(op.batch) > 2)]
    three = [step for name in ("r6", "r7", "r8") for step in (Submit(name, (1, 2)), Match(name))]
    freed = [op for i in range(6) for op in (Abort(f"r{i}"), Commit(f"r{i}", 0))]
    in_one_batch = Alloc(tuple(AllocItem(name, 2) for name in ("r6", "r7", "r8")))
    ops = [*clean[:450], *freed, *three, in_one_batch, *clean[450:]]
    assert len(ops) >= 600
    signature, fails_at = failing_signature(CONFIG, ops, FailsOnThird)
    assert fails_at > 450
    n_run = 0

    def judge(config, candidate):
        nonlocal n_run
        failed, steps = failing_signature(config, candidate, FailsOnThird)
        n_run += steps
        return failed, steps

    search = Minimizer(CONFIG, tuple(ops), FailsOnThird, signature, seconds=1000.0, judge=judge)

    assert search.run()
    assert len(search.ops) == 7
    assert_fails_as_promised(search)
    assert search.tried < 150
    assert n_run < 8 * fails_at


class FailsWithTwoInFlight(ReferenceTarget):
    """A pass lands only where no other one is in flight."""

    def commit(self, request, kept, sampled):
        super().commit(request, kept, sampled)
        if any(one.state == "IN_FLIGHT" for one in self.cache.requests.values()):
            raise KeyError(request)


def test_two_batches_become_one():
    search = minimizer_of([*started("r0", (1,))[:3], *started("r1", (1,))[:3], Commit("r0", 1)], FailsWithTwoInFlight)

    assert search.run()
    assert [kind_of(op) for op in search.ops] == ["submit", "match", "submit", "match", "alloc", "commit"]


class FailsAtSecondPublication(ReferenceTarget):
    n_publications = 0

    def checkpoint(self, request):
        super().checkpoint(request)
        self._count(request)

    def release(self, request):
        super().release(request)
        self._count(request)

    def _count(self, request):
        self.n_publications += 1
        if self.n_publications > 1:
            raise KeyError(request)


@pytest.mark.parametrize("publish", [Checkpoint, Release])
def test_two_requests_become_one_that_is_checkpointed_twice(publish):
    ops = [*started("r0", (1, 2)), publish("r0"), *started("r1", (3, 4, 5, 6)), Checkpoint("r1")]
    search = minimizer_of(ops, FailsAtSecondPublication)

    assert search.run()
    assert [kind_of(op) for op in search.ops] == ["submit", "match", "alloc", "commit", "checkpoint", "checkpoint"]
