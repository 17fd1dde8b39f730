"""The reference model behind the contract of a target, and its state as a plain snapshot.

As a target it is the honest one: the harness run against its own law, and the base from which the
wrong targets of the kit are made. `snapshot_of` is what the lockstep compares after every operation.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from kvlockstep.fuzz.config import POLICIES, CacheConfig
from kvlockstep.fuzz.ops import AllocItem, Namespace
from kvlockstep.fuzz.targets import base
from kvlockstep.invariants import FULL, ROOT, NodeView, PoolView, RequestView, RowView, Snapshot, Unit
from kvlockstep.reference import refusals
from kvlockstep.reference.cache import Cache
from kvlockstep.reference.requests import Request
from kvlockstep.reference.rows import slots_of
from kvlockstep.reference.tree import Vertex

_TARGET_REFUSALS = {kind.__name__: kind for kind in base.REFUSALS}


class ReferenceTarget:
    """The model as a suspect. It forgets the name of a request that is NEW, as SPEC section 2 says."""

    name = "reference"
    conformance: Literal["exact", "legal"] = "exact"

    def __init__(self, config: CacheConfig) -> None:
        if config.options:
            raise ValueError(f"the reference has no options, got {', '.join(config.options)}")
        self.capabilities = frozenset(
            ["namespaces", "content_ids", "private", "bigram", "drafts", "discards", "sharing", "no_sharing"]
            + ["priority", "kv"]
            + [f"policy:{policy}" for policy in POLICIES]
        )
        self.cache = new_cache(config)
        self.kv = dict.fromkeys(range(config.n_slots), 0)

    def peek(self, request: str, tokens: Sequence[int], namespace: Namespace, private: bool) -> int:
        with _refused_as_target(), self._known(request, tokens, namespace, 0, private):
            return self.cache.peek(request)

    def match(self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int, private: bool) -> int:
        with _refused_as_target(), self._known(request, tokens, namespace, priority, private):
            return self.cache.match(request)

    def alloc(self, batch: Sequence[AllocItem]) -> base.AllocResult:
        with _refused_as_target():
            done = self.cache.alloc([(item.request, item.n, item.drafts) for item in batch])
        return base.AllocResult(done.write_sets, done.evicted)

    def commit(self, request: str, kept: int, sampled: Sequence[int]) -> None:
        with _refused_as_target():
            self.cache.commit(request, kept, sampled)

    def checkpoint(self, request: str) -> None:
        with _refused_as_target():
            self.cache.checkpoint(request)

    def release(self, request: str) -> None:
        with _refused_as_target():
            self.cache.release(request)

    def abort(self, request: str) -> None:
        with _refused_as_target():
            self.cache.abort(request)

    def retract(self, request: str, publish: bool) -> None:
        with _refused_as_target():
            self.cache.retract(request, publish)
        self.cache.abort(request)

    def evict(self, n_slots: int) -> list[list[int]]:
        with _refused_as_target():
            return self.cache.evict(n_slots)

    def reset(self) -> None:
        with _refused_as_target():
            self.cache.reset()

    def snapshot(self) -> Snapshot:
        return snapshot_of(self.cache)

    def glance(self, request: str, start: int) -> tuple[RequestView, list[int]] | None:
        r = self.cache.requests.get(request)
        if r is None:
            return None
        view = RequestView(request, r.state, r.protected_len, r.committed_len, r.allocated_len, None, r.row)
        return view, [] if r.row is None else self.cache.rows.slots(r.row, start, r.allocated_len)

    def write_kv(self, slots: Sequence[int], values: Sequence[int]) -> None:
        self.kv.update(zip(slots, values, strict=True))

    def read_kv(self, row: int, length: int) -> list[int]:
        return self.read_slots(self.cache.rows.slots(row, 0, length))

    def read_slots(self, slots: Sequence[int]) -> list[int]:
        return [self.kv[slot] for slot in slots]

    @contextmanager
    def _known(
        self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int, private: bool
    ) -> Iterator[None]:
        """Let the model know a waiting request for one operation; forget it if it still waits afterwards.

        It is not submitted: a retracted request may have one token more than ``submit`` accepts.
        """
        requests = self.cache.requests
        if request not in requests:
            requests[request] = Request(request, list(tokens), namespace, priority, private)
        try:
            yield
        finally:
            if requests[request].state == "NEW":
                del requests[request]


def make(config: CacheConfig) -> ReferenceTarget:
    """Build a fresh target."""
    return ReferenceTarget(config)


def new_cache(config: CacheConfig, allowances: Collection[str] = frozenset()) -> Cache:
    """Build a fresh model of a cache of this shape, with these differences from SPEC."""
    return Cache(
        page_size=config.page_size,
        n_pages=config.n_pages,
        n_rows=config.n_rows,
        max_context_len=config.max_context_len,
        policy=config.policy,
        key_units=config.key_units,
        prefix_sharing=config.prefix_sharing,
        allowances=allowances,
    )


def snapshot_of(cache: Cache) -> Snapshot:
    """Turn a model into what can be seen of a cache. Nodes are numbered from 0, parents before children."""
    page_size = cache.page_size
    locks = cache.lock_counts()
    nodes: list[NodeView] = []
    id_of: dict[Vertex, int] = {cache.tree.root: ROOT}
    n_published = 0
    evictable_nodes = []
    for number, node in enumerate(cache.tree.nodes()):
        end, mark = node.end, node.end.mark
        assert mark is not None, "a node ends in a mark"
        id_of[end] = number
        if node.parent != ROOT:
            children = nodes[node.parent].children
            assert children is not None, "filled for every node below"
            children.append(number)
        n_published += len(node.edge)
        lock_ref = locks.get(end, 0)
        if not lock_ref and not end.children:
            evictable_nodes.append(number)
        units: list[Unit] = []
        for vertex in node.edge:
            units.extend(vertex.key)
        slots = slots_of([vertex.page for vertex in node.edge], page_size)
        nodes.append(
            NodeView(
                number,
                node.parent,
                end.namespace,
                units,
                {FULL: slots},
                lock_ref,
                mark.stamp,
                mark.created,
                mark.hits,
                mark.priority,
                [],
            )
        )
    seen = [r for r in cache.requests.values() if r.state != "NEW"]
    pool = PoolView(
        n_pages=cache.pages.n_pages,
        free_pages=cache.pages.free(),
        page_generations=list(cache.pages.generations),
        available=cache.available,
        evictable=(n_published - len(locks)) * page_size,
        protected=len(locks) * page_size,
    )
    return Snapshot(
        page_size=page_size,
        n_rows=cache.rows.n_rows,
        pools={FULL: pool},
        rows=[
            RowView(r.row, r.request, cache.rows.slots(r.row, 0, r.allocated_len)) for r in seen if r.row is not None
        ],
        free_rows=cache.rows.free(),
        row_generations=list(cache.rows.generations),
        requests=[
            RequestView(
                r.request,
                r.state,
                r.protected_len,
                r.committed_len,
                r.allocated_len,
                None if r.anchor is None else id_of[r.anchor],
                r.row,
            )
            for r in seen
        ],
        nodes=nodes,
        evictable_nodes=evictable_nodes,
        root_lock_ref=0,
        max_context_len=cache.max_context_len,
    )


@contextmanager
def _refused_as_target() -> Iterator[None]:
    """Turn a refusal of the model into the refusal of a target with the same name."""
    try:
        yield
    except refusals.Refused as refused:
        raise _TARGET_REFUSALS[refused.kind](str(refused)) from refused
