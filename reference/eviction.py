"""Which nodes are evicted, and in which order (SPEC sections 4 and 5). Plans only; removes nothing.

A plan is a list of edges in victim order. It is made in full before anything changes, so that an
implementation's victims can be proved legal first.
"""

from collections.abc import Collection, Sequence

from kvlockstep.reference.choices import IllegalChoice
from kvlockstep.reference.rows import slots_of
from kvlockstep.reference.tree import Tree, Vertex

POLICIES = ("lru", "mru", "fifo", "filo", "lfu", "slru", "priority", "tlru")
"""The seven of SPEC section 5, and ``tlru``."""

Edge = list[Vertex]


def victim_order(policy: str, edge: Edge) -> tuple[int, ...]:
    """Sort key of a node: the smallest goes first.

    Two leaves never share a stamp or a creation tick; path length and first page are a guard.

    ``tlru`` (tail-optimized LRU) spares what a long prefix starts with: a node goes first that begins within the
    last two pages of the longest prefix that ever passed through it. With pages of 2, ``a b c d e f`` published as
    one node and as two, ``a b c d`` and ``e f``: the one node begins at 0, before 2, and is spared; so is
    ``a b c d`` even once ``e f`` is gone, for it remembers that a prefix of 6 passed; ``e f`` begins at 4.
    """
    end = edge[-1]
    mark = end.mark
    assert mark is not None, "a node ends in a mark"
    guard = (end.depth, edge[0].page)
    match policy:
        case "lru":
            return (mark.stamp, *guard)
        case "mru":
            return (-mark.stamp, *guard)
        case "fifo":
            return (mark.created, *guard)
        case "filo":
            return (-mark.created, *guard)
        case "lfu":
            return (mark.hits, mark.stamp, *guard)
        case "slru":
            return (int(mark.hits >= 2), mark.stamp, *guard)
        case "priority":
            return (mark.priority, mark.stamp, *guard)
        case "tlru":
            begins = end.depth - len(edge)
            return (int(begins < mark.history - 2), mark.stamp, *guard)
    raise AssertionError(f"policy {policy} is one of {POLICIES}")


def evictable_nodes(
    vertices: Sequence[Vertex], locked: Collection[Vertex], gone: Collection[Vertex] = ()
) -> list[Edge]:
    """List the nodes that nobody locks and that have no children, once ``gone`` is gone."""
    return [
        vertex.edge()
        for vertex in vertices
        if vertex.mark is not None
        and vertex not in locked
        and vertex not in gone
        and all(child in gone for child in vertex.children.values())
    ]


def plan_eviction(tree: Tree, locked: Collection[Vertex], policy: str, n_pages: int) -> list[Edge]:
    """Choose whole nodes in policy order, anew after each one, until ``n_pages`` or nothing is left."""
    vertices = tree.vertices()
    gone: set[Vertex] = set()
    plan: list[Edge] = []
    while len(gone) < n_pages:
        candidates = evictable_nodes(vertices, locked, gone)
        if not candidates:
            break
        victim = min(candidates, key=lambda edge: victim_order(policy, edge))
        plan.append(victim)
        gone.update(victim)
    return plan


def plan_of_victims(
    tree: Tree, locked: Collection[Vertex], victims: Sequence[Sequence[int]], page_size: int
) -> list[Edge]:
    """Find the nodes that an implementation says it evicted.

    Raises IllegalChoice unless each list names exactly the slots of a node that is evictable at its turn.
    """
    vertices = tree.vertices()
    gone: set[Vertex] = set()
    plan: list[Edge] = []
    for slots in victims:
        candidates = evictable_nodes(vertices, locked, gone)
        wanted = sorted(slots)
        for edge in candidates:
            if sorted(edge_slots(edge, page_size)) == wanted:
                plan.append(edge)
                gone.update(edge)
                break
        else:
            legal = [edge_slots(edge, page_size) for edge in candidates]
            raise IllegalChoice(f"victim {len(plan)} has slots {list(slots)}, expected those of one node of {legal}")
    return plan


def edge_slots(edge: Edge, page_size: int) -> list[int]:
    """List the slots of an edge in position order."""
    return slots_of([vertex.page for vertex in edge], page_size)
