"""The choices of SPEC section 6: what an implementation is free to decide, and the model adopts.

The model proves a choice legal before it changes anything. Without a choice it takes the lowest
free rows and pages, and victims in policy order.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


class IllegalChoice(Exception):
    """The implementation decided something that SPEC section 6 does not leave to it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What an implementation decided in one ``alloc``."""

    rows: Mapping[str, int] = field(default_factory=dict)  # for each request of the batch that had no row
    pages: Mapping[str, Sequence[int]] = field(default_factory=dict)  # whole new pages, in position order
    victims: Sequence[Sequence[int]] | None = None  # slots per evicted node, in order; None: policy order


def prove_rows(rows: Mapping[str, int], takers: Sequence[str], free: Collection[int]) -> None:
    """Raise IllegalChoice unless each taker, and nobody else, gets a free row of its own.

    >>> prove_rows({"r0": 2}, ["r0"], [2, 3])
    >>> prove_rows({"r0": 1}, ["r0"], [2, 3])
    Traceback (most recent call last):
    kvlockstep.reference.choices.IllegalChoice: row 1 for r0 is not free, expected one of [2, 3]
    """
    if sorted(rows) != sorted(takers):
        raise IllegalChoice(f"rows chosen for {sorted(rows)}, expected for {sorted(takers)}")
    taken: dict[int, str] = {}
    for request, row in rows.items():
        if row not in free:
            raise IllegalChoice(f"row {row} for {request} is not free, expected one of {sorted(free)}")
        if row in taken:
            raise IllegalChoice(f"row {row} chosen for {taken[row]} and for {request}, expected different rows")
        taken[row] = request


def prove_pages(pages: Mapping[str, Sequence[int]], needs: Mapping[str, int], free: Collection[int]) -> None:
    """Raise IllegalChoice unless each request gets exactly the pages it needs, free ones, no page twice.

    >>> prove_pages({"r0": [4, 2]}, {"r0": 2, "r1": 0}, [2, 3, 4])
    >>> prove_pages({"r0": [4, 4]}, {"r0": 2, "r1": 0}, [2, 3, 4])
    Traceback (most recent call last):
    kvlockstep.reference.choices.IllegalChoice: page 4 chosen for r0 and for r0, expected different pages
    """
    for request in pages:
        if request not in needs:
            raise IllegalChoice(f"pages chosen for {request}, which is not in the batch")
    taken: dict[int, str] = {}
    for request, need in needs.items():
        chosen = pages.get(request, ())
        if len(chosen) != need:
            raise IllegalChoice(f"{len(chosen)} new pages chosen for {request}, expected {need}")
        for page in chosen:
            if page not in free:
                raise IllegalChoice(f"page {page} for {request} is not free, expected one of {sorted(free)}")
            if page in taken:
                raise IllegalChoice(f"page {page} chosen for {taken[page]} and for {request}, expected different pages")
            taken[page] = request
