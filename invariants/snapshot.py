"""What can be seen of a cache at one moment, in plain Python, the same for every target.

A snapshot is collected by walking the free list, the edges and the row table; counters that the
cache keeps stand beside what was walked, as *claims* to be recounted (law 6). A part that a target
cannot show is ``None``: the checks that need it are reported as skipped, never as passed.

Pools are named, and an edge has slots per pool, so that a second pool (sliding window, recurrent
state, host tier) is one more key and not another format. Today's caches have the one pool ``"full"``.

With pages of 2, after ``r1`` published ``a b`` and goes on with ``c``::

    pools["full"].free_pages   [3, 4]            page 1 is on the edge, page 2 is r1's tail
    nodes                      [NodeView(7, parent=ROOT, units=(a, b), slots={"full": [2, 3]}, lock_ref=1)]
    rows                       [RowView(row=1, request="r1", slots=[2, 3, 4])]
    requests                   [RequestView("r1", "RUNNING", 2, 3, 3, anchor=7, row=1)]

Slot 5 is the slack of r1's last page: the request holds it, and no row names it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

FULL = "full"
"""Name of the pool that every cache of today has."""

ROOT = -1
"""Stands for the root, which has no edge and no entry in ``Snapshot.nodes``."""

Namespace = tuple[str | None, str | None, tuple[str, ...]]
"""``(extra_key, cache_salt, content_ids)``; compared part by part, absent (None) differs from empty."""

Unit = int | tuple[int, int]
"""A key unit: a token, or in bigram mode a pair of neighbouring tokens."""


@dataclass(slots=True)
class PoolView:
    """One pool: who is free, how often each page came back, and what the cache says of its sizes."""

    n_pages: int  # usable pages are 1..n_pages; page 0 is padding
    free_pages: list[int] | None  # in any order; a list, so that a page that stands in it twice shows
    page_generations: list[int] | None  # indexed by page, n_pages + 1 entries
    available: int | None  # claims, in slots
    evictable: int | None
    protected: int | None


@dataclass(slots=True)
class RowView:
    """A row that some request holds, with the slots of positions ``[0, allocated_len)``."""

    row: int
    request: str
    slots: list[int]


@dataclass(slots=True)
class RequestView:
    """A request that the cache knows: MATCHED, RUNNING or IN_FLIGHT (a NEW one is the harness's alone)."""

    request: str
    state: str
    protected_len: int
    committed_len: int
    allocated_len: int
    anchor: int | None  # node id, ROOT for an empty path, None if not observed
    row: int | None  # None while MATCHED without a row


@dataclass(slots=True)
class NodeView:
    """One node and the edge that leads to it."""

    node: int  # any identity that is stable within this snapshot, never ROOT
    parent: int  # node id or ROOT
    namespace: Namespace
    units: Sequence[Unit]  # key units of the edge
    slots: dict[str, list[int]]  # per pool
    lock_ref: int
    stamp: int | None  # tick of the last match or publication through it; only the order matters
    created: int | None  # tick of creation; only the order matters
    hits: int | None
    priority: int | None
    children: list[int] | None = None  # ids of the nodes found below it; None where only parents can be seen


@dataclass(slots=True)
class Snapshot:
    """A cache at one moment."""

    page_size: int
    n_rows: int  # usable rows are 1..n_rows; row 0 is padding
    pools: dict[str, PoolView]
    rows: list[RowView] | None
    free_rows: list[int] | None
    row_generations: list[int] | None  # indexed by row, n_rows + 1 entries
    requests: list[RequestView] | None
    nodes: list[NodeView] | None
    evictable_nodes: list[int] | None = None  # claim: ids of the nodes that eviction may take now
    root_lock_ref: int | None = None  # claim: 0, the root is not counted
    max_context_len: int | None = None  # positions of one row


@dataclass(slots=True)
class Hold:
    """What an IN_FLIGHT request must still hold when its pass lands; remembered at ``alloc``."""

    row: int
    row_generation: int
    page_generations: dict[int, int]  # page -> generation, of its tail and of its locked prefix
    write_slots: list[int]  # positions [committed_len, committed_len + n), in position order


@dataclass(slots=True)
class Read:
    """Fingerprints of a request's committed positions: those that belong there, and those read back."""

    request: str
    row: int
    expected: list[int]
    got: list[int]


@dataclass(slots=True)
class Observation:
    """One operation as seen from outside: what was asked, what came back, the cache before and after.

    ``written`` is the harness's own memory of the pool: for each slot the fingerprint of what the
    last pass wrote there. ``fingerprints`` are, for each request named by this operation, those of
    its tokens, position by position. Both are kept beside the cache and never read from it.
    """

    step: int
    kind: str  # submit, peek, match, alloc, commit, checkpoint, release, abort, retract, evict, reset
    requests: list[str]  # those named, in batch order
    n: int  # evict: slots asked; alloc: pages needed, -1 where something else forbids it; commit: kept; else 0
    refused: str | None  # name of the refusal, or None if it was done
    before: Snapshot
    now: Snapshot
    matched_len: int | None = None  # peek, match
    key_units: str = "token"  # or "bigram"
    write_sets: list[list[int]] | None = None  # alloc, in batch order
    evicted: list[list[int]] = field(default_factory=list)  # freed slots per node, in victim order
    holds: dict[str, Hold] = field(default_factory=dict)  # of all requests in flight after this operation
    written: dict[int, int] = field(default_factory=dict)
    fingerprints: dict[str, list[int]] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)  # commit: every live row, through the gather path
    pool_expected: list[int] | None = None  # commit, by slot: fingerprints that the pool must hold now
    pool_got: list[int] | None = None
    allowed: dict[str, int] = field(default_factory=dict)  # differences from SPEC that the model made here, by name
    whole: bool = True  # False: ``before`` and ``now`` are of an earlier moment, only what came back was seen
