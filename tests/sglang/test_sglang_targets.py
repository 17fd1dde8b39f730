"""SGLang's caches behind the contract: clean under fuzzing, the same in every process, and seen as they are."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import Lockstep
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
)
from kvlockstep.fuzz.registry import TargetUnusable, factory_for
from kvlockstep.fuzz.target_check import defect_of
from kvlockstep.fuzz.worker import Order, Worker
from kvlockstep.invariants import FULL
from kvlockstep.invariants.agreement import OutcomeDiffers
from kvlockstep.invariants.paths import AnchorOffTree
from kvlockstep.invariants.promises import AllocPromiseBroken

pytestmark = pytest.mark.needs("sglang")

TREES = ("radix", "unified-python", "unified-rust")
NS = (None, None, ())


@pytest.fixture(params=TREES)
def name(request):
    return f"sglang:{request.param}"


def lockstep_on(name, **config):
    config = CacheConfig(**config)
    return Lockstep(config, factory_for(name)(config), digest=True)


def prefill(lockstep, request, tokens, *, priority=0, sampled=(9,), end="release"):
    """Take a request from submit to a commit of its whole prompt, then checkpoint or release it."""
    lockstep.run(Submit(request, tuple(tokens), NS, priority))
    found = lockstep.run(Match(request)).value
    n = len(tokens) - found
    lockstep.run(Alloc((AllocItem(request, n),)))
    lockstep.run(Commit(request, n, tuple(sampled)))
    if end:
        lockstep.run({"release": Release, "checkpoint": Checkpoint}[end](request))
    return found


def events_of_a_run(order):
    """Fuzz in a fresh process; return its reports by kind, the last of each."""
    from dataclasses import asdict

    command = [sys.executable, "-P", "-m", "kvlockstep.fuzz.worker", json.dumps(asdict(order))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return {event["event"]: event for event in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("lane", ["torch", "interpret"])
def test_fuzzing_finds_nothing(name, lane, tmp_path, record_property):
    order = Order(name, lane, 8.0, 11, str(tmp_path), "fuzz")
    events = events_of_a_run(order)
    assert "failure" not in events
    assert "broken" not in events
    statistics = events["end"]["statistics"]
    done = sum(row.get("done", 0) for row in statistics["outcomes"].values())
    record_property("show", f"{name} on {lane}: {done} operations done, {statistics['distinct_cases']} distinct traces")
    assert done > 200
    assert statistics["labels"]["allocation evicted"] > 0
    assert statistics["allowances"]["prompt_split"] > 0


def test_the_same_seed_gives_the_same_bytes_in_any_process(name, tmp_path):
    from kvlockstep.fuzz.machine import run_cases
    from kvlockstep.fuzz.trace import Header, Trace, write_trace

    worker = Worker(Order(name, None, 600.0, 3, str(tmp_path), "w"), factory_for(name), lambda event, **facts: None)
    run_cases(worker, 3, n_cases=2, steps=60)
    path = tmp_path / "trace.jsonl"
    write_trace(path, Trace(Header(worker.header.config, "", target=name, lane=None), worker.ops))
    digests = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-P", "-m", "kvlockstep", "replay", "--target", name, str(path)]
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
        digests.add(next(line for line in done.stdout.splitlines() if "digest" in line))
    assert len(digests) == 1


def test_it_is_a_target(name):
    config = CacheConfig()
    assert defect_of(factory_for(name)(config), config) is None


def test_an_option_that_is_none_is_refused(name):
    with pytest.raises(TargetUnusable, match="option 'turbo': expected some of free_group, need_sort, no_speculation"):
        factory_for(name)(replace(CacheConfig(), options=("turbo",)))


def test_a_row_counts_how_often_it_was_given_back(name):
    lockstep = lockstep_on(name, page_size=1, n_rows=1)
    assert lockstep.now.row_generations == [0, 0]
    prefill(lockstep, "r0", [1, 2, 3], end=None)
    assert lockstep.now.row_generations == [0, 0]  # held: not yet given back
    lockstep.run(Release("r0"))
    assert lockstep.now.row_generations == [0, 1]


def test_a_pass_counts_as_committed_when_it_lands(name):
    lockstep = lockstep_on(name, page_size=2)
    lockstep.run(Submit("r0", (1, 2, 3), NS))
    lockstep.run(Match("r0"))
    lockstep.run(Alloc((AllocItem("r0", 3),)))
    (view,) = lockstep.now.requests
    assert (view.committed_len, view.allocated_len) == (0, 3)
    lockstep.run(Commit("r0", 3, (4,)))
    (view,) = lockstep.now.requests
    assert (view.committed_len, view.allocated_len) == (3, 3)


def test_a_node_ends_at_the_prompt(name):
    lockstep = lockstep_on(name, page_size=2, policy="priority")
    prefill(lockstep, "r0", [1, 2, 3, 4], sampled=(5,), end=None)
    for token in (6, 7, 8):
        lockstep.run(Alloc((AllocItem("r0", 1),)))
        lockstep.run(Commit("r0", 1, (token,)))
    lockstep.run(Release("r0"))
    edges = sorted(node.units for node in lockstep.now.nodes)
    assert edges == [(1, 2, 3, 4), (5, 6)]
    assert lockstep.model.allowed["prompt_split"] == 1


def test_keys_slots_and_locks_are_read_from_the_tree(name):
    lockstep = lockstep_on(name, page_size=2, key_units="bigram")
    prefill(lockstep, "r0", [1, 2, 3, 4, 5], end="checkpoint")
    (node,) = lockstep.now.nodes
    assert node.units == ((1, 2), (2, 3), (3, 4), (4, 5))
    assert len(node.slots[FULL]) == 4
    assert node.lock_ref == 1
    assert lockstep.now.root_lock_ref == 0


def test_a_refused_decode_may_have_evicted(name):
    lockstep = lockstep_on(name, page_size=1, n_pages=6, n_rows=2)
    prefill(lockstep, "r0", [7, 7])
    prefill(lockstep, "r1", [1, 2, 3], end=None)
    lockstep.run(Alloc((AllocItem("r1", 1),)))
    lockstep.run(Commit("r1", 1, (4,)))
    outcome = lockstep.run(Alloc((AllocItem("r1", 1, ()),)))
    lockstep.run(Commit("r1", 1, (4,)))
    outcome = lockstep.run(Alloc((AllocItem("r1", 1, ()),)))
    lockstep.run(Commit("r1", 1, (4,)))
    outcome = lockstep.run(Alloc((AllocItem("r1", 1, ()),)))
    assert outcome.refused == "OutOfPages"


def test_sglang_itself_says_whether_a_decode_fits(name, monkeypatch):
    lockstep = lockstep_on(name, page_size=1, n_pages=6)
    prefill(lockstep, "r0", [1, 2, 3], end=None)
    allocator = lockstep.target._engine.allocator
    monkeypatch.setattr(allocator, "check_decode_capacity", lambda **asked: False)
    with pytest.raises(AllocPromiseBroken):
        lockstep.run(Alloc((AllocItem("r0", 1),)))


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_pass_over_an_allocated_tail_may_evict_nothing(name, page_size, monkeypatch):
    lockstep = lockstep_on(name, page_size=page_size, n_pages=4, n_rows=2)
    prefill(lockstep, "r0", [1] * page_size)
    prefill(lockstep, "r1", [2] * page_size, end=None)
    lockstep.run(Alloc((AllocItem("r1", page_size, (7,) * (page_size - 1)),)))
    lockstep.run(Commit("r1", 1, (5,)))
    from kvlockstep.fuzz.targets.sglang.engine import EvictParams

    target = lockstep.target
    speculate = target._speculate

    def evict_for_nothing(lives, lengths):
        target._engine.cache.evict(EvictParams(num_tokens=1))
        return speculate(lives, lengths)

    monkeypatch.setattr(target, "_speculate", evict_for_nothing)
    with pytest.raises(OutcomeDiffers, match="alloc evicted other nodes"):
        lockstep.run(Alloc((AllocItem("r1", 1),)))


def test_a_lock_that_is_lost_is_no_blind_spot(name):
    lockstep = lockstep_on(name, page_size=2)
    prefill(lockstep, "r0", [1, 2, 3, 4, 5], end="checkpoint")
    lockstep.target._table.live["r0"].engine.req.lock = None
    with pytest.raises(AnchorOffTree):
        lockstep.run(Evict(1))


def test_the_same_req_comes_back_after_a_retract(name):
    lockstep = lockstep_on(name, page_size=2)
    prefill(lockstep, "r0", [1, 2, 3, 4, 5], end="checkpoint")
    before = lockstep.target._table.live["r0"].engine.req
    lockstep.run(Retract("r0", False))
    assert lockstep.run(Peek("r0")).value == 4
    assert lockstep.run(Match("r0")).value == 4
    assert lockstep.target._table.live["r0"].engine.req is before
    assert before.retraction_count == 1


def test_a_waiting_req_is_forgotten_with_its_name(name):
    lockstep = lockstep_on(name, page_size=2)
    prefill(lockstep, "r0", [1, 2, 3, 4, 5], end="checkpoint")
    lockstep.run(Retract("r0", False))
    lockstep.run(Abort("r0"))
    assert prefill(lockstep, "r0", [8, 8, 8], end="checkpoint") == 0


def test_a_private_request_shares_nothing(name):
    lockstep = lockstep_on(name, page_size=2)
    prefill(lockstep, "r0", [1, 2, 3, 4, 5])
    lockstep.run(Submit("r1", (1, 2, 3, 4, 5), NS, 0, True))
    assert lockstep.run(Match("r1")).value == 0


def test_victims_are_reported_a_node_each(name):
    lockstep = lockstep_on(name, page_size=2)
    prefill(lockstep, "r0", [1, 2, 3, 4])
    prefill(lockstep, "r1", [5, 6, 7, 8])
    assert [len(slots) for slots in lockstep.run(Evict(1)).value] == [4]
