"""Law 11: what an IN_FLIGHT request holds stays its own until its pass lands, and late readers can tell.

``holds`` is the harness's memory of what each request in flight was given at ``alloc``. Generations
are compared across the operation: what somebody gave back has a higher one, and none is ever lower.

Not verified here: that a generation is raised by exactly one, and that nothing else raises it (the
comparison with the model); the bytes behind the held slots (laws 8 and 9).
"""

from kvlockstep.invariants.index import Index, PageOwner, Seen
from kvlockstep.invariants.owners import Facts, listing, operation, owner_facts, page_owners, span, those
from kvlockstep.invariants.snapshot import Hold
from kvlockstep.invariants.violation import Violation


class InFlightDisturbed(Violation):
    """A request in flight lost its row, a page, or a slot that its pass writes."""


class GenerationNotRaised(Violation):
    """A page or row was given back and looks to a late reader as if it had not been."""


class GenerationLowered(Violation):
    """A generation was set back."""


def requests_in_flight_keep_their_row(seen: Seen) -> None:
    """Each request in flight has the row, and the row the generation, that it had at ``alloc``."""
    for name, hold in seen.observation.holds.items():
        request = seen.now.requests.get(name)
        row = None if request is None else request.row
        if row != hold.row or name not in seen.now.rows:
            raise InFlightDisturbed(
                f"request {name} is in flight and has {'no row' if row is None else f'row {row}'}, "
                f"expected row {hold.row} until it lands",
                [("after", operation(seen.observation))],
                ("row",),
            )
        generations = seen.observation.now.row_generations
        if generations is not None and generations[hold.row] != hold.row_generation:
            raise InFlightDisturbed(
                f"row {hold.row} of request {name} in flight has generation {generations[hold.row]}, "
                f"expected {hold.row_generation} until it lands",
                [("after", operation(seen.observation))],
                ("row generation",),
            )


def requests_in_flight_keep_their_write_slots(seen: Seen) -> None:
    """The row of each request in flight names, from ``committed_len`` on, the slots that its pass writes."""
    for name, hold in seen.observation.holds.items():
        row, request = seen.now.rows.get(name), seen.now.requests.get(name)
        if row is None or request is None:
            continue  # named by the check before this one
        end = request.committed_len + len(hold.write_slots)
        if row.slots[request.committed_len : end] != hold.write_slots:
            raise InFlightDisturbed(
                f"row {hold.row} of request {name} in flight changed at {span(request.committed_len, end)}",
                [
                    ("expected", listing(hold.write_slots)),
                    ("got", listing(row.slots[request.committed_len : end])),
                    ("after", operation(seen.observation)),
                ],
                ("write set",),
            )


def requests_in_flight_keep_their_pages(seen: Seen) -> None:
    """Tail and locked prefix of each request in flight stay where they were, with their generations."""
    generations = seen.now.full.view.page_generations
    for name, hold in seen.observation.holds.items():
        lost = _lost_pages(seen.now, name, hold)
        if lost:
            owners = page_owners(seen.now).get(lost[0], [])
            raise InFlightDisturbed(
                f"{those('page', lost)} of request {name} in flight changed hands, expected to stay until it lands",
                [*owner_facts(owners), ("after", operation(seen.observation))],
                tuple(sorted({owner.kind for owner in owners})) or ("nobody",),
            )
        if generations is None:
            continue
        raised = [page for page, generation in hold.page_generations.items() if generations[page] != generation]
        if raised:
            page = raised[0]
            raise InFlightDisturbed(
                f"page {page} of request {name} in flight has generation {generations[page]}, "
                f"expected {hold.page_generations[page]} until it lands",
                [*owner_facts(page_owners(seen.now).get(page, [])), ("after", operation(seen.observation))],
                ("page generation",),
            )


def _lost_pages(now: Index, name: str, hold: Hold) -> list[int]:
    """Held pages that are neither in the request's tail nor, as the tree's, at the front of its row.

    Before: the row names the write slots from ``committed_len`` on.
    """
    owner, page_size = now.full.owner, now.page_size
    row_pages, own = now.row_pages.get(name, ()), set(now.full.tails.get(name, ()))
    row, start = set(row_pages), _committed_len(now, name)
    end = start + len(hold.write_slots)
    lost = [page for page in hold.page_generations if page not in own and not (page in row and owner[page] == "tree")]
    lost += [page for page in row_pages[start // page_size : -(-end // page_size)] if page not in own]
    return sorted(set(lost))


def _committed_len(now: Index, name: str) -> int:
    return now.requests[name].committed_len if name in now.requests else 0


def page_generations_never_fall(seen: Seen) -> None:
    """No operation sets a page's generation back, ``reset`` included."""
    for name, pool in seen.now.pools.items():
        before = seen.observation.before.pools[name].page_generations or []
        now = pool.view.page_generations or []
        if before != now:
            lowered = _lowered(before, now)
            if lowered:
                page = lowered[0]
                raise GenerationLowered(
                    f"page {page} has generation {listing(now[page : page + 1])}, expected at least {before[page]}",
                    [("after", operation(seen.observation))],
                    ("page",),
                )


def row_generations_never_fall(seen: Seen) -> None:
    """No operation sets a row's generation back, ``reset`` included."""
    before, now = seen.observation.before.row_generations or [], seen.observation.now.row_generations or []
    if before != now:
        lowered = _lowered(before, now)
        if lowered:
            row = lowered[0]
            raise GenerationLowered(
                f"row {row} has generation {listing(now[row : row + 1])}, expected at least {before[row]}",
                [("after", operation(seen.observation))],
                ("row",),
            )


def _lowered(before: list[int], now: list[int]) -> list[int]:
    """List the indices whose generation is lower now, or gone."""
    return [i for i, generation in enumerate(before) if i >= len(now) or now[i] < generation]


def pages_given_back_have_a_new_generation(seen: Seen) -> None:
    """A page that left an edge or a tail, but for the tree that a request published it to, has a higher generation."""
    for name, pool in seen.now.pools.items():
        owner_before = seen.before.pools[name].owner
        if owner_before == pool.owner:
            continue
        before = seen.observation.before.pools[name].page_generations or []
        now = pool.view.page_generations or []
        for page, old in owner_before.items():
            new = pool.owner.get(page)
            published = new == "tree" and old != "free"
            if old not in ("free", new) and not published and now[page] <= before[page]:
                raise GenerationNotRaised(
                    f"page {page} was given back and has generation {now[page]}, expected {before[page] + 1}",
                    _hands(old, new, seen),
                    (_kind(old), _kind(new)),
                )


def rows_given_back_have_a_new_generation(seen: Seen) -> None:
    """A row that its request no longer holds has a higher generation."""
    before = seen.observation.before.row_generations or []
    now = seen.observation.now.row_generations or []
    holder = {row.row: row.request for row in seen.observation.now.rows or ()}
    for row in seen.observation.before.rows or ():
        if holder.get(row.row) != row.request and now[row.row] <= before[row.row]:
            new = holder.get(row.row)
            raise GenerationNotRaised(
                f"row {row.row} was given back and has generation {now[row.row]}, expected {before[row.row] + 1}",
                _hands(("request", row.request), "free" if new is None else ("request", new), seen),
                ("row",),
            )


def _hands(old: PageOwner, new: PageOwner | None, seen: Seen) -> Facts:
    return [("was", _words(old)), ("is", _words(new)), ("after", operation(seen.observation))]


def _words(owner: PageOwner | None) -> str:
    if owner is None:
        return "nobody's"
    return owner if isinstance(owner, str) else f"request {owner[1]}'s"


def _kind(owner: PageOwner | None) -> str:
    return "nobody" if owner is None else owner if isinstance(owner, str) else "request"
