"""Classes of states, transitions between them, and the search that goes back to what was met least often."""

from dataclasses import replace

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.labels import Memory
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.ops import Alloc, AllocItem, Checkpoint, Commit, Evict, Match, Release, Submit
from kvlockstep.fuzz.search import LONGEST, N_DRAWN, Frontier
from kvlockstep.fuzz.states import StateClass, state_class
from kvlockstep.fuzz.statistics import CaseWatcher, Statistics
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.worker import Order, Worker
from kvlockstep.invariants import FULL

SMALL = CacheConfig(page_size=2, n_pages=4, n_rows=1, max_context_len=8)
PLAIN = (None, None, ())
ONE = [Submit("a", (1, 2, 3, 4), PLAIN), Match("a"), Alloc((AllocItem("a", 4),)), Commit("a", 4)]
EMPTY = StateClass("roomy", "empty", "none", "none", "some")


def run(ops, config=SMALL, frontier=None):
    """Run operations on the reference target; give the statistics and the last snapshot."""
    statistics, done = Statistics(), []
    watch = CaseWatcher(statistics, Memory(config), frontier, done)
    lockstep = Lockstep(config, ReferenceTarget(config), watch=watch)
    for op in ops:
        done.append(op)
        lockstep.run(op)
    return statistics, lockstep.now


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ([], EMPTY),
        (ONE[:3], StateClass("tight", "empty", "one", "none", "none")),
        (ONE, StateClass("tight", "empty", "none", "some", "none")),
        ([*ONE, Checkpoint("a")], StateClass("tight", "locked", "none", "some", "none")),
        ([*ONE, Release("a")], StateClass("tight", "free", "none", "none", "some")),
    ],
)
def test_class_of_a_state(ops, expected):
    assert state_class(run(ops)[1]) == expected


@pytest.mark.parametrize(("free", "evictable", "pool"), [([], 0, "full"), ([], 2, "evict"), ([1, 2, 3], 0, "roomy")])
def test_class_tells_a_pool_that_eviction_can_help_from_one_that_is_full(free, evictable, pool):
    snapshot = run([])[1]
    snapshot.pools[FULL] = replace(snapshot.pools[FULL], free_pages=free, evictable=evictable)

    assert state_class(snapshot).pool == pool


def test_what_a_target_does_not_show_is_a_class_of_its_own():
    snapshot = run([])[1]
    snapshot.pools[FULL] = replace(snapshot.pools[FULL], free_pages=None, available=None)
    snapshot.nodes = snapshot.requests = snapshot.free_rows = None

    assert state_class(snapshot) == StateClass("?", "?", "?", "?", "?")


def test_transitions_of_a_case_are_those_of_its_operations_done():
    statistics, _ = run([*ONE, Evict(0), Release("a")])
    tight = StateClass("tight", "empty", "none", "some", "none")

    assert statistics.transitions == {
        ("submit", EMPTY, EMPTY): 1,
        ("match", EMPTY, EMPTY): 1,
        ("alloc", EMPTY, StateClass("tight", "empty", "one", "none", "none")): 1,
        ("commit", StateClass("tight", "empty", "one", "none", "none"), tight): 1,
        ("release", tight, StateClass("tight", "free", "none", "none", "some")): 1,
    }


@pytest.mark.parametrize("kind", ["commit", "checkpoint", "release"])
def test_operation_that_the_class_rules_out_is_not_missed(kind):
    assert not EMPTY.allows(kind)
    assert StateClass("roomy", "empty", "one", "some", "some").allows(kind)


def test_reset_is_possible_where_nothing_lives():
    assert EMPTY.allows("reset")
    assert not StateClass("roomy", "locked", "none", "none", "some").allows("reset")
    assert not StateClass("roomy", "empty", "one", "none", "some").allows("reset")


def test_frontier_keeps_the_shortest_way_to_each_situation():
    frontier = Frontier()

    assert frontier.meet(("s",), SMALL, ONE)
    assert not frontier.meet(("s",), SMALL, ONE[:2])
    assert not frontier.meet(("s",), SMALL, ONE)

    assert frontier.begin(N_DRAWN - 1) == (SMALL, tuple(ONE[:2]))


def test_frontier_does_not_keep_a_way_too_long_to_read():
    frontier = Frontier()
    frontier.meet(("s",), SMALL, [Match("a")] * (LONGEST + 1))

    assert len(frontier) == 0
    assert frontier.begin(N_DRAWN - 1) is None


def test_half_of_what_is_drawn_begins_afresh_and_most_of_the_rest_at_what_was_met_least():
    frontier = Frontier()
    for n in range(10):
        for _ in range(10 - n):
            frontier.meet((n,), SMALL, [Match(f"r{n}")])

    begun = [frontier.begin(drawn) for drawn in range(N_DRAWN)]

    assert begun[: N_DRAWN // 2] == [None] * (N_DRAWN // 2)
    counts = [sum(at == (SMALL, (Match(f"r{n}"),)) for at in begun) for n in range(10)]
    assert counts == sorted(counts)
    assert counts[9] > 3 * counts[5] > 0


def test_case_that_goes_on_from_a_way_runs_its_operations_first(tmp_path):
    begun = []

    class Recorded(Worker):
        def begin_case(self, drawn):
            known = super().begin_case(drawn | N_DRAWN // 2)
            begun.append((known, self))
            return known

        def start(self, config):
            if begun[:-1] and begun[-2][0] is not None:
                assert tuple(self.ops[: len(begun[-2][0][1])]) == begun[-2][0][1]
                assert self.header.config == begun[-2][0][0]
            return super().start(config)

    order = Order("reference", None, 600.0, 0, str(tmp_path), "worker")
    run_cases(Recorded(order, ReferenceTarget, lambda event, **facts: None), 1, n_cases=12, steps=30)

    assert sum(known is not None for known, _ in begun) >= 10


def test_search_is_the_same_for_the_same_seed(tmp_path):
    def statistics_of():
        worker = Worker(Order("reference", None, 600.0, 0, str(tmp_path), "w"), ReferenceTarget, lambda *_, **__: None)
        for batch in range(3):
            run_cases(worker, batch, n_cases=10, steps=40)
        return worker.statistics

    assert statistics_of() == statistics_of()


def test_worker_that_shall_not_learn_begins_every_case_afresh(tmp_path):
    order = Order("reference", None, 600.0, 0, str(tmp_path), "worker", learn=False)
    worker = Worker(order, ReferenceTarget, lambda event, **facts: None)
    run_cases(worker, 1, n_cases=5, steps=30)

    assert worker.begin_case(N_DRAWN - 1) is None
    assert worker.statistics.situations == 0
    assert len(worker.statistics.transitions) > 20
