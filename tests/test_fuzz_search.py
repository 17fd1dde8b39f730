"""Classes of states, transitions between them, and the search that tries what was tried least."""

from dataclasses import replace

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.labels import Memory
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.ops import Alloc, AllocItem, Checkpoint, Commit, Evict, Match, Release, Submit
from kvlockstep.fuzz.search import Search
from kvlockstep.fuzz.states import StateClass, state_class
from kvlockstep.fuzz.statistics import CaseWatcher, Statistics
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.worker import Order, Worker
from kvlockstep.invariants import FULL

SMALL = CacheConfig(page_size=2, n_pages=4, n_rows=1, max_context_len=8)
PLAIN = (None, None, ())
ONE = [Submit("a", (1, 2, 3, 4), PLAIN), Match("a"), Alloc((AllocItem("a", 4),)), Commit("a", 4)]
EMPTY = StateClass("roomy", "empty", "none", "none", "some")


def run(ops, config=SMALL, search=None):
    """Run operations on the reference target; give the statistics and the last snapshot."""
    statistics = Statistics()
    watch = CaseWatcher(statistics, Memory(config), search)
    lockstep = Lockstep(config, ReferenceTarget(config), watch=watch)
    for op in ops:
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


def test_search_puts_first_what_was_tried_least_in_the_class_at_hand():
    search, kinds = Search(), ("alloc", "commit", "evict")
    for kind in ("alloc", "alloc", "evict"):
        search.note(kind, EMPTY)

    assert search.rarest_first(EMPTY, kinds) == ["commit", "evict", "alloc"]
    assert search.rarest_first(EMPTY._replace(pool="full"), kinds) == list(kinds), "nothing was tried there"


def test_search_counts_what_is_done_and_what_is_refused():
    search = Search()
    run([Evict(0), Evict(0), Submit("a", (1,), PLAIN)], search=search)

    assert search.rarest_first(EMPTY, ("evict", "submit", "peek")) == ["peek", "submit", "evict"]


def statistics_of(out, learn, batches=3):
    """Run batches of cases as a worker does."""
    order = Order("reference", None, 600.0, 0, str(out), "worker", learn=learn)
    worker = Worker(order, ReferenceTarget, lambda event, **facts: None)
    for batch in range(batches):
        run_cases(worker, batch, n_cases=20, steps=60)
    return worker.statistics


def test_search_is_the_same_for_the_same_seed_and_tries_more_than_weights_do(tmp_path):
    learned, again, by_weight = (statistics_of(tmp_path, learn) for learn in (True, True, False))

    assert learned == again
    assert len(learned.transitions) > len(by_weight.transitions)
