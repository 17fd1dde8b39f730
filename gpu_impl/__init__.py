"""A paged KV cache with a prefix tree, on torch and Triton: the optimized side of the lockstep.

Host decides, device follows: pages, locks and the tree are integers and byte strings on the host; the row
table and the keys and values are tensors. No operation brings data from the device to the host. Start in
`cache.py`; `tree.py` is the prefix tree, `kernels.py` the device work.

>>> from array import array
>>> import torch
>>> from kvlockstep.gpu_impl import CacheConfig, Extend, KvCache
>>> cache = KvCache(CacheConfig(page_size=2, n_pages=8, n_rows=2, max_context_len=16, head_dim=4), lane="torch")
>>> prompt = array("q", [11, 12, 13, 14, 15])
>>> cache.match("r0", prompt)  # nothing is published yet
0
>>> step = cache.alloc([Extend("r0", n=5)])
>>> step.write_set.shape, step.offsets, step.lengths
(torch.Size([5]), [0], [5])
>>> kv = torch.ones(1, 5, 1, 4, dtype=torch.bfloat16, device=step.write_set.device)
>>> cache.write_kv(step.write_set, kv, 2 * kv)  # what the model's forward pass does
>>> cache.commit("r0", kept=5, sampled=array("q", [16]))
>>> cache.release("r0")
>>> cache.match("r1", prompt)  # the two whole pages of r0 are found again
4
>>> cache.abort("r1")
>>> cache.available, cache.evictable, cache.protected
(12, 4, 0)

Names are loaded when they are first used: `arithmetic`, `lane` and `refusals` import without torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Allocation": "cache",
    "CacheConfig": "config",
    "Extend": "cache",
    "KvCache": "cache",
    "LaneUnavailable": "lane",
    "Refused": "refusals",
    "choose_lane": "lane",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)  # asked once
    return value
