"""What follows from one snapshot and several checks need: worked out once, shared by all of them.

A page is looked at through its first slot, so that a snapshot costs a step a page and not a step a
slot; whether slots really run in whole pages is one comparison of lists (``in_pages``). Where that
comparison fails, `owners.page_owners` looks at every slot instead.

Ownership is per pool: requests hold pages of the pool ``"full"`` only, edges may hold pages of any.

With pages of 2, a row 2 3 6 7 9 and a protected length of 2: ``row_pages`` is [1, 3, 4], the tail
is [3, 4], and slot 8, which no row names, still belongs to the request: pages have owners, slots do not.
"""

from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import chain

from kvlockstep.invariants.snapshot import (
    FULL,
    ROOT,
    NodeView,
    Observation,
    PoolView,
    RequestView,
    RowView,
    Snapshot,
)

PageOwner = str | tuple[str, str]
"""``"free"``, ``"tree"``, or ``("request", name)``."""


LONGEST_KEPT_RUN = 64
"""Pages; longer runs are spelled out anew each time, so that what is kept stays small."""


@lru_cache(maxsize=1024)
def _kept_run(pages: tuple[int, ...], page_size: int) -> list[int]:
    return run_in_pages(pages, page_size)


def run_in_pages(pages: Iterable[int], page_size: int) -> list[int]:
    """List every slot of ``pages``, in order.

    >>> run_in_pages([1, 3], 2)
    [2, 3, 6, 7]
    """
    return list(chain.from_iterable([range(page * page_size, page * page_size + page_size) for page in pages]))


def is_in_pages(slots: list[int], pages: tuple[int, ...], page_size: int) -> bool:
    """Tell whether ``slots`` are these whole pages one after the other, the last one perhaps cut.

    >>> is_in_pages([2, 3, 6], (1, 3), 2), is_in_pages([2, 4, 6], (1, 3), 2)
    (True, False)
    """
    run = _kept_run(pages, page_size) if len(pages) <= LONGEST_KEPT_RUN else run_in_pages(pages, page_size)
    return slots == (run if len(run) == len(slots) else run[: len(slots)])


class PoolIndex:
    """The pages of one pool, by owner."""

    def __init__(self, name: str, view: PoolView, page_size: int, edges: list[list[int]], tails: dict[str, list[int]]):
        self.name = name
        self.view = view
        self.page_size = page_size
        self.edges = edges
        self.tails = tails
        self.free = view.free_pages or []
        self.edge_pages = [tuple([slot // page_size for slot in edge[::page_size]]) for edge in edges]
        self.tree_pages = list(chain.from_iterable(self.edge_pages))

    @cached_property
    def edges_in_pages(self) -> bool:
        """Every edge is whole pages, its slots consecutive within each."""
        page_size = self.page_size
        for edge, pages in zip(self.edges, self.edge_pages, strict=True):
            if len(edge) % page_size or not is_in_pages(edge, pages, page_size):
                return False
        return True

    @cached_property
    def held_pages(self) -> list[int]:
        """Pages named by someone, with repeats: the free list, the edges, the tails."""
        return list(chain(self.free, self.tree_pages, *self.tails.values()))

    @cached_property
    def adds_up(self) -> bool:
        """Each page of the pool is named once, as far as first slots show; no edge hides another page."""
        n_pages = self.view.n_pages
        held = self.held_pages
        return len(held) == n_pages and set(held) == set(range(1, n_pages + 1)) and self.edges_in_pages

    @cached_property
    def owner(self) -> dict[int, PageOwner]:
        """Owner of each page. Before: no page has two owners."""
        owner: dict[int, PageOwner] = dict.fromkeys(self.free, "free")
        owner.update(dict.fromkeys(self.tree_pages, "tree"))
        for request, pages in self.tails.items():
            owner.update(dict.fromkeys(pages, ("request", request)))
        return owner


class Index:
    """One snapshot, with its parts found by name and its pages by owner."""

    def __init__(self, snapshot: Snapshot) -> None:
        page_size = snapshot.page_size
        nodes = snapshot.nodes or []
        rows = snapshot.rows or []
        self.snapshot = snapshot
        self.page_size = page_size
        self.requests: dict[str, RequestView] = {request.request: request for request in snapshot.requests or ()}
        self.row_pages = {row.request: tuple([slot // page_size for slot in row.slots[::page_size]]) for row in rows}
        tails = {
            request.request: list(dict.fromkeys(self.row_pages[request.request][request.protected_len // page_size :]))
            for request in self.requests.values()
            if request.request in self.row_pages
        }
        self.pools = {
            name: PoolIndex(
                name,
                view,
                page_size,
                [node.slots.get(name, []) for node in nodes],  # an edge without slots in this pool has no pages
                tails if name == FULL else {},
            )
            for name, view in snapshot.pools.items()
        }
        self.full = self.pools[FULL]

    @cached_property
    def nodes(self) -> dict[int, NodeView]:
        return {node.node: node for node in self.snapshot.nodes or ()}

    @cached_property
    def rows(self) -> dict[str, RowView]:
        return {row.request: row for row in self.snapshot.rows or ()}

    @cached_property
    def rows_in_pages(self) -> bool:
        """Every row is whole pages, the last one perhaps cut, its slots consecutive within each."""
        return all(is_in_pages(row.slots, self.row_pages[name], self.page_size) for name, row in self.rows.items())

    @cached_property
    def paths(self) -> dict[str, list[NodeView] | None]:
        """For each request the path that it locks, root first; None where parents do not lead to the root."""
        of_anchor = {anchor: self.path(anchor) for anchor in {request.anchor for request in self.requests.values()}}
        return {name: of_anchor[request.anchor] for name, request in self.requests.items()}

    @cached_property
    def path_pages(self) -> dict[str, tuple[int, ...]]:
        """For each request whose path leads to the root, the pages along it. Before: edges run in pages."""
        pages_of = dict(zip(self.nodes, self.full.edge_pages, strict=True))
        return {
            name: tuple(chain.from_iterable([pages_of[node.node] for node in path]))
            for name, path in self.paths.items()
            if path is not None
        }

    def path_slots(self, request: str) -> list[int]:
        """Slots along the path that a request locks, none where it does not lead to the root."""
        return list(chain.from_iterable([node.slots.get(FULL, ()) for node in self.paths.get(request) or ()]))

    def path(self, anchor: int | None) -> list[NodeView] | None:
        """Nodes from below the root down to ``anchor``; None where a parent is missing or they go round."""
        path: list[NodeView] = []
        at = anchor
        while at != ROOT:
            node = None if at is None else self.nodes.get(at)
            if node is None or len(path) == len(self.nodes):
                return None
            path.append(node)
            at = node.parent
        path.reverse()
        return path

    @cached_property
    def unlocked(self) -> list[NodeView]:
        """Nodes that nobody locks: those that eviction can reach."""
        return [node for node in self.snapshot.nodes or () if node.lock_ref == 0]

    def unlocked_slots(self, pool: str = FULL) -> int:
        return sum([len(node.slots.get(pool, ())) for node in self.unlocked])


class Seen:
    """An observation with both of its snapshots indexed: what a check is given."""

    def __init__(self, observation: Observation, before: Index | None = None) -> None:
        assert before is None or before.snapshot is observation.before, "the index is of another snapshot"
        self.observation = observation
        self.before = before or Index(observation.before)
        self.now = Index(observation.now)
