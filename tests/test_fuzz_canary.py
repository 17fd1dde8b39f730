"""The canary is found on every target within a second, and a worker that is blind does not call anything clean."""

import json
import subprocess
import sys

import pytest

from kvlockstep.fuzz.canary import CANARY_OPERATIONS, Canary, RepeatsWriteSlot
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.crew import WorkerState, follow
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import Alloc, AllocItem, Match, Submit
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.verdict import shortfalls
from kvlockstep.fuzz.worker import Order, Worker
from kvlockstep.invariants.writes import WriteSlotRepeated


def reports_of(factory, out, seed=0, seconds=0.0, target="reference"):
    """Run a worker to its end; list its reports as pairs of event and facts."""
    reports = []
    order = Order(target, None, seconds, seed, str(out), "worker")
    Worker(order, factory, lambda event, **facts: reports.append((event, facts))).fuzz()
    return reports


def blind(factory):
    """Make a factory whose targets hide the mistake that the canary makes of an alloc."""

    class Blind(ReferenceTarget):
        def alloc(self, batch):
            done = super().alloc(batch)
            kept = [list(write_set) for write_set in done.write_sets]

            class Stubborn(list):
                def __setitem__(self, key, value):
                    pass

            done.write_sets = Stubborn(Stubborn(write_set) for write_set in kept)
            return done

    return Blind


def test_canary_is_two_tokens_in_one_slot():
    config = CacheConfig()
    lockstep = Lockstep(config, RepeatsWriteSlot(ReferenceTarget(config)))
    for op in (Submit("r0", (1, 2, 3), (None, None, ())), Match("r0")):
        lockstep.run(op)

    with pytest.raises(WriteSlotRepeated):
        lockstep.run(Alloc((AllocItem("r0", 3),)))


@pytest.mark.parametrize("seed", range(20))
def test_canary_is_found_first_and_within_a_second(seed, tmp_path, record_property):
    event, facts = reports_of(ReferenceTarget, tmp_path, seed)[0]

    record_property("show", f"canary, seed {seed}: {facts['operations']} operations, {facts['seconds']:.3f} s")
    assert (event, facts["law"]) == ("canary", "WriteSlotRepeated")
    assert facts["operations"] <= CANARY_OPERATIONS // 10


@pytest.mark.parametrize("lane", ["torch", "interpret"])
def test_every_worker_of_a_run_finds_it_within_a_second(lane, tmp_path):
    order = {"target": "gpu_impl", "lane": lane, "seconds": 0.1, "seed": 3, "out": str(tmp_path), "name": lane}
    command = [sys.executable, "-P", "-m", "kvlockstep.fuzz.worker", json.dumps(order)]

    done = subprocess.run(command, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]

    assert [event["event"] for event in found][:2] == ["ready", "canary"]
    assert found[1]["law"] == "WriteSlotRepeated"
    assert found[1]["seconds"] < 1.0


def test_run_of_its_own_starts_after_the_canary_and_knows_nothing_of_it(tmp_path):
    *_, (event, facts) = reports_of(ReferenceTarget, tmp_path, seconds=0.2)

    assert event == "end"
    assert facts["statistics"]["cases"] >= 1
    assert facts["statistics"]["outcomes"]["alloc"]["done"] > 0


def test_blind_worker_looks_as_long_as_it_must_and_is_not_called_clean(tmp_path):
    event, facts = reports_of(blind(ReferenceTarget), tmp_path)[0]
    state = WorkerState(Order("reference", None, 60.0, 0, str(tmp_path), "worker"))
    follow(state, {"event": event, **facts})

    assert state.canary is not None
    assert (state.canary.caught, state.canary.law, state.canary.operations) == (False, None, CANARY_OPERATIONS)
    assert shortfalls([state], 60.0)[0].startswith("worker worker: the canary")


@pytest.mark.parametrize(
    ("canary", "became"),
    [
        (None, "it did not run"),
        (Canary(None, 400, 2.0), "400 operations, no violation"),
        (Canary("PageLeaked", 9, 0.1), "9 operations, PageLeaked"),
    ],
)
def test_worker_that_did_not_find_the_canary_says_what_became_of_it(canary, became):
    state = WorkerState(Order("gpu_impl", "torch", 60.0, 0, "out", "torch"), canary=canary)

    assert shortfalls([state], 60.0)[0] == (
        f"worker torch: the canary, a batch that ends in the slot it begins with, was not found: {became}"
    )


def test_target_that_cannot_be_made_is_said_once(tmp_path):
    made = []

    def factory(config):
        made.append(config)
        if len(made) > 1:
            raise RuntimeError("no second one")
        return ReferenceTarget(config)

    with pytest.raises(RuntimeError, match="no second one"):
        reports_of(factory, tmp_path)

    assert len(made) == 2, "the worker's probe and one target for the canary, which is not tried again"


def test_hunt_of_a_fault_needs_no_canary(tmp_path):
    reports = []
    order = Order("reference", None, 0.0, 0, str(tmp_path), "worker", canary=False)
    Worker(order, factory_for("reference"), lambda event, **facts: reports.append(event)).fuzz()

    assert "canary" not in reports
