"""Law 4: the three lengths in order, and a row that names each slot once, in whole pages.

Not verified here: the lengths' values (the comparison with the model), and that the protected part
of a row is the tree's (law 2).
"""

from kvlockstep.invariants.index import Index, Seen, run_in_pages
from kvlockstep.invariants.owners import first_repeated, listing, slot_facts, span
from kvlockstep.invariants.snapshot import RequestView
from kvlockstep.invariants.violation import Violation


class LengthsOutOfOrder(Violation):
    """The three lengths of a request are not in order, or the protected one is no whole page."""


class RowOverrun(Violation):
    """A request has more positions than a row holds."""


class RowLengthWrong(Violation):
    """A row names more or fewer slots than the request has allocated positions."""


class TailRepeatsSlot(Violation):
    """A row's tail names one slot for two positions."""


class PageNotConsecutive(Violation):
    """Positions of one page do not lie on consecutive slots of one page."""


def lengths_are_ordered(seen: Seen) -> None:
    """``0 <= protected_len <= committed_len <= allocated_len``, and ``protected_len`` is whole pages."""
    page_size = seen.now.page_size
    for request in seen.now.requests.values():
        in_order = 0 <= request.protected_len <= request.committed_len <= request.allocated_len
        if not in_order or request.protected_len % page_size:
            raise LengthsOutOfOrder(
                f"lengths of request {request.request} are {_lengths(request)}, "
                f"expected 0 <= protected <= committed <= allocated, protected a multiple of {page_size}",
                roles=("request", request.state),
            )


def rows_are_long_enough(seen: Seen) -> None:
    """``allocated_len <= max_context_len``."""
    longest = seen.observation.now.max_context_len
    for request in seen.now.requests.values():
        if longest is not None and request.allocated_len > longest:
            raise RowOverrun(
                f"request {request.request} has allocated_len {request.allocated_len}, expected at most {longest}",
                [("lengths", _lengths(request))],
                ("request", request.state),
            )


def rows_name_allocated_positions(seen: Seen) -> None:
    """A row names one slot for each position of ``[0, allocated_len)``, and no more."""
    for name, row in seen.now.rows.items():
        request = seen.now.requests.get(name)
        if request is not None and len(row.slots) != request.allocated_len:
            raise RowLengthWrong(
                f"row {row.row} of request {name} names {len(row.slots)} slots, expected {request.allocated_len}",
                [("lengths", _lengths(request))],
                ("request", request.state),
            )


def tail_names_each_slot_once(seen: Seen) -> None:
    """No slot stands twice in ``[protected_len, allocated_len)`` of a row."""
    for name, row in seen.now.rows.items():
        request = seen.now.requests.get(name)
        start = 0 if request is None else request.protected_len
        if seen.now.rows_in_pages and _names_each_page_once(seen.now, name, start):
            continue
        tail = row.slots[start:]
        if len(set(tail)) != len(tail):
            slot = first_repeated(tail)
            where = [pos for pos, named in enumerate(tail, start) if named == slot]
            raise TailRepeatsSlot(
                f"row {row.row} of request {name} names slot {slot} {len(where)} times in its tail, expected 1",
                [("positions", listing(where)), ("tail", f"positions {span(start, len(row.slots))}")],
                ("request",),
            )


def _names_each_page_once(now: Index, name: str, start: int) -> bool:
    """Tell whether no page comes twice from ``start`` on. Before: the row runs in whole pages."""
    pages = now.row_pages[name][start // now.page_size :]
    return len(set(pages)) == len(pages)


def pages_are_consecutive(seen: Seen) -> None:
    """Within a page, positions lie on consecutive slots, the page's first position on its first slot."""
    if seen.now.rows_in_pages:
        return
    for name, row in seen.now.rows.items():
        expected = run_in_pages(seen.now.row_pages[name], seen.now.page_size)
        wrong = [pos for pos, slot in enumerate(row.slots) if slot != expected[pos]]
        if wrong:
            pos = wrong[0]
            raise PageNotConsecutive(
                f"row {row.row} of request {name} at position {pos}: "
                f"expected slot {expected[pos]}, got {row.slots[pos]}",
                [
                    ("positions", listing(wrong)),
                    *slot_facts(seen.now, expected[pos]),
                    *slot_facts(seen.now, row.slots[pos]),
                ],
                ("request",),
            )


def _lengths(request: RequestView) -> str:
    return (
        f"protected {request.protected_len}, committed {request.committed_len}, allocated {request.allocated_len} "
        f"({request.state})"
    )
