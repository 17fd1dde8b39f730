"""Law 1: every page and every row has exactly one owner. A leak and a double count are two violations.

A page is owned by the free list, one edge, or one request's tail, the slack of its last page
included; a row by the free list or one request. A free list is a set: what stands in it twice has
two owners. Padding (page 0, row 0) is law 9's.

Not verified here: the order of a free list (any order is right), which page or row was handed out
(a free choice), whether slots run consecutively within a page (laws 4 and 7), and pages that a
target holds aside from these three owners, such as a page being transferred.
"""

from kvlockstep.invariants.index import PoolIndex, Seen
from kvlockstep.invariants.owners import (
    Owner,
    kinds,
    last_owner_facts,
    owner_facts,
    page_owners,
    roles,
    row_owners,
    those,
)
from kvlockstep.invariants.snapshot import FULL
from kvlockstep.invariants.violation import Violation


class PageOutOfRange(Violation):
    """A page that the pool does not have."""


class PageOwnedTwice(Violation):
    """A page with more than one owner: a double count."""


class PageLeaked(Violation):
    """A page without an owner: it can never be handed out again."""


class RowOutOfRange(Violation):
    """A row that the table does not have."""


class RowOwnedTwice(Violation):
    """A row with more than one owner."""


class RowLeaked(Violation):
    """A row without an owner."""


class RowHolderWrong(Violation):
    """A row and a request that do not name each other."""


def every_page_exists(seen: Seen) -> None:
    """Free lists, edges and rows name pages of the pool only."""
    for name, pool in seen.now.pools.items():
        if not _adds_up(seen, pool):
            owners = page_owners(seen.now, name)
            outside = sorted(page for page in owners if not 0 <= page <= pool.view.n_pages)
            if outside:
                raise PageOutOfRange(
                    f"{those('page', outside)} named, expected 1..{pool.view.n_pages}",
                    _pool_facts(name) + owner_facts(owners[outside[0]]),
                    kinds(owners[outside[0]]),
                )


def no_page_has_two_owners(seen: Seen) -> None:
    """No page stands in two of free list, tree (edges) and requests (tails), nor twice in one of them."""
    for name, pool in seen.now.pools.items():
        if not _adds_up(seen, pool):
            owners = page_owners(seen.now, name)
            shared = sorted(page for page, names in owners.items() if len(names) > 1 and page != 0)
            if shared:
                page = shared[0]
                before = page_owners(seen.before, name).get(page, [])
                raise PageOwnedTwice(
                    f"page {page} has {len(owners[page])} owners, expected 1",
                    _pool_facts(name)
                    + owner_facts(owners[page])
                    + last_owner_facts(before, seen.observation)
                    + _also(shared[1:]),
                    roles(owners[page], before),
                )


def no_page_is_lost(seen: Seen) -> None:
    """Each page of the pool is in the free list, in an edge, or in a tail."""
    for name, pool in seen.now.pools.items():
        if not _adds_up(seen, pool):
            owners = page_owners(seen.now, name)
            lost = [page for page in range(1, pool.view.n_pages + 1) if page not in owners]
            if lost:
                page = lost[0]
                before = page_owners(seen.before, name).get(page, [])
                raise PageLeaked(
                    f"page {page} has 0 owners, expected 1",
                    _pool_facts(name) + last_owner_facts(before, seen.observation) + _also(lost[1:]),
                    roles([], before),
                )


def _adds_up(seen: Seen, pool: PoolIndex) -> bool:
    """Tell quickly that all is well; if not, the checks look slot by slot for who is wrong."""
    return pool.adds_up and seen.now.rows_in_pages


def _pool_facts(name: str) -> list[tuple[str, str]]:
    """Name the pool, where it is not the one that every cache has."""
    return [] if name == FULL else [("pool", name)]


def _also(pages: list[int]) -> list[tuple[str, str]]:
    return [("also", those("page", pages))] if pages else []


def every_row_exists(seen: Seen) -> None:
    """The free list and the requests name rows of the table only."""
    n_rows = seen.observation.now.n_rows
    if not _rows_add_up(seen):
        owners = row_owners(seen.now)
        outside = sorted(row for row in owners if not 0 <= row <= n_rows)
        if outside:
            raise RowOutOfRange(
                f"{those('row', outside)} named, expected 1..{n_rows}",
                owner_facts(owners[outside[0]]),
                kinds(owners[outside[0]]),
            )


def no_row_has_two_owners(seen: Seen) -> None:
    """No row is held by two requests, free and held, or twice in the free list."""
    if not _rows_add_up(seen):
        owners = row_owners(seen.now)
        shared = sorted(row for row, names in owners.items() if len(names) > 1 and row != 0)
        if shared:
            row, before = shared[0], _row_before(seen, shared[0])
            raise RowOwnedTwice(
                f"row {row} has {len(owners[row])} owners, expected 1",
                owner_facts(owners[row]) + last_owner_facts(before, seen.observation),
                roles(owners[row], before),
            )


def no_row_is_lost(seen: Seen) -> None:
    """Each row of the table is free or held."""
    if not _rows_add_up(seen):
        owners = row_owners(seen.now)
        lost = [row for row in range(1, seen.observation.now.n_rows + 1) if row not in owners]
        if lost:
            before = _row_before(seen, lost[0])
            raise RowLeaked(
                f"row {lost[0]} has 0 owners, expected 1",
                last_owner_facts(before, seen.observation),
                roles([], before),
            )


def rows_and_requests_name_each_other(seen: Seen) -> None:
    """A held row names a request that the cache knows and that names this row; only a MATCHED one may have none."""
    now = seen.now
    for row in now.snapshot.rows or ():
        request = now.requests.get(row.request)
        if request is None or request.row != row.row:
            said = "no such request" if request is None else f"request {row.request} names row {request.row}"
            raise RowHolderWrong(
                f"row {row.row} is held for request {row.request}, expected that request to name it",
                [("request", said)],
                ("request",) if request else ("nobody",),
            )
    for request in now.requests.values():
        if request.row is not None and request.request not in now.rows:
            raise RowHolderWrong(
                f"request {request.request} names row {request.row}, expected the row to be held for it",
                [(f"row {request.row}", ", ".join(o.text for o in row_owners(now).get(request.row, [])) or "nobody's")],
                ("request", "row"),
            )
        if request.row is None and request.state != "MATCHED":
            raise RowHolderWrong(
                f"request {request.request} is {request.state} without a row, expected a row",
                roles=("request", request.state),
            )


def _rows_add_up(seen: Seen) -> bool:
    now = seen.observation.now
    rows = (now.free_rows or []) + [row.row for row in now.rows or ()]
    return len(rows) == now.n_rows and set(rows) == set(range(1, now.n_rows + 1))


def _row_before(seen: Seen, row: int) -> list[Owner]:
    return row_owners(seen.before).get(row, [])
