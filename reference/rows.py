"""The request row table (SPEC section 1). Row 0 is padding and is never taken.

A taken row is kept as the pages of its positions, in position order. Pages are whole and aligned, so
``R[row, pos]`` follows: with pages of 2 and a row of pages 3 and 1, its slots are 6 7 2 3.
"""

from collections.abc import Iterable

from kvlockstep.reference.arithmetic import pages_between


class Rows:
    """Contents and generations of rows ``1..n_rows``; a row without contents is free.

    >>> rows = Rows(n_rows=2, page_size=2)
    >>> rows.take(1, [3])
    >>> rows.pages_of[1].append(1)
    >>> rows.slots(1, 1, 4)
    [7, 2, 3]
    >>> rows.give_back(1)
    >>> rows.free(), rows.generations
    ([1, 2], [0, 1, 0])
    """

    def __init__(self, n_rows: int, page_size: int) -> None:
        self.n_rows = n_rows
        self.page_size = page_size
        self.pages_of: dict[int, list[int]] = {}
        self.generations = [0] * (n_rows + 1)

    @property
    def n_free(self) -> int:
        return self.n_rows - len(self.pages_of)

    def free(self) -> list[int]:
        """List the free rows, lowest first."""
        return [row for row in range(1, self.n_rows + 1) if row not in self.pages_of]

    def slots(self, row: int, start: int, end: int) -> list[int]:
        """Read ``R[row, start:end]``."""
        first, behind = pages_between(start, end, self.page_size)
        pages = self.pages_of[row][first:behind]
        slots = slots_of(pages, self.page_size)
        return slots[start - first * self.page_size : end - first * self.page_size]

    def take(self, row: int, prefix_pages: Iterable[int]) -> None:
        """Take a free row and write the canonical pages of the locked prefix into it."""
        assert 1 <= row <= self.n_rows, f"row {row} is not usable"
        assert row not in self.pages_of, f"row {row} is taken"
        self.pages_of[row] = list(prefix_pages)

    def give_back(self, row: int) -> None:
        del self.pages_of[row]
        self.generations[row] += 1


def slots_of(pages: Iterable[int], page_size: int) -> list[int]:
    """List the slots of whole pages, in the order of the pages.

    >>> slots_of([3, 1], 2)
    [6, 7, 2, 3]
    """
    slots: list[int] = []
    for page in pages:
        slots.extend(range(page * page_size, (page + 1) * page_size))
    return slots
