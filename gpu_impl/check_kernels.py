"""The device side of `device_checks.py`: kernels that count what breaks a law, their launchers, and twins in torch.

A launcher and its twin leave the same report. Nothing here copies from the device to the host, and no size
depends on device data; an address that is read from the device is looked at before it is used, so a broken
cache is reported and does not crash the check. Import only after `lane.choose_lane`.

**Report**: int64, two numbers a defect: how often it was found, and the least place where it was found (a
number, a cell of the row table, or a slot; ``NOWHERE`` if there is none). Neither depends on the order in which
programs run.

**Marks**: int32, one a page (or row) and a spare one at the end. Whoever claims page ``p`` does an atomic maximum
of its own id, 1 or more, on ``marks[p]``. The first finds 0; another one finds an id that is not its own, and sets
the bit ``TWICE``. A mark of 0 at the end is a page without an owner.

**Runs** of positions are laid out as in `kernels.py`: a table of int32, one column a run, whose first line
``end`` numbers the positions of all runs one after another.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_checks import NOWHERE, Defect
from .kernels import _block_of

TWICE = 1 << 30
"""Bit of a mark: two owners claimed it. Ids are smaller."""

WORD_BITS = 32

TWICE_BIT = tl.constexpr(TWICE)


class CheckKernels(NamedTuple):
    """One lane's way to check the laws. The first argument of each is the report that it adds to."""

    claim_pages: Callable[[Tensor, Tensor, Tensor], None]
    claim_rows: Callable[[Tensor, Tensor, Tensor], None]
    claim_tails: Callable[[Tensor, Tensor, Tensor, Tensor, int, int, int], None]
    count_pages: Callable[[Tensor, Tensor], None]
    count_rows: Callable[[Tensor, Tensor], None]
    check_paths: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], None]
    check_writes: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, int, int], None]


# Parts of kernels


@triton.jit
def count(report_ptr, defect, found, place):
    """Add to a report each lane that ``found`` a defect, and the least ``place`` of it. Costs little where none did."""
    entry = report_ptr + 2 * defect + place.to(tl.int64) * 0
    tl.atomic_add(entry, place.to(tl.int64) * 0 + 1, mask=found)
    tl.atomic_min(entry + 1, place.to(tl.int64), mask=found)


@triton.jit
def run_of(end_ptr, number, n_runs, n_search_steps):
    """Find the run that each position belongs to: the first one that ends behind it."""
    run = number * 0
    last = run + (n_runs - 1)
    for _ in range(n_search_steps):
        middle = (run + last) // 2
        found = number < tl.load(end_ptr + middle)
        last = tl.where(found, middle, last)
        run = tl.where(found, run, middle + 1)
    return run


@triton.jit
def claim(marks_ptr, report_ptr, number, owner, mask, n_numbers, OUTSIDE: tl.constexpr, PADDING: tl.constexpr):
    """Let ``owner`` claim ``number``, in each lane of ``mask``."""
    exists = mask & (number >= 0) & (number < n_numbers)
    before = tl.atomic_max(marks_ptr + number, owner, mask=exists)
    tl.atomic_or(marks_ptr + number, TWICE_BIT, mask=exists & (before != 0) & (before != owner))
    count(report_ptr, tl.where(number == 0, PADDING, OUTSIDE), mask & (~exists | (number == 0)), number)


def count_torch(report: Tensor, defect: int, found: Tensor, place: Tensor) -> None:
    """Twin of `count`, over all programs at once."""
    report[2 * defect] += found.sum()
    least = torch.where(found, place.long(), NOWHERE).amin()
    report[2 * defect + 1] = torch.minimum(report[2 * defect + 1], least)


def runs_torch(runs: Tensor, n_positions: int) -> tuple[Tensor, Tensor]:
    """Number all positions, and find the run of each: twin of `run_of`."""
    number = torch.arange(n_positions, dtype=torch.int32, device=runs.device)
    return number, torch.searchsorted(runs[0], number, right=True)


def claim_torch(
    report: Tensor, marks: Tensor, number: Tensor, owner: Tensor, mask: Tensor, outside: int, padding: int
) -> None:
    """Twin of `claim`. What is not claimed goes to the spare mark."""
    n_numbers = marks.shape[0] - 1
    missing = (number < 0) | (number >= n_numbers)
    index = torch.where(mask & ~missing, number, n_numbers).long()
    known = marks & (TWICE - 1)
    greatest = known.scatter_reduce(0, index, owner, "amax")
    least = torch.where(known == 0, TWICE, known).scatter_reduce(0, index, owner, "amin")
    marks.copy_(torch.where(least < greatest, greatest | TWICE, greatest | (marks & TWICE)))
    count_torch(report, outside, mask & missing, number)
    count_torch(report, padding, mask & (number == 0), number)


# Claim what is listed: free pages and the pages of edges; free rows and those of requests


@triton.jit(do_not_specialize=["n", "n_numbers"])
def claim_listed_kernel(
    report_ptr,
    marks_ptr,  # int32 [n_numbers + 1]
    listed_ptr,  # int32 [n]
    n,
    n_numbers,
    OUTSIDE: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Claim each number for the place where it is listed: the ``i``-th has the id ``i + 1``.

    Writes: the marks of these numbers, and the report.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    number = tl.load(listed_ptr + i, mask=mask, other=-1)
    claim(marks_ptr, report_ptr, number, i + 1, mask, n_numbers, OUTSIDE, PADDING)


def _claim_listed(report: Tensor, marks: Tensor, listed: Tensor, outside: int, padding: int) -> None:
    n = listed.shape[0]
    if n:
        block = _block_of(n, marks)
        claim_listed_kernel[(triton.cdiv(n, block),)](
            report, marks, listed, n, marks.shape[0] - 1, OUTSIDE=outside, PADDING=padding, BLOCK=block
        )


def _claim_listed_torch(report: Tensor, marks: Tensor, listed: Tensor, outside: int, padding: int) -> None:
    n = listed.shape[0]
    if n:
        owner = torch.arange(1, n + 1, dtype=torch.int32, device=listed.device)
        claim_torch(report, marks, listed, owner, torch.ones_like(owner, dtype=torch.bool), outside, padding)


def claim_pages(report: Tensor, marks: Tensor, listed: Tensor) -> None:
    """Claim the pages that the free list and the edges list."""
    _claim_listed(report, marks, listed, int(Defect.PAGE_OUT_OF_RANGE), int(Defect.PADDING_PAGE_OWNED))


def claim_pages_torch(report: Tensor, marks: Tensor, listed: Tensor) -> None:
    """Twin of `claim_pages`."""
    _claim_listed_torch(report, marks, listed, Defect.PAGE_OUT_OF_RANGE, Defect.PADDING_PAGE_OWNED)


def claim_rows(report: Tensor, marks: Tensor, listed: Tensor) -> None:
    """Claim the rows that the free list and the requests name."""
    _claim_listed(report, marks, listed, int(Defect.ROW_OUT_OF_RANGE), int(Defect.PADDING_ROW_OWNED))


def claim_rows_torch(report: Tensor, marks: Tensor, listed: Tensor) -> None:
    """Twin of `claim_rows`."""
    _claim_listed_torch(report, marks, listed, Defect.ROW_OUT_OF_RANGE, Defect.PADDING_ROW_OWNED)


# Claim what rows name beyond the part that the tree owns


@triton.jit(do_not_specialize=["n_runs", "n_positions", "first_id", "width", "n_numbers", "n_search_steps"])
def claim_tails_kernel(
    report_ptr,
    marks_ptr,  # int32 [n_numbers + 1]
    row_table_ptr,  # int32 [n_rows + 1, width]
    tails_ptr,  # int32 [3, n_runs]: end, shift, row
    n_runs,
    n_positions,
    first_id,
    width,
    n_numbers,
    n_search_steps,
    OUTSIDE: tl.constexpr,
    PADDING: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Claim the page of each slot that a row names in a run; run ``r`` has the id ``first_id + r``.

    A slot on the page of the one to its left claims nothing. Before: runs begin at a page.
    Writes: the marks of these pages, and the report.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n_positions
    number = tl.minimum(i, n_positions - 1)
    run = run_of(tails_ptr, number, n_runs, n_search_steps)
    pos = number + tl.load(tails_ptr + n_runs + run)
    cell = tl.load(tails_ptr + 2 * n_runs + run).to(tl.int64) * width + pos
    slot = tl.load(row_table_ptr + cell, mask=mask, other=0)
    left = tl.load(row_table_ptr + cell - 1, mask=mask & (pos % PAGE_SIZE != 0), other=-1)
    page = tl.where(slot < 0, -1, slot // PAGE_SIZE)
    first = (left < 0) | (left // PAGE_SIZE != page)
    owner = (first_id + run).to(tl.int32)
    claim(marks_ptr, report_ptr, page, owner, mask & first, n_numbers, OUTSIDE, PADDING)


def claim_tails(
    report: Tensor, marks: Tensor, row_table: Tensor, tails: Tensor, n_positions: int, first_id: int, page_size: int
) -> None:
    """Claim for each run of ``tails`` the pages that its row names there."""
    if n_positions:
        n_runs, block = tails.shape[1], _block_of(n_positions, marks)
        claim_tails_kernel[(triton.cdiv(n_positions, block),)](
            report,
            marks,
            row_table,
            tails,
            n_runs,
            n_positions,
            first_id,
            row_table.shape[1],
            marks.shape[0] - 1,
            (n_runs - 1).bit_length(),
            OUTSIDE=int(Defect.PAGE_OUT_OF_RANGE),
            PADDING=int(Defect.PADDING_PAGE_OWNED),
            PAGE_SIZE=page_size,
            BLOCK=block,
        )


def claim_tails_torch(
    report: Tensor, marks: Tensor, row_table: Tensor, tails: Tensor, n_positions: int, first_id: int, page_size: int
) -> None:
    """Twin of `claim_tails`."""
    if n_positions:
        number, run = runs_torch(tails, n_positions)
        pos = number + tails[1, run]
        cell = tails[2, run].long() * row_table.shape[1] + pos
        slot = row_table.view(-1)[cell]
        left = torch.where(pos % page_size != 0, row_table.view(-1)[(cell - 1).clamp(min=0)], -1)
        page = torch.where(slot < 0, -1, slot // page_size)
        first = (left < 0) | (left // page_size != page)
        owner = (first_id + run).int()
        claim_torch(report, marks, page, owner, first, Defect.PAGE_OUT_OF_RANGE, Defect.PADDING_PAGE_OWNED)


# Count who was claimed twice, and who was not


@triton.jit(do_not_specialize=["n_numbers"])
def count_marks_kernel(
    report_ptr,
    marks_ptr,  # int32 [n_numbers + 1]
    n_numbers,
    OWNED_TWICE: tl.constexpr,
    LOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the numbers from 1 on that have two owners, and those that have none.

    Writes: the report.
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + 1
    mark = tl.load(marks_ptr + number, mask=number < n_numbers, other=1)
    count(report_ptr, tl.where(mark == 0, LOST, OWNED_TWICE), (mark == 0) | (mark >= TWICE_BIT), number)


def _count_marks(report: Tensor, marks: Tensor, owned_twice: int, lost: int) -> None:
    n_numbers = marks.shape[0] - 1
    block = _block_of(n_numbers, marks)
    count_marks_kernel[(triton.cdiv(n_numbers - 1, block),)](
        report, marks, n_numbers, OWNED_TWICE=owned_twice, LOST=lost, BLOCK=block
    )


def _count_marks_torch(report: Tensor, marks: Tensor, owned_twice: int, lost: int) -> None:
    mark = marks[1:-1]
    number = torch.arange(1, mark.shape[0] + 1, dtype=torch.int32, device=marks.device)
    count_torch(report, owned_twice, mark >= TWICE, number)
    count_torch(report, lost, mark == 0, number)


def count_pages(report: Tensor, marks: Tensor) -> None:
    """Count the pages with two owners and those with none."""
    _count_marks(report, marks, int(Defect.PAGE_OWNED_TWICE), int(Defect.PAGE_LOST))


def count_pages_torch(report: Tensor, marks: Tensor) -> None:
    """Twin of `count_pages`."""
    _count_marks_torch(report, marks, Defect.PAGE_OWNED_TWICE, Defect.PAGE_LOST)


def count_rows(report: Tensor, marks: Tensor) -> None:
    """Count the rows with two owners and those with none."""
    _count_marks(report, marks, int(Defect.ROW_OWNED_TWICE), int(Defect.ROW_LOST))


def count_rows_torch(report: Tensor, marks: Tensor) -> None:
    """Twin of `count_rows`."""
    _count_marks_torch(report, marks, Defect.ROW_OWNED_TWICE, Defect.ROW_LOST)


# Rows against the paths that requests lock


@triton.jit(do_not_specialize=["n_runs", "n_positions", "width", "n_search_steps"])
def check_paths_kernel(
    report_ptr,
    row_table_ptr,  # int32 [n_rows + 1, width]
    pages_ptr,  # int32, of all edges
    paths_ptr,  # int32 [4, n_runs]: end, shift, page_shift, row; one run for each edge of each path
    n_runs,
    n_positions,
    width,
    n_search_steps,
    DEFECT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the cells of rows that do not name the slot of the edge, over all edges of each request's path.

    Writes: the report.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n_positions
    number = tl.minimum(i, n_positions - 1)
    run = run_of(paths_ptr, number, n_runs, n_search_steps)
    pos = number + tl.load(paths_ptr + n_runs + run)
    page = tl.load(pages_ptr + tl.load(paths_ptr + 2 * n_runs + run) + pos // PAGE_SIZE)
    cell = tl.load(paths_ptr + 3 * n_runs + run).to(tl.int64) * width + pos
    slot = tl.load(row_table_ptr + cell, mask=mask, other=0)
    count(report_ptr, DEFECT, mask & (slot != page.to(tl.int64) * PAGE_SIZE + pos % PAGE_SIZE), cell)


def check_paths(
    report: Tensor, row_table: Tensor, pages: Tensor, paths: Tensor, n_positions: int, page_size: int
) -> None:
    """Compare rows with the slots along the locked paths."""
    if n_positions:
        n_runs, block = paths.shape[1], _block_of(n_positions, row_table)
        check_paths_kernel[(triton.cdiv(n_positions, block),)](
            report,
            row_table,
            pages,
            paths,
            n_runs,
            n_positions,
            row_table.shape[1],
            (n_runs - 1).bit_length(),
            DEFECT=int(Defect.ROW_OFF_PATH),
            PAGE_SIZE=page_size,
            BLOCK=block,
        )


def check_paths_torch(
    report: Tensor, row_table: Tensor, pages: Tensor, paths: Tensor, n_positions: int, page_size: int
) -> None:
    """Twin of `check_paths`."""
    if n_positions:
        number, run = runs_torch(paths, n_positions)
        pos = number + paths[1, run]
        page = pages[paths[2, run] + pos // page_size]
        cell = paths[3, run].long() * row_table.shape[1] + pos
        slot = row_table.view(-1)[cell]
        count_torch(report, Defect.ROW_OFF_PATH, slot != page.long() * page_size + pos % page_size, cell)


# The write set of a batch


@triton.jit(do_not_specialize=["n_runs", "n_positions", "n_free", "n_listed", "width", "n_numbers", "n_search_steps"])
def check_writes_kernel(
    report_ptr,
    marks_ptr,  # int32 [n_numbers + 1], all claims done
    seen_ptr,  # int32, one bit a slot, all 0
    row_table_ptr,  # int32 [n_rows + 1, width]
    write_set_ptr,  # int32
    writes_ptr,  # int32 [7, n_runs]: end, shift, write_shift, row, id, low, high; one run a request
    n_runs,
    n_positions,
    n_free,
    n_listed,
    width,
    n_numbers,
    n_search_steps,
    REPEATED: tl.constexpr,
    OFF_ROW: tl.constexpr,
    OF_PADDING: tl.constexpr,
    OF_FREE: tl.constexpr,
    OF_TREE: tl.constexpr,
    OF_OTHER: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count write slots that come again, that their row does not name there, or whose page is not the request's.

    A request may write positions ``[low, high)`` of its row. A page with two owners passes for either's: the
    count of marks speaks of it.
    Writes: the bit of each write slot, and the report.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n_positions
    number = tl.minimum(i, n_positions - 1)
    run = run_of(writes_ptr, number, n_runs, n_search_steps)
    pos = number + tl.load(writes_ptr + n_runs + run)
    slot = tl.load(write_set_ptr + number + tl.load(writes_ptr + 2 * n_runs + run))
    row = tl.load(writes_ptr + 3 * n_runs + run).to(tl.int64)
    own = tl.load(writes_ptr + 4 * n_runs + run)
    allowed = (pos >= tl.load(writes_ptr + 5 * n_runs + run)) & (pos < tl.load(writes_ptr + 6 * n_runs + run))
    named = tl.load(row_table_ptr + row * width + pos, mask=mask & allowed, other=-1)
    count(report_ptr, OFF_ROW, mask & (~allowed | (slot != named)), slot)

    page = slot // PAGE_SIZE
    exists = mask & (slot >= 0) & (page < n_numbers)
    bit = (slot * 0 + 1) << (slot % 32)
    before = tl.atomic_or(seen_ptr + slot // 32, bit, mask=exists)
    count(report_ptr, REPEATED, exists & ((before & bit) != 0), slot)

    mark = tl.load(marks_ptr + page, mask=exists, other=0)
    owner = mark & (TWICE_BIT - 1)
    wrong = exists & ((page == 0) | ((owner != own) & (mark < TWICE_BIT)))
    whose = tl.where(owner <= n_free, OF_FREE, tl.where(owner <= n_listed, OF_TREE, OF_OTHER))
    whose = tl.where(page == 0, OF_PADDING, tl.where(owner == 0, OF_OTHER, whose))
    count(report_ptr, whose, wrong, slot)


def seen_words(n_slots: int) -> int:
    """Count the words that hold one bit a slot."""
    return -(-n_slots // WORD_BITS)


def check_writes(
    report: Tensor,
    marks: Tensor,
    row_table: Tensor,
    write_set: Tensor,
    writes: Tensor,
    n_positions: int,
    n_free: int,
    n_listed: int,
    page_size: int,
) -> None:
    """Check the write slots of each run. Ids up to ``n_free`` are free pages, those up to ``n_listed`` the tree's."""
    if n_positions:
        n_runs, block, n_numbers = writes.shape[1], _block_of(n_positions, marks), marks.shape[0] - 1
        seen = torch.zeros(seen_words(n_numbers * page_size), dtype=torch.int32, device=marks.device)
        check_writes_kernel[(triton.cdiv(n_positions, block),)](
            report,
            marks,
            seen,
            row_table,
            write_set,
            writes,
            n_runs,
            n_positions,
            n_free,
            n_listed,
            row_table.shape[1],
            n_numbers,
            (n_runs - 1).bit_length(),
            REPEATED=int(Defect.WRITE_SLOT_REPEATED),
            OFF_ROW=int(Defect.WRITE_SLOT_OFF_ROW),
            OF_PADDING=int(Defect.WRITE_SLOT_PADDING),
            OF_FREE=int(Defect.WRITE_SLOT_FREE),
            OF_TREE=int(Defect.WRITE_SLOT_OF_TREE),
            OF_OTHER=int(Defect.WRITE_SLOT_OF_OTHER),
            PAGE_SIZE=page_size,
            BLOCK=block,
        )


def check_writes_torch(
    report: Tensor,
    marks: Tensor,
    row_table: Tensor,
    write_set: Tensor,
    writes: Tensor,
    n_positions: int,
    n_free: int,
    n_listed: int,
    page_size: int,
) -> None:
    """Twin of `check_writes`."""
    if not n_positions:
        return
    number, run = runs_torch(writes, n_positions)
    pos = number + writes[1, run]
    slot = write_set[number + writes[2, run]]
    allowed = (pos >= writes[5, run]) & (pos < writes[6, run])
    cell = torch.where(allowed, writes[3, run].long() * row_table.shape[1] + pos, 0)
    count_torch(report, Defect.WRITE_SLOT_OFF_ROW, ~allowed | (slot != row_table.view(-1)[cell]), slot)

    n_numbers = marks.shape[0] - 1
    page = slot // page_size
    exists = (slot >= 0) & (page < n_numbers)
    n_slots = n_numbers * page_size
    times = torch.zeros(n_slots + 1, dtype=torch.int32, device=marks.device)
    times.index_add_(0, torch.where(exists, slot, n_slots).long(), torch.ones_like(slot))
    report[2 * Defect.WRITE_SLOT_REPEATED] += (times[:-1] - 1).clamp(min=0).sum()
    every = torch.arange(n_slots, dtype=torch.int64, device=marks.device)
    least = torch.where(times[:-1] > 1, every, NOWHERE).amin()
    known = report[2 * Defect.WRITE_SLOT_REPEATED + 1]
    report[2 * Defect.WRITE_SLOT_REPEATED + 1] = torch.minimum(known, least)

    mark = marks[torch.where(exists, page, n_numbers).long()]
    owner = mark & (TWICE - 1)
    wrong = exists & (page != 0) & (owner != writes[4, run]) & (mark < TWICE)
    count_torch(report, Defect.WRITE_SLOT_PADDING, exists & (page == 0), slot)
    count_torch(report, Defect.WRITE_SLOT_FREE, wrong & (owner >= 1) & (owner <= n_free), slot)
    count_torch(report, Defect.WRITE_SLOT_OF_TREE, wrong & (owner > n_free) & (owner <= n_listed), slot)
    count_torch(report, Defect.WRITE_SLOT_OF_OTHER, wrong & ((owner == 0) | (owner > n_listed)), slot)


TRITON = CheckKernels(claim_pages, claim_rows, claim_tails, count_pages, count_rows, check_paths, check_writes)
TORCH = CheckKernels(
    claim_pages_torch,
    claim_rows_torch,
    claim_tails_torch,
    count_pages_torch,
    count_rows_torch,
    check_paths_torch,
    check_writes_torch,
)


def check_kernels_of(lane: str) -> CheckKernels:
    """Give the way to check on a lane."""
    return TORCH if lane == "torch" else TRITON
