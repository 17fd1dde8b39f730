"""`gpu_impl` behind the contract of a target.

Lists come in and go out here; the cache itself takes token buffers and tensors. This is the only place
that brings its data from the device to the host, and only after an operation has returned.

The snapshot is walked: the free stacks, the edges from the root down, the row tensor. The counters,
locks and the victims' queue that the cache maintains stand beside it as claims.
"""

from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvlockstep import gpu_impl
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import NO_NAMESPACE, AllocItem, Namespace
from kvlockstep.fuzz.targets.base import REFUSALS, AllocResult
from kvlockstep.fuzz.targets.planes import Planes
from kvlockstep.invariants import FULL, ROOT, NodeView, PoolView, RequestView, RowView, Snapshot, Unit

T = TypeVar("T")

REFUSAL_OF = {refusal.__name__: refusal for refusal in REFUSALS}
MEMO_LIMIT = 4096
"""Decoded edges that are remembered; a long run with large pools starts over at times."""
LONGEST_REMEMBERED = 1024
"""Units or slots of such an edge; longer ones are decoded each time, so that what is remembered stays small."""


def make(config: CacheConfig) -> "GpuImplTarget":
    """Build a fresh cache on the lane of this process."""
    return GpuImplTarget(config)


_DEFAULTS: dict[str, object] = {"namespace": NO_NAMESPACE, "priority": 0, "private": False, "publish": False}
"""Of arguments of the cache; no engine says them either."""


def _said(**arguments: object) -> dict[str, Any]:
    """Leave out the arguments that are the default."""
    return {name: value for name, value in arguments.items() if value != _DEFAULTS[name]}


def _if_any(tokens: Sequence[int]) -> "tuple[array[int], ...]":
    """Leave out a last argument that would be an array of nothing."""
    return (array("q", tokens),) if tokens else ()


class GpuImplTarget:
    """One `KvCache`. ``impl`` is the package it comes from, so that an altered copy can stand in."""

    name = "gpu_impl"
    conformance: Literal["exact", "legal"] = "exact"
    capabilities = frozenset(
        {"namespaces", "content_ids", "private", "bigram", "drafts", "discards", "sharing", "no_sharing"}
        | {"priority", "kv"}
        | {f"policy:{policy}" for policy in ("lru", "mru", "fifo", "filo", "lfu", "slru", "priority")}
    )

    def __init__(self, config: CacheConfig, impl: ModuleType = gpu_impl) -> None:
        self._impl: Any = impl
        self._cache: Any = impl.KvCache(impl.CacheConfig(**config.to_json()))
        self.lane: str = self._cache.lane
        self._config = config
        self._units_of: dict[bytes, tuple[Unit, ...]] = {}
        self._slots_of: dict[bytes, list[int]] = {}
        self._planes = Planes(config)
        self._retracted: dict[str, array[int]] = {}  # tokens that the cache gave back, for the next match

    @property
    def kernels(self) -> ModuleType:
        """The module of the kernels that its operations launch. Before: the lane is not ``torch``."""
        return import_module(f"{self._impl.__name__}.kernels")

    # Operations

    def peek(self, request: str, tokens: Sequence[int], namespace: Namespace, private: bool) -> int:
        known, said = self._tokens(request, tokens), _said(namespace=namespace, private=private)
        matched_len: int = self._ask(lambda: self._cache.peek(request, known, **said))
        return matched_len

    def match(self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int, private: bool) -> int:
        known = self._tokens(request, tokens)
        said = _said(namespace=namespace, priority=priority, private=private)
        matched_len: int = self._ask(lambda: self._cache.match(request, known, **said))
        self._retracted.pop(request, None)
        return matched_len

    def _tokens(self, request: str, tokens: Sequence[int]) -> "array[int]":
        """Give what the cache itself gave back when it retracted the request, or else what the harness knows."""
        return self._retracted.get(request, array("q", tokens))

    def alloc(self, batch: Sequence[AllocItem]) -> AllocResult:
        items = [self._impl.Extend(item.request, item.n, *_if_any(item.drafts)) for item in batch]
        done = self._ask(lambda: self._cache.alloc(items))
        slots = done.write_set.tolist()
        write_sets = [slots[start : start + n] for start, n in zip(done.offsets, done.lengths, strict=True)]
        return AllocResult(write_sets, [freed.tolist() for freed in done.evicted])

    def commit(self, request: str, kept: int, sampled: Sequence[int]) -> None:
        self._ask(lambda: self._cache.commit(request, kept, *_if_any(sampled)))

    def checkpoint(self, request: str) -> None:
        self._ask(lambda: self._cache.checkpoint(request))

    def release(self, request: str) -> None:
        self._ask(lambda: self._cache.release(request))

    def abort(self, request: str) -> None:
        self._ask(lambda: self._cache.abort(request))

    def retract(self, request: str, publish: bool) -> None:
        self._retracted[request] = self._ask(lambda: self._cache.retract(request, **_said(publish=publish)))

    def forget(self, request: str) -> None:
        """A waiting request has ended: its name may come back with other tokens."""
        self._retracted.pop(request, None)

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
                rows.append(RowView(live.row, name, self._row_slots(live, 0)))
            requests.append(_request_view(name, live))
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
            evictable_nodes=cache.tree.victims.nodes(),
            root_lock_ref=cache.tree.lock_ref[0],
            max_context_len=cache.device.row_table.shape[1],
        )

    def glance(self, request: str, start: int) -> tuple[RequestView, list[int]] | None:
        live = self._cache.requests.get(request)
        if live is None:
            return None
        return _request_view(request, live), [] if live.row is None else self._row_slots(live, start)

    def _row_slots(self, live: Any, start: int) -> list[int]:
        slots: list[int] = self._cache.device.row_table[live.row, start : live.allocated_len].tolist()
        return slots

    def _nodes(self) -> list[NodeView]:
        """Walk from the root down, each node below the parent that lists it."""
        tree = self._cache.tree
        parent_of = tree.parent
        lock_ref, stamp, created, hits, priority = tree.lock_ref, tree.stamp, tree.created, tree.hits, tree.priority
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
                        parent_of[node] or ROOT,
                        namespace,
                        self._units(tree.edge[node]),
                        {FULL: self._slots(tree.pages[node])},
                        lock_ref[node],
                        stamp[node],
                        created[node],
                        hits[node],
                        priority[node],
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
        kv = self._planes.spell(np.array(values, dtype=np.uint32)).to(self._cache.device.device)
        self._cache.write_kv(self._on_device(array("i", slots)), kv[0], kv[1])

    def read_kv(self, row: int, length: int) -> list[int]:
        return self._planes.read(np.stack([self._planes.host_bits(kv) for kv in self._cache.read_kv(row, length)]))

    def read_slots(self, slots: Sequence[int]) -> list[int]:
        pool = self._planes.host_bits(self._cache.device.kv_pool)
        return self._planes.read(pool.take(array("i", slots), axis=2).swapaxes(0, 1))

    def _on_device(self, numbers: "array[int]") -> Tensor:
        if not numbers:
            return torch.empty(0, dtype=torch.int32, device=self._cache.device.device)
        return torch.frombuffer(numbers, dtype=torch.int32).to(self._cache.device.device)


def _request_view(name: str, live: Any) -> RequestView:
    return RequestView(
        name,
        live.state,
        live.protected_len,
        live.committed_len,
        live.allocated_len,
        live.anchor or ROOT,
        live.row,
    )


def _remember(memo: dict[bytes, Any], key: bytes, value: Any) -> None:
    if len(value) > LONGEST_REMEMBERED:
        return
    if len(memo) >= MEMO_LIMIT:
        memo.clear()
    memo[key] = value
