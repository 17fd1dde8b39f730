"""The cache of hash-chained blocks under test. Grown from smallest_target.py; docs/adopt.md goes through it.

A request's lock is here the reference that its sequence holds on each of its blocks. What the snapshot shows is
walked: the queue, the dict of cached blocks, the block table.

Not shown, because the cache has no such thing: generations, stamps and hits, links from a block to the next ones,
a set of evictable blocks.
"""

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from examples.hash_blocks import Block, HashBlockCache
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import AllocItem, Namespace
from kvlockstep.fuzz.targets.base import AllocResult, OutOfPages, OutOfRows
from kvlockstep.fuzz.targets.requests import Live, RequestTable
from kvlockstep.invariants import FULL, ROOT, NodeView, PoolView, RequestView, RowView, Snapshot

NOT_CACHED = -2
"""Stands for a parent that the cache no longer finds: no node has this number, so law 7 will say so."""


class HashBlockTarget:
    name = "hash_blocks"
    conformance: Literal["exact", "legal"] = "legal"
    capabilities = frozenset(
        {"sharing", "no_sharing", "namespaces", "content_ids", "private", "drafts", "discards", "kv", "policy:lru"}
    )
    allowances = frozenset({"page_nodes"})
    cache_type = HashBlockCache

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.table = RequestTable(config.max_context_len)
        shape = (config.n_pages, config.page_size, config.n_rows, config.max_context_len, config.layers)
        self.cache = self.cache_type(*shape, sharing=config.prefix_sharing)
        n_planes = 2 * config.layers
        self.salts = (np.arange(1, n_planes + 1, dtype=np.uint32) * 0x9E3779B1).reshape(config.layers, 2, 1)

    # Requests

    def peek(self, request: str, tokens: Sequence[int], namespace: Namespace, private: bool) -> int:
        self.table.refuse_known(request, "peek")
        if private or not self.config.prefix_sharing:
            return 0
        return len(self.cache.lookup(tokens, namespace)) * self.config.page_size

    def match(self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int, private: bool) -> int:
        self.table.refuse_known(request, "match")
        sequence = self.cache.admit(tokens, namespace, shares=not private)
        matched_len = len(sequence.blocks) * self.config.page_size
        self.table.matched(request, tokens, namespace, priority, private, matched_len).engine = sequence
        return matched_len

    def alloc(self, batch: Sequence[AllocItem]) -> AllocResult:
        lives = self.table.batch(batch)
        ends = [live.committed_len + item.n for live, item in zip(lives, batch, strict=True)]
        if sum(live.engine.row is None for live in lives) > len(self.cache.free_rows):
            raise OutOfRows(f"{len(self.cache.free_rows)} rows free")
        if sum(map(self.cache.missing, [live.engine for live in lives], ends)) > len(self.cache.queue):
            raise OutOfPages(f"{len(self.cache.queue)} blocks free or reusable")
        done = AllocResult([])
        for live, item, end in zip(lives, batch, ends, strict=True):
            done.evicted += map(self._slots_of, self.cache.grow(live.engine, end))
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
        self._publish(self.table.named(request, "checkpoint"))

    def release(self, request: str) -> None:
        live = self.table.named(request, "release")
        self._publish(live)
        self._end(live)

    def abort(self, request: str) -> None:
        if (live := self.table.abort(request)) is not None:
            self._end(live)

    def retract(self, request: str, publish: bool) -> None:
        live = self.table.named(request, "retract")
        if publish and live.state == "RUNNING":
            self._publish(live)
        self._end(live)

    def evict(self, n_slots: int) -> list[list[int]]:
        self.table.evict_check(n_slots)
        return [self._slots_of(number) for number in self.cache.evict(-(-n_slots // self.config.page_size))]

    def reset(self) -> None:
        self.table.reset_check()
        self.cache.clear()

    def _publish(self, live: Live) -> None:
        self.cache.publish(live.engine, live.tokens[: live.committed_len])

    def _end(self, live: Live) -> None:
        self.cache.finish(live.engine)
        self.table.ended(live)

    def _slots_of(self, number: int) -> list[int]:
        size = self.config.page_size
        return list(range(number * size, (number + 1) * size))

    # KV

    def write_kv(self, slots: Sequence[int], values: Sequence[int]) -> None:
        self.cache.write(slots, np.asarray(values, np.uint32) ^ self.salts)

    def read_kv(self, row: int, length: int) -> list[int]:
        return self._values(self.cache.gather(row, length))

    def read_slots(self, slots: Sequence[int]) -> list[int]:
        return self._values(self.cache.kv.reshape(*self.cache.kv.shape[:2], -1)[:, :, slots])

    def _values(self, planes: NDArray[np.uint32]) -> list[int]:
        """Fingerprints of K and V, [layers, 2, n]: negative where the planes disagree, as in a slot never written."""
        plain = (planes ^ self.salts).reshape(-1, planes.shape[2])
        values: list[int] = plain[0].tolist()
        for i in np.flatnonzero((plain != plain[0]).any(axis=0)):
            values[i] = -1 - zlib.crc32(plain[:, i].tobytes())
        return values

    # What can be seen

    def snapshot(self) -> Snapshot:
        cache, size = self.cache, self.config.page_size
        pool = PoolView(
            n_pages=self.config.n_pages,
            free_pages=[block.number for block in cache.queue.values() if block.hash is None],
            page_generations=None,
            available=(len(cache.queue) - cache.n_reusable) * size,
            evictable=cache.n_reusable * size,
            protected=(len(cache.cached) - cache.n_reusable) * size,
        )
        rows, requests = [], []
        for live in self.table.live.values():
            sequence = live.engine
            anchor = sequence.blocks[sequence.n_cached - 1].number if sequence.n_cached else ROOT
            lengths = (sequence.n_cached * size, live.committed_len, live.allocated_len)
            requests.append(RequestView(live.request, live.state, *lengths, anchor, sequence.row))
            if sequence.row is not None:
                numbers = cache.block_table[sequence.row].tolist()
                slots = [slot for number in numbers for slot in self._slots_of(number)]
                rows.append(RowView(sequence.row, live.request, slots[: live.allocated_len]))
        return Snapshot(
            page_size=size,
            n_rows=self.config.n_rows,
            pools={FULL: pool},
            rows=rows,
            free_rows=list(cache.free_rows),
            row_generations=None,
            requests=requests,
            nodes=[self._node(block) for block in cache.cached.values()],
            max_context_len=self.config.max_context_len,
        )

    def _node(self, block: Block) -> NodeView:
        """Show a cached block as a node. Its reference count stands as its lock count, to be recounted."""
        content: Any = block.content
        parent = ROOT
        if content.parent is not None:
            above = self.cache.cached.get(content.parent)
            parent = NOT_CACHED if above is None else above.number
        return NodeView(
            node=block.number,
            parent=parent,
            namespace=content.namespace,
            units=content.tokens,
            slots={FULL: self._slots_of(block.number)},
            lock_ref=block.ref_count,
            stamp=None,
            created=None,
            hits=None,
            priority=None,
        )


make = HashBlockTarget
