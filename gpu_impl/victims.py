"""The queue of nodes that eviction may take, in the order of one policy.

A binary heap with lazy deletion. ``entries`` maps each evictable node to its one valid heap entry; an
entry of the heap that is not the valid one of its node is stale and is dropped when it surfaces. So
``put``, ``discard`` and ``pop`` take O(log n) and never look at the rest of the tree. Stale entries are
swept out when they outnumber the valid ones, which bounds the heap to twice the nodes plus a constant
and is paid for by the calls that left them behind.

A rank is a tuple, smallest first. Stamps of leaves differ; the length of the path and the first page of
the edge stand behind them as a guard.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

Rank = tuple[int, ...]

SLACK = 8
"""Stale entries that are tolerated however few nodes there are."""

# (stamp, created, hits, priority) -> what the policy looks at first
POLICIES: dict[str, Callable[[int, int, int, int], Rank]] = {
    "lru": lambda stamp, created, hits, priority: (stamp,),
    "mru": lambda stamp, created, hits, priority: (-stamp,),
    "fifo": lambda stamp, created, hits, priority: (created,),
    "filo": lambda stamp, created, hits, priority: (-created,),
    "lfu": lambda stamp, created, hits, priority: (hits, stamp),
    "slru": lambda stamp, created, hits, priority: (int(hits >= 2), stamp),
    "priority": lambda stamp, created, hits, priority: (priority, stamp),
}


class VictimQueue:
    """Nodes with ranks; the smallest rank leaves first.

    >>> queue = VictimQueue()
    >>> queue.put(7, (1, 4)), queue.put(8, (2, 4)), queue.put(7, (3, 4))  # 7 was used again
    (None, None, None)
    >>> queue.pop(), queue.pop(), queue.pop()
    (8, 7, None)
    """

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Rank, int]] = {}
        self._heap: list[tuple[Rank, int]] = []

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def heap_len(self) -> int:
        """Entries held, stale ones included."""
        return len(self._heap)

    def put(self, node: int, rank: Rank) -> None:
        """Add ``node``, or give it another rank."""
        known = self.entries.get(node)
        if known is not None and known[0] == rank:
            return
        entry = (rank, node)
        self.entries[node] = entry
        heappush(self._heap, entry)
        self._sweep()

    def discard(self, node: int) -> None:
        """Take ``node`` out if it is in."""
        if self.entries.pop(node, None) is not None:
            self._sweep()

    def pop(self) -> int | None:
        """Take out the first victim, or None if there is none."""
        while self._heap:
            entry = heappop(self._heap)
            if self.entries.get(entry[1]) is entry:
                del self.entries[entry[1]]
                self._sweep()
                return entry[1]
        return None

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self.entries) + SLACK:
            self._heap = list(self.entries.values())
            heapify(self._heap)
