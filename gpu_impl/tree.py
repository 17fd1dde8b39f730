# cython: annotation_typing=False
"""The prefix tree: published runs of key units with their pages, found again by comparing memory.

A compressed radix tree over whole pages. Each node is a number; its fields stand in parallel buffers and lists. The
edge that leads to a node is a byte string of int32 tokens, so matching a run is one memory compare,
however long the run is. In bigram mode the units of ``k`` pages overlap, and their edge is the bytes of
``k * page_size + 1`` tokens; the last one is the first of the edge below.

A node's children are found by the bytes of their first page; those of the root, which has children of
every namespace, by ``(namespace, bytes)``. Nothing else remembers a namespace, so none outlives its nodes.

With pages of 2, after ``a b c d`` was published on pages 1 2 and then ``a b x y`` on pages 3 4 (page 3
is a duplicate and goes back to its request)::

    root -- "ab" page 1 (end 1) --+-- "cd" page 2 (end 2)      the lower part of the split keeps its number,
                                  +-- "xy" page 4 (end 2)      so locks anchored there stay where they are

A lock on a node counts on the whole path above it, the root left out. Nodes that are unlocked and have no
children stand in the queue of victims. Lengths here are in pages. Nothing recurses: a chain may be as
deep as memory allows.
"""

import sys
from array import array

from .victims import POLICIES, VictimQueue

Namespace = tuple[str | None, str | None, tuple[str, ...]]
"""``(extra_key, cache_salt, content_ids)``, compared part by part."""

ROOT = 0
TOKEN_BYTES = 4


class PrefixTree:
    """Published prefixes, their pages, locks, and the order in which they may be evicted."""

    def __init__(self, page_size: int, bigram: bool, policy: str) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self.overlap_bytes = TOKEN_BYTES if bigram else 0
        self.first_bytes = self.page_bytes + self.overlap_bytes
        self._policy = POLICIES[policy]
        self.tick = 0
        self.clear()

    def clear(self) -> None:
        """Drop every node, locked or not."""
        self.edge: list[bytes] = [b""]
        self.pages: list[bytes] = [b""]  # of the edge, int32
        self.children: list[dict[object, int] | None] = [None]
        self.namespace: list[Namespace | None] = [None]  # of nodes right below the root
        self.parent = array("q", [ROOT])
        self.end = array("q", [0])  # pages from the root to the end of the edge
        self.lock_ref = array("q", [0])
        self.stamp = array("q", [0])
        self.created = array("q", [0])
        self.hits = array("q", [0])
        self.priority = array("q", [0])
        self._spare: list[int] = []  # numbers of removed nodes
        self.victims = VictimQueue()
        self.evictable = 0  # pages on unlocked nodes
        self.protected = 0  # pages on locked nodes

    # Finding

    def match(self, namespace: Namespace, key: bytes, n_pages: int, lock: bool) -> "tuple[int, array[int]]":
        """Find the longest published prefix of ``key``, split where it ends, stamp its path and perhaps lock it.

        Before: ``key`` is ``n_pages`` whole pages of units. Returns the node at the end and the pages.
        """
        self.tick += 1
        path = self._descend(ROOT, namespace, key, n_pages)
        for node in path:
            self.stamp[node] = self.tick
        end = path[-1] if path else ROOT
        if lock:
            self._move_lock(ROOT, end)
        else:
            self._requeue(end)
        return end, self._pages_along(path)

    def publish(
        self,
        anchor: int,
        namespace: Namespace,
        key: bytes,
        own_pages: "array[int]",
        inserted: int,
        priority: int,
    ) -> "tuple[int, array[int]]":
        """Publish ``key`` below ``anchor``, and move the caller's lock from there to the end of the path.

        Stamps the path and counts a hit on its nodes that end beyond ``inserted``.
        Before: the caller's lock is at ``anchor``, and ``key`` spells ``own_pages`` right after it.
        After: one new node owns those of ``own_pages`` for which the tree had none, with a copy of their
        numbers. Returns the node at the end, and the canonical pages of the leading part that was there
        already: as many of ``own_pages``, from the first on, are duplicates and still the caller's.
        """
        self.tick += 1
        path = self._descend(anchor, namespace, key, len(own_pages))
        canonical = self._pages_along(path)
        end = path[-1] if path else anchor
        if len(canonical) < len(own_pages):
            rest = key[len(canonical) * self.page_bytes :]
            end = self._add_child(end, namespace, rest, own_pages[len(canonical) :].tobytes(), priority)
        node = end
        while node != ROOT:
            self.stamp[node] = self.tick
            if self.end[node] > inserted:
                self.hits[node] += 1
            if self.priority[node] < priority:
                self.priority[node] = priority
            node = self.parent[node]
        self._move_lock(anchor, end)
        return end, canonical

    def _descend(self, node: int, namespace: Namespace, key: bytes, n_pages: int) -> list[int]:
        """List the nodes below ``node`` that spell the longest prefix of ``key``; split the last edge if need be."""
        path: list[int] = []
        walked = 0
        while walked < n_pages:
            children = self.children[node]
            if children is None:
                break
            offset = walked * self.page_bytes
            first = key[offset : offset + self.first_bytes]
            child = children.get((namespace, first) if node == ROOT else first)
            if child is None:
                break
            if not key.startswith(self.edge[child], offset):
                path.append(self._split(child, self._shared_pages(child, key, offset, n_pages - walked)))
                break
            path.append(child)
            walked += len(self.pages[child]) // TOKEN_BYTES
            node = child
        return path

    def _shared_pages(self, node: int, key: bytes, offset: int, n_pages: int) -> int:
        """Count the leading pages that the edge of ``node`` shares with ``key``; at least one, not all of the edge."""
        edge = self.edge[node]
        known, limit = 1, min(len(self.pages[node]) // TOKEN_BYTES, n_pages)
        while known < limit:
            middle = (known + limit + 1) // 2
            start, stop = known * self.page_bytes, middle * self.page_bytes + self.overlap_bytes
            if key.startswith(edge[start:stop], offset + start):
                known = middle
            else:
                limit = middle - 1
        return known

    def _pages_along(self, path: list[int]) -> "array[int]":
        pages = array("i")
        for node in path:
            pages.frombytes(self.pages[node])
        return pages

    # Shape

    def _add_child(self, parent: int, namespace: Namespace, key: bytes, pages: bytes, priority: int) -> int:
        """Hang a new leaf below ``parent``, unlocked and not yet among the victims.

        Before: no child of that namespace starts with the same page.
        """
        node = self._new_node()
        self.edge[node] = key
        self.pages[node] = pages
        self.end[node] = self.end[parent] + len(pages) // TOKEN_BYTES
        self.created[node] = self.tick
        self.hits[node] = 0
        self.priority[node] = priority
        self._link(parent, node, namespace if parent == ROOT else None)
        self.evictable += len(pages) // TOKEN_BYTES
        self.victims.discard(parent)
        return node

    def _split(self, node: int, n_pages: int) -> int:
        """Cut the edge of ``node`` after ``n_pages`` pages and return the new upper part; ``node`` stays the lower."""
        upper = self._new_node()
        parent, cut = self.parent[node], n_pages * self.page_bytes
        edge, pages = self.edge[node], self.pages[node]
        self.edge[upper] = edge[: cut + self.overlap_bytes]
        self.pages[upper] = pages[: n_pages * TOKEN_BYTES]
        self.end[upper] = self.end[parent] + n_pages
        self.lock_ref[upper] = self.lock_ref[node]
        self.stamp[upper] = self.stamp[node]
        self.created[upper] = self.created[node]
        self.hits[upper] = self.hits[node]
        self.priority[upper] = self.priority[node]
        self._link(parent, upper, self.namespace[node])
        self.edge[node] = edge[cut:]
        self.pages[node] = pages[n_pages * TOKEN_BYTES :]
        self._link(upper, node, None)
        self._requeue(node)
        return upper

    def _link(self, parent: int, node: int, namespace: Namespace | None) -> None:
        """Make ``node`` a child of ``parent``, in place of a child with the same first page."""
        self.parent[node] = parent
        self.namespace[node] = namespace
        children = self.children[parent]
        if children is None:
            children = self.children[parent] = {}
        children[self._child_key(node)] = node

    def _child_key(self, node: int) -> object:
        first = self.edge[node][: self.first_bytes]
        return (self.namespace[node], first) if self.parent[node] == ROOT else first

    def _new_node(self) -> int:
        if self._spare:
            return self._spare.pop()
        if len(self.edge) == len(self.parent):
            self.parent = _doubled(self.parent)
            self.end = _doubled(self.end)
            self.lock_ref = _doubled(self.lock_ref)
            self.stamp = _doubled(self.stamp)
            self.created = _doubled(self.created)
            self.hits = _doubled(self.hits)
            self.priority = _doubled(self.priority)
        self.edge.append(b"")
        self.pages.append(b"")
        self.children.append(None)
        self.namespace.append(None)
        return len(self.edge) - 1

    # Locks

    def _move_lock(self, old: int, new: int) -> None:
        """Move a lock from ``old`` down to ``new``. At the root nothing is counted, so from there it is a new lock."""
        lock_ref, parent, pages = self.lock_ref, self.parent, self.pages
        newly_locked = 0
        node = new
        while node != old:
            lock_ref[node] += 1
            if lock_ref[node] == 1:
                newly_locked += len(pages[node])
            node = parent[node]
        self.evictable -= newly_locked // TOKEN_BYTES
        self.protected += newly_locked // TOKEN_BYTES
        if new != old:
            self.victims.discard(new)

    def unlock(self, anchor: int) -> None:
        """Take a lock off the whole path of ``anchor``."""
        lock_ref, parent, pages = self.lock_ref, self.parent, self.pages
        newly_unlocked = 0
        node = anchor
        while node != ROOT:
            lock_ref[node] -= 1
            if lock_ref[node] == 0:
                newly_unlocked += len(pages[node])
            node = parent[node]
        self.evictable += newly_unlocked // TOKEN_BYTES
        self.protected -= newly_unlocked // TOKEN_BYTES
        self._requeue(anchor)

    # Eviction

    def evict_one(self) -> "array[int] | None":
        """Remove the first victim and return its pages, or None where every node is locked or there is none."""
        node = self.victims.pop()
        if node < 0:
            return None
        freed = array("i", self.pages[node])
        parent = self.parent[node]
        children = self.children[parent]
        assert children is not None, "a node is a child of its parent"
        del children[self._child_key(node)]
        if not children:
            self.children[parent] = None
        self.evictable -= len(freed)
        self.edge[node] = self.pages[node] = b""
        self.namespace[node] = None
        self._spare.append(node)
        self._requeue(parent)
        return freed

    def _requeue(self, node: int) -> None:
        """Put ``node`` in its place among the victims if it is evictable: unlocked and without children."""
        if node != ROOT and self.lock_ref[node] == 0 and self.children[node] is None:
            self._enqueue(node)

    def _enqueue(self, node: int) -> None:
        """Rank ``node`` by the policy; then, as a guard, by the shorter path and the smaller first page of the edge."""
        first, second = self._policy(self.stamp[node], self.created[node], self.hits[node], self.priority[node])
        first_page = int.from_bytes(self.pages[node][:TOKEN_BYTES], sys.byteorder)
        self.victims.put(node, first, second, self.end[node] << 32 | first_page)

    def all_pages(self) -> "array[int]":
        """Collect the pages of every node."""
        pages = array("i")
        for edge_pages in self.pages:
            pages.frombytes(edge_pages)
        return pages


def _doubled(numbers: "array[int]") -> "array[int]":
    """Copy a buffer with as much room again, zeros. One that is in use elsewhere cannot grow in place."""
    return array("q", bytes(numbers) + bytes(8 * len(numbers)))
