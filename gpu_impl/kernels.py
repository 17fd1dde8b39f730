"""The device side: each Triton kernel, its launcher, and its twin in torch with the launcher's signature.

A launcher and its twin leave the same bits in every tensor; tests hold them against each other. Nothing
here copies from the device to the host, and no size depends on device data. Slots and pages are int32;
offsets into the row table and the pool are widened to int64 before they are multiplied. KV is moved as
integer words, so a NaN keeps its payload. Import only after `lane.choose_lane`.

Triton would compile a variant for each scalar that is 1 or a multiple of 16; scalars that change from
call to call are kept out of that, so a kernel is compiled once per page size, word count and block.

A *plan* is one int32 buffer that says what an ``alloc`` batch wants on the device, as runs of positions::

    end[n_runs] shift[n_runs] page_shift[n_runs] row[n_runs] pages...

Number the positions of all runs one after another: number ``i`` belongs to the first run ``r`` with
``i < end[r]``, is position ``pos = i + shift[r]`` of its request, and lies on page
``pages[page_shift[r] + pos // page_size]``. The first runs are written to rows, the rest, the write set, to
a tensor of their own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FIELDS = 4
"""Integers a run takes in a plan, its pages not counted."""


class Kernels(NamedTuple):
    """One lane's way to do the device work."""

    apply_plan: Callable[[Tensor, Tensor, int, int, int, int], Tensor]
    rewrite_row: Callable[[Tensor, int, int, Tensor, int], None]
    scatter_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    gather_kv: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


FEWEST_PROGRAMS = 1
"""Programs that a launch has at least, if it has as many elements. Several show how they get along with each other."""


def _block_of(n: int, tensor: Tensor) -> int:
    """Choose the elements of one program: few on a GPU; on the CPU, interpreted, each program costs milliseconds."""
    limit = 1024 if tensor.is_cuda else 16384
    return min(limit, int(triton.next_power_of_2(triton.cdiv(n, FEWEST_PROGRAMS))))


# Apply a planned batch


@triton.jit(do_not_specialize=["n_runs", "n_row_positions", "n_positions", "width", "n_search_steps"])
def apply_plan_kernel(
    row_table_ptr,  # int32 [n_rows + 1, width]
    write_set_ptr,  # int32 [n_positions - n_row_positions]
    plan_ptr,  # int32
    n_runs,
    n_row_positions,
    n_positions,
    width,
    n_search_steps,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Expand the pages of a plan to slots; write rows and write set.

    Writes: the rows at the positions of the plan's row runs, and the whole write set.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n_positions
    number = tl.minimum(i, n_positions - 1)
    run = number * 0
    last = run + (n_runs - 1)
    for _ in range(n_search_steps):
        middle = (run + last) // 2
        found = number < tl.load(plan_ptr + middle)
        last = tl.where(found, middle, last)
        run = tl.where(found, run, middle + 1)
    pos = number + tl.load(plan_ptr + n_runs + run)
    page_shift = tl.load(plan_ptr + 2 * n_runs + run)
    row = tl.load(plan_ptr + 3 * n_runs + run)
    page = tl.load(plan_ptr + 4 * n_runs + page_shift + pos // PAGE_SIZE)
    slot = page.to(tl.int64) * PAGE_SIZE + pos % PAGE_SIZE
    cell = row.to(tl.int64) * width + pos
    tl.store(row_table_ptr + cell, slot.to(tl.int32), mask=mask & (i < n_row_positions))
    tl.store(write_set_ptr + (i - n_row_positions), slot.to(tl.int32), mask=mask & (i >= n_row_positions))


def apply_plan(
    row_table: Tensor, plan: Tensor, n_runs: int, n_row_positions: int, n_positions: int, page_size: int
) -> Tensor:
    """Write the rows of a plan and return its write set, in one launch."""
    write_set = torch.empty(n_positions - n_row_positions, dtype=torch.int32, device=row_table.device)
    block = _block_of(n_positions, row_table)
    apply_plan_kernel[(triton.cdiv(n_positions, block),)](
        row_table,
        write_set,
        plan,
        n_runs,
        n_row_positions,
        n_positions,
        row_table.shape[1],
        (n_runs - 1).bit_length(),
        PAGE_SIZE=page_size,
        BLOCK=block,
    )
    return write_set


def apply_plan_torch(
    row_table: Tensor, plan: Tensor, n_runs: int, n_row_positions: int, n_positions: int, page_size: int
) -> Tensor:
    """Twin of `apply_plan`."""
    number = torch.arange(n_positions, dtype=torch.int32, device=plan.device)
    end, shift, page_shift, row = plan[: FIELDS * n_runs].view(FIELDS, n_runs).unbind()
    run = torch.searchsorted(end, number, right=True)
    pos = number + shift[run]
    page = plan[FIELDS * n_runs :][page_shift[run] + pos // page_size]
    slot = page * page_size + pos % page_size
    cell = row[run].long() * row_table.shape[1] + pos
    row_table.view(-1).index_copy_(0, cell[:n_row_positions], slot[:n_row_positions])
    return slot[n_row_positions:]


# Rewrite a row to the canonical slots


@triton.jit(do_not_specialize=["row", "start", "n", "width"])
def rewrite_row_kernel(row_table_ptr, pages_ptr, row, start, n, width, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Name in ``row``, from position ``start`` on, the ``n`` slots of ``pages``.

    Writes: ``[start, start + n)`` of the row.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    page = tl.load(pages_ptr + i // PAGE_SIZE, mask=mask, other=0)
    slot = page.to(tl.int64) * PAGE_SIZE + i % PAGE_SIZE
    cell = row.to(tl.int64) * width + start + i
    tl.store(row_table_ptr + cell, slot.to(tl.int32), mask=mask)


def rewrite_row(row_table: Tensor, row: int, start: int, pages: Tensor, page_size: int) -> None:
    """Name the slots of ``pages`` in a row, from position ``start`` on."""
    n = pages.shape[0] * page_size
    block = _block_of(n, row_table)
    rewrite_row_kernel[(triton.cdiv(n, block),)](
        row_table, pages, row, start, n, row_table.shape[1], PAGE_SIZE=page_size, BLOCK=block
    )


def rewrite_row_torch(row_table: Tensor, row: int, start: int, pages: Tensor, page_size: int) -> None:
    """Twin of `rewrite_row`."""
    offset = torch.arange(page_size, dtype=torch.int32, device=pages.device)
    slots = pages.unsqueeze(1) * page_size + offset
    row_table[row, start : start + pages.shape[0] * page_size] = slots.view(-1)


# Write KV to slots


@triton.jit(do_not_specialize=["n", "n_slots", "n_elements"])
def scatter_kv_kernel(
    pool_ptr,  # [layers, 2, n_slots, WORDS]
    slots_ptr,  # int32 [n]
    k_ptr,  # [layers, n, WORDS]
    v_ptr,
    n,
    n_slots,
    n_elements,  # layers * n * WORDS
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the keys and values of all layers to ``slots``.

    Before: ``slots`` has no repeats.
    Writes: exactly the slots named, in every layer, K and V.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n_elements
    word = i % WORDS
    nth = (i // WORDS) % n
    layer = i // WORDS // n
    slot = tl.load(slots_ptr + nth, mask=mask, other=0).to(tl.int64)
    target = (layer * 2 * n_slots + slot) * WORDS + word
    v_plane = n_slots.to(tl.int64) * WORDS
    tl.store(pool_ptr + target, tl.load(k_ptr + i, mask=mask, other=0), mask=mask)
    tl.store(pool_ptr + target + v_plane, tl.load(v_ptr + i, mask=mask, other=0), mask=mask)


def scatter_kv(pool: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write ``k`` and ``v``, each [layers, n, words], to ``slots`` of the pool [layers, 2, n_slots, words]."""
    n_elements = k.numel()
    block = _block_of(n_elements, pool)
    scatter_kv_kernel[(triton.cdiv(n_elements, block),)](
        pool, slots, k, v, slots.shape[0], pool.shape[2], n_elements, WORDS=pool.shape[3], BLOCK=block
    )


def scatter_kv_torch(pool: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Twin of `scatter_kv`."""
    target = slots.long()
    pool[:, 0].index_copy_(1, target, k)
    pool[:, 1].index_copy_(1, target, v)


# Read KV through a row


@triton.jit(do_not_specialize=["row", "length", "width", "n_slots", "n_elements"])
def gather_kv_kernel(
    pool_ptr,  # [layers, 2, n_slots, WORDS]
    row_table_ptr,  # int32 [n_rows + 1, width]
    k_ptr,  # [layers, length, WORDS]
    v_ptr,
    row,
    length,
    width,
    n_slots,
    n_elements,  # layers * length * WORDS
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read the keys and values of all layers at positions ``[0, length)`` of a row.

    Writes: all of ``k`` and ``v``; nothing in the pool.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n_elements
    word = i % WORDS
    pos = (i // WORDS) % length
    layer = i // WORDS // length
    slot = tl.load(row_table_ptr + row.to(tl.int64) * width + pos, mask=mask, other=0).to(tl.int64)
    source = (layer * 2 * n_slots + slot) * WORDS + word
    v_plane = n_slots.to(tl.int64) * WORDS
    tl.store(k_ptr + i, tl.load(pool_ptr + source, mask=mask, other=0), mask=mask)
    tl.store(v_ptr + i, tl.load(pool_ptr + source + v_plane, mask=mask, other=0), mask=mask)


def gather_kv(pool: Tensor, row_table: Tensor, row: int, length: int) -> tuple[Tensor, Tensor]:
    """Read K and V, each [layers, length, words], at the first ``length`` positions of a row."""
    layers, _, n_slots, words = pool.shape
    k, v = torch.empty((2, layers, length, words), dtype=pool.dtype, device=pool.device).unbind()
    n_elements = k.numel()
    block = _block_of(n_elements, pool)
    gather_kv_kernel[(triton.cdiv(n_elements, block),)](
        pool, row_table, k, v, row, length, row_table.shape[1], n_slots, n_elements, WORDS=words, BLOCK=block
    )
    return k, v


def gather_kv_torch(pool: Tensor, row_table: Tensor, row: int, length: int) -> tuple[Tensor, Tensor]:
    """Twin of `gather_kv`."""
    both = pool.index_select(2, row_table[row, :length])
    return both[:, 0], both[:, 1]


TRITON = Kernels(apply_plan, rewrite_row, scatter_kv, gather_kv)
TORCH = Kernels(apply_plan_torch, rewrite_row_torch, scatter_kv_torch, gather_kv_torch)


def kernels_of(lane: str) -> Kernels:
    """Give the way to do device work on a lane."""
    return TORCH if lane == "torch" else TRITON
