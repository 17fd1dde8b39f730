"""What lives on the device: the row table and the KV pool, and the launches that change them.

The host tells the device what to do and never asks it anything. `DeviceState` knows slots, rows and bits;
it does not know who owns them.
"""

from array import array

import torch
from torch import Tensor

from .config import ITEM_BYTES, CacheConfig
from .plan import BatchPlan
from .refusals import BadArgument

WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16))
"""Integer types that KV is moved as, the widest first."""


class DeviceState:
    """The row table, the KV pool and the lane that works on them."""

    def __init__(self, config: CacheConfig, lane: str) -> None:
        from .kernels import kernels_of  # imports Triton, so it comes after the choice of the lane

        self.device = torch.device("cuda" if lane == "cuda" else "cpu")
        self._kernels = kernels_of(lane)
        self._page_size = config.page_size
        self.row_table = torch.zeros((config.n_rows + 1, config.max_context_len), dtype=torch.int32, device=self.device)
        self.kv_pool = torch.zeros(
            (config.layers, 2, config.n_slots, config.kv_heads, config.head_dim),
            dtype=getattr(torch, config.dtype),
            device=self.device,
        )
        slot_bytes = config.kv_heads * config.head_dim * ITEM_BYTES[config.dtype]
        self._word = next(word for size, word in WORDS if slot_bytes % size == 0)
        self._pool_words = self._as_words(self.kv_pool)

    def apply(self, plan: BatchPlan) -> Tensor:
        """Write the rows of a planned batch and return its write set, int32."""
        return self._kernels.apply_plan(
            self.row_table,
            self.upload(plan.buffer()),
            plan.n_runs,
            plan.n_row_positions,
            plan.n_positions,
            self._page_size,
        )

    def rewrite_row(self, row: int, start: int, pages: "array[int]") -> None:
        """Name the slots of ``pages`` in ``row``, from position ``start`` on."""
        self._kernels.rewrite_row(self.row_table, row, start, self.upload(pages), self._page_size)

    def write_kv(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write ``k`` and ``v`` [layers, n, kv_heads, head_dim] to ``slots`` [n], int32, bit for bit.

        Refuses, before anything is launched: another shape or dtype, at which a kernel would read or write elsewhere.
        """
        layers, _, _, kv_heads, head_dim = self.kv_pool.shape
        shape, dtype = (layers, slots.shape[0], kv_heads, head_dim), self.kv_pool.dtype
        for name, kv in (("k", k), ("v", v)):
            if kv.shape != shape or kv.dtype != dtype:
                raise BadArgument(f"{name}: {list(kv.shape)} of {kv.dtype}, expected {list(shape)} of {dtype}")
        if slots.dtype != torch.int32:
            raise BadArgument(f"slots: {slots.dtype}, expected torch.int32")
        if slots.shape[0]:
            self._kernels.scatter_kv(self._pool_words, slots, self._as_words(k), self._as_words(v))

    def read_kv(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Read K and V [layers, length, kv_heads, head_dim] through a row.

        Refuses: a row or a length that the table does not have.
        """
        n_rows, width = self.row_table.shape
        if not (0 <= row < n_rows and 0 <= length <= width):
            raise BadArgument(f"positions [0, {length}) of row {row}, the table has {n_rows} rows of {width}")
        layers, _, _, kv_heads, head_dim = self.kv_pool.shape
        shape = (layers, length, kv_heads, head_dim)
        if length == 0:
            empty = torch.empty(shape, dtype=self.kv_pool.dtype, device=self.device)
            return empty, empty.clone()
        k, v = self._kernels.gather_kv(self._pool_words, self.row_table, row, length)
        return k.view(self.kv_pool.dtype).view(shape), v.view(self.kv_pool.dtype).view(shape)

    def _as_words(self, kv: Tensor) -> Tensor:
        """See the elements of each slot as integer words: [..., kv_heads, head_dim] as [..., words]."""
        return kv.contiguous().flatten(-2).view(self._word)

    def upload(self, numbers: "array[int]") -> Tensor:
        """Bring a buffer to the device without waiting for it."""
        tensor = torch.frombuffer(numbers, dtype=torch.int32)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
