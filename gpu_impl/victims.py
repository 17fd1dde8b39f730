# cython: annotation_typing=False
"""The queue of nodes that eviction may take, in the order of one policy.

A heap in one flat integer buffer, with the place of every node beside it: a node stands in it once at most, so
the heap is never longer than there are evictable nodes, and no call ever pays for what earlier ones left behind.
``put``, ``discard`` and ``pop`` take O(log n). Each place has ``ARITY`` places below it, whose ranks lie side by
side in memory.

A rank is three integers, the smallest leaves first: two of the policy, then a guard. Stamps of leaves differ; the
length of the path and the first page of the edge stand behind them as a guard.
"""

from array import array
from collections.abc import Callable

# (stamp, created, hits, priority) -> what the policy looks at first
POLICIES: dict[str, Callable[[int, int, int, int], tuple[int, int]]] = {
    "lru": lambda stamp, created, hits, priority: (stamp, 0),
    "mru": lambda stamp, created, hits, priority: (-stamp, 0),
    "fifo": lambda stamp, created, hits, priority: (created, 0),
    "filo": lambda stamp, created, hits, priority: (-created, 0),
    "lfu": lambda stamp, created, hits, priority: (hits, stamp),
    "slru": lambda stamp, created, hits, priority: (int(hits >= 2), stamp),
    "priority": lambda stamp, created, hits, priority: (priority, stamp),
}

ARITY = 4
WIDTH = 4  # integers of one place: three of the rank, and the node
NODE = 3
NOWHERE = -1


class VictimQueue:
    """Nodes with ranks; the smallest rank leaves first.

    >>> queue = VictimQueue()
    >>> queue.put(7, 1, 0, 4), queue.put(8, 2, 0, 4), queue.put(7, 3, 0, 4)  # 7 was used again
    (None, None, None)
    >>> queue.pop(), queue.pop(), queue.pop()
    (8, 7, -1)
    """

    def __init__(self) -> None:
        self._heap = array("q", bytes(8 * WIDTH))
        self._place = array("q", [NOWHERE])  # of each node
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def nodes(self) -> list[int]:
        """List the nodes, in no order that means anything."""
        return [self._heap[place * WIDTH + NODE] for place in range(self._n)]

    def put(self, node: int, first: int, second: int, guard: int) -> None:
        """Add ``node``, or give it another rank."""
        while node >= len(self._place):
            self._place = array("q", bytes(self._place) + array("q", [NOWHERE]).tobytes() * len(self._place))
        place = self._place[node]
        if place == NOWHERE:
            place = self._n
            self._n += 1
            if self._n * WIDTH > len(self._heap):
                self._heap = array("q", bytes(self._heap) + bytes(8 * len(self._heap)))
        at = place * WIDTH
        self._heap[at] = first
        self._heap[at + 1] = second
        self._heap[at + 2] = guard
        self._heap[at + NODE] = node
        self._place[node] = place
        self._settle(place)

    def discard(self, node: int) -> None:
        """Take ``node`` out if it is in."""
        if node >= len(self._place):
            return
        place = self._place[node]
        if place == NOWHERE:
            return
        self._n -= 1
        self._swap(place, self._n)
        self._place[node] = NOWHERE
        if place < self._n:
            self._settle(place)

    def pop(self) -> int:
        """Take out the first victim, and return it; NOWHERE if there is none."""
        if self._n == 0:
            return NOWHERE
        node = self._heap[NODE]
        self.discard(node)
        return node

    def _settle(self, place: int) -> None:
        """Move what stands at ``place`` up or down, to where its rank belongs."""
        while place > 0:
            above = (place - 1) // ARITY
            if not self._is_before(place, above):
                break
            self._swap(place, above)
            place = above
        while True:
            first = place
            below = place * ARITY + 1
            while below <= place * ARITY + ARITY and below < self._n:
                if self._is_before(below, first):
                    first = below
                below += 1
            if first == place:
                return
            self._swap(place, first)
            place = first

    def _is_before(self, place: int, other: int) -> bool:
        a = place * WIDTH
        b = other * WIDTH
        for _ in range(NODE):
            if self._heap[a] != self._heap[b]:
                return self._heap[a] < self._heap[b]
            a += 1
            b += 1
        return False

    def _swap(self, place: int, other: int) -> None:
        a = place * WIDTH
        b = other * WIDTH
        for _ in range(WIDTH):
            kept = self._heap[a]
            self._heap[a] = self._heap[b]
            self._heap[b] = kept
            a += 1
            b += 1
        self._place[self._heap[place * WIDTH + NODE]] = place
        self._place[self._heap[other * WIDTH + NODE]] = other
