"""The smallest target with a snapshot: who holds which row and page. It still shares nothing, so there are no nodes."""

from examples.smallest_target import SmallestTarget
from kvlockstep.invariants import FULL, ROOT, PoolView, RequestView, RowView, Snapshot


class ShownTarget(SmallestTarget):
    name = "shown"

    def snapshot(self) -> Snapshot:
        cache, size = self.cache, self.config.page_size
        rows, requests = [], []
        for live in self.table.live.values():
            row = live.engine.row
            requests.append(RequestView(live.request, live.state, 0, live.committed_len, live.allocated_len, ROOT, row))
            if row is not None:
                numbers = cache.block_table[row].tolist()
                slots = [number * size + offset for number in numbers for offset in range(size)]
                rows.append(RowView(row, live.request, slots[: live.allocated_len]))
        free_pages = list(cache.queue)
        return Snapshot(
            page_size=size,
            n_rows=self.config.n_rows,
            pools={FULL: PoolView(self.config.n_pages, free_pages, None, None, None, None)},
            rows=rows,
            free_rows=list(cache.free_rows),
            row_generations=None,
            requests=requests,
            nodes=[],
        )


make = ShownTarget
