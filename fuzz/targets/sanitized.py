"""`gpu_impl` with its kernels under the sanitizer: what each promises to write, and a target that holds it to that.

The promises are read off the arguments of a launch, position by position, as the docstrings of ``kernels.py`` have
them and not their code. A launch is divided into several programs, as on a GPU.

Not promised: that all of the cells are written, and what is written there; laws 2 and 3 and the content see to that.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import numpy as np

from kvlockstep.fuzz.sanitizer import Cells, Promise, Sanitizer
from kvlockstep.fuzz.targets.base import Target

PROGRAMS = 4
"""So many programs a launch has, if it has as many elements. Interpreted, each costs more than a millisecond."""


# What kernels promise to write


def _all_of(tensor: Any) -> Cells:
    return np.arange(tensor.numel(), dtype=np.int64)


def _positions(table: Any, row: int, start: int, end: int) -> list[int]:
    """Return the cells of positions ``[start, end)`` of a row, as far as the row table has them."""
    n_rows, width = table.shape
    if not 0 <= row < n_rows:
        return []
    return [row * width + pos for pos in range(max(0, start), min(end, width))]


def _apply_plan(given: Mapping[str, Any]) -> Mapping[str, Cells]:
    """Promise the positions of the plan's row runs, and the whole write set."""
    n_runs, n_row_positions = given["n_runs"], given["n_row_positions"]
    plan = given["plan_ptr"].tolist()
    cells: list[int] = []
    begin = 0
    for run in range(n_runs):
        end, shift, row = plan[run], plan[n_runs + run], plan[3 * n_runs + run]
        cells += _positions(given["row_table_ptr"], row, begin + shift, min(end, n_row_positions) + shift)
        begin = end
    return {"row_table_ptr": np.array(cells, dtype=np.int64), "write_set_ptr": _all_of(given["write_set_ptr"])}


def _rewrite_row(given: Mapping[str, Any]) -> Mapping[str, Cells]:
    """Promise ``[start, start + n)`` of the row."""
    start = given["start"]
    cells = _positions(given["row_table_ptr"], given["row"], start, start + given["n"])
    return {"row_table_ptr": np.array(cells, dtype=np.int64)}


def _scatter_kv(given: Mapping[str, Any]) -> Mapping[str, Cells]:
    """Promise the slots named, in every layer, K and V."""
    layers, planes, n_slots, words = shape = tuple(given["pool_ptr"].shape)
    slots = [slot for slot in given["slots_ptr"].tolist() if 0 <= slot < n_slots]
    grid = np.ix_(np.arange(layers), np.arange(planes), np.array(slots, dtype=np.int64), np.arange(words))
    return {"pool_ptr": np.ravel_multi_index(grid, shape).astype(np.int64).ravel()}


def _gather_kv(given: Mapping[str, Any]) -> Mapping[str, Cells]:
    """Promise all of ``k`` and ``v``."""
    return {name: _all_of(given[name]) for name in ("k_ptr", "v_ptr")}


PROMISES: Mapping[str, Promise] = {
    "apply_plan_kernel": _apply_plan,
    "rewrite_row_kernel": _rewrite_row,
    "scatter_kv_kernel": _scatter_kv,
    "gather_kv_kernel": _gather_kv,
}
"""By the name of the kernel."""


# A target


class SanitizedTarget:
    """A target of `gpu_impl` on the lane ``interpret``, with or without a fault. Operations raise KernelViolation.

    After: each operation leaves the bits that it leaves without the sanitizer.
    """

    def __init__(self, target: Any, seed: int) -> None:
        self._target = target
        self._kernels = target.kernels
        self._sanitizer = Sanitizer(seed, PROMISES)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        @wraps(value)
        def watched(*args: Any) -> Any:
            with self._sanitizer.watching(), self._divided():
                return value(*args)

        setattr(self, name, watched)
        return watched

    @contextmanager
    def _divided(self) -> Iterator[None]:
        """Let launches have several programs."""
        before = self._kernels.FEWEST_PROGRAMS
        self._kernels.FEWEST_PROGRAMS = PROGRAMS
        try:
            yield
        finally:
            self._kernels.FEWEST_PROGRAMS = before


def sanitized(target: Target, seed: int) -> Target:
    """Put a target under the sanitizer."""
    return cast(Target, SanitizedTarget(target, seed))
