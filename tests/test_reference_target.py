"""The model behind the contract of a target, and the snapshot that is made of it."""

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import NO_NAMESPACE, AllocItem
from kvlockstep.fuzz.targets import base
from kvlockstep.fuzz.targets.base import Target
from kvlockstep.fuzz.targets.reference import make, snapshot_of
from kvlockstep.invariants import FULL, ROOT, NodeView, PoolView, RequestView, RowView, Snapshot

NS = NO_NAMESPACE
CONFIG = CacheConfig(page_size=2, n_pages=4, n_rows=2, max_context_len=4)


def run(target, name, tokens):
    matched = target.match(name, tokens, NS, 0, False)
    target.alloc([AllocItem(name, len(tokens) - matched)])
    target.commit(name, len(tokens) - matched, [])


def test_target_fits_the_contract():
    assert isinstance(make(CONFIG), Target)


def test_target_forgets_request_that_waits():
    target = make(CONFIG)

    assert target.peek("r0", [1, 2, 3], NS, False) == 0
    with pytest.raises(base.UnknownRequest):
        target.abort("r0")

    target.match("r0", [1, 2, 3], NS, 0, False)
    target.retract("r0", False)
    with pytest.raises(base.UnknownRequest):
        target.alloc([AllocItem("r0", 1)])


def test_target_refuses_match_of_admitted_request():
    target = make(CONFIG)
    target.match("r0", [1, 2, 3], NS, 0, False)

    with pytest.raises(base.WrongState):
        target.match("r0", [1, 2, 3], NS, 0, False)
    with pytest.raises(base.WrongState):
        target.peek("r0", [1, 2, 3], NS, False)


def test_target_matches_retracted_request_that_is_longer_than_a_row():
    target = make(CONFIG)
    run(target, "r0", [1, 2, 3, 4])
    target.release("r0")

    assert target.match("r0", [1, 2, 3, 4, 5], NS, 0, False) == 4


def test_refusal_of_the_model_becomes_one_of_the_contract():
    target = make(CONFIG)

    with pytest.raises(base.BadArgument, match="0 slots asked"):
        target.evict(0)
    with pytest.raises(base.EmptyBatch):
        target.alloc([])


def test_written_kv_is_read_back_through_the_row():
    target = make(CONFIG)
    target.match("r0", [7, 8, 9], NS, 0, False)
    write_set = target.alloc([AllocItem("r0", 3)]).write_sets[0]

    target.write_kv(write_set, [70, 80, 90])

    assert target.read_kv(1, 3) == [70, 80, 90]
    assert target.read_slots([0, *write_set]) == [0, 70, 80, 90]


def test_snapshot_shows_what_can_be_seen():
    target = make(CONFIG)
    run(target, "r0", [1, 2, 3])
    target.checkpoint("r0")
    run(target, "r1", [1, 2])
    target.release("r1")
    target.cache.submit("waiting", [5], NS)

    assert snapshot_of(target.cache) == Snapshot(
        page_size=2,
        n_rows=2,
        pools={
            FULL: PoolView(
                n_pages=4, free_pages=[3, 4], page_generations=[0, 0, 0, 1, 0], available=4, evictable=0, protected=2
            )
        },
        rows=[RowView(1, "r0", [2, 3, 4])],
        free_rows=[2],
        row_generations=[0, 0, 1],
        requests=[RequestView("r0", "RUNNING", 2, 3, 3, anchor=0, row=1)],
        nodes=[
            NodeView(
                0, ROOT, NS, [1, 2], {FULL: [2, 3]}, lock_ref=1, stamp=4, created=2, hits=2, priority=0, children=[]
            ),
        ],
        evictable_nodes=[],
        root_lock_ref=0,
        max_context_len=4,
    )


def test_snapshot_is_a_copy():
    target = make(CONFIG)
    run(target, "r0", [1, 2, 3])
    before = target.snapshot()

    target.checkpoint("r0")
    target.release("r0")

    assert before.rows == [RowView(1, "r0", [2, 3, 4])]
    assert before.pools[FULL].page_generations == [0, 0, 0, 0, 0]
