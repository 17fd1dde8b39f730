"""SGLang imported and its cache objects built, without a server, a model or a GPU.

Three things need care, and only here: image models import torchvision, for which empty modules stand in; some
functions read the published server arguments, for which SGLang's own test hook publishes dummy ones; and the
`RadixCache` reads the wall clock, for which a counter stands in, so that a trace gives the same bytes every time.

On the lane ``interpret`` the paged allocator runs SGLang's Triton kernels in Triton's interpreter; on the lane
``torch`` it takes SGLang's torch fallbacks. The row writer of speculative decode has no fallback and is interpreted
on both.
"""

import logging
import os
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Any

LANE = os.environ.get("KVLOCKSTEP_LANE", "torch")
LANES = ("torch", "interpret")
SGLANG_VERSION = version("sglang")

if LANE not in LANES:
    raise RuntimeError(f"SGLang's caches run here on the lanes {' and '.join(LANES)}, not on {LANE}")
if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("Triton was imported before SGLang's targets: set TRITON_INTERPRET=1 for this process")
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported


def _stand_in_for_torchvision() -> None:
    """Let SGLang import the names that its image models take from torchvision; none is ever called."""
    names: dict[str, dict[str, object]] = {
        "torchvision": {},
        "torchvision.io": {"decode_jpeg": None},
        "torchvision.transforms": {"InterpolationMode": None},
        "torchvision.transforms.functional": {"InterpolationMode": None},
    }
    for name, attributes in names.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules.setdefault(name, module)


logging.getLogger("sglang").setLevel(logging.CRITICAL)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoProcessor  # noqa: F401 first, so that it notices that torchvision is absent

    _stand_in_for_torchvision()
    import torch
    from sglang.srt.managers.embed_types import PositionalEmbeds
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, release_req
    from sglang.srt.mem_cache import radix_cache
    from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend, alloc_for_spec_decode
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.model_executor.runner import get_is_capture_mode  # noqa: F401 the KV pool's write imports it late
    from sglang.srt.runtime_context import get_context, get_spec
    from sglang.srt.sampling.sampling_params import SamplingParams

from kvlockstep.fuzz.config import CacheConfig  # noqa: E402

__all__ = [
    "FINISH_LENGTH",
    "LANE",
    "SGLANG_VERSION",
    "SOME_EMBEDS",
    "ComponentType",
    "Engine",
    "EvictParams",
    "Req",
    "SamplingParams",
    "alloc_for_decode",
    "alloc_for_extend",
    "alloc_for_spec_decode",
    "build",
    "checkpoint_kv_cache",
    "get_spec",
    "release_kv_cache",
    "release_req",
]


class Ticks:
    """Stands in for the module ``time`` where a tree reads its clock: each reading is one more than the last."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now

    perf_counter = monotonic


radix_cache.time = Ticks()
get_context().override_server_args(attention_backend="torch_native").install()

SOME_EMBEDS = PositionalEmbeds(torch.zeros(1, 1), [0])
"""What a private request carries: embeddings that its tokens do not tell."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The objects that a scheduler of SGLang holds."""

    rows: Any  # ReqToTokenPool
    allocator: Any  # TokenToKVPoolAllocator, or PagedTokenToKVPoolAllocator
    kv: Any  # MHATokenToKVPool
    cache: Any  # RadixCache or UnifiedRadixCache


def build(config: CacheConfig, tree: str, *, need_sort: bool) -> Engine:
    """Build the objects for a config; ``tree`` is ``radix``, ``unified-python`` or ``unified-rust``."""
    size = config.n_pages * config.page_size
    dtype = getattr(torch, config.dtype)
    rows = ReqToTokenPool(config.n_rows, config.max_context_len, "cpu", False)
    kv = MHATokenToKVPool(
        size=size,
        page_size=config.page_size,
        dtype=dtype,
        head_num=config.kv_heads,
        head_dim=config.head_dim,
        layer_num=config.layers,
        device="cpu",
        enable_memory_saver=False,
    )
    if config.page_size == 1:
        allocator = TokenToKVPoolAllocator(size, dtype, "cpu", kv, need_sort)
    else:
        allocator = PagedTokenToKVPoolAllocator(size, config.page_size, dtype, "cpu", kv, need_sort)
        allocator.use_triton_kernels = LANE == "interpret"
    params = CacheInitParams(
        disable=not config.prefix_sharing,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=config.page_size,
        is_eagle=config.key_units == "bigram",
        eviction_policy=config.policy,
    )
    if tree == "radix":
        return Engine(rows, allocator, kv, RadixCache(params))
    if config.policy == "tlru":
        params.eviction_policy_config = {"threshold": 2 * config.page_size}
    params.tree_components = (ComponentType.FULL,)
    params.tree_core_backend = tree.removeprefix("unified-")
    return Engine(rows, allocator, kv, UnifiedRadixCache(params))
