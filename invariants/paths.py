"""Law 2: what a row names in its protected part is what the tree holds on the path the request locks.

The path is walked from the request's anchor up to the root, whatever the request's tokens are.

Not verified here: that the path spells the request's tokens and namespace (laws 8 and 10 see it by
content, the comparison with the model by units), and rows without a request (law 1).
"""

from kvlockstep.invariants.index import Seen
from kvlockstep.invariants.owners import anchor_name, slot_facts, span
from kvlockstep.invariants.snapshot import RequestView
from kvlockstep.invariants.violation import Violation


class AnchorOffTree(Violation):
    """A request locks a node from which no path leads to the root."""


class ProtectedLenOffPath(Violation):
    """A request's protected length is not the length of the path that it locks."""


class RowOffCanonicalPath(Violation):
    """A row names other slots than the tree does for the same prefix."""


def every_anchor_hangs_on_the_root(seen: Seen) -> None:
    """From each request's anchor, parents lead to the root."""
    for name, path in seen.now.paths.items():
        if path is None:
            raise AnchorOffTree(
                f"request {name} is anchored off the tree, expected a path of parents to the root",
                [("anchor", anchor_name(seen.now, seen.now.requests[name].anchor))],
                ("request", "tree"),
            )


def protected_length_is_path_length(seen: Seen) -> None:
    """Each request protects exactly the positions of the path that it locks."""
    for name, path in seen.now.paths.items():
        request = seen.now.requests[name]
        path_len = sum([len(node.units) for node in path or ()])
        if path_len != request.protected_len:
            raise ProtectedLenOffPath(
                f"request {name} has protected_len {request.protected_len}, "
                f"expected {path_len}, the length of its path",
                [("anchor", anchor_name(seen.now, request.anchor))],
                ("request", "tree"),
            )


def row_starts_with_canonical_slots(seen: Seen) -> None:
    """``R[row, 0:protected_len)`` equals the slots along the locked path."""
    now = seen.now
    in_pages = now.rows_in_pages and now.full.edges_in_pages and len(now.nodes) == len(now.full.edges)
    for name, row in now.rows.items():
        if in_pages:
            pages = now.path_pages.get(name, ())
            if now.row_pages[name][: len(pages)] == pages and len(row.slots) >= len(pages) * now.page_size:
                continue
        slots = now.path_slots(name)
        if row.slots[: len(slots)] != slots:
            request = seen.now.requests[name]
            pos = next(i for i, slot in enumerate(slots) if row.slots[i : i + 1] != [slot])
            got = row.slots[pos] if pos < len(row.slots) else None
            raise RowOffCanonicalPath(
                f"row {row.row} of request {name} at position {pos}: expected slot {slots[pos]}, got {got}",
                [
                    ("protected", f"positions {span(0, request.protected_len)}"),
                    ("anchor", anchor_name(seen.now, request.anchor)),
                    *slot_facts(seen.now, slots[pos]),
                    *([] if got is None else slot_facts(seen.now, got)),
                ],
                ("tree", _kind(seen, request, got)),
            )


def _kind(seen: Seen, request: RequestView, slot: int | None) -> str:
    """Kind of the owner of the slot that stands where a canonical one should."""
    owner = None if slot is None else seen.now.full.owner.get(slot // seen.now.page_size)
    if owner == ("request", request.request):
        return "same request"
    return owner if isinstance(owner, str) else "nobody" if owner is None else "request"
