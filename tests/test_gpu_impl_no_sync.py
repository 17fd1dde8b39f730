"""No cache operation brings data from the device to the host, or makes a size depend on it.

The guard makes every such call raise while an operation runs. It is meant for the lanes ``cuda`` and
``torch``; the interpreter itself reads tensors on the host.
"""

import os
from array import array
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvlockstep.gpu_impl import CacheConfig, Extend, KvCache

LANE = os.environ.get("KVLOCKSTEP_LANE", "torch")
pytestmark = pytest.mark.skipif(LANE == "interpret", reason="the interpreter reads tensors on the host")

TO_HOST = (
    "tolist",
    "item",
    "cpu",
    "numpy",
    "__int__",
    "__float__",
    "__bool__",
    "__index__",
    "__array__",
    "__contains__",
)
SIZED_BY_DATA = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_dim")


class ReadBack(Exception):
    """Something asked the device."""


class RefuseDataDependence(TorchDispatchMode):
    """Refuse operations that read a value, or whose output's size depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        if name in SIZED_BY_DATA:
            raise ReadBack(name)
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            raise ReadBack("repeat_interleave without output_size")
        if name in ("index", "index_put", "index_put_"):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise ReadBack(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_read_back():
    """Raise ReadBack where a tensor is asked for its values."""

    def refusing(name):
        def refuse(*_args, **_kwargs):
            raise ReadBack(name)

        return refuse

    with pytest.MonkeyPatch.context() as patch, RefuseDataDependence():
        for name in TO_HOST:
            patch.setattr(torch.Tensor, name, refusing(name))
        yield


OFFENCES = {
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t[0].item(),
    "cpu": lambda t: t.cpu(),
    "numpy": lambda t: t.numpy(),
    "int": lambda t: int(t[0]),
    "float": lambda t: float(t[0]),
    "bool": lambda t: bool(t[0]),
    "index": lambda t: [1, 2, 3][t[0]],
    "array": lambda t: memoryview(t.__array__()),
    "range": lambda t: range(t[0]),
    "slice": lambda t: t[: t[0]],
    "nonzero": lambda t: t.nonzero(),
    "nonzero function": lambda t: torch.nonzero(t),
    "where": lambda t: torch.where(t > 1),
    "argwhere": lambda t: torch.argwhere(t),
    "unique": lambda t: t.unique(),
    "masked_select": lambda t: torch.masked_select(t, t > 1),
    "mask read": lambda t: t[t > 1],
    "mask write": lambda t: t.__setitem__(t > 1, t[:1].expand(2)),
    "repeat": lambda t: torch.repeat_interleave(t, t),
}


@pytest.mark.parametrize("offence", OFFENCES.values(), ids=OFFENCES.keys())
def test_guard_fires_on_every_way_to_read_back(offence):
    tensor = torch.tensor([1, 2, 3])
    with nothing_read_back(), pytest.raises(ReadBack):
        offence(tensor)
    offence(tensor)  # allowed outside


def every_operation(config, around):
    """Run through every operation, with eviction, duplicates, rewritten rows, drafts and a pending abort.

    ``around`` is entered once the cache and what the forward pass wrote exist.
    """
    cache = KvCache(config, LANE)
    prompt = array("q", range(1, 18))
    kv = torch.ones((1, 17, 1, 4), dtype=torch.bfloat16, device=cache.device.device)
    with around:
        cache.peek("r0", prompt)
        cache.match("r0", prompt)
        cache.match("r1", prompt)
        step = cache.alloc([Extend("r0", 17), Extend("r1", 9)])
        cache.write_kv(step.write_set[: step.lengths[0]], kv, kv)
        cache.commit("r0", 17, array("q", [3]))
        cache.commit("r1", 9)
        cache.checkpoint("r0")
        cache.checkpoint("r1")  # its pages are duplicates
        cache.alloc([Extend("r0", 3, array("q", [4, 5]))])
        cache.commit("r0", 2, array("q", [6]))
        cache.read_kv(1, 18)
        cache.release("r0")
        cache.alloc([Extend("r1", 1)])
        cache.abort("r1")
        cache.commit("r1", 0)
        cache.match("r2", array("q", range(100, 132)))
        evicted = cache.alloc([Extend("r2", 30)]).evicted
        cache.commit("r2", 30)
        cache.retract("r2", publish=True)
        freed = cache.evict(1)
        cache.reset()

    assert evicted
    assert freed
    assert cache.available == 40


@pytest.mark.parametrize("key_units", ["token", "bigram"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_no_operation_reads_back(page_size, key_units):
    config = CacheConfig(
        page_size=page_size, n_pages=40 // page_size, n_rows=3, max_context_len=32, key_units=key_units, head_dim=4
    )
    every_operation(config, nothing_read_back())


# What the profiler counts, of the device itself where there is one

IN_A_PROFILE = ("_local_scalar_dense", "DtoH", "cudaStreamSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")
"""Names of copies to the host and of waits. The profiler itself waits for the whole device, which is another call."""


def read_backs_of(profile):
    return [event.name for event in profile.events() if any(word in event.name for word in IN_A_PROFILE)]


def profiled():
    return torch.profiler.profile(activities=list(torch.profiler.supported_activities()))


def test_profiler_counts_a_read_back():
    tensor = torch.tensor([1, 2, 3], device="cuda" if LANE == "cuda" else "cpu")
    with profiled() as profile:
        int(tensor.sum())

    assert read_backs_of(profile)


def test_profiler_counts_none_in_any_operation():
    config = CacheConfig(page_size=4, n_pages=10, n_rows=3, max_context_len=32, head_dim=4)
    every_operation(config, nullcontext())  # kernels are compiled
    profile = profiled()
    every_operation(config, profile)

    assert len(profile.events()) > 20
    assert read_backs_of(profile) == []
