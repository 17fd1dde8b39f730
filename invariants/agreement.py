"""The comparison of two snapshots, model against implementation, both directions.

It runs last: a fault that breaks a law is named by that law, and "differs from the model" is what
remains. Nodes have no common ids; they are told apart by the first slot of their edge, which no two
edges share once law 1 holds. Ages are compared as ranks, free lists as sets.

A part that the second snapshot does not show is not compared; what is not shown of one node is not
compared for any node.

Not verified here: the order of free lists, and ticks and creation counts as numbers.
"""

from collections.abc import Sequence
from typing import Any

from kvlockstep.invariants.owners import Facts, listing, node_name
from kvlockstep.invariants.snapshot import FULL, ROOT, NodeView, RequestView, Snapshot
from kvlockstep.invariants.violation import Divergence


class OutcomeDiffers(Divergence):
    """Model and implementation gave different results or refusals."""


class ChoiceIllegal(Divergence):
    """The implementation chose a page, row or victim that was not free to choose."""


class RequestsDiffer(Divergence):
    """States, lengths, rows or anchors of requests differ."""


class RowsDiffer(Divergence):
    """Rows name different slots."""


class FreeListsDiffer(Divergence):
    """Different pages or rows are free."""


class TreeDiffers(Divergence):
    """Nodes, their edges, locks, hits or priorities differ."""


class AgeOrderDiffers(Divergence):
    """Nodes were stamped or created in a different order."""


class GenerationsDiffer(Divergence):
    """Generations of pages or rows differ."""


class SizesDiffer(Divergence):
    """Reported sizes differ."""


def compare(model: Snapshot, now: Snapshot, model_name: str = "reference", now_name: str = "target") -> None:
    """Raise the first difference of two snapshots; the names stand for the sides in its text."""
    sides = _Sides(model, now, model_name, now_name)
    _compare_requests(sides)
    _compare_rows(sides)
    _compare_tree(sides)
    _compare_free_lists(sides)
    _compare_age_order(sides)
    _compare_generations(sides)
    _compare_sizes(sides)


class _Sides:
    """The two snapshots, their nodes found by id and by first slot."""

    def __init__(self, model: Snapshot, now: Snapshot, model_name: str, now_name: str) -> None:
        self.model, self.now = model, now
        self.names = (model_name, now_name)
        self.first_of = [_first_slots(model), _first_slots(now)]

    def facts(self, expected: object, got: object) -> Facts:
        return [(self.names[0], str(expected)), (self.names[1], str(got))]


def _first_slots(snapshot: Snapshot) -> dict[int, int]:
    """First slot of the edge of each node, by node id; the root stands for itself."""
    first = {ROOT: ROOT}
    for node in snapshot.nodes or ():
        first[node.node] = node.slots[FULL][0]
    return first


def _request_key(request: RequestView, first_of: dict[int, int], anchors: bool) -> tuple[Any, ...]:
    anchor = None if request.anchor is None or not anchors else first_of.get(request.anchor)
    return (
        request.request,
        request.state,
        request.protected_len,
        request.committed_len,
        request.allocated_len,
        request.row,
        anchor,
    )


_REQUEST_FIELDS = ("state", "protected_len", "committed_len", "allocated_len", "row", "anchor")


def _compare_requests(sides: _Sides) -> None:
    """Both sides know the same requests, each in the same state, with the same lengths, row and anchor."""
    if sides.model.requests is None or sides.now.requests is None:
        return
    anchors = None not in [request.anchor for request in sides.now.requests] and sides.now.nodes is not None
    expected, got = [
        sorted([_request_key(r, first_of, anchors) for r in snapshot.requests or ()], key=lambda key: str(key[0]))
        for snapshot, first_of in zip((sides.model, sides.now), sides.first_of, strict=True)
    ]
    if expected != got:
        name, model_has, now_has = _first_difference(_by_key(expected), _by_key(got))
        fields = _differing(_REQUEST_FIELDS, model_has, now_has)
        raise RequestsDiffer(
            f"request {name} differs in {listing(fields)}",
            sides.facts(_request_words(sides.model, name), _request_words(sides.now, name)),
            tuple(fields),
        )


def _request_words(snapshot: Snapshot, name: str) -> str:
    found = [request for request in snapshot.requests or () if request.request == name]
    if not found:
        return "no such request"
    return "; ".join(
        f"{r.state}, protected {r.protected_len}, committed {r.committed_len}, allocated {r.allocated_len}, "
        f"row {r.row}, anchor {_anchor_words(snapshot, r.anchor)}"
        for r in found
    )


def _anchor_words(snapshot: Snapshot, anchor: int | None) -> str:
    if anchor == ROOT:
        return "root"
    node = next((node for node in snapshot.nodes or () if node.node == anchor), None)
    return str(anchor) if node is None else node_name(node)


def _compare_rows(sides: _Sides) -> None:
    """Held rows name the same slots."""
    if sides.model.rows is None or sides.now.rows is None:
        return
    expected, got = [
        sorted([(row.row, row.request, row.slots) for row in snapshot.rows or ()])
        for snapshot in (sides.model, sides.now)
    ]
    if expected != got:
        row, model_has, now_has = _first_difference(_by_key(expected), _by_key(got))
        pos = _first_position(model_has[1] if model_has else (), now_has[1] if now_has else ())
        raise RowsDiffer(
            f"row {row} differs" + ("" if pos is None else f" from position {pos} on"),
            sides.facts(*[_row_words(side, pos) for side in (model_has, now_has)]),
            ("holder",) if pos is None else ("slots",),
        )


def _row_words(row: tuple[Any, ...] | None, pos: int | None) -> str:
    if row is None:
        return "nobody holds it"
    slots = row[1] if pos is None else row[1][pos:]
    return f"request {row[0]}, {len(row[1])} slots" + ("" if pos is None else f", then {listing(slots)}")


def _node_key(node: NodeView, first_of: dict[int, int], hits: bool, priority: bool) -> tuple[Any, ...]:
    return (
        first_of[node.node],
        first_of.get(node.parent),
        node.namespace,
        list(node.units),
        node.slots,
        node.lock_ref,
        node.hits if hits else None,
        node.priority if priority else None,
    )


_NODE_FIELDS = ("parent", "namespace", "units", "slots", "lock_ref", "hits", "priority")


def _compare_tree(sides: _Sides) -> None:
    """Both trees have the same nodes: same parent, namespace, units, slots, locks, hits, priority."""
    if sides.model.nodes is None or sides.now.nodes is None:
        return
    both = sides.model.nodes + sides.now.nodes
    hits = None not in [node.hits for node in both]
    priority = None not in [node.priority for node in both]
    expected, got = [
        {first_of[node.node]: _node_key(node, first_of, hits, priority) for node in snapshot.nodes or ()}
        for snapshot, first_of in zip((sides.model, sides.now), sides.first_of, strict=True)
    ]
    if expected != got:
        first, model_has, now_has = _first_difference(
            {slot: key[1:] for slot, key in expected.items()}, {slot: key[1:] for slot, key in got.items()}
        )
        fields = _differing(_NODE_FIELDS, model_has, now_has)
        raise TreeDiffers(
            f"the node whose edge starts at slot {first} differs in {listing(fields)}",
            sides.facts(
                _node_words(sides.model, first, fields, hits, priority),
                _node_words(sides.now, first, fields, hits, priority),
            ),
            tuple(fields),
        )
    if len(sides.model.nodes) != len(sides.now.nodes):
        raise TreeDiffers(
            "the trees have different numbers of nodes",
            sides.facts(len(sides.model.nodes), len(sides.now.nodes)),
            ("count",),
        )


def _node_words(snapshot: Snapshot, first: int, fields: list[str], hits: bool, priority: bool) -> str:
    first_of = _first_slots(snapshot)
    node = next((node for node in snapshot.nodes or () if first_of[node.node] == first), None)
    if node is None:
        return "no such node"
    values = _node_key(node, first_of, hits, priority)[1:]
    shown = [f"{name} {_value_words(values[i])}" for i, name in enumerate(_NODE_FIELDS) if name in fields]
    return ": ".join([node_name(node), *([", ".join(shown)] if shown else [])])


def _value_words(value: Any) -> str:
    return listing(value) if isinstance(value, list) else str(value)


def _compare_free_lists(sides: _Sides) -> None:
    """The same pages and the same rows are free."""
    for name, view in sides.model.pools.items():
        other = sides.now.pools.get(name)
        if other is not None and view.free_pages is not None and other.free_pages is not None:
            _compare_free(sides, "pages", view.free_pages, other.free_pages)
    if sides.model.free_rows is not None and sides.now.free_rows is not None:
        _compare_free(sides, "rows", sides.model.free_rows, sides.now.free_rows)


def _compare_free(sides: _Sides, what: str, model: list[int], now: list[int]) -> None:
    expected, got = sorted(model), sorted(now)
    if expected != got:
        raise FreeListsDiffer(
            f"{len(got)} {what} are free, expected {len(expected)}"
            if len(expected) != len(got)
            else f"other {what} are free than expected",
            sides.facts(
                f"only here: {listing(item for item in expected if item not in got)}",
                f"only here: {listing(item for item in got if item not in expected)}",
            ),
            (what,),
        )


def _compare_age_order(sides: _Sides) -> None:
    """Nodes were stamped, and created, in the same order."""
    if sides.model.nodes is None or sides.now.nodes is None:
        return
    expected, got = [
        sorted(snapshot.nodes or (), key=lambda node: node.slots[FULL][0]) for snapshot in (sides.model, sides.now)
    ]
    for what in ("stamp", "created"):
        model_ages, now_ages = [[getattr(node, what) for node in nodes] for nodes in (expected, got)]
        if None in model_ages or None in now_ages or model_ages == now_ages:
            continue
        model_ranks, now_ranks = _ranks(model_ages), _ranks(now_ages)
        if model_ranks != now_ranks:
            raise AgeOrderDiffers(
                f"nodes are in a different order by {what}",
                sides.facts(_age_words(expected, model_ages), _age_words(got, now_ages)),
                (what,),
            )


def _ranks(ages: list[int]) -> list[int]:
    """Replace ages by their place in order, equal ages by equal places.

    >>> _ranks([40, 7, 40, 12])
    [2, 0, 2, 1]
    """
    rank = {age: place for place, age in enumerate(sorted(set(ages)))}
    return [rank[age] for age in ages]


def _age_words(nodes: list[NodeView], ages: list[int]) -> str:
    """Nodes oldest first, each by its first slot; those of one age joined by ``=``."""
    groups = {age: [str(n.slots[FULL][0]) for n, a in zip(nodes, ages, strict=True) if a == age] for age in ages}
    return "oldest first, by first slot: " + " ".join("=".join(groups[age]) for age in sorted(groups))


def _compare_generations(sides: _Sides) -> None:
    """Pages and rows have the same generations."""
    for name, view in sides.model.pools.items():
        other = sides.now.pools.get(name)
        if other is not None:
            _compare_counters(sides, "page", view.page_generations, other.page_generations)
    _compare_counters(sides, "row", sides.model.row_generations, sides.now.row_generations)


def _compare_counters(sides: _Sides, what: str, expected: list[int] | None, got: list[int] | None) -> None:
    if expected is None or got is None or expected == got:
        return
    index = _first_position(expected, got)
    assert index is not None, "two lists that differ have a first difference"
    raise GenerationsDiffer(
        f"{what} {index} has different generations",
        sides.facts(listing(expected[index : index + 1]), listing(got[index : index + 1])),
        (what,),
    )


def _compare_sizes(sides: _Sides) -> None:
    """Both sides report the same sizes."""
    for name, view in sides.model.pools.items():
        other = sides.now.pools.get(name)
        for what in ("n_pages", "available", "evictable", "protected") if other is not None else ():
            expected, got = getattr(view, what), getattr(other, what)
            if expected is not None and got is not None and expected != got:
                raise SizesDiffer(f"{what} differs", sides.facts(expected, got), (what,))


def _by_key(entries: Sequence[tuple[Any, ...]]) -> dict[Any, tuple[Any, ...]]:
    """Entries by their first part; one that stands twice keeps both, so that counts differ too."""
    found: dict[Any, tuple[Any, ...]] = {}
    for key, *rest in entries:
        found[key] = found.get(key, ()) + tuple(rest)
    return found


def _first_difference(
    expected: dict[Any, tuple[Any, ...]], got: dict[Any, tuple[Any, ...]]
) -> tuple[Any, tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """First key at which two dicts differ, looked for in both, with what each has there."""
    key = min(key for key in {*expected, *got} if expected.get(key) != got.get(key))
    return key, expected.get(key), got.get(key)


def _differing(names: Sequence[str], expected: tuple[Any, ...] | None, got: tuple[Any, ...] | None) -> list[str]:
    """Name the parts in which two entries differ: ``presence`` where one is missing, ``count`` where one repeats."""
    if expected is None or got is None:
        return ["presence"]
    return [name for name, left, right in zip(names, expected, got, strict=False) if left != right] or ["count"]


def _first_position(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """First index at which two lists differ, the end of the shorter one included; None if they are equal."""
    for i, (left, right) in enumerate(zip(expected, got, strict=False)):
        if left != right:
            return i
    return None if len(expected) == len(got) else min(len(expected), len(got))
