"""The prefix tree (SPEC section 4), kept as a trie of pages with a mark wherever a node ends.

A vertex is one published page. A node of SPEC is a marked vertex together with the unmarked ones
right above it, its edge. Splitting an edge is then one more mark and moves nothing. After ``a b c d``
and then ``a b c e`` were published with pages of 1::

    root - a - b - c* - d*        three nodes: "abc", "d" and "e"; the mark at c was
                      \\ e*        set when the second publication diverged behind it

Two things hold between operations: a vertex without children is marked, and so is one with several.
Kept here: stamps, creation ticks, hits, priorities and histories of nodes. Not kept but derived when asked:
lock counts (from the live locks), edges, sizes, what may be evicted (`eviction.py`).

Four allowances (`allowances.py`) change when a node ends, is dated or is stamped; each is one ``if`` here.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvlockstep.reference.keys import Namespace, PageKey


@dataclass(slots=True)
class Mark:
    """What is remembered of a node. Both parts of a split edge keep all of it."""

    created: int  # tick
    stamp: int  # tick of the last match or publication through the node
    hits: int
    priority: int
    history: int = 0  # pages of the longest prefix ever published at or below it, also once its tail is gone


@dataclass(slots=True, eq=False)
class Vertex:
    """One page of a published prefix."""

    parent: "Vertex | None"  # None for the root
    namespace: Namespace
    key: PageKey
    page: int
    depth: int  # pages from the root, this one included
    mark: Mark | None = None  # set where a node ends
    children: "dict[tuple[Namespace, PageKey], Vertex]" = field(default_factory=dict)

    def path(self) -> "list[Vertex]":
        """List the vertices from the root, which is left out, to this one."""
        path = []
        vertex = self
        while vertex.parent is not None:
            path.append(vertex)
            vertex = vertex.parent
        path.reverse()
        return path

    def pages(self) -> list[int]:
        """List the pages of the canonical path that ends here."""
        return [vertex.page for vertex in self.path()]

    def edge(self) -> "list[Vertex]":
        """List the vertices of the node that ends here, top down."""
        edge = [self]
        while (above := edge[-1].parent) is not None and above.parent is not None and above.mark is None:
            edge.append(above)
        edge.reverse()
        return edge


@dataclass(slots=True)
class Node:
    """A node as SPEC sees it, derived from the trie."""

    end: Vertex
    parent: int  # index in the list that `Tree.nodes` returns, -1 for the root
    edge: list[Vertex]


class Tree:
    """All published prefixes of all namespaces, below one root.

    >>> tree, ns = Tree(), (None, None, ())
    >>> end = tree.publish(tree.root, ns, [("a", "b"), ("c", "d")], [5, 6], inserted_pages=0, priority=0)
    >>> end.pages()
    [5, 6]
    >>> tree.match(ns, [("a", "b"), ("x", "y")]).pages()
    [5]
    >>> [[vertex.page for vertex in node.edge] for node in tree.nodes()]
    [[5], [6]]
    """

    def __init__(self, allowances: Collection[str] = (), allowed: "Counter[str] | None" = None) -> None:
        """``allowed`` counts the allowances where they make a difference."""
        self.root = Vertex(None, (None, None, ()), (), 0, 0)
        self.tick = 0
        self.allowances = allowances
        self.allowed: Counter[str] = Counter() if allowed is None else allowed

    def match(self, namespace: Namespace, keys: Sequence[PageKey]) -> Vertex:
        """Find the end of the longest published prefix, split there and stamp the path."""
        end = self.descend(self.root, namespace, keys)
        self._split_at(end)
        self._stamp(end)
        return end

    def descend(self, start: Vertex, namespace: Namespace, keys: Iterable[PageKey]) -> Vertex:
        """Walk down as far as the keys are published."""
        vertex = start
        for key in keys:
            child = vertex.children.get((namespace, key))
            if child is None:
                break
            vertex = child
        return vertex

    def publish(
        self,
        start: Vertex,
        namespace: Namespace,
        keys: Sequence[PageKey],
        pages: Sequence[int],
        inserted_pages: int,
        priority: int,
    ) -> Vertex:
        """Make the tree spell ``keys`` below ``start``: one tick, and at most one new child.

        ``pages`` are those of ``keys``; the tree takes only the ones behind what it already holds.
        The publication counts as a hit on the nodes that end beyond ``inserted_pages``.
        Returns the end of the published path.
        """
        end = self.descend(start, namespace, keys)
        self._split_at(end)
        held = end.depth - start.depth
        new = list(zip(keys[held:], pages[held:], strict=True))
        pages_are_nodes = "page_nodes" in self.allowances and len(new) > 1
        for key, page in new:
            if pages_are_nodes and end.depth > start.depth + held:
                end.mark = self._new_mark(priority)
                self.tick += 1
            child = Vertex(end, namespace, key, page, end.depth + 1)
            end.children[(namespace, key)] = child
            end = child
        if new:
            end.mark = self._new_mark(priority)
        if pages_are_nodes:
            self.allowed["page_nodes"] += 1
        self._stamp(end)
        for vertex in end.path():
            if vertex.mark is not None:
                vertex.mark.priority = max(vertex.mark.priority, priority)
                vertex.mark.history = max(vertex.mark.history, end.depth)
                if vertex.depth > inserted_pages:
                    vertex.mark.hits += 1
        return end

    def end_node_at_prompt(self, published: Vertex, prompt_pages: int, priority: int) -> None:
        """Follow ``prompt_split`` after a publication: let a node end at the prompt's whole pages.

        Its path is stamped once more and gets ``priority + 1``; hits stay, and what is locked too.
        """
        if not 0 < prompt_pages < published.depth:
            return
        end = published.path()[prompt_pages - 1]
        self._split_at(end)
        self._stamp(end)
        for vertex in end.path():
            if vertex.mark is not None:
                vertex.mark.priority = max(vertex.mark.priority, priority + 1)
        self.allowed["prompt_split"] += 1

    def remove(self, edge: Sequence[Vertex]) -> None:
        """Take a node without children out of the tree."""
        top, end = edge[0], edge[-1]
        assert not end.children, f"the node at page {end.page} has children"
        assert top.parent is not None, "the root is no node"
        del top.parent.children[(top.namespace, top.key)]

    def vertices(self) -> list[Vertex]:
        """List all vertices but the root, parents before their children."""
        found = list(self.root.children.values())
        for vertex in found:  # grows while it is read
            found.extend(vertex.children.values())
        return found

    def nodes(self) -> list[Node]:
        """List all nodes, parents before their children."""
        nodes: list[Node] = []
        tops = [(-1, vertex) for vertex in self.root.children.values()]
        for parent, end in tops:  # grows while it is read
            edge = [end]
            while end.mark is None:
                (end,) = end.children.values()
                edge.append(end)
            tops.extend((len(nodes), below) for below in end.children.values())
            nodes.append(Node(end, parent, edge))
        return nodes

    def _split_at(self, vertex: Vertex) -> None:
        """Let a node end at this vertex; a part that was cut off the top keeps all that is remembered."""
        below = vertex
        while below.mark is None:
            if below.parent is None:
                return  # the root
            (below,) = below.children.values()
        if vertex.mark is not None:
            return
        vertex.mark = replace(below.mark)
        if "split_refreshes_tail" in self.allowances:
            self.tick += 1
            below.mark.stamp = self.tick
            self.allowed["split_refreshes_tail"] += 1
        if "split_dates_upper_new" in self.allowances:
            self.tick += 1
            vertex.mark.created = self.tick
            self.allowed["split_dates_upper_new"] += 1

    def _new_mark(self, priority: int) -> Mark:
        """Make the mark of a node that the next tick creates."""
        return Mark(created=self.tick + 1, stamp=self.tick + 1, hits=0, priority=priority)

    def _stamp(self, end: Vertex) -> None:
        """Spend one tick on the path that ends here."""
        self.tick += 1
        for vertex in end.path():
            if vertex.mark is not None:
                vertex.mark.stamp = self.tick


def lock_counts(anchors: Iterable[Vertex]) -> dict[Vertex, int]:
    """Count for each vertex the locks anchored at it or below. Absent means none; the root never counts."""
    counts: dict[Vertex, int] = {}
    for anchor in anchors:
        for vertex in _upwards(anchor):
            counts[vertex] = counts.get(vertex, 0) + 1
    return counts


def _upwards(vertex: Vertex) -> Iterator[Vertex]:
    while vertex.parent is not None:
        yield vertex
        vertex = vertex.parent
