"""Words for the things in a snapshot, for the text of violations: who owns a page, a row, a slot.

Slow and exact: it looks at every slot, so it is right on a broken snapshot too. Nothing here runs
while all laws hold.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvlockstep.invariants.index import Index
from kvlockstep.invariants.snapshot import FULL, ROOT, NodeView, Observation

Facts = list[tuple[str, str]]


class Owner(NamedTuple):
    """One owner of a page or row: its kind, which goes into signatures, and its name for the reader."""

    kind: str  # free, tree, request
    text: str


def span(start: int, end: int) -> str:
    return f"[{start}, {end})"


def listing(items: Iterable[object], limit: int = 12) -> str:
    """Join with spaces, the first ``limit`` only: ``1 2 5 and 3 more``."""
    words = [str(item) for item in items]
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return (" ".join(words[:limit]) + more) or "none"


def first_repeated(items: Iterable[int]) -> int:
    """Return the first item that comes a second time. Before: one does."""
    seen: set[int] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    raise ValueError("no item comes twice")


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def those(noun: str, items: list[int]) -> str:
    """``page 3`` or ``pages 3 5``."""
    return f"{noun} {items[0]}" if len(items) == 1 else f"{noun}s {listing(items)}"


def operation(observation: Observation) -> str:
    """What was done: ``alloc r1 r2``, ``evict 6``."""
    words = observation.requests or ([str(observation.n)] if observation.kind == "evict" else [])
    return " ".join([observation.kind, *words])


def node_name(node: NodeView) -> str:
    """``node 3 (tokens 5 6 7 8 ..)``."""
    tokens = [str(unit if isinstance(unit, int) else unit[0]) for unit in node.units[:4]]
    return f"node {node.node} (tokens {' '.join(tokens)}{' ..' if len(node.units) > 4 else ''})"


def anchor_name(index: Index, anchor: int | None) -> str:
    if anchor == ROOT:
        return "the root"
    node = None if anchor is None else index.nodes.get(anchor)
    return f"node {anchor}" if node is None else node_name(node)


def kinds(owners: Iterable[Owner]) -> tuple[str, ...]:
    return tuple(sorted({owner.kind for owner in owners})) or ("nobody",)


def roles(now: Iterable[Owner], before: Iterable[Owner]) -> tuple[str, ...]:
    """Kinds of owner for a cause signature: those of now, then ``was`` and those of before."""
    return kinds(now) + tuple(f"was {kind}" for kind in kinds(before))


def page_owners(index: Index, pool: str = FULL) -> dict[int, list[Owner]]:
    """Find everyone who names a page, slot by slot; a request counts once, a free list as often as it lists it."""
    page_size = index.page_size
    owners: dict[int, list[Owner]] = {}
    for page in index.pools[pool].free:
        owners.setdefault(page, []).append(Owner("free", "free list"))
    for node in index.snapshot.nodes or ():
        path = index.path(node.node)
        start = sum(len(above.units) for above in path[:-1]) if path else 0
        for page, where in _page_spans(node.slots.get(pool, []), start, page_size):
            owners.setdefault(page, []).append(Owner("tree", f"{node_name(node)}, positions {where}"))
    for row in (index.snapshot.rows or ()) if pool == FULL else ():
        request = index.requests.get(row.request)
        start = 0 if request is None else request.protected_len // page_size * page_size
        for page, where in _page_spans(row.slots[start:], start, page_size):
            owners.setdefault(page, []).append(Owner("request", f"request {row.request}, positions {where}"))
    return owners


def _page_spans(slots: list[int], start: int, page_size: int) -> list[tuple[int, str]]:
    """Pages that a run of slots names, each once, with the positions from its first to its last slot."""
    spans: dict[int, tuple[int, int]] = {}
    for pos, slot in enumerate(slots, start):
        first, _ = spans.get(slot // page_size, (pos, pos))
        spans[slot // page_size] = (first, pos + 1)
    return [(page, span(first, end)) for page, (first, end) in spans.items()]


def owner_facts(owners: Iterable[Owner]) -> Facts:
    return [("owner", owner.text) for owner in owners] or [("owner", "nobody")]


def last_owner_facts(owners: Iterable[Owner], observation: Observation) -> Facts:
    return [("was", f"{owner.text}, before {operation(observation)}") for owner in owners] or [
        ("was", f"nobody's, already before {operation(observation)}")
    ]


def slot_facts(index: Index, slot: int) -> Facts:
    """Say whose a slot is."""
    page = slot // index.page_size
    owners = page_owners(index).get(page, [])
    return [(f"slot {slot}", f"page {page}, {owner.text}") for owner in owners] or [
        (f"slot {slot}", f"page {page}, owned by nobody")
    ]


def row_owners(index: Index) -> dict[int, list[Owner]]:
    """Find everyone who names a row; a free list as often as it lists it."""
    owners: dict[int, list[Owner]] = {}
    for row in index.snapshot.free_rows or ():
        owners.setdefault(row, []).append(Owner("free", "free list"))
    for view in index.snapshot.rows or ():
        owners.setdefault(view.row, []).append(Owner("request", f"request {view.request}"))
    return owners
