"""Faults in what SGLang does for requests: what it publishes, rows, lengths, and the ways to an end."""

from dataclasses import replace
from typing import Any

from kvlockstep.fuzz.faults.fault import PatchFault
from kvlockstep.fuzz.faults.sglang_patching import Patch, Wrapper, around, instead

REQ = "sglang.srt.managers.schedule_batch:Req"


# publications


def _duplicates_never_freed(original: Wrapper, cache: Any, req: Any, token_ids: Any, **options: Any) -> Any:
    with instead(cache.token_to_kv_pool_allocator, free_segment=lambda free_index, *, start_pos: None):
        return original(cache, req, token_ids, **options)


def _duplicates_freed_from_zero(original: Wrapper, cache: Any, req: Any, token_ids: Any, **options: Any) -> Any:
    allocator = cache.token_to_kv_pool_allocator
    row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    free_segment = allocator.free_segment

    def free_from_zero(free_index: Any, *, start_pos: int) -> None:
        free_segment(row[: start_pos + len(free_index)], start_pos=0)

    with instead(allocator, free_segment=free_from_zero):
        return original(cache, req, token_ids, **options)


def _prompt_ends_one_token_early(original: Wrapper, cache: Any, req: Any, token_ids: Any, **options: Any) -> Any:
    with instead(req, origin_input_ids=req.origin_input_ids[:-1]):
        return original(cache, req, token_ids, **options)


def _pair_with_sampled_token_published(original: Wrapper, cache: Any, req: Any, *, up_to: int) -> Any:
    if cache.is_eagle and up_to < len(req.full_untruncated_fill_ids):
        up_to += 1
    return original(cache, req, up_to=up_to)


def _row_not_rewritten(original: Wrapper, cache: Any, req: Any, *, up_to: int) -> Any:
    with instead(cache.req_to_token_pool, write=lambda indices, values: None):
        return original(cache, req, up_to=up_to)


def _published_without_salt(original: Wrapper, cache: Any, req: Any, *, up_to: int, **others: Any) -> Any:
    with instead(req, cache_salt=None):
        return original(cache, req, up_to=up_to, **others)


def _sampled_token_published(original: Wrapper, cache: Any, req: Any, *, up_to: int, **others: Any) -> Any:
    row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    if up_to % cache.page_size and up_to < min(len(row), len(req.full_untruncated_fill_ids)):
        row[up_to] = row[up_to - 1] + 1
        up_to += 1
    return original(cache, req, up_to=up_to, **others)


def in_prompt_split(patch: Patch, **changes: Any) -> None:
    """Change the parameters of the insertion that only lets a node end at the prompt, the second of a checkpoint."""
    n_inserted = 0

    def checkpoint(original: Wrapper, cache: Any, req: Any, **options: Any) -> Any:
        nonlocal n_inserted
        n_inserted = 0
        return original(cache, req, **options)

    def insert(original: Wrapper, cache: Any, params: Any) -> Any:
        nonlocal n_inserted
        n_inserted += 1
        return original(cache, params if n_inserted == 1 else replace(params, **changes))

    patch.around(".unified_radix_cache:UnifiedRadixCache.checkpoint_into_tree", checkpoint)
    patch.around(".unified_radix_cache:UnifiedRadixCache.insert", insert)


# from match to end


def _match_leaves_nothing(original: Wrapper, req: Any, input_len: int) -> Any:
    return original(req, input_len) + 1


def _second_match_keeps_protected_length(
    original: Wrapper, req: Any, tree_cache: Any = None, cow_mamba: Any = None
) -> Any:
    protected_len = req.kv.cache_protected_len
    original(req, tree_cache, cow_mamba)
    if protected_len:
        req.kv.cache_protected_len = protected_len


def _retract_keeps_inserted_length(original: Wrapper, req: Any) -> Any:
    inserted_len = req.kv.cache_inserted_len
    original(req)
    req.kv.cache_inserted_len = inserted_len


def _abort_of_matched_keeps_lock(patch: Patch) -> None:
    gave_back = False

    def free_kv_row(original: Wrapper, cache: Any, kv: Any, ranges: Any) -> Any:
        nonlocal gave_back
        gave_back = True
        return original(cache, kv, ranges)

    def unlock(original: Wrapper, cache: Any, lock: Any) -> Any:
        nonlocal gave_back
        has_row, gave_back = gave_back, False
        return original(cache, lock) if has_row or patch.operation != "abort" else None

    patch.around(".radix_cache:RadixCache.free_kv_row", free_kv_row)
    patch.around(".radix_cache:RadixCache.unlock", unlock)


def _draft_tail_not_freed(original: Wrapper, req: Any, start_p: int, end_p: int, tree_cache: Any) -> Any:
    return None


# rows


def _row_freed_twice(original: Wrapper, rows: Any, indices: list[int]) -> Any:
    return original(rows, [*indices, *indices])


def _generation_raised_once_a_batch(original: Wrapper, rows: Any, need_size: int) -> Any:
    taken = original(rows, need_size)
    if taken:
        rows.req_generation[taken[1:]] -= 1
    return taken


def _reset_zeroes_generations(original: Wrapper, rows: Any) -> Any:
    original(rows)
    rows.req_generation.zero_()


def _reset_frees_padding_row(original: Wrapper, rows: Any) -> Any:
    original(rows)
    rows.free_slots.insert(0, 0)


def _later_chunk_row_off_by_one(patch: Patch) -> None:
    is_later: list[bool] = []  # of each request of the batch at hand

    def prefix_kv_indices(original: Wrapper, batch: Any, req: Any) -> Any:
        is_later.append(req.kv.holds_kv)
        return original(batch, req)

    def write_cache_indices(original: Wrapper, *arguments: Any) -> None:
        original(*arguments)
        row_indices, starts, ends, rows = (arguments[i] for i in (2, 4, 6, 10))
        batch = zip(row_indices.tolist(), starts.tolist(), ends.tolist(), is_later[-len(starts) :], strict=True)
        for row, start, end, later in batch:
            if later:
                rows.req_to_token[row, start:end] = rows.req_to_token[row, start:end].roll(1)
        is_later.clear()

    patch.around(".allocation:_prefix_kv_indices", prefix_kv_indices)
    patch.around(".allocation:write_cache_indices", write_cache_indices)


REQUEST_FAULTS = (
    PatchFault(
        name="radix-duplicates-never-freed",
        story="A publication that finds its pages published keeps its own copies, which nobody frees any more.",
        kind="exit path that forgets to release",
        target="sglang:radix",
        plant=around(".radix_cache:RadixCache._insert_cache", _duplicates_never_freed),
        laws=("PageLeaked",),
    ),
    PatchFault(
        name="radix-duplicates-freed-from-zero",
        story="A publication frees duplicates from position 0 on, the prefix that the tree owns already among them.",
        kind="watermark drift",
        bug="sgl-project/sglang#24193",
        target="sglang:radix",
        plant=around(".radix_cache:RadixCache._insert_cache", _duplicates_freed_from_zero),
        laws=("PageOwnedTwice",),
    ),
    PatchFault(
        name="radix-prompt-split-one-token-early",
        story="The node of a prompt ends one token early, so a prompt of whole pages is cut one page too soon.",
        kind="page versus token units",
        target="sglang:radix",
        plant=around(".radix_cache:RadixCache._insert_cache", _prompt_ends_one_token_early),
        laws=("TreeDiffers", "RequestsDiffer"),
        needs=("off by one only at kP",),
        hides_behind="prompt_split",
    ),
    PatchFault(
        name="radix-checkpoint-keeps-row",
        story="A checkpoint frees the duplicate pages but leaves their slots in the row.",
        kind="insert and match disagree, row not remapped",
        target="sglang:radix",
        plant=around(".radix_cache:RadixCache.checkpoint", _row_not_rewritten),
        laws=("RowOffCanonicalPath",),
    ),
    PatchFault(
        name="radix-bigram-key-one-too-long",
        story="In bigram mode a publication takes the pair along whose second token was sampled and not yet computed.",
        kind="two things share a key, or one thing has two keys",
        bug="sgl-project/sglang#24371",
        target="sglang:radix",
        plant=around(".radix_cache:RadixCache.checkpoint", _pair_with_sampled_token_published),
        laws=("Divergence",),
        needs=("two features together", "off by one only at kP"),
    ),
    PatchFault(
        name="unified-publication-without-salt",
        story="A publication forgets the salt of its request, so others find a prefix that was meant for one user.",
        kind="two things share a key, or one thing has two keys",
        bug="vllm-project/vllm#44701",
        target="sglang:unified-python",
        plant=around(".unified_radix_cache:UnifiedRadixCache.checkpoint_into_tree", _published_without_salt),
        laws=("Divergence", "PageOwnedTwice"),
    ),
    PatchFault(
        name="unified-sampled-token-published",
        story="A publication takes the sampled token along where its page has room for it, before its KV is computed.",
        kind="published before written",
        bug="huggingface/text-generation-inference#2489",
        target="sglang:unified-python",
        plant=around(".unified_radix_cache:UnifiedRadixCache.checkpoint", _sampled_token_published),
        laws=("RowOffCanonicalPath", "TreeDiffers"),
    ),
    PatchFault(
        name="unified-prompt-split-counts-hit",
        story="Letting a node end at the prompt counts one more hit on the whole prompt.",
        kind="counter drift without real damage",
        target="sglang:unified-python",
        plant=lambda patch: in_prompt_split(patch, inserted_len=0),
        laws=("TreeDiffers",),
        hides_behind="prompt_split",
    ),
    PatchFault(
        name="unified-prompt-split-frees-prompt",
        story="Letting a node end at the prompt frees the slots of the prompt as if they were duplicates.",
        kind="same thing freed twice",
        target="sglang:unified-rust",
        plant=lambda patch: in_prompt_split(patch, prev_prefix_len=0),
        laws=("PageOwnedTwice",),
        hides_behind="prompt_split",
    ),
    PatchFault(
        name="match-takes-last-token-too",
        story="A prompt of whole pages that is published already matches to its last token.",
        kind="page versus token units",
        bug="sgl-project/sglang#22819",
        target="sglang:unified-rust",
        plant=around(f"{REQ}._compute_max_prefix_len", _match_leaves_nothing),
        laws=("MatchTooLong",),
        needs=("off by one only at kP",),
    ),
    PatchFault(
        name="second-match-keeps-protected-length",
        story="A waiting request that is looked at again adopts the longer prefix, but keeps its old protected length.",
        kind="watermark drift",
        bug="sgl-project/sglang#24193",
        target="sglang:unified-python",
        plant=around(f"{REQ}.init_next_round_input", _second_match_keeps_protected_length),
        laws=("ProtectedLenOffPath",),
    ),
    PatchFault(
        name="retract-keeps-inserted-length",
        story="A retracted request remembers how far it had published, and is not counted where it publishes again.",
        kind="watermark drift",
        target="sglang:radix",
        plant=around(f"{REQ}.reset_for_retract", _retract_keeps_inserted_length),
        laws=("TreeDiffers",),
        needs=("two features together",),
    ),
    PatchFault(
        name="abort-of-matched-keeps-lock",
        story="An abort of a request that was matched and has no row yet forgets to unlock its prefix.",
        kind="exit path that forgets to release",
        bug="LMCache/LMCache#2017",
        target="sglang:radix",
        plant=_abort_of_matched_keeps_lock,
        laws=("LockCountWrong",),
    ),
    PatchFault(
        name="draft-tail-not-freed",
        story="The end of a request frees what was accepted, and loses the pages that only rejected drafts used.",
        kind="watermark drift",
        bug="sgl-project/sglang-jax#1147",
        target="sglang:unified-rust",
        plant=around(".common:_release_overallocated_kv_indices", _draft_tail_not_freed),
        laws=("PageLeaked",),
    ),
    PatchFault(
        name="row-freed-twice",
        story="The end of a request puts its row on the free list twice.",
        kind="same thing freed twice",
        target="sglang:radix",
        plant=around(".memory_pool:ReqToTokenPool.free_rows", _row_freed_twice),
        laws=("RowOwnedTwice",),
    ),
    PatchFault(
        name="row-generation-raised-once-a-batch",
        story="Of the rows that a batch takes only the first gets a new generation.",
        kind="reuse while a reader or writer is still in flight",
        bug="sgl-project/sglang#18803",
        target="sglang:unified-rust",
        plant=around(".memory_pool:ReqToTokenPool.alloc_rows", _generation_raised_once_a_batch),
        laws=("GenerationLowered", "GenerationNotRaised"),
    ),
    PatchFault(
        name="reset-zeroes-row-generations",
        story="A reset starts all row generations again at 0, so an old handle fits a new request.",
        kind="reuse while a reader or writer is still in flight",
        bug="NVIDIA/TensorRT-LLM#14423",
        target="sglang:unified-python",
        plant=around(".memory_pool:ReqToTokenPool.clear", _reset_zeroes_generations),
        laws=("GenerationLowered",),
        needs=("only after reset",),
    ),
    PatchFault(
        name="reset-frees-padding-row",
        story="A reset puts row 0, which padded entries of a batch write to, on the free list.",
        kind="stale entry in a side table after recycling",
        bug="sgl-project/sglang#24243",
        target="sglang:radix",
        plant=around(".memory_pool:ReqToTokenPool.clear", _reset_frees_padding_row),
        laws=("PaddingOwned",),
        needs=("only after reset",),
    ),
    PatchFault(
        name="later-chunk-row-off-by-one",
        story="The slots of a later chunk of a prompt are written one position off, the last one in front.",
        kind="watermark drift",
        target="sglang:unified-rust",
        plant=_later_chunk_row_off_by_one,
        laws=("WriteSlotIllegal",),
        needs=("only the second chunk",),
    ),
)
