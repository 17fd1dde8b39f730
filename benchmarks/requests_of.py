"""Eight prefills at a time, as an engine makes them: through `gpu_impl`'s cache, or through SGLang's functions.

Allocators, rows and requests are the real ones of each side. Timed are what a pass asks of the cache: the ``alloc`` of
the whole batch with its rows and its write set, and the checkpoint of each request. Matching, ending the requests and
their garbage are not.
"""

import random
from array import array
from collections.abc import Iterator
from statistics import median
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, Protocol

P = 16
BATCH = 8
LENGTH = 512
N_PAGES = 16_384


class Passes(Protocol):
    def run(self, n_batches: int) -> tuple[float, float]:
        """Give the median microseconds of an alloc of a batch, and of a checkpoint."""


def passes_of(name: str) -> Passes:
    return GpuImplPasses() if name == "gpu_impl" else SglangPasses(name.removeprefix("sglang:"))


def prompts() -> Iterator["array[int]"]:
    draw = random.Random(3)
    while True:
        yield array("q", [draw.randrange(1 << 20) for _ in range(LENGTH + 1)])


def microseconds(started: int) -> float:
    return (perf_counter_ns() - started) / 1000


class GpuImplPasses:
    def __init__(self) -> None:
        from kvlockstep.gpu_impl import CacheConfig, KvCache

        config = CacheConfig(page_size=P, n_pages=N_PAGES, n_rows=64, max_context_len=4096, head_dim=2)
        self._cache = KvCache(config, lane="torch")
        self._prompts = prompts()

    def run(self, n_batches: int) -> tuple[float, float]:
        from kvlockstep.gpu_impl import Extend

        cache = self._cache
        allocs, checkpoints = [], []
        names = [f"r{i}" for i in range(BATCH)]
        for _ in range(n_batches):
            for name in names:
                cache.match(name, next(self._prompts))
            started = perf_counter_ns()
            cache.alloc([Extend(name, LENGTH) for name in names])
            allocs.append(microseconds(started))
            for name in names:
                cache.commit(name, LENGTH)
                started = perf_counter_ns()
                cache.checkpoint(name)
                checkpoints.append(microseconds(started))
            for name in names:
                cache.abort(name)
            cache.evict(BATCH * LENGTH)
        return median(allocs), median(checkpoints)


class SglangPasses:
    def __init__(self, tree: str) -> None:
        from kvlockstep.fuzz.config import CacheConfig
        from kvlockstep.fuzz.targets.sglang import engine

        config = CacheConfig(page_size=P, n_pages=N_PAGES, n_rows=64, max_context_len=4096, head_dim=2)
        self._sgl: Any = engine
        self._engine = engine.build(config, tree, need_sort=False)
        self._prompts = prompts()

    def run(self, n_batches: int) -> tuple[float, float]:
        import torch

        sgl, engine = self._sgl, self._engine
        allocs, checkpoints = [], []
        for _ in range(n_batches):
            reqs = [self._req(f"r{i}") for i in range(BATCH)]
            for req in reqs:
                req.init_next_round_input(engine.cache)
                req.lock = engine.cache.lock(req.last_node)
                req.extend_end = LENGTH
            ends = torch.full((BATCH,), LENGTH)
            batch = SimpleNamespace(
                reqs=reqs,
                device="cpu",
                tree_cache=engine.cache,
                req_to_token_pool=engine.rows,
                token_to_kv_pool_allocator=engine.allocator,
                seq_lens=ends,
                seq_lens_cpu=ends,
                prefix_lens=[req.prefix_len for req in reqs],
                extend_lens=[LENGTH] * BATCH,
                extend_num_tokens=BATCH * LENGTH,
                hisparse_coordinator=None,
                maybe_evict_swa=lambda: None,
                is_dllm=lambda: False,
            )
            started = perf_counter_ns()
            sgl.alloc_for_extend(batch)
            allocs.append(microseconds(started))
            for req in reqs:
                started = perf_counter_ns()
                sgl.checkpoint_kv_cache(req, engine.cache)
                checkpoints.append(microseconds(started))
            for req in reqs:
                sgl.release_kv_cache(req, engine.cache, checkpoint=False)
            engine.cache.evict(sgl.EvictParams(num_tokens=BATCH * LENGTH))
        return median(allocs), median(checkpoints)

    def _req(self, name: str) -> Any:
        return self._sgl.Req(
            rid=name,
            origin_input_text="",
            origin_input_ids=next(self._prompts),
            sampling_params=self._sgl.SamplingParams(max_new_tokens=1 << 30),
        )
