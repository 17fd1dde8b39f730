"""Law 7: the shape of the tree: links, namespaces, edges, first pages, and what may be evicted.

Not verified here: that the children a cache finds in its lookup are the ones that a walk finds, that
neighbouring bigrams overlap, and whether two nodes should be one (the comparison with the model).
"""

from collections import Counter

from kvlockstep.invariants.index import Seen, is_in_pages
from kvlockstep.invariants.owners import Owner, kinds, listing, node_name, owner_facts, page_owners
from kvlockstep.invariants.snapshot import FULL, ROOT, NodeView, Unit
from kvlockstep.invariants.violation import Violation


class LinksDisagree(Violation):
    """Parent and child links do not make a tree."""


class NamespaceMixed(Violation):
    """A node and its parent belong to different namespaces."""


class EdgeMalformed(Violation):
    """An edge is empty, no whole pages, or has not one slot a unit."""


class SiblingsShareFirstPage(Violation):
    """Two children of one node and one namespace start with the same page of units."""


class PageOnTwoEdges(Violation):
    """One page stands on two edges, or twice on one."""


class EvictableSetWrong(Violation):
    """The nodes offered for eviction are not the unlocked leaves."""


def parents_lead_to_the_root(seen: Seen) -> None:
    """Every node has an id of its own, and from each one parents lead to the root."""
    nodes = seen.observation.now.nodes or []
    if len(seen.now.nodes) != len(nodes):
        double = next(node for node in nodes if seen.now.nodes[node.node] is not node)
        raise LinksDisagree(f"{node_name(double)} is found twice in the tree, expected once", roles=("twice",))
    hangs = {ROOT}
    for node in nodes:
        if node.parent in hangs:
            hangs.add(node.node)
            continue
        climbed: dict[int, None] = {}
        at = node.node
        while at not in hangs:
            climbed[at] = None
            parent = seen.now.nodes[at].parent
            if parent in climbed or (parent != ROOT and parent not in seen.now.nodes):
                raise LinksDisagree(
                    f"{node_name(seen.now.nodes[at])} has parent {parent}, expected a node that leads to the root",
                    [("path", listing(f"node {below}" for below in climbed))],
                    ("round",) if parent in climbed else ("missing",),
                )
            at = parent
        hangs.update(climbed)


def children_name_their_parent(seen: Seen) -> None:
    """Child links and parent links are the same links, seen from both ends."""
    nodes = seen.now.nodes
    below = [(child, node.node) for node in nodes.values() for child in node.children or ()]
    above = [(node.node, node.parent) for node in nodes.values() if node.parent != ROOT]
    if sorted(below) != sorted(above):
        found, named = Counter(below), Counter(above)
        child, parent = next(
            (link for link in sorted(below) if link not in named or found[link] > 1),
            next((link for link in sorted(above) if link not in found), (ROOT, ROOT)),
        )
        raise LinksDisagree(
            f"node {child} and its parent do not name each other once, expected both links",
            [
                ("parent", f"of node {child}: {nodes[child].parent if child in nodes else 'no such node'}"),
                ("children", f"of node {parent}: {listing(nodes[parent].children or [])}"),
            ],
            ("child link",) if (child, parent) in found else ("parent link",),
        )


def children_keep_the_namespace(seen: Seen) -> None:
    """A node belongs to its parent's namespace."""
    nodes = seen.now.nodes
    for node in nodes.values():
        parent = nodes.get(node.parent)
        if parent is not None and parent.namespace != node.namespace:
            raise NamespaceMixed(
                f"{node_name(node)} is in namespace {node.namespace}, expected {parent.namespace}",
                [("parent", node_name(parent))],
                ("tree",),
            )


def edges_are_whole_pages(seen: Seen) -> None:
    """An edge has one or more whole pages, one slot a unit, the slots of a page consecutive."""
    page_size, nodes = seen.now.page_size, seen.observation.now.nodes or []
    for name, pool in seen.now.pools.items():
        n_units_of = [len(node.units) for node in nodes]
        if pool.edges_in_pages and n_units_of == list(map(len, pool.edges)) and 0 not in n_units_of:
            continue
        for node in nodes:
            slots = node.slots.get(name)
            if slots is None and name != FULL:
                continue
            n_slots, n_units = len(slots or ()), len(node.units)
            if n_slots != n_units or not n_units or n_units % page_size:
                raise EdgeMalformed(
                    f"the edge of {node_name(node)} has {n_units} units and {n_slots} slots, "
                    f"expected as many of both, a positive multiple of {page_size}",
                    roles=("length",),
                )
        if not pool.edges_in_pages:
            _raise_for_scattered_edge(seen, name)


def _raise_for_scattered_edge(seen: Seen, pool: str) -> None:
    page_size = seen.now.page_size
    for node in seen.now.nodes.values():
        slots = node.slots.get(pool, [])
        for start in range(0, len(slots), page_size):
            page = slots[start : start + page_size]
            if not is_in_pages(page, (page[0] // page_size,), page_size):
                first = page[0] // page_size * page_size
                raise EdgeMalformed(
                    f"page {start // page_size} of the edge of {node_name(node)} is scattered, "
                    f"expected slots [{first}, {first + page_size})",
                    [("got", listing(page, page_size))],
                    ("slots",),
                )


def siblings_start_with_different_pages(seen: Seen) -> None:
    """Children of one node in one namespace start with different first pages. Before: no edge is empty."""
    nodes, page_size = seen.observation.now.nodes or [], seen.now.page_size
    if len({(node.parent, node.units[0]) for node in nodes}) == len(nodes):
        return  # they differ in the first unit already
    seen_first: dict[tuple[int, object, tuple[Unit, ...]], NodeView] = {}
    for node in nodes:
        key = (node.parent, node.namespace, tuple(node.units[:page_size]))
        other = seen_first.setdefault(key, node)
        if other is not node:
            raise SiblingsShareFirstPage(
                f"2 children of {'the root' if node.parent == ROOT else f'node {node.parent}'} "
                f"start with the same page of units, expected 1",
                [
                    ("first", node_name(other)),
                    ("second", node_name(node)),
                    ("namespace", str(node.namespace)),
                    ("page", listing(key[2], page_size)),
                ],
                ("tree",),
            )


def no_page_is_on_two_edges(seen: Seen) -> None:
    """No page stands on two edges.

    Law 1 says so first where the whole of ownership can be seen.
    """
    for name, pool in seen.now.pools.items():
        if len(set(pool.tree_pages)) != len(pool.tree_pages):
            times = Counter(pool.tree_pages)
            page = next(page for page in pool.tree_pages if times[page] > 1)
            owners: list[Owner] = [o for o in page_owners(seen.now, name)[page] if o.kind == "tree"]
            raise PageOnTwoEdges(
                f"page {page} stands {times[page]} times on edges, expected 1",
                owner_facts(owners),
                kinds(owners),
            )


def evictable_nodes_are_unlocked_leaves(seen: Seen) -> None:
    """Nodes offered for eviction are those with ``lock_ref == 0`` and no children."""
    nodes = seen.now.nodes
    inner = {node.parent for node in nodes.values()}
    expected = sorted([node.node for node in seen.now.unlocked if node.node not in inner])
    got = sorted(seen.observation.now.evictable_nodes or [])
    if got != expected:
        extra = sorted(set(got) - set(expected))
        roles = ["locked" if node in nodes and nodes[node].lock_ref else "not a leaf" for node in extra]
        raise EvictableSetWrong(
            f"{len(got)} nodes are offered for eviction, expected {len(expected)}: the unlocked leaves",
            [("expected", listing(expected)), ("got", listing(got))],
            tuple(sorted(set(roles))) or ("missing",),
        )
