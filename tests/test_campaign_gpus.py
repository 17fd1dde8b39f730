"""Campaigns on GPUs, as far as that shows without one: a worker each, which ends where its context may be lost."""

import pytest

from kvlockstep.fuzz import crew
from kvlockstep.fuzz.crew import gpus
from kvlockstep.fuzz.lockstep import TargetRaised
from kvlockstep.fuzz.places import n_workers
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.worker import ContextInDoubt, Order, Plan, Worker


@pytest.mark.parametrize(("visible", "names"), [("0,2", ["0", "2"]), ("", []), ("GPU-8932, 1", ["GPU-8932", "1"])])
def test_gpus_are_those_that_are_visible(visible, names, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert gpus() == names


def test_gpus_are_those_of_the_machine_if_nobody_says(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(crew, "NVIDIA", tmp_path)
    assert gpus() == ["0", "1"]

    monkeypatch.setattr(crew, "NVIDIA", tmp_path / "no driver")
    assert gpus() == []


def test_there_is_a_worker_for_each_gpu_and_else_for_each_core(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    monkeypatch.setattr("kvlockstep.fuzz.places.n_cores", lambda: 3)

    assert n_workers([("gpu_impl", "cuda")]) == 5
    assert n_workers([("gpu_impl", "torch")]) == 3
    assert n_workers([("gpu_impl", "cuda"), ("gpu_impl", "torch")]) == 3
    assert n_workers([("gpu_impl", lane) for lane in ("cuda", "torch", "interpret")] * 2) == 6


def order_on(lane, slot=0):
    return Order("gpu_impl", lane, 1.0, 0, "out", "w", plan=Plan("base", 1, slot))


@pytest.mark.parametrize(("lane", "slot", "device"), [("cuda", 0, "4"), ("cuda", 3, "7"), ("torch", 3, "4,7")])
def test_workers_on_gpus_have_one_each_by_turns(lane, slot, device, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")

    assert crew._variables(order_on(lane, slot))["CUDA_VISIBLE_DEVICES"] == device


class Poisoned(ReferenceTarget):
    lane = "cuda"

    def alloc(self, batch):
        raise RuntimeError("an illegal memory access was encountered")


def test_worker_whose_context_may_be_lost_ends_and_leaves_its_trace_to_the_post_mortem(tmp_path):
    order = Order("reference", None, 5.0, 0, str(tmp_path), "w", canary=False, plan=Plan("base", 1, 0))
    events = []

    with pytest.raises(ContextInDoubt, match="an illegal memory access"):
        Worker(order, Poisoned, lambda event, **facts: events.append(event)).fuzz()
    assert "found" not in events
    assert (tmp_path / "w.current.jsonl").stat().st_size > 0


class Forgetful(Poisoned):
    def alloc(self, batch):
        done = ReferenceTarget.alloc(self, batch)
        done.write_sets[-1][-1] = done.write_sets[0][0] + 1
        return done


def test_violation_of_another_kind_is_settled_there_and_ends_the_worker(tmp_path):
    order = Order("reference", None, 5.0, 0, str(tmp_path), "w", canary=False, plan=Plan("base", 1, 0))
    events = []
    Worker(order, Forgetful, lambda event, **facts: events.append(event)).fuzz()

    assert events.count("failure") == 1
    assert events[-1] == "end"
    assert TargetRaised.__name__ not in str(list(tmp_path.iterdir()))
