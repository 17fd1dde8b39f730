"""Faults in SGLang's two prefix trees in Python: locks, splits, keys, eviction and age."""

from typing import Any

from kvlockstep.fuzz.faults.fault import PatchFault
from kvlockstep.fuzz.faults.sglang_patching import Wrapper, around, instead

POLICY = "sglang.srt.mem_cache.evict_policy"


# RadixCache


def _unlock_stops_one_node_early(original: Wrapper, cache: Any, node: Any, params: Any = None) -> Any:
    top = node
    while top is not cache.root_node and top.parent is not cache.root_node:
        top = top.parent
    with instead(cache, root_node=top):
        return original(cache, node, params)


def _split_loses_lock_count(original: Wrapper, cache: Any, key: Any, child: Any, split_len: int) -> Any:
    upper = original(cache, key, child, split_len)
    upper.lock_ref = 0
    return upper


def _split_leaves_lower_part_listed(original: Wrapper, cache: Any, key: Any, child: Any, split_len: int) -> Any:
    upper = original(cache, key, child, split_len)
    upper.parent.children[key.child_key(cache.page_size)] = child
    return upper


def _child_key_without_namespace(original: Wrapper, key: Any, offset: int, page_size: int = 1) -> Any:
    with instead(key, extra_key=None, cache_salt=None):
        return original(key, offset, page_size)


def _match_counts_hit(original: Wrapper, cache: Any, node: Any, key: Any) -> Any:
    value, end = original(cache, node, key)
    if end is not cache.root_node:
        end.hit_count += 1
    return value, end


def _match_dates_end_new(original: Wrapper, cache: Any, node: Any, key: Any) -> Any:
    value, end = original(cache, node, key)
    end.creation_time = end.last_access_time
    return value, end


def _locked_leaves(cache: Any) -> set[Any]:
    nodes = [cache.root_node]
    for node in nodes:  # grows while it is read
        nodes.extend(node.children.values())
    return {node for node in nodes[1:] if node.lock_ref and not node.children}


def _evicts_locked_leaf(original: Wrapper, cache: Any, params: Any) -> Any:
    locked = _locked_leaves(cache)
    cache.evictable_leaves |= locked
    result = original(cache, params)
    cache.evictable_leaves -= locked
    return result


def _refusal_evicts_locked_leaf(
    original: Wrapper, allocator: Any, *, num_tokens: int, tree_cache: Any, **others: Any
) -> Any:
    fits = num_tokens <= allocator.available_size() + tree_cache.evictable_size()
    locked = set() if fits else _locked_leaves(tree_cache)
    tree_cache.evictable_leaves |= locked
    result = original(allocator, num_tokens=num_tokens, tree_cache=tree_cache, **others)
    tree_cache.evictable_leaves -= locked
    return result


def _ranked_by_last_use(original: Wrapper, strategy: Any, node: Any) -> Any:
    return node.last_access_time


def _ranked_the_other_way(original: Wrapper, strategy: Any, node: Any) -> Any:
    return -original(strategy, node)


def _ranked_by_highest_priority(original: Wrapper, strategy: Any, node: Any) -> Any:
    priority, last_use = original(strategy, node)
    return -priority, last_use


# UnifiedRadixCache over its Python core


def _lock_only_last_node(original: Wrapper, component: Any, node: Any, result: Any, lock_host: bool = False) -> Any:
    core = component.tree_core
    if node is core.root_node:
        return original(component, node, result, lock_host)
    with instead(core, root_node=node.parent):
        return original(component, node, result, lock_host)


def _unlock_keeps_protected_size(
    original: Wrapper, component: Any, node: Any, params: Any, lock_host: bool = False
) -> Any:
    sizes = component.tree_core.component_protected_size_
    protected = sizes[component.component_type]
    original(component, node, params, lock_host)
    sizes[component.component_type] = protected


def _split_dates_tail_zero(original: Wrapper, core: Any, key: Any, child: Any, split_len: int) -> Any:
    split = original(core, key, child, split_len)
    child.last_access_time = 0.0
    return split


def _inner_node_offered(original: Wrapper, core: Any, node: Any) -> Any:
    with instead(node, children={}):
        return original(core, node)


def _used_last_among_equals(original: Wrapper, strategy: Any, node: Any) -> Any:
    hits, last_use = original(strategy, node)
    return hits, -last_use


def _protected_one_hit_too_late(original: Wrapper, strategy: Any, node: Any) -> Any:
    with instead(strategy, protected_threshold=strategy.protected_threshold + 1):
        return original(strategy, node)


def _history_of_what_is_left(original: Wrapper, strategy: Any, node: Any) -> Any:
    with instead(node, _tlru_history_len=node._tlru_cached_prefix_len):
        return original(strategy, node)


def _allocation_evicts_one_more(original: Wrapper, cache: Any, params: Any, **others: Any) -> Any:
    params.num_tokens += cache.page_size
    return original(cache, params, **others)


TREE_FAULTS = (
    PatchFault(
        name="radix-unlock-stops-one-node-early",
        story="Unlocking a path leaves out the node below the root, so what every prompt begins with is never evicted.",
        kind="lock or pin not balanced",
        target="sglang:radix",
        plant=around(".radix_cache:RadixCache.dec_lock_ref", _unlock_stops_one_node_early),
        laws=("LockCountWrong",),
    ),
    PatchFault(
        name="radix-split-loses-lock-count",
        story="Splitting a locked edge leaves the upper part unlocked.",
        kind="split or re-key loses something",
        bug="sgl-project/sglang#16946",
        target="sglang:radix",
        plant=around(".radix_cache:RadixCache._split_node", _split_loses_lock_count),
        laws=("LockCountWrong",),
        needs=("only after a split of a locked edge",),
    ),
    PatchFault(
        name="radix-split-leaves-lower-part-listed",
        story="After a split the parent still lists the lower part of the edge, so nothing leads to the upper one.",
        kind="split or re-key loses something",
        bug="NVIDIA/TensorRT-LLM#13571",
        target="sglang:radix",
        plant=around(".radix_cache:RadixCache._split_node", _split_leaves_lower_part_listed),
        laws=("TargetRaised", "PageLeaked"),
    ),
    PatchFault(
        name="radix-match-dates-its-end-new",
        story="A match dates the node that it ends at new also where it splits nothing, so what came first goes late.",
        kind="replicas or ranks diverge",
        bug="sgl-project/sglang#28429",
        target="sglang:radix",
        plant=around(".radix_cache:RadixCache._match_prefix_helper", _match_dates_end_new),
        laws=("OutcomeDiffers",),
        hides_behind="split_dates_upper_new",
    ),
    PatchFault(
        name="radix-child-key-without-namespace",
        story="Children are filed under their tokens alone, so the prompt of one adapter runs into that of another.",
        kind="two things share a key, or one thing has two keys",
        target="sglang:radix",
        plant=around(".radix_cache:RadixKey.child_key_at", _child_key_without_namespace),
        laws=("TargetRaised",),
    ),
    PatchFault(
        name="radix-match-counts-hit",
        story="A match counts a hit on the node that it ends at, although only publications count.",
        kind="counter drift without real damage",
        target="sglang:radix",
        plant=around(".radix_cache:RadixCache._match_prefix_helper", _match_counts_hit),
        laws=("TreeDiffers",),
    ),
    PatchFault(
        name="radix-evicts-locked-leaf",
        story="An eviction looks at all leaves, locked or not, so a prefix goes that a request is about to read.",
        kind="window between match and use",
        bug="vllm-project/vllm#37076",
        target="sglang:radix",
        plant=around(".radix_cache:RadixCache.evict", _evicts_locked_leaf),
        laws=("AnchorOffTree",),
    ),
    PatchFault(
        name="radix-refusal-evicts-locked-leaf",
        story="A decode batch that will not fit evicts what it can before it is refused, locked leaves too.",
        kind="promise of capacity broken, or no progress",
        bug="vllm-project/vllm#45357",
        target="sglang:radix",
        plant=around(".allocator.base:BaseTokenToKVPoolAllocator.check_decode_capacity", _refusal_evicts_locked_leaf),
        laws=("AnchorOffTree", "TargetRaised"),
        hides_behind="evicts_before_refusal",
    ),
    PatchFault(
        name="radix-fifo-counts-from-last-use",
        story="First-in first-out evicts what was used longest ago, not what came first.",
        kind="replicas or ranks diverge",
        target="sglang:radix",
        plant=around(f"{POLICY}:FIFOStrategy.get_priority", _ranked_by_last_use),
        laws=("OutcomeDiffers",),
    ),
    PatchFault(
        name="radix-filo-takes-first-in",
        story="First-in last-out evicts what came first.",
        kind="replicas or ranks diverge",
        target="sglang:radix",
        plant=around(f"{POLICY}:FILOStrategy.get_priority", _ranked_the_other_way),
        laws=("OutcomeDiffers",),
    ),
    PatchFault(
        name="radix-priority-highest-first",
        story="Eviction by priority takes the most important prefix first.",
        kind="replicas or ranks diverge",
        target="sglang:radix",
        plant=around(f"{POLICY}:PriorityStrategy.get_priority", _ranked_by_highest_priority),
        laws=("OutcomeDiffers",),
    ),
    PatchFault(
        name="python-core-locks-only-last-node",
        story="Locking a path counts only its last node, so the nodes above look unlocked.",
        kind="lock or pin not balanced",
        bug="sgl-project/mini-sglang#52",
        target="sglang:unified-python",
        plant=around(".unified_cache.components.full:FullComponent.acquire_component_lock", _lock_only_last_node),
        laws=("LockCountWrong", "TargetRaised"),
    ),
    PatchFault(
        name="python-core-unlock-keeps-protected-size",
        story="Unlocking adds to what can be evicted and takes nothing from what is protected.",
        kind="counter drift without real damage",
        bug="UbiquitousLearning/mllm#656",
        target="sglang:unified-python",
        plant=around(
            ".unified_cache.components.full:FullComponent.release_component_lock", _unlock_keeps_protected_size
        ),
        laws=("SizesDoNotRecount",),
    ),
    PatchFault(
        name="python-core-offers-inner-node",
        story="A node counts as evictable as soon as it is unlocked, also while it has children.",
        kind="window between match and use",
        bug="NVIDIA/Megatron-LM#5822",
        target="sglang:unified-python",
        plant=around(".unified_cache.unified_tree_core:UnifiedTreeCore._is_device_leaf", _inner_node_offered),
        laws=("EvictableSetWrong",),
    ),
    PatchFault(
        name="python-core-split-dates-tail-zero",
        story="A split starts the unmatched half at time 0 instead of now, so what was next to a hit goes first.",
        kind="split or re-key loses something",
        target="sglang:unified-python",
        plant=around(".unified_cache.unified_tree_core:UnifiedTreeCore._split_node", _split_dates_tail_zero),
        laws=("OutcomeDiffers",),
        hides_behind="split_refreshes_tail",
    ),
    PatchFault(
        name="python-core-mru-takes-oldest",
        story="Most recently used evicts what was used longest ago.",
        kind="replicas or ranks diverge",
        target="sglang:unified-python",
        plant=around(f"{POLICY}:MRUStrategy.get_priority", _ranked_the_other_way),
        laws=("OutcomeDiffers",),
    ),
    PatchFault(
        name="python-core-lfu-breaks-ties-by-youth",
        story="Among nodes used equally often the one used last is evicted first.",
        kind="replicas or ranks diverge",
        target="sglang:unified-python",
        plant=around(f"{POLICY}:LFUStrategy.get_priority", _used_last_among_equals),
        laws=("OutcomeDiffers",),
    ),
    PatchFault(
        name="python-core-slru-protects-one-hit-too-late",
        story="Segmented LRU counts a node as often used from three hits on instead of two.",
        kind="replicas or ranks diverge",
        target="sglang:unified-python",
        plant=around(f"{POLICY}:SLRUStrategy.get_priority", _protected_one_hit_too_late),
        laws=("OutcomeDiffers",),
    ),
    PatchFault(
        name="python-core-tlru-forgets-trimmed-tail",
        story="Tail-optimized LRU measures a conversation by what is left of it, and trims it down to nothing.",
        kind="stale entry in a side table after recycling",
        target="sglang:unified-python",
        plant=around(f"{POLICY}:TLRUStrategy.get_priority", _history_of_what_is_left),
        laws=("OutcomeDiffers",),
    ),
    PatchFault(
        name="python-core-allocation-evicts-one-more",
        story="An allocation that runs short evicts one page more than it is short of.",
        kind="promise of capacity broken, or no progress",
        target="sglang:unified-python",
        plant=around(".unified_radix_cache:UnifiedRadixCache.evict_for_alloc", _allocation_evicts_one_more),
        laws=("OutcomeDiffers",),
        hides_behind="pages_overestimated",
    ),
)
