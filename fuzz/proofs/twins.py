"""Each Triton kernel, interpreted, against its twin in torch: every small shape, bit for bit.

    python -m kvlockstep.fuzz.proofs.twins SIZE

runs in a process of its own, because a lane is for the life of a process, and prints a line for each kernel: how many
cases agreed. It ends with 1 at the first that does not. ``SIZE`` bounds lengths, pages, layers and words, as each
function says. A kernel runs as one program and again as several, which is what `FEWEST_PROGRAMS` is for.

Not verified here: that either is right (tests hold both against Python), and what a GPU makes of a kernel.
"""

import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvlockstep.gpu_impl.lane import choose_lane
from kvlockstep.gpu_impl.plan import BatchPlan

choose_lane("interpret")
kernels: Any = import_module("kvlockstep.gpu_impl.kernels")

PROGRAMS = (1, 2)


def _same(what: str, results: Sequence[tuple[Tensor, ...]]) -> None:
    by_kernel, by_twin = results
    for got, expected in zip(by_kernel, by_twin, strict=True):
        if got.dtype != expected.dtype or not torch.equal(got, expected):
            raise AssertionError(f"{what}: the kernel gives {got.tolist()}, its twin {expected.tolist()}")


def _items(size: int, page_size: int) -> Iterator[tuple[int, int, int]]:
    """Every ``(row_start, write_start, end)``: a new row, one that goes on, and one that names all already."""
    for end in range(1, size + 1):
        for write_start in range(end):
            starts = set(range(write_start, end + 1))
            if write_start % page_size == 0:
                starts.add(0)  # of a new row, whose prefix is in whole pages
            yield from ((row_start, write_start, end) for row_start in sorted(starts))


def apply_plan(size: int) -> int:
    """Batches of one request up to ``size`` positions and of two up to ``size - 1``, page sizes up to ``size``."""
    n_cases = 0
    for page_size, n_programs in product(range(1, size + 1), PROGRAMS):
        kernels.FEWEST_PROGRAMS = n_programs
        batches = [(item,) for item in _items(size, page_size)]
        batches += list(product(_items(size - 1, page_size), repeat=2))  # type: ignore[arg-type]
        for batch in batches:
            n_cases += 1
            plan = BatchPlan(page_size)
            for row, (row_start, write_start, end) in enumerate(batch, start=1):
                plan.add(row, row_start, write_start, end, array("i", range(10 * row, 10 * row + size)))
            buffer = torch.tensor(plan.buffer(), dtype=torch.int32)
            results = []
            for side in (kernels.TRITON, kernels.TORCH):
                rows = torch.full((3, size), -7, dtype=torch.int32)
                sizes = plan.n_runs, plan.n_row_positions, plan.n_positions, page_size
                results.append((side.apply_plan(rows, buffer, *sizes), rows))
            _same(f"apply_plan {page_size=} {batch=}", results)
    return n_cases


def rewrite_row(size: int) -> int:
    """Up to ``size`` pages of sizes up to ``size``, from every start, in every row of three."""
    n_cases = 0
    for page_size, n_pages, row, n_programs in product(range(1, size + 1), range(1, size + 1), range(3), PROGRAMS):
        kernels.FEWEST_PROGRAMS = n_programs
        for start in range(size + 1):
            n_cases += 1
            pages = torch.arange(7, 7 - n_pages, -1, dtype=torch.int32)
            results = []
            for side in (kernels.TRITON, kernels.TORCH):
                rows = torch.arange(3 * (size * size + size), dtype=torch.int32).view(3, -1)
                side.rewrite_row(rows, row, start, pages, page_size)
                results.append((rows,))
            _same(f"rewrite_row {page_size=} {n_pages=} {row=} {start=}", results)
    return n_cases


def _pools(size: int) -> Iterator[Tensor]:
    for layers, words, dtype in product(
        range(1, size + 1), range(1, size + 1), (torch.int16, torch.int32, torch.int64)
    ):
        n_slots = 2 * size
        yield torch.arange(layers * 2 * n_slots * words, dtype=dtype).view(layers, 2, n_slots, words)


def scatter_kv(size: int) -> int:
    """Up to ``size`` slots, layers and words of each dtype, the slots in order and not."""
    n_cases = 0
    for pool, n, n_programs in product(_pools(size), range(1, size + 1), PROGRAMS):
        kernels.FEWEST_PROGRAMS = n_programs
        words = pool.shape[3]
        for slots in ([*range(n)], [*range(2 * size - 1, 2 * size - 1 - n, -1)]):
            n_cases += 1
            k = -torch.arange(1, pool.shape[0] * n * words + 1, dtype=pool.dtype).view(-1, n, words)
            results = []
            for side in (kernels.TRITON, kernels.TORCH):
                written = pool.clone()
                side.scatter_kv(written, torch.tensor(slots, dtype=torch.int32), k, 3 * k)
                results.append((written,))
            _same(f"scatter_kv {slots} into {list(pool.shape)} of {pool.dtype}", results)
    return n_cases


def gather_kv(size: int) -> int:
    """Up to ``size`` positions, layers and words of each dtype, from each of two rows."""
    n_cases = 0
    for pool, length, row, n_programs in product(_pools(size), range(1, size + 1), (0, 1), PROGRAMS):
        kernels.FEWEST_PROGRAMS = n_programs
        n_cases += 1
        rows = torch.tensor([[*range(size)], [*range(2 * size - 1, size - 1, -1)]], dtype=torch.int32)
        results = []
        for side in (kernels.TRITON, kernels.TORCH):
            kept = pool.clone()
            results.append((*side.gather_kv(kept, rows, row, length), kept))
        _same(f"gather_kv {length=} of row {row} from {list(pool.shape)} of {pool.dtype}", results)
    return n_cases


TWINS: tuple[Callable[[int], int], ...] = (apply_plan, rewrite_row, scatter_kv, gather_kv)


def main(size: int) -> int:
    """Run all four and print what was done."""
    for twin in TWINS:
        began = time.monotonic()
        try:
            n_cases = twin(size)
        except AssertionError as error:
            print(f"differs\t{error}")  # noqa: T201
            return 1
        print(f"{twin.__name__}\t{n_cases}\t{time.monotonic() - began:.1f}", flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
