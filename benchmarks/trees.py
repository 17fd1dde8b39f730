"""The trees that `benchmarks/against_sglang.py` compares, behind one interface: `gpu_impl` and the three of SGLang.

Each call starts from token ids in an ``array('q')`` and ends with the slots in an array; whatever a tree converts on
the way is in its time. Pages to publish, and SGLang's tensors of slots, are made before. The allocator only counts,
on both sides.
"""

from array import array
from types import SimpleNamespace
from typing import Any, Protocol

P = 16
TREES = ("gpu_impl", "sglang:radix", "sglang:unified-python", "sglang:unified-rust")


class Tree(Protocol):
    """What is timed. ``pages`` and ``lock`` objects are the tree's own."""

    def pages(self, n_pages: int) -> Any: ...
    def insert(self, tokens: "array[int]", pages: Any) -> None: ...
    def match(self, tokens: "array[int]") -> Any: ...
    def evict(self) -> Any: ...
    def node(self, tokens: "array[int]") -> Any: ...
    def lock_unlock(self, node: Any) -> None: ...


def tree_of(name: str) -> Tree:
    return GpuImplTree() if name == "gpu_impl" else SglangTree(name.removeprefix("sglang:"))


class GpuImplTree:
    """`gpu_impl`'s tree, driven as its cache does."""

    def __init__(self) -> None:
        from kvlockstep.gpu_impl.native import HOW, PrefixTree, int32_bytes, slots_of

        assert HOW == "compiled", "install kvlockstep where there is a C compiler"
        self._tree = PrefixTree(P, False, "lru")
        self._spell, self._slots_of = int32_bytes, slots_of
        self._next_page = 1
        self._space = (None, None, ())
        self.freed = 0

    def pages(self, n_pages: int) -> "array[int]":
        self._next_page += n_pages
        return array("i", range(self._next_page - n_pages, self._next_page))

    def insert(self, tokens: "array[int]", pages: "array[int]") -> None:
        end, canonical = self._tree.publish(0, self._space, self._spell(tokens, 0, len(tokens)), pages, 0, 0)
        self.freed += len(canonical)
        self._tree.unlock(end)

    def match(self, tokens: "array[int]") -> Any:
        n_pages = len(tokens) // P
        _, pages = self._tree.match(self._space, self._spell(tokens, 0, n_pages * P), n_pages, False)
        return self._slots_of(pages, P)

    def evict(self) -> Any:
        slots = self._slots_of(self._tree.evict_one(), P)
        self.freed += len(slots)
        return slots

    def node(self, tokens: "array[int]") -> int:
        n_pages = len(tokens) // P
        node: int = self._tree.match(self._space, self._spell(tokens, 0, n_pages * P), n_pages, False)[0]
        return node

    def lock_unlock(self, node: int) -> None:
        self._tree._move_lock(0, node)
        self._tree.unlock(node)


class CountingAllocator:
    """Takes slots back and counts them."""

    device = "cpu"
    page_size = P

    def __init__(self) -> None:
        self.freed = 0

    def free_segment(self, slots: Any, *, start_pos: int) -> None:
        del start_pos
        self.freed += len(slots)

    def free(self, slots: Any) -> None:
        self.freed += len(slots)


class SglangTree:
    """One of SGLang's trees, by the calls that its scheduler makes."""

    def __init__(self, tree: str) -> None:
        from kvlockstep.fuzz.targets.sglang import engine as sgl  # noqa: I001  prepares the import of SGLang
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self._key, self._insert, self._match = RadixKey, InsertParams, MatchPrefixParams
        self._evict_params = EvictParams(num_tokens=1)
        self.allocator = CountingAllocator()
        rows = SimpleNamespace(device="cpu")
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=P,
            eviction_policy="lru",
        )
        if tree == "radix":
            self._cache = RadixCache(params)
        else:
            params.tree_components = (sgl.ComponentType.FULL,)
            params.tree_core_backend = tree.removeprefix("unified-")
            self._cache = UnifiedRadixCache(params)
        self._next_slot = P

    def pages(self, n_pages: int) -> Any:
        import torch

        self._next_slot += n_pages * P
        return torch.arange(self._next_slot - n_pages * P, self._next_slot)

    def insert(self, tokens: "array[int]", pages: Any) -> None:
        self._cache.insert(self._insert(key=self._key(tokens), value=pages))

    def match(self, tokens: "array[int]") -> Any:
        found = self._cache.match_prefix(self._match(key=self._key(tokens)))
        return self._cache.path_device_indices(found.last_device_node)

    def evict(self) -> None:
        self._cache.evict(self._evict_params)

    def node(self, tokens: "array[int]") -> Any:
        return self._cache.match_prefix(self._match(key=self._key(tokens))).last_device_node

    def lock_unlock(self, node: Any) -> None:
        self._cache.unlock(self._cache.lock(node))
