"""SGLang behind the contract of a target: each operation is made of what SGLang's scheduler calls.

=============  ==========================================================================================
``peek``       `Req.init_next_round_input`: the look of the scheduler at a waiting request
``match``      the same, then `lock` on the node that was found
``alloc``      `alloc_for_extend`, `alloc_for_decode` or `alloc_for_spec_decode`, a sub-batch each
``commit``     the accepted and the sampled token join the `Req`'s output
``checkpoint`` `checkpoint_kv_cache`
``release``    `release_kv_cache(checkpoint=True)` of a finished `Req`
``abort``      `release_kv_cache(checkpoint=False)`; before it holds a row, `unlock`
``retract``    `release_req`, after which the same `Req` waits again
``evict``      `evict`
``reset``      `reset` of the tree, `clear` of rows and slots
=============  ==========================================================================================

SGLang trusts its scheduler: names, states, rows and the room for a prefill are checked here, before it is called;
whether a decode fits is its own verdict (`check_decode_capacity`). SPEC wants two things that its scheduler does
otherwise: an abort publishes nothing, and a retract may publish. Three of its habits are translated, without loss:

- It counts the positions of a pass as committed when the pass is launched; the snapshot does when it lands.
- It raises a row's generation when the row is handed out; the snapshot's counts how often it was given back.
- It holds one lock on the root; the snapshot's root has none.

What it does differently on purpose is declared in ``allowances``. It has no generation of pages, and throws no pass
away: neither is observed or drawn.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import AllocItem, Namespace
from kvlockstep.fuzz.targets.base import AllocResult, OutOfPages, OutOfRows
from kvlockstep.fuzz.targets.planes import Planes
from kvlockstep.fuzz.targets.requests import Live, RequestTable
from kvlockstep.fuzz.targets.sglang import engine as sgl
from kvlockstep.fuzz.targets.sglang_dump import request_view, snapshot_of
from kvlockstep.fuzz.targets.sglang_trees import view_of
from kvlockstep.invariants import RequestView, Snapshot

POLICIES = ("lru", "mru", "fifo", "filo", "lfu", "slru", "priority")

_COMMON = frozenset(
    {"kv", "sharing", "no_sharing", "namespaces", "private", "priority", "bigram", "victim_order"}
    | {f"policy:{policy}" for policy in POLICIES}
)
_EVICTION = frozenset({"pages_overestimated", "evicts_before_refusal"})
_UNIFIED = _EVICTION | {"split_refreshes_tail", "prompt_split"}

ALLOWANCES: dict[str, frozenset[str]] = {
    "radix": _UNIFIED | {"split_dates_upper_new"},
    "unified-python": _UNIFIED,
    "unified-rust": _UNIFIED,
}
"""Deliberate differences from SPEC, for each tree; see docs/sglang.md."""


@dataclass(slots=True)
class Admission:
    """What the scheduler knows of a request that it admitted."""

    req: Any  # SGLang's Req
    prefill_len: int  # tokens to compute before the first token is decoded
    ahead: int = 0  # positions that SGLang counts as committed and whose pass has not landed


class SglangTarget:
    """Rows, slots, tree and KV of one SGLang cache. ``tree`` is ``radix``, ``unified-python`` or ``unified-rust``.

    Options: ``need_sort`` parks freed pages and sorts them when an allocation runs short; ``free_group`` gives pages
    back in a group at the end of the operation, as SGLang does with the results of a batch; ``no_speculation``
    decodes through `alloc_for_decode`, which knows no drafts.
    """

    conformance: Literal["exact", "legal"] = "legal"
    options = ("free_group", "need_sort", "no_speculation")
    page_sizes = (1, 2, 4, 16, 64)
    lane = sgl.LANE

    def __init__(self, config: CacheConfig, tree: str) -> None:
        for option in config.options:
            if option not in self.options:
                raise ValueError(f"option {option!r}: expected some of {', '.join(self.options)}")
        self.name = f"sglang:{tree}"
        self.allowances = ALLOWANCES[tree]
        self._speculates = "no_speculation" not in config.options
        self.capabilities = _COMMON | ({"drafts"} if self._speculates else set())
        if tree != "radix":
            self.capabilities |= {"policy:tlru"}
        self._config = config
        self._engine = sgl.build(config, tree, need_sort="need_sort" in config.options)
        self._view = view_of(self._engine.cache, tree)
        self._table = RequestTable(config.max_context_len)
        self._waiting: dict[str, Any] = {}  # Reqs that were peeked at or retracted, and wait
        self._freed: list[list[int]] = []  # slots of each segment that the allocator took back
        self._planes = Planes(config)
        self._layers = [SimpleNamespace(layer_id=layer) for layer in range(config.layers)]
        self._watch_frees()

    def _watch_frees(self) -> None:
        """Note each segment that is freed: within an eviction each is one node, in victim order."""
        allocator, free_segment = self._engine.allocator, self._engine.allocator.free_segment

        def noting(free_index: Any, *, start_pos: int) -> None:
            self._freed.append(free_index.tolist())
            free_segment(free_index, start_pos=start_pos)

        allocator.free_segment = noting

    # Operations

    def peek(self, request: str, tokens: Sequence[int], namespace: Namespace, private: bool) -> int:
        self._table.refuse_known(request, "peek")
        if request not in self._waiting:
            self._waiting[request] = self._req(request, tokens, namespace, 0, private)
        req = self._waiting[request]
        req.init_next_round_input(self._engine.cache)
        matched_len: int = req.prefix_len
        return matched_len

    def match(self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int, private: bool) -> int:
        self._table.refuse_known(request, "match")
        req = self._waiting.pop(request, None)
        if req is None:
            req = self._req(request, tokens, namespace, priority, private)
        req.priority = priority
        req.init_next_round_input(self._engine.cache)
        req.lock = self._engine.cache.lock(req.last_node)
        matched_len: int = req.prefix_len
        live = self._table.matched(request, tokens, namespace, priority, private, matched_len)
        live.engine = Admission(req, len(tokens))
        return matched_len

    def _req(self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int, private: bool) -> Any:
        return sgl.Req(
            rid=request,
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=sgl.SamplingParams(max_new_tokens=1 << 30),
            extra_key=namespace[0],
            cache_salt=namespace[1],
            priority=priority,
            positional_embed_overrides=sgl.SOME_EMBEDS if private else None,
        )

    def forget(self, request: str) -> None:
        self._waiting.pop(request, None)

    def alloc(self, batch: Sequence[AllocItem]) -> AllocResult:
        lives = self._table.batch(batch)
        self._refuse_rows(lives)
        self._freed = []
        self._refuse_pages(lives, batch)
        slots = self._take(lives, batch)
        for live, item in zip(lives, batch, strict=True):
            self._table.launched(live, item.n, item.drafts)
        return AllocResult([slots[item.request] for item in batch], self._freed.copy())

    def _take(self, lives: Sequence[Live], batch: Sequence[AllocItem]) -> dict[str, list[int]]:
        """Allocate for each request in the sub-batch that a scheduler would put it in; return the slots by request."""
        n_of = {item.request: item.n for item in batch}
        prefills = [live for live in lives if _is_prefill(live)]
        decodes = [live for live in lives if not _is_prefill(live)]
        slots = dict(zip(_names(prefills), self._extend(prefills, [n_of[n] for n in _names(prefills)]), strict=True))
        take = self._speculate if self._speculates else self._decode
        return slots | dict(zip(_names(decodes), take(decodes, [n_of[n] for n in _names(decodes)]), strict=True))

    def _refuse_rows(self, lives: Sequence[Live]) -> None:
        takers = sum([not live.engine.req.kv.holds_kv for live in lives])
        if takers > (left := self._engine.rows.available_size()):
            raise OutOfRows(f"{takers} rows asked, {left} free")

    def _refuse_pages(self, lives: Sequence[Live], batch: Sequence[AllocItem]) -> None:
        size = self._config.page_size
        need = sum(
            [
                max(0, _pages(live.committed_len + item.n, size) - _pages(live.allocated_len, size))
                for live, item in zip(lives, batch, strict=True)
            ]
        )
        allocator, cache = self._engine.allocator, self._engine.cache
        free, evictable = allocator.available_size(), cache.evictable_size()
        if any(_is_prefill(live) for live in lives):
            fits = need * size <= free + evictable  # the scheduler's budget keeps a prefill within this
        else:
            # what a scheduler asks before each decode; it evicts, and may still say no
            fits = allocator.check_decode_capacity(num_tokens=need * size, tree_cache=cache)
        if not fits:
            raise OutOfPages(f"{need} pages asked, {free} slots free and {evictable} evictable", self._freed)

    def _extend(self, lives: Sequence[Live], lengths: Sequence[int]) -> list[list[int]]:
        """Allocate the next chunk of each prompt, guesses behind the last one included; return the slots of each."""
        if not lives:
            return []
        reqs = [live.engine.req for live in lives]
        for live, req, n in zip(lives, reqs, lengths, strict=True):
            req.extend_end = live.committed_len + n
            live.engine.ahead = n
        ends = torch.tensor([req.extend_end for req in reqs])
        batch = self._batch(reqs, ends)
        batch.prefix_lens = [req.prefix_len for req in reqs]
        batch.extend_lens = list(lengths)
        batch.extend_num_tokens = sum(lengths)
        slots, rows, rows_on_host = sgl.alloc_for_extend(batch)
        held = [req.kv.req_pool_idx for req in reqs]
        assert rows.tolist() == rows_on_host.tolist() == held, f"a pass is told rows {rows.tolist()}, expected {held}"
        return [part.tolist() for part in slots.split(list(lengths))]

    def _decode(self, lives: Sequence[Live], lengths: Sequence[int]) -> list[list[int]]:
        """Allocate one position for each request that decodes; return its slot."""
        if not lives:
            return []
        assert set(lengths) == {1}, "without speculation no guesses are drawn"
        for live in lives:
            live.engine.ahead = 1
        reqs = [live.engine.req for live in lives]
        batch = self._batch(reqs, torch.tensor([live.committed_len for live in lives]))
        batch.req_pool_indices = batch.req_pool_indices_cpu = torch.tensor([req.kv.req_pool_idx for req in reqs])
        batch.model_config = SimpleNamespace(is_encoder_decoder=False)
        return [[slot] for slot in sgl.alloc_for_decode(batch, 1).tolist()]

    def _speculate(self, lives: Sequence[Live], lengths: Sequence[int]) -> list[list[int]]:
        """Allocate one position and the guesses behind it, over what an earlier pass left; return the slots of each."""
        if not lives:
            return []
        reqs = [live.engine.req for live in lives]
        ends = [live.committed_len + n for live, n in zip(lives, lengths, strict=True)]
        allocated = torch.tensor([req.kv.kv_allocated_len for req in reqs], dtype=torch.int32)
        wanted = torch.maximum(allocated, torch.tensor(ends, dtype=torch.int32))
        sgl.alloc_for_spec_decode(
            self._engine.cache,
            self._engine.rows,
            reqs=reqs,
            req_pool_indices=torch.tensor([req.kv.req_pool_idx for req in reqs]),
            cur_kv_lens=allocated,
            cur_kv_lens_cpu=allocated,
            nxt_kv_lens=wanted,
            nxt_kv_lens_cpu=wanted,
            num_needed_tokens=int((wanted - allocated).sum()),
            batch=self._batch(reqs, wanted),
        )
        # it returns none: SGLang's verify pass, too, finds its slots in the row
        rows = self._engine.rows.req_to_token
        return [
            rows[req.kv.req_pool_idx, live.committed_len : end].tolist()
            for req, live, end in zip(reqs, lives, ends, strict=True)
        ]

    def _batch(self, reqs: Sequence[Any], seq_lens: Any) -> Any:
        """Stand in for a `ScheduleBatch`, with what the allocation path reads of one."""
        return SimpleNamespace(
            reqs=list(reqs),
            device="cpu",
            tree_cache=self._engine.cache,
            req_to_token_pool=self._engine.rows,
            token_to_kv_pool_allocator=self._engine.allocator,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            hisparse_coordinator=None,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
        )

    def commit(self, request: str, kept: int, sampled: Sequence[int]) -> None:
        live = self._table.commit(request, kept, sampled)
        admission: Admission = live.engine
        admission.ahead = 0
        if live.abort_pending:
            self._release(admission.req, publish=False)
            self._table.ended(live)
            return
        accepted = max(0, kept - live.known_in_flight)
        admission.req.output_ids.extend([*live.drafts[:accepted], *sampled])
        admission.req.kv.kv_committed_len = live.committed_len + kept
        admission.req.prefix_len = live.committed_len + kept  # where the next chunk begins, published or not
        self._table.landed(live, kept, sampled)

    def checkpoint(self, request: str) -> None:
        self._checkpoint(self._table.named(request, "checkpoint"))

    def _checkpoint(self, live: Live) -> None:
        req = live.engine.req
        req.refresh_fill_ids()
        req.extend_end = live.committed_len
        with self._results():
            sgl.checkpoint_kv_cache(req, self._engine.cache)

    def release(self, request: str) -> None:
        live = self._table.named(request, "release")
        req = live.engine.req
        req.finished_len = len(req.output_ids)
        req.finished_reason = sgl.FINISH_LENGTH(length=req.finished_len)
        self._release(req, publish=True)
        self._table.ended(live)

    def _release(self, req: Any, *, publish: bool) -> None:
        with self._results():
            sgl.release_kv_cache(req, self._engine.cache, checkpoint=publish)

    def abort(self, request: str) -> None:
        live = self._table.abort(request)
        if live is None:
            return
        if live.state == "MATCHED":
            self._engine.cache.unlock(live.engine.req.lock)
        else:
            self._release(live.engine.req, publish=False)
        self._table.ended(live)

    def retract(self, request: str, publish: bool) -> None:
        live = self._table.named(request, "retract")
        req = live.engine.req
        if live.state == "MATCHED":
            self._engine.cache.unlock(req.lock)
            req.reset_for_retract()
        else:
            if publish:
                self._checkpoint(live)
            with self._results():
                sgl.release_req(
                    req=req,
                    remaing_req_count=0,  # of the running requests, for which it would evict ahead
                    req_to_token_pool=self._engine.rows,
                    token_to_kv_pool_allocator=self._engine.allocator,
                    tree_cache=self._engine.cache,
                    hisparse_coordinator=None,
                )
        self._waiting[request] = req
        self._table.ended(live)

    def evict(self, n_slots: int) -> list[list[int]]:
        self._table.evict_check(n_slots)
        self._freed = []
        result = self._engine.cache.evict(sgl.EvictParams(num_tokens=n_slots))
        freed = sum([len(slots) for slots in self._freed])
        assert result.num_tokens_evicted == freed, f"{result.num_tokens_evicted} slots evicted, {freed} freed"
        return self._freed.copy()

    def reset(self) -> None:
        self._table.reset_check()
        self._view.check_idle()
        self._engine.cache.reset()
        self._engine.rows.clear()
        self._engine.allocator.clear()

    @contextmanager
    def _results(self) -> Iterator[None]:
        """Run as SGLang runs what follows a pass: with its speculation in force, pages given back in one group."""
        spec = {"speculative_algorithm": "EAGLE"} if self._speculates else {}
        with sgl.get_spec().override(**spec):
            if "free_group" not in self._config.options:
                yield
                return
            self._engine.allocator.free_group_begin()
            try:
                yield
            finally:
                self._engine.allocator.free_group_end()

    # What can be seen

    def snapshot(self) -> Snapshot:
        views = [self._request(live) for live in self._table.live.values()]
        return snapshot_of(self._engine.cache, self._view, views)

    def glance(self, request: str, start: int) -> tuple[RequestView, list[int]] | None:
        live = self._table.live.get(request)
        if live is None:
            return None
        view = self._request(live)
        if view.row is None:
            return view, []
        slots: list[int] = self._engine.rows.req_to_token[view.row, start : view.allocated_len].tolist()
        return view, slots

    def _request(self, live: Live) -> RequestView:
        admission: Admission = live.engine
        return request_view(live.request, live.state, admission.req, self._view, admission.ahead)

    # KV

    def write_kv(self, slots: Sequence[int], values: Sequence[int]) -> None:
        kv = self._planes.spell(np.array(values, dtype=np.uint32))
        at = torch.tensor(slots, dtype=torch.int64)
        for layer, (k, v) in zip(self._layers, kv.swapaxes(0, 1), strict=True):
            self._engine.kv.set_kv_buffer(layer, at, k, v)

    def read_kv(self, row: int, length: int) -> list[int]:
        return self._read(self._engine.rows.req_to_token[row, :length].to(torch.int64))

    def read_slots(self, slots: Sequence[int]) -> list[int]:
        return self._read(torch.tensor(slots, dtype=torch.int64))

    def _read(self, slots: Any) -> list[int]:
        """Gather as SGLang's attention on a CPU does: each layer's buffers, indexed by the slots of a row."""
        kv = self._engine.kv
        sides = [
            [self._planes.host_bits(buffer_of(layer.layer_id)[slots]) for layer in self._layers]
            for buffer_of in (kv.get_key_buffer, kv.get_value_buffer)
        ]
        return self._planes.read(np.stack([np.stack(side) for side in sides]))


def _is_prefill(live: Live) -> bool:
    """Tell whether a request still computes what it was admitted with; after that it decodes."""
    admission: Admission = live.engine
    return live.committed_len < admission.prefill_len


def _names(lives: Sequence[Live]) -> list[str]:
    return [live.request for live in lives]


def _pages(length: int, page_size: int) -> int:
    return -(-length // page_size)
