"""What it takes to reach a state label: the parts of a snapshot that it is told from, and capabilities of the target.

A label that a target cannot reach whatever happens is not required of it, and a run says which those are.
"""

from collections.abc import Collection

from kvlockstep.fuzz.labels import (
    VICTIM_CHOSEN,
    Label,
    abort_while_in_flight,
    allocation_evicted,
    draft_rejected_across_page_boundary,
    duplicate_pages_freed_at_checkpoint,
    edge_split,
    eviction_made_parent_evictable,
    eviction_skipped_locked_leaf,
    later_chunk_of_a_prefill,
    locked_edge_split,
    match_ended_inside_prompt,
    match_of_whole_prompt_minus_one,
    page_reused_while_old_row_names_it,
    partial_last_page_at_abort,
    partial_last_page_at_checkpoint,
    partial_last_page_at_release,
    pending_abort_landed,
    pool_exactly_full,
    reset_with_old_handles_alive,
    row_reused,
    row_rewritten_to_canonical_slots,
    same_tokens_in_two_namespaces,
    split_at_page_boundary_inside_edge,
    tail_reused_without_new_page,
)
from kvlockstep.invariants import Snapshot
from kvlockstep.invariants.checks import hidden_parts

NEEDED_PARTS: dict[Label, tuple[str, ...]] = {
    **dict.fromkeys((edge_split, split_at_page_boundary_inside_edge, locked_edge_split), ("nodes",)),
    duplicate_pages_freed_at_checkpoint: ("rows", "requests", "free_pages"),
    row_rewritten_to_canonical_slots: ("rows",),
    partial_last_page_at_checkpoint: ("requests",),
    partial_last_page_at_release: ("requests",),
    partial_last_page_at_abort: ("requests",),
    eviction_made_parent_evictable: ("nodes",),
    eviction_skipped_locked_leaf: ("nodes", "ages"),
    **dict.fromkeys(VICTIM_CHOSEN.values(), ("nodes",)),
    row_reused: ("rows", "row_generations"),
    page_reused_while_old_row_names_it: ("rows",),
    pool_exactly_full: ("free_pages",),
    tail_reused_without_new_page: ("requests",),
    later_chunk_of_a_prefill: ("requests",),
    draft_rejected_across_page_boundary: ("requests",),
    pending_abort_landed: ("requests",),
    abort_while_in_flight: ("requests",),
    same_tokens_in_two_namespaces: ("nodes",),
    reset_with_old_handles_alive: ("row_generations",),
}
"""Parts of a snapshot without which a label is never reached; ``ages`` are stamps, creation ticks, hits, priorities."""

_OF_SHARING = (
    edge_split,
    split_at_page_boundary_inside_edge,
    locked_edge_split,
    duplicate_pages_freed_at_checkpoint,
    row_rewritten_to_canonical_slots,
    eviction_made_parent_evictable,
    eviction_skipped_locked_leaf,
    allocation_evicted,
    match_of_whole_prompt_minus_one,
    match_ended_inside_prompt,
)

NEEDED_CAPABILITIES: dict[Label, tuple[str, ...]] = {
    **dict.fromkeys(_OF_SHARING, ("sharing",)),
    same_tokens_in_two_namespaces: ("sharing", "namespaces"),
    **{label: ("sharing", f"policy:{policy}") for policy, label in VICTIM_CHOSEN.items()},
    draft_rejected_across_page_boundary: ("drafts",),
}
"""Capabilities that a target must have all of, for a label to be reached on it."""


def is_promised(label: Label, capabilities: Collection[str]) -> bool:
    return set(NEEDED_CAPABILITIES.get(label, ())).issubset(capabilities)


def hidden_from(label: Label, hidden: Collection[str]) -> list[str]:
    """List the parts that a label needs and that are hidden."""
    return [part for part in NEEDED_PARTS.get(label, ()) if part in hidden]


def hidden_from_labels(snapshot: Snapshot) -> set[str]:
    """Name the parts that the snapshot does not show, those included that labels alone read."""
    hidden = hidden_parts(snapshot)
    for view in snapshot.nodes or ():
        if None in (view.stamp, view.created, view.hits, view.priority):
            hidden.add("ages")
    return hidden
