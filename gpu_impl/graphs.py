"""Batches of fixed shape, whose launch is captured in a CUDA graph once and replayed from then on.

A decode step launches little work often, so what a launch costs on the host counts. A graph replays a launch as
it was captured: same shape, same addresses. So a plan is padded to the next of a few sizes (*buckets*) and copied
to where the graph reads it. `GraphedDevice` is what a cache has in place of a `DeviceState`::

    cache = KvCache(config, device=partial(GraphedDevice, buckets=(8, 64, 256)))

Every bucket is captured then, which waits for the device; no operation afterwards does. A plan that fits no bucket
(a prefill) is launched as it is.

**Padding** touches cell (row 0, position 0) and names slot 0, nothing else; both are nobody's. The padded write set
of a bucket lies in `GraphedDevice.write_set_of`, always at the same address, its tail all slot 0: a forward pass
that the engine captured in a graph of its own scatters through it.

On lanes without a GPU nothing is captured and the same launches run on the same padded tensors, so that all but
the capture is tested there. Not for plans beyond a few thousand positions: a padding position is a run of its own.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .config import CacheConfig
from .device import DeviceState
from .plan import BatchPlan


def n_padded_numbers(n: int) -> int:
    """Count the integers of a plan padded to ``n``: 2 * n runs of four, and their pages.

    A request writes at least one position, so pages are at most row positions + 2 * write positions.
    """
    return 4 * 2 * n + 3 * n + 1


def padded(plan: BatchPlan, n: int) -> "array[int]":
    """Lay a plan out with exactly ``n`` row positions, then ``n`` write positions, in ``2 * n`` runs.

    Before: it has no more of either.

    With pages of 2, one position to write on page 5, padded to two. The runs are the real one and a padding one
    of the row, then the same of the write set; pages are 5 and, for padding, 0:

    >>> plan = BatchPlan(page_size=2)
    >>> plan.add(row=1, row_start=2, write_start=2, end=3, pages=array("i", [3, 5]))
    >>> padded(plan, 2).tolist()
    [1, 2, 3, 4, 2, -1, 0, -3, -1, 1, -1, 1, 1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0]
    """
    buffer, n_runs, n_rows = plan.buffer(), plan.n_runs, plan.n_row_positions
    end, shift, page_shift, row = (buffer[line * n_runs : (line + 1) * n_runs] for line in range(4))
    pages = buffer[4 * n_runs :]
    n_row_runs = bisect_right(end, n_rows)
    lines = [array("i") for _ in range(4)]

    def add(*fields: int) -> None:
        for line, number in zip(lines, fields, strict=True):
            line.append(number)

    def pad(start: int, stop: int) -> None:
        for number in range(start, stop):
            add(number + 1, -number, len(pages), 0)  # position 0 of row 0, on the page after the last one: page 0

    for i in range(n_row_runs):
        add(end[i], shift[i], page_shift[i], row[i])
    pad(n_rows, n)
    for i in range(n_row_runs, n_runs):
        add(end[i] + n - n_rows, shift[i] - n + n_rows, page_shift[i], 0)
    pad(plan.n_positions + n - n_rows, 2 * n)
    while len(lines[0]) < 2 * n:
        add(2 * n, 0, 0, 0)  # no position is left for these
    laid_out = lines[0] + lines[1] + lines[2] + lines[3] + pages
    laid_out.frombytes(bytes(4 * (n_padded_numbers(n) - len(laid_out))))
    return laid_out


class GraphedDevice(DeviceState):
    """A `DeviceState` that applies plans by replaying launches of fixed shape.

    Refuses (ValueError): a bucket below 1.
    """

    def __init__(self, config: CacheConfig, lane: str, buckets: Sequence[int]) -> None:
        super().__init__(config, lane)
        self.buckets = sorted(set(buckets))
        if self.buckets and self.buckets[0] < 1:
            raise ValueError(f"buckets: expected at least 1, got {self.buckets[0]}")
        self._plan_of: dict[int, Tensor] = {}
        self._replay_of: dict[int, Callable[[], object]] = {}
        self._write_set_of: dict[int, Tensor] = {}
        for n in self.buckets:
            self._plan_of[n] = self.upload(padded(BatchPlan(config.page_size), n))
            self._replay_of[n], self._write_set_of[n] = self._captured(n)

    def bucket_of(self, plan: BatchPlan) -> int | None:
        """Give the least bucket that a plan fits in, or None."""
        needed = max(plan.n_row_positions, plan.n_positions - plan.n_row_positions)
        return next((n for n in self.buckets if needed <= n), None)

    def write_set_of(self, bucket: int) -> Tensor:
        """Give the write set of the plan that was applied last in a bucket, padded with slot 0; int32 [bucket]."""
        return self._write_set_of[bucket]

    def apply(self, plan: BatchPlan) -> Tensor:
        """Write the rows of a planned batch and return its write set, int32; a copy, so later plans leave it alone."""
        n = self.bucket_of(plan)
        if n is None:
            return super().apply(plan)
        self._plan_of[n].copy_(self.upload(padded(plan, n)), non_blocking=True)
        self._replay_of[n]()
        return self._write_set_of[n][: plan.n_positions - plan.n_row_positions].clone()

    def _captured(self, n: int) -> tuple[Callable[[], object], Tensor]:
        """Make what replays the launch of a bucket, and the write set that it fills.

        Before: the plan of the bucket is all padding, for it is applied once or twice here.
        """

        def launch() -> Tensor:
            return self._kernels.apply_plan(self.row_table, self._plan_of[n], 2 * n, n, 2 * n, self._page_size)

        if self.device.type == "cpu":
            write_set = launch()
            return lambda: write_set.copy_(launch()), write_set
        # Triton compiles a kernel at its first launch, which must not fall into the capture.
        beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(beside):
            launch()
        torch.cuda.current_stream(self.device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            write_set = launch()
        return graph.replay, write_set
