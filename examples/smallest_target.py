"""The smallest target that runs: requests without sharing, and a snapshot that shows nothing yet."""

from collections.abc import Sequence
from typing import Literal

from examples.hash_blocks import HashBlockCache
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import AllocItem, Namespace
from kvlockstep.fuzz.targets.base import AllocResult, OutOfPages, OutOfRows
from kvlockstep.fuzz.targets.requests import Live, RequestTable
from kvlockstep.invariants import FULL, PoolView, Snapshot


class SmallestTarget:
    name = "smallest"
    conformance: Literal["exact", "legal"] = "legal"
    capabilities = frozenset({"no_sharing", "policy:lru"})

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.table = RequestTable(config.max_context_len)
        self.cache = HashBlockCache(config.n_pages, config.page_size, config.n_rows, config.max_context_len)

    def peek(self, request: str, tokens: Sequence[int], namespace: Namespace, private: bool) -> int:
        self.table.refuse_known(request, "peek")
        return 0

    def match(self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int, private: bool) -> int:
        self.table.refuse_known(request, "match")
        live = self.table.matched(request, tokens, namespace, priority, private, 0)
        live.engine = self.cache.admit(tokens, namespace, shares=False)
        return 0

    def alloc(self, batch: Sequence[AllocItem]) -> AllocResult:
        lives = self.table.batch(batch)
        ends = [live.committed_len + item.n for live, item in zip(lives, batch, strict=True)]
        if sum(live.engine.row is None for live in lives) > len(self.cache.free_rows):
            raise OutOfRows(f"{len(self.cache.free_rows)} rows free")
        if sum(map(self.cache.missing, [live.engine for live in lives], ends)) > len(self.cache.queue):
            raise OutOfPages(f"{len(self.cache.queue)} blocks free")
        done = AllocResult([])
        for live, item, end in zip(lives, batch, ends, strict=True):
            self.cache.grow(live.engine, end)
            done.write_sets.append(self.cache.slots(live.engine, live.committed_len, end))
            self.table.launched(live, item.n, item.drafts)
        return done

    def commit(self, request: str, kept: int, sampled: Sequence[int]) -> None:
        live = self.table.commit(request, kept, sampled)
        if live.abort_pending:
            self._end(live)
        else:
            self.table.landed(live, kept, sampled)

    def checkpoint(self, request: str) -> None:
        self.table.named(request, "checkpoint")

    def release(self, request: str) -> None:
        self._end(self.table.named(request, "release"))

    def abort(self, request: str) -> None:
        if (live := self.table.abort(request)) is not None:
            self._end(live)

    def retract(self, request: str, publish: bool) -> None:
        self._end(self.table.named(request, "retract"))

    def evict(self, n_slots: int) -> list[list[int]]:
        self.table.evict_check(n_slots)
        return []

    def reset(self) -> None:
        self.table.reset_check()

    def snapshot(self) -> Snapshot:
        pool = PoolView(self.config.n_pages, None, None, None, None, None)
        return Snapshot(self.config.page_size, self.config.n_rows, {FULL: pool}, None, None, None, None, None)

    def _end(self, live: Live) -> None:
        self.cache.finish(live.engine)
        self.table.ended(live)


make = SmallestTarget
