"""`gpu_impl` behind the contract of a target.

Lists come in and go out here; the cache itself takes token buffers and tensors. This is the only place
that brings its data from the device to the host, and only after an operation has returned.

The snapshot is walked: the free stacks, the edges from the root down, the row tensor. The counters,
locks and the victims' queue that the cache maintains stand beside it as claims.

KV carries one 32-bit fingerprint a slot. Each plane (a layer's K or V) holds it as often as it fits, as
bits, xored with a salt that differs from plane to plane and word to word; so a plane that is stale,
swapped or shifted is told from the others.
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlockstep import gpu_impl
from kvlockstep.fuzz.config import POLICIES, CacheConfig
from kvlockstep.fuzz.ops import NO_NAMESPACE, AllocItem, Namespace
from kvlockstep.fuzz.targets.base import REFUSALS, AllocResult
from kvlockstep.invariants import FULL, ROOT, NodeView, PoolView, RequestView, RowView, Snapshot, Unit

T = TypeVar("T")
Words = NDArray[np.uint32]

REFUSAL_OF = {refusal.__name__: refusal for refusal in REFUSALS}
MEMO_LIMIT = 4096
"""Decoded edges that are remembered; a long run with large pools starts over at times."""


def make(config: CacheConfig) -> "GpuImplTarget":
    """Build a fresh cache on the lane of this process."""
    return GpuImplTarget(config)


class GpuImplTarget:
    """One `KvCache`. ``impl`` is the package it comes from, so that an altered copy can stand in."""

    name = "gpu_impl"
    conformance: Literal["exact", "legal"] = "exact"
    capabilities = frozenset(
        {"namespaces", "private", "bigram", "drafts", "sharing", "no_sharing", "priority", "kv"}
        | {f"policy:{policy}" for policy in POLICIES}
    )

    def __init__(self, config: CacheConfig, impl: ModuleType = gpu_impl) -> None:
        self._impl: Any = impl
        self._cache: Any = impl.KvCache(impl.CacheConfig(**config.to_json()))
        self.lane: str = self._cache.lane
        self._config = config
        self._units_of: dict[bytes, tuple[Unit, ...]] = {}
        self._slots_of: dict[bytes, list[int]] = {}
        self._salts = _salts(config)
        self._multipliers = self._salts | np.uint32(1)
        self._heads = (config.kv_heads, config.head_dim)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._bits = torch.int32 if config.dtype == "float32" else torch.int16
        self._host_bits_type = np.int32 if config.dtype == "float32" else np.int16
        self._cut_word = config.dtype != "float32" and config.kv_heads * config.head_dim % 2 == 1

    # Operations

    def peek(self, request: str, tokens: Sequence[int], namespace: Namespace, private: bool) -> int:
        matched_len: int = self._ask(lambda: self._cache.peek(request, array("i", tokens), namespace, private))
        return matched_len

    def match(self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int, private: bool) -> int:
        tokens = array("i", tokens)
        matched_len: int = self._ask(lambda: self._cache.match(request, tokens, namespace, priority, private))
        return matched_len

    def alloc(self, batch: Sequence[AllocItem]) -> AllocResult:
        items = [self._impl.Extend(item.request, item.n, array("i", item.drafts)) for item in batch]
        done = self._ask(lambda: self._cache.alloc(items))
        slots = done.write_set.tolist()
        write_sets = [slots[start : start + n] for start, n in zip(done.offsets, done.lengths, strict=True)]
        return AllocResult(write_sets, [freed.tolist() for freed in done.evicted])

    def commit(self, request: str, kept: int, sampled: Sequence[int]) -> None:
        self._ask(lambda: self._cache.commit(request, kept, array("i", sampled)))

    def checkpoint(self, request: str) -> None:
        self._ask(lambda: self._cache.checkpoint(request))

    def release(self, request: str) -> None:
        self._ask(lambda: self._cache.release(request))

    def abort(self, request: str) -> None:
        self._ask(lambda: self._cache.abort(request))

    def retract(self, request: str, publish: bool) -> None:
        self._ask(lambda: self._cache.retract(request, publish))

    def evict(self, n_slots: int) -> list[list[int]]:
        return [freed.tolist() for freed in self._ask(lambda: self._cache.evict(n_slots))]

    def reset(self) -> None:
        self._ask(lambda: self._cache.reset())

    def _ask(self, operation: Callable[[], T]) -> T:
        """Run an operation; give its refusal, if any, as the harness's class of the same name."""
        try:
            return operation()
        except self._impl.Refused as refusal:
            raise REFUSAL_OF[type(refusal).__name__](str(refusal)) from refusal

    # What can be seen

    def snapshot(self) -> Snapshot:
        cache = self._cache
        rows: list[RowView] = []
        requests: list[RequestView] = []
        for name, live in cache.requests.items():
            if live.row is not None:
                slots = cache.device.row_table[live.row, : live.allocated_len].tolist()
                rows.append(RowView(live.row, name, slots))
            anchor = live.anchor or ROOT
            requests.append(
                RequestView(
                    name, live.state, live.protected_len, live.committed_len, live.allocated_len, anchor, live.row
                )
            )
        pool = PoolView(
            self._config.n_pages,
            cache.free_pages.free.tolist(),
            cache.free_pages.generations.tolist(),
            cache.available,
            cache.evictable,
            cache.protected,
        )
        return Snapshot(
            page_size=self._config.page_size,
            n_rows=self._config.n_rows,
            pools={FULL: pool},
            rows=rows,
            free_rows=cache.free_rows.free.tolist(),
            row_generations=cache.free_rows.generations.tolist(),
            requests=requests,
            nodes=self._nodes(),
            evictable_nodes=list(cache.tree.victims.entries),
            root_lock_ref=cache.tree.lock_ref[0],
            max_context_len=cache.device.row_table.shape[1],
        )

    def _nodes(self) -> list[NodeView]:
        """Walk from the root down, each node below the parent that lists it."""
        tree = self._cache.tree
        nodes: list[NodeView] = []
        todo: list[tuple[int, Namespace]] = [(0, NO_NAMESPACE)]
        while todo:
            parent, inherited = todo.pop()
            children = tree.children[parent]
            if not children:
                continue
            for node in children.values():
                namespace: Namespace = tree.namespace[node] if parent == 0 else inherited
                nodes.append(
                    NodeView(
                        node,
                        tree.parent[node] or ROOT,
                        namespace,
                        self._units(tree.edge[node]),
                        {FULL: self._slots(tree.pages[node])},
                        tree.lock_ref[node],
                        tree.stamp[node],
                        tree.created[node],
                        tree.hits[node],
                        tree.priority[node],
                        list((tree.children[node] or {}).values()),
                    )
                )
                todo.append((node, namespace))
        return nodes

    def _units(self, edge: bytes) -> tuple[Unit, ...]:
        units = self._units_of.get(edge)
        if units is None:
            tokens = array("i", edge).tolist()
            units = tuple(pairwise(tokens)) if self._config.key_units == "bigram" else tuple(tokens)
            _remember(self._units_of, edge, units)
        return units

    def _slots(self, pages: bytes) -> list[int]:
        slots = self._slots_of.get(pages)
        if slots is None:
            size = self._config.page_size
            slots = [slot for page in array("i", pages) for slot in range(page * size, (page + 1) * size)]
            _remember(self._slots_of, pages, slots)
        return slots.copy()

    # KV

    def write_kv(self, slots: Sequence[int], values: Sequence[int]) -> None:
        kv = self._planes_of(np.array(values, dtype=np.uint32))
        self._cache.write_kv(self._on_device(array("i", slots)), kv[0], kv[1])

    def read_kv(self, row: int, length: int) -> list[int]:
        return self._values_of(np.stack([self._host_bits(kv) for kv in self._cache.read_kv(row, length)]))

    def read_slots(self, slots: Sequence[int]) -> list[int]:
        pool = self._host_bits(self._cache.device.kv_pool)
        return self._values_of(pool.take(array("i", slots), axis=2).swapaxes(0, 1))

    def _host_bits(self, kv: Tensor) -> NDArray[Any]:
        """Bring KV [..., kv_heads, head_dim] to the host as integers [..., elements]."""
        host: NDArray[Any] = kv.flatten(-2).view(self._bits).cpu().numpy()
        return host

    def _on_device(self, numbers: "array[int]") -> Tensor:
        if not numbers:
            return torch.empty(0, dtype=torch.int32, device=self._cache.device.device)
        return torch.frombuffer(numbers, dtype=torch.int32).to(self._cache.device.device)

    def _planes_of(self, values: Words) -> Tensor:
        """Spell fingerprints [n] as KV [K or V, layers, n, kv_heads, head_dim]."""
        bits = (self._salts ^ values[:, None]).view(self._host_bits_type)
        kv = torch.from_numpy(bits).view(self._dtype)[..., : self._heads[0] * self._heads[1]]
        return kv.reshape(*kv.shape[:3], *self._heads).to(self._cache.device.device)

    def _values_of(self, bits: NDArray[Any]) -> list[int]:
        """Read fingerprints back from the bits of KV [K or V, layers, n, elements].

        Where the planes disagree, as in a slot that was never written, give a negative number that depends on
        every bit of the slot, so that any change of it shows; `plane_of` tells the first plane that spells
        another fingerprint than plane 0 begins with.
        """
        if self._cut_word:
            bits = np.pad(bits, ((0, 0), (0, 0), (0, 0), (0, 1)))
        words = np.ascontiguousarray(bits).view(np.uint32) ^ self._salts
        values = words[0, 0, :, 0].copy()
        words ^= values[:, None]
        if self._cut_word:
            words[..., -1] &= np.uint32(0xFFFF)
        found = values.astype(np.int64)
        torn = np.flatnonzero(words.any(axis=(0, 1, 3)))
        if torn.size:
            words = words[:, :, torn]
            bits_sum = values[torn] + (words * self._multipliers).sum(axis=(0, 1, 3), dtype=np.uint32)
            # of planes that disagree the first one: K and V of layer 0, K and V of layer 1, and so on
            disagree: NDArray[Any] = np.any(words, axis=3)
            first = disagree.swapaxes(0, 1).reshape(-1, torn.size).argmax(axis=0)
            found[torn] = -1 - first - 2 * self._config.layers * bits_sum.astype(np.int64)
        read: list[int] = found.tolist()
        return read


def plane_of(value: int, layers: int) -> int:
    """Tell from a negative reading which plane disagrees first: K and V of layer 0, K and V of layer 1, and so on."""
    return (-1 - value) % (2 * layers)


def _remember(memo: dict[bytes, Any], key: bytes, value: Any) -> None:
    if len(memo) >= MEMO_LIMIT:
        memo.clear()
    memo[key] = value


def _salts(config: CacheConfig) -> Words:
    """Give 32 bits for each word of each plane: [K or V, layers, 1, words]."""
    elements = config.kv_heads * config.head_dim
    n_words = elements if config.dtype == "float32" else (elements + 1) // 2
    plane = np.arange(2 * config.layers, dtype=np.uint32).reshape(config.layers, 2).T
    word = np.arange(n_words, dtype=np.uint32)
    # Odd multipliers keep the salts of all planes apart, and those of neighbouring words.
    salts = plane[:, :, None, None] * np.uint32(0x9E3779B1) + word * np.uint32(0x85EBCA6B) + np.uint32(0x27D4EB2F)
    return np.ascontiguousarray(salts)
