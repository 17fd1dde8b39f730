"""What an ``alloc`` batch wants on the device, planned on the host.

`kernels.py` says how the buffer reads. Row runs stand before write runs, so that one numbering of all
positions splits into rows and write set at a single place.
"""

from array import array

from .arithmetic import pages_touched


class BatchPlan:
    """Runs of positions with the pages they lie on.

    With pages of 2: a new request takes row 1 with its prefix on page 3 and two positions on page 5.

    >>> plan = BatchPlan(page_size=2)
    >>> plan.add(row=1, row_start=0, write_start=2, end=4, pages=array("i", [3, 5]))
    >>> plan.n_row_positions, plan.n_positions, plan.offsets, plan.lengths
    (4, 6, [0], [2])
    >>> plan.buffer()  # end, shift, page_shift, row of a row run and a write run; then the pages
    array('i', [4, 6, 0, -2, 0, 0, 1, 0, 3, 5])
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._row_runs: list[tuple[int, int, int, int]] = []  # start, length, page_shift, row
        self._write_runs: list[tuple[int, int, int, int]] = []
        self._pages = array("i")
        self.n_row_positions = 0
        self.offsets: list[int] = []  # of each request in the write set
        self.lengths: list[int] = []

    @property
    def n_runs(self) -> int:
        return len(self._row_runs) + len(self._write_runs)

    @property
    def n_positions(self) -> int:
        """Positions of all runs: those of rows, then those of the write set."""
        return self.n_row_positions + sum(self.lengths)

    def add(self, row: int, row_start: int, write_start: int, end: int, pages: "array[int]") -> None:
        """Plan one request: name ``[row_start, end)`` in its row, and let it write ``[write_start, end)``.

        ``pages`` are the request's, from position 0 on. ``row_start >= end`` where its row names all already.
        """
        first_page, behind = pages_touched(min(row_start, write_start), end, self._page_size)
        page_shift = len(self._pages) - first_page
        self._pages.extend(pages[first_page:behind])
        if row_start < end:
            self._row_runs.append((row_start, end - row_start, page_shift, row))
            self.n_row_positions += end - row_start
        self._write_runs.append((write_start, end - write_start, page_shift, 0))
        self.offsets.append(self.offsets[-1] + self.lengths[-1] if self.offsets else 0)
        self.lengths.append(end - write_start)

    def buffer(self) -> "array[int]":
        """Lay the plan out for the device."""
        ends, shifts, page_shifts, rows = array("i"), array("i"), array("i"), array("i")
        total = 0
        for start, length, page_shift, row in self._row_runs + self._write_runs:
            shifts.append(start - total)
            total += length
            ends.append(total)
            page_shifts.append(page_shift)
            rows.append(row)
        return ends + shifts + page_shifts + rows + self._pages
