"""Faults in the Python side of SGLang's Rust tree core: what it hands over, and what it makes of the answers.

The core itself is a binary and stays as it is; it shows no hit counts, priorities or sets of leaves, so a fault in
those has to show in what is evicted.
"""

from copy import copy
from dataclasses import replace
from typing import Any

from kvlockstep.fuzz.faults.fault import PatchFault
from kvlockstep.fuzz.faults.sglang_patching import Patch, Wrapper, around, instead

CORE = ".rust_tree_core.adapter:RustUnifiedTreeCore"


def _core_with_pages_of_one(original: Wrapper, core: Any, params: Any) -> None:
    told = copy(params)
    told.page_size = 1
    original(core, told)
    core._page_size = params.page_size


def _core_told_mru_for_lru(original: Wrapper, core: Any, params: Any) -> None:
    told = copy(params)
    told.eviction_policy = {"lru": "mru"}.get(params.eviction_policy, params.eviction_policy)
    original(core, told)


def _core_told_twice_the_budget(original: Wrapper, core: Any, params: Any) -> None:
    told = copy(params)
    if params.eviction_policy == "tlru":
        told.eviction_policy_config = {"threshold": 2 * params.eviction_policy_config["threshold"]}
    original(core, told)


def _match_without_extra_key(original: Wrapper, core: Any, params: Any) -> Any:
    with instead(params.key, extra_key=None):
        return original(core, params)


def _namespace_joined(patch: Patch) -> None:
    def joined(original: Wrapper, core: Any, params: Any) -> Any:
        key = params.key
        spelled = (key.extra_key or "") + (key.cache_salt or "")
        with instead(key, extra_key=spelled or None, cache_salt=None):
            return original(core, params)

    patch.around(f"{CORE}.match_prefix", joined)
    patch.around(f"{CORE}.begin_insert", joined)


def _insert_told_nothing_inserted(original: Wrapper, core: Any, params: Any) -> Any:
    return original(core, replace(params, inserted_len=0))


def _insert_without_priority(original: Wrapper, core: Any, params: Any) -> Any:
    return original(core, replace(params, priority=0))


def _last_action_lost(original: Wrapper, core: Any, actions: Any) -> Any:
    applied = original(core, actions)
    return applied[:-1] if len(applied) > 1 else applied


def _freed_counted_twice(original: Wrapper, core: Any, binding_result: Any, result: Any) -> Any:
    filled = original(core, binding_result, result)
    for component in filled.tracker:
        filled.tracker[component] *= 2
    return filled


def _row_rewrite_one_page_short(original: Wrapper, cache: Any, req: Any, **options: Any) -> Any:
    rows = cache.req_to_token_pool
    write = rows.write

    def write_all_but_last_page(indices: Any, values: Any) -> None:
        row, positions = indices
        end = max(positions.start, positions.stop - cache.page_size)
        write((row, slice(positions.start, end)), values[: end - positions.start])

    with instead(rows, write=write_all_but_last_page):
        return original(cache, req, **options)


RUST_FAULTS = (
    PatchFault(
        name="rust-core-told-pages-of-one",
        story="The core is built with pages of one token while everything around it has larger ones.",
        kind="page versus token units",
        bug="sgl-project/sglang#32433",
        target="sglang:unified-rust",
        plant=around(f"{CORE}.__init__", _core_with_pages_of_one),
        laws=("PageOwnedTwice",),
    ),
    PatchFault(
        name="rust-core-told-mru-for-lru",
        story="The core is told to evict what was used last where the server asked for what was used longest ago.",
        kind="replicas or ranks diverge",
        target="sglang:unified-rust",
        plant=around(f"{CORE}.__init__", _core_told_mru_for_lru),
        laws=("OutcomeDiffers",),
    ),
    PatchFault(
        name="rust-core-told-twice-the-tail-budget",
        story="Tail-optimized LRU in the core trims twice as many tokens as the server was asked to.",
        kind="page versus token units",
        target="sglang:unified-rust",
        plant=around(f"{CORE}.__init__", _core_told_twice_the_budget),
        laws=("OutcomeDiffers",),
    ),
    PatchFault(
        name="rust-match-without-extra-key",
        story="A match is handed over without its adapter's name, so it finds what the plain model computed.",
        kind="two things share a key, or one thing has two keys",
        target="sglang:unified-rust",
        plant=around(f"{CORE}.match_prefix", _match_without_extra_key),
        laws=("MatchedUncommitted", "Divergence"),
    ),
    PatchFault(
        name="rust-namespace-parts-joined",
        story="The parts of a namespace are joined, so adapter `a` with salt `bc` reads the KV of `ab` with salt `c`.",
        kind="two things share a key, or one thing has two keys",
        bug="vllm-project/vllm#44701",
        target="sglang:unified-rust",
        plant=_namespace_joined,
        laws=("MatchedUncommitted", "Divergence"),
    ),
    PatchFault(
        name="rust-hits-counted-at-each-checkpoint",
        story="The core is not told how far a request has published, so each of its checkpoints counts a hit again.",
        kind="counter drift without real damage",
        target="sglang:unified-rust",
        plant=around(f"{CORE}.begin_insert", _insert_told_nothing_inserted),
        laws=("OutcomeDiffers",),
        needs=("only the second chunk",),
    ),
    PatchFault(
        name="rust-priority-not-handed-over",
        story="The core is not told the priority of a publication, and evicts the important like the rest.",
        kind="component or tier not valid together",
        target="sglang:unified-rust",
        plant=around(f"{CORE}.begin_insert", _insert_without_priority),
        laws=("OutcomeDiffers",),
    ),
    PatchFault(
        name="rust-last-action-lost",
        story="Of several actions that the core asks for at once the last is not carried out.",
        kind="exit path that forgets to release",
        target="sglang:unified-rust",
        plant=around(f"{CORE}._cache_actions_from_tagged", _last_action_lost),
        laws=("PageLeaked",),
    ),
    PatchFault(
        name="rust-eviction-counts-twice",
        story="What an eviction freed is counted twice, so it stops half way.",
        kind="promise of capacity broken, or no progress",
        target="sglang:unified-rust",
        plant=around(f"{CORE}._fill_evict_result", _freed_counted_twice),
        laws=("EvictPromiseBroken", "TargetRaised"),
    ),
    PatchFault(
        name="rust-row-rewrite-one-page-short",
        story="After a publication the row is rewritten to the canonical slots but for the last page.",
        kind="insert and match disagree, row not remapped",
        bug="sgl-project/sglang#35270",
        target="sglang:unified-rust",
        plant=around(".unified_radix_cache:UnifiedRadixCache.checkpoint_into_tree", _row_rewrite_one_page_short),
        laws=("RowOffCanonicalPath",),
    ),
)
