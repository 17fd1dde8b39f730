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
    edge_of_four_pages_split_behind_its_second,
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
    pass_thrown_away,
    peek_renewed_a_victim,
    pending_abort_landed,
    pool_exactly_full,
    private_request_published_nothing,
    reset_with_old_handles_alive,
    row_reused,
    row_rewritten_to_canonical_slots,
    same_tokens_in_two_namespaces,
    split_at_page_boundary_inside_edge,
    tail_reused_without_new_page,
    token_of_31_bits_published,
)
from kvlockstep.invariants import Snapshot
from kvlockstep.invariants.checks import hidden_parts

_SPLITS = (
    edge_split,
    split_at_page_boundary_inside_edge,
    edge_of_four_pages_split_behind_its_second,
    locked_edge_split,
)

NEEDED_PARTS: dict[Label, tuple[str, ...]] = {
    **dict.fromkeys(_SPLITS, ("nodes",)),
    duplicate_pages_freed_at_checkpoint: ("rows", "requests", "free_pages"),
    row_rewritten_to_canonical_slots: ("rows",),
    partial_last_page_at_checkpoint: ("requests",),
    partial_last_page_at_release: ("requests",),
    partial_last_page_at_abort: ("requests",),
    eviction_made_parent_evictable: ("nodes",),
    eviction_skipped_locked_leaf: ("nodes", "ages", "hits", "priority"),
    **dict.fromkeys(VICTIM_CHOSEN.values(), ("nodes",)),
    peek_renewed_a_victim: ("nodes", "ages"),
    private_request_published_nothing: ("nodes", "requests"),
    token_of_31_bits_published: ("nodes",),
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
"""Parts of a snapshot without which a label is never reached; ``ages`` are stamps and creation ticks of nodes."""

LARGER_PAGES = "pages of more than one token"
"""No part of a snapshot, yet hidden where a target takes pages of one token only."""

NEED_LARGER_PAGES = (
    split_at_page_boundary_inside_edge,
    partial_last_page_at_checkpoint,
    partial_last_page_at_release,
    partial_last_page_at_abort,
)

PARTS_OF_NODES = {"ages": ("stamp", "created"), "hits": ("hits",), "priority": ("priority",)}
"""Parts that only the comparison with the model and labels read, with their fields in a node."""

_OF_SHARING = (
    *_SPLITS,
    duplicate_pages_freed_at_checkpoint,
    row_rewritten_to_canonical_slots,
    eviction_made_parent_evictable,
    eviction_skipped_locked_leaf,
    allocation_evicted,
    match_of_whole_prompt_minus_one,
    match_ended_inside_prompt,
    peek_renewed_a_victim,
    token_of_31_bits_published,
)

NEEDED_CAPABILITIES: dict[Label, tuple[str, ...]] = {
    **dict.fromkeys(_OF_SHARING, ("sharing",)),
    same_tokens_in_two_namespaces: ("sharing", "namespaces"),
    **{label: ("sharing", f"policy:{policy}") for policy, label in VICTIM_CHOSEN.items()},
    draft_rejected_across_page_boundary: ("drafts",),
    pass_thrown_away: ("discards",),
    private_request_published_nothing: ("sharing", "private"),
}
"""Capabilities that a target must have all of, for a label to be reached on it."""

NEEDED_ONE_OF: dict[Label, tuple[str, ...]] = {tail_reused_without_new_page: ("drafts", "discards")}
"""Capabilities that a target must have one of: else whatever is allocated is committed."""

IMPOSSIBLE_WITH: dict[Label, str] = dict.fromkeys(_SPLITS, "page_nodes")
"""Labels that an allowance makes impossible: an edge of one page is never split."""


def is_promised(label: Label, capabilities: Collection[str], allowances: Collection[str] = ()) -> bool:
    """Tell whether a target with these capabilities, and these allowances declared, can reach a label at all."""
    if not set(NEEDED_CAPABILITIES.get(label, ())).issubset(capabilities):
        return False
    one_of = NEEDED_ONE_OF.get(label)
    return (one_of is None or not set(one_of).isdisjoint(capabilities)) and IMPOSSIBLE_WITH.get(label) not in allowances


def hidden_from(label: Label, hidden: Collection[str]) -> list[str]:
    """List the parts that a label needs and that are hidden."""
    needed = (*NEEDED_PARTS.get(label, ()), *((LARGER_PAGES,) if label in NEED_LARGER_PAGES else ()))
    return [part for part in needed if part in hidden]


def hidden_from_labels(snapshot: Snapshot) -> set[str]:
    """Name the parts that the snapshot does not show, those included that labels alone read."""
    hidden = hidden_parts(snapshot)
    for view in snapshot.nodes or ():
        for part, names in PARTS_OF_NODES.items():
            if None in [getattr(view, name) for name in names]:
                hidden.add(part)
    return hidden
