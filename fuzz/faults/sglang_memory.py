"""Faults in SGLang's allocators and KV pool: which slots are free, which are handed out, and what is written there."""

from types import SimpleNamespace
from typing import Any

import torch

from kvlockstep.fuzz.faults.fault import PatchFault
from kvlockstep.fuzz.faults.sglang_patching import Wrapper, around

PAGED = ".allocator.paged:PagedTokenToKVPoolAllocator"


# what is given back


def _segment_from_second_slot(original: Wrapper, allocator: Any, free_index: Any, *, start_pos: int) -> Any:
    return original(allocator, free_index[1:], start_pos=start_pos)


def _group_loses_last_segment(original: Wrapper, allocator: Any) -> Any:
    del allocator.free_page_ids_group[-1:]
    return original(allocator)


def _group_keeps_view(original: Wrapper, free_index: Any) -> Any:
    return free_index


def _sort_keeps_staged(original: Wrapper, allocator: Any) -> Any:
    staged, n_staged = allocator.staged_pages, allocator.num_staged_pages
    original(allocator)
    allocator.staged_pages, allocator.num_staged_pages = staged, n_staged


# what is handed out


def _decode_ignores_page_boundary(
    original: Wrapper, allocator: Any, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any
) -> Any:
    return last_loc.to(torch.int64) + 1


def _extend_refuses_exact_fit(
    original: Wrapper, allocator: Any, prefix_lens: Any, prefix_lens_cpu: Any, *others: Any, **named: Any
) -> Any:
    _, seq_lens_cpu, *_ = others
    size = allocator.page_size
    need = int(((seq_lens_cpu + size - 1) // size - (prefix_lens_cpu + size - 1) // size).sum())
    if need and need * size == allocator.available_size():
        return None
    return original(allocator, prefix_lens, prefix_lens_cpu, *others, **named)


def _demand_overestimated_twice(
    original: Wrapper, allocator: Any, prefix_lens_cpu: Any, seq_lens_cpu: Any, **options: Any
) -> Any:
    demand = original(allocator, prefix_lens_cpu, seq_lens_cpu, **options)
    return demand + len(seq_lens_cpu) * allocator.page_size


def _later_write_slots_one_early(original: Wrapper, out_cache_loc: Any, *others: Any) -> Any:
    result = original(out_cache_loc, *others)
    rows, extend_lens = others[1], others[7]
    if len(rows) > 1:
        begin = int(extend_lens[0])
        out_cache_loc[begin:] = out_cache_loc[begin - 1 : -1].clone()
    return result


# what is written


def _all_layers_in_first(original: Wrapper, pool: Any, layer: Any, loc: Any, k: Any, v: Any) -> Any:
    return original(pool, SimpleNamespace(layer_id=0), loc, k, v)


def _padding_hits_last_slot(original: Wrapper, pool: Any, layer: Any, loc: Any, k: Any, v: Any) -> Any:
    if len(loc) % 2:
        loc, k, v = torch.cat((loc, loc.new_tensor([-1]))), torch.cat((k, k[-1:])), torch.cat((v, v[-1:]))
    return original(pool, layer, loc, k, v)


MEMORY_FAULTS = (
    PatchFault(
        name="segment-freed-from-second-slot",
        story="A segment is freed from its second slot on, so a last page that holds a single token is lost.",
        kind="page versus token units",
        bug="sgl-project/sglang#38941",
        target="sglang:unified-python",
        plant=around(f"{PAGED}.free_segment", _segment_from_second_slot),
        laws=("PageLeaked",),
    ),
    PatchFault(
        name="free-group-loses-last-segment",
        story="A group of frees is given back without its last segment.",
        kind="exit path that forgets to release",
        target="sglang:unified-python",
        plant=around(f"{PAGED}.free_group_end", _group_loses_last_segment),
        laws=("PageLeaked",),
    ),
    PatchFault(
        name="free-group-keeps-view-of-row",
        story="A group of frees keeps a view of the row, which is rewritten before the group ends.",
        kind="same thing freed twice",
        bug="sgl-project/sglang#34644",
        target="sglang:radix",
        plant=around(".allocator.base:BaseTokenToKVPoolAllocator._copy_for_free_group", _group_keeps_view),
        laws=("PageOwnedTwice", "PageLeaked"),
    ),
    PatchFault(
        name="sorted-pages-stay-staged",
        story="Pages that waited to be sorted are merged into the free list and go on waiting.",
        kind="same thing freed twice",
        bug="sgl-project/sglang#25590",
        target="sglang:unified-rust",
        plant=around(f"{PAGED}.merge_and_sort_free", _sort_keeps_staged),
        laws=("PageOwnedTwice",),
    ),
    PatchFault(
        name="decode-ignores-page-boundary",
        story="Decode takes the slot behind the last one also where a page ends.",
        kind="page versus token units",
        bug="pegainfer-project/pegainfer#350",
        target="sglang:radix",
        plant=around(f"{PAGED}.alloc_decode", _decode_ignores_page_boundary),
        laws=("PageOwnedTwice", "PageOutOfRange"),
        needs=("off by one only at kP",),
    ),
    PatchFault(
        name="extend-refuses-exact-fit",
        story="A prefill that would take the very last page fails.",
        kind="promise of capacity broken, or no progress",
        bug="sgl-project/sglang#28530",
        target="sglang:unified-rust",
        plant=around(f"{PAGED}.alloc_extend", _extend_refuses_exact_fit),
        laws=("TargetRaised",),
        needs=("only when the pool is exactly full",),
    ),
    PatchFault(
        name="extend-overestimates-twice",
        story="A prefill evicts as if each request needed two pages more than it may, not one.",
        kind="promise of capacity broken, or no progress",
        target="sglang:radix",
        plant=around(f"{PAGED}.get_extend_allocation_demand", _demand_overestimated_twice),
        laws=("OutcomeDiffers",),
        hides_behind="pages_overestimated",
    ),
    PatchFault(
        name="later-write-slots-one-early",
        story="Behind the first request of a batch each pass writes where the position before belongs; rows are right.",
        kind="reuse while a reader or writer is still in flight",
        bug="wtdcode/vllm-backport#63",
        target="sglang:unified-rust",
        plant=around(".allocation:write_cache_indices", _later_write_slots_one_early),
        laws=("WriteSlotRepeated",),
    ),
    PatchFault(
        name="kv-of-all-layers-in-first",
        story="The keys and values of every layer are written to the first one.",
        kind="component or tier not valid together",
        bug="sgl-project/sglang#26866",
        target="sglang:unified-python",
        plant=around(".memory_pool:MHATokenToKVPool.set_kv_buffer", _all_layers_in_first),
        laws=("ContentWrong",),
    ),
    PatchFault(
        name="kv-padding-hits-last-slot",
        story="A batch padded to an even length writes its padding to slot -1, which is the last slot of the pool.",
        kind="stale entry in a side table after recycling",
        bug="vllm-project/vllm#43810",
        target="sglang:radix",
        plant=around(".memory_pool:MHATokenToKVPool.set_kv_buffer", _padding_hits_last_slot),
        laws=("SlotChangedOutsideWriteSet", "ContentWrong"),
    ),
)
