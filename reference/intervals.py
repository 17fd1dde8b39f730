"""Who owns which positions of a row (SPEC section 2).

With pages of 2, lengths 2, 3 and 5: one page is the tree's, two are the request's. The second is cut
by a boundary and counts once; the third has one position named by the row and one of slack::

    pos      0 1 | 2 3 | 4 .
    owner    tree| request
    meaning  canonical | committed 2, open 3 and 4
"""

from typing import Literal, NamedTuple


class OwnershipInterval(NamedTuple):
    """Positions ``[start, end)`` of one row, and whose they are."""

    start: int
    end: int
    owner: Literal["tree", "request"]


def ownership_intervals(protected_len: int, committed_len: int, allocated_len: int) -> list[OwnershipInterval]:
    """Cut ``[0, allocated_len)`` where the owner or the meaning changes; empty intervals are left out.

    >>> ownership_intervals(2, 3, 5)
    [OwnershipInterval(start=0, end=2, owner='tree'),
     OwnershipInterval(start=2, end=3, owner='request'),
     OwnershipInterval(start=3, end=5, owner='request')]
    >>> ownership_intervals(4, 4, 4)
    [OwnershipInterval(start=0, end=4, owner='tree')]
    """
    assert 0 <= protected_len <= committed_len <= allocated_len, "the three lengths are ordered"
    cuts = [
        OwnershipInterval(0, protected_len, "tree"),
        OwnershipInterval(protected_len, committed_len, "request"),
        OwnershipInterval(committed_len, allocated_len, "request"),
    ]
    return [cut for cut in cuts if cut.start < cut.end]
