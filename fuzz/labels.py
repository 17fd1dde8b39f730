"""State labels: named states that a run reached, told from what was seen before and after an operation.

A label is a function of one `Observation` and of a short `Memory` of earlier ones; the rule that hopes for
a state never sets it. A refused operation changed nothing and reaches no label, but for those that are about
the refusal. A run that did not reach a required label often enough proves less than it seems to: the run ends
``unknown`` and names the label.

Not counted here: operations by outcome (``statistics.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlockstep.fuzz.config import POLICIES, CacheConfig
from kvlockstep.invariants import FULL, ROOT, NodeView, Observation, RequestView, RowView, Snapshot


@dataclass(slots=True)
class Memory:
    """What labels need to remember from earlier operations of the same case."""

    config: CacheConfig
    retracted: set[str] = field(default_factory=set)
    abort_pending: set[str] = field(default_factory=set)
    stale_rows: dict[int, set[int]] = field(default_factory=dict)  # row -> pages that it named when given back
    pass_len: dict[str, int] = field(default_factory=dict)  # request in flight -> n of its pass
    prompt_len: dict[str, int] = field(default_factory=dict)  # tokens known when the request was matched
    matched_len: dict[str, int] = field(default_factory=dict)  # length of that match


def _request(snapshot: Snapshot, name: str) -> RequestView | None:
    return next((view for view in snapshot.requests or [] if view.request == name), None)


def _row(snapshot: Snapshot, name: str) -> RowView | None:
    return next((view for view in snapshot.rows or [] if view.request == name), None)


def _by_first_slot(snapshot: Snapshot) -> dict[int, NodeView]:
    return {view.slots[FULL][0]: view for view in snapshot.nodes or [] if view.slots.get(FULL)}


def _edges_cut(seen: Observation) -> list[tuple[NodeView, NodeView]]:
    """Nodes whose edge is shorter now, with the upper part that begins where they began."""
    if not seen.before.nodes or seen.now.nodes is None or seen.before.nodes is seen.now.nodes:
        return []
    now = _by_first_slot(seen.now)
    cut = []
    for old in seen.before.nodes:
        new = now.get(old.slots[FULL][0]) if old.slots.get(FULL) else None
        if new is not None and len(new.units) < len(old.units):
            cut.append((old, new))
    return cut


def edge_split(seen: Observation, memory: Memory) -> bool:
    return bool(_edges_cut(seen))


def split_at_page_boundary_inside_edge(seen: Observation, memory: Memory) -> bool:
    return memory.config.page_size > 1 and bool(_edges_cut(seen))


def edge_of_four_pages_split_behind_its_second(seen: Observation, memory: Memory) -> bool:
    """The place to split an edge at is searched; on short edges any search finds it."""
    size = memory.config.page_size
    return any(len(old.units) >= 4 * size and len(new.units) >= 2 * size for old, new in _edges_cut(seen))


def locked_edge_split(seen: Observation, memory: Memory) -> bool:
    return any(old.lock_ref > 0 for old, _ in _edges_cut(seen))


def duplicate_pages_freed_at_checkpoint(seen: Observation, memory: Memory) -> bool:
    name = seen.requests[0]
    before, row = _request(seen.before, name), _row(seen.before, name)
    after, pool = _request(seen.now, name), seen.now.pools[FULL]
    if before is None or after is None or row is None or pool.free_pages is None:
        return False
    published = row.slots[before.protected_len : after.protected_len]
    return not {slot // seen.now.page_size for slot in published}.isdisjoint(pool.free_pages)


def row_rewritten_to_canonical_slots(seen: Observation, memory: Memory) -> bool:
    before, after = _row(seen.before, seen.requests[0]), _row(seen.now, seen.requests[0])
    return before is not None and after is not None and before.slots != after.slots


def _partial_page_freed(seen: Observation) -> bool:
    """The last page of the row that the request gave back was not full: a boundary cut it, and it had slack."""
    view = _request(seen.before, seen.requests[0])
    gone = view is not None and view.row is not None and _request(seen.now, seen.requests[0]) is None
    return gone and view is not None and view.allocated_len % seen.now.page_size != 0


def partial_last_page_at_checkpoint(seen: Observation, memory: Memory) -> bool:
    view = _request(seen.before, seen.requests[0])
    return view is not None and view.committed_len % seen.now.page_size != 0


def partial_last_page_at_release(seen: Observation, memory: Memory) -> bool:
    return _partial_page_freed(seen)


def partial_last_page_at_abort(seen: Observation, memory: Memory) -> bool:
    """The abort took effect; a pending one frees nothing."""
    return _partial_page_freed(seen)


def _victims(seen: Observation) -> list[NodeView]:
    nodes = _by_first_slot(seen.before) if seen.evicted else {}
    return [nodes[slots[0]] for slots in seen.evicted if slots and slots[0] in nodes]


def eviction_made_parent_evictable(seen: Observation, memory: Memory) -> bool:
    """The last child of an unlocked node was evicted, and perhaps the node after it."""
    gone = {victim.node for victim in _victims(seen)}
    before = seen.before.nodes or []
    bereaved = {view.parent for view in before if view.node in gone}
    bereaved -= {view.parent for view in before if view.node not in gone}
    return any(view.node in bereaved and view.lock_ref == 0 for view in before)


def eviction_skipped_locked_leaf(seen: Observation, memory: Memory) -> bool:
    """By policy a locked leaf would have gone before something that was evicted."""
    victims = _victims(seen)
    if not victims:
        return False
    before = seen.before.nodes or []
    parents = {view.parent for view in before}
    locked = [view for view in before if view.lock_ref > 0 and view.node not in parents]
    if None in [part for view in victims + locked for part in (view.stamp, view.created, view.hits, view.priority)]:
        return False  # ages, hits or priorities that are not shown
    if memory.config.policy == "tlru":
        return False  # it goes by what no snapshot shows
    last = max(_eviction_rank(view, memory.config.policy) for view in victims)
    return any(_eviction_rank(view, memory.config.policy) < last for view in locked)


def _chosen_by(policy: str) -> "Label":
    """Make the label of one policy: an eviction had to choose, so a wrong order would show."""

    def victim_chosen(seen: Observation, memory: Memory) -> bool:
        if memory.config.policy != policy or not _victims(seen):
            return False
        before = seen.before.nodes or []
        parents = {view.parent for view in before}
        return sum(view.lock_ref == 0 and view.node not in parents for view in before) > 1

    victim_chosen.__name__ = f"victim_chosen_among_several_by_{policy}"
    return victim_chosen


VICTIM_CHOSEN = {policy: _chosen_by(policy) for policy in POLICIES}


def _eviction_rank(view: NodeView, policy: str) -> tuple[int, int]:
    """Return the place of a node in policy order, the first victim lowest (SPEC section 5)."""
    stamp, created, hits = view.stamp or 0, view.created or 0, view.hits or 0
    return {
        "lru": (0, stamp),
        "mru": (0, -stamp),
        "fifo": (0, created),
        "filo": (0, -created),
        "lfu": (hits, stamp),
        "slru": (int(hits >= 2), stamp),
        "priority": (view.priority or 0, stamp),
    }[policy]


def eviction_found_nothing(seen: Observation, memory: Memory) -> bool:
    return not seen.evicted


def peek_renewed_a_victim(seen: Observation, memory: Memory) -> bool:
    """A peek ended at a leaf that eviction may take, which is now younger than it was."""
    now = _by_first_slot(seen.now)
    before = seen.before.nodes or []
    parents = {view.parent for view in before}
    leaves = {
        slot: view
        for slot, view in _by_first_slot(seen.before).items()
        if view.lock_ref == 0 and view.node not in parents and view.stamp is not None
    }
    return any(slot in now and now[slot].stamp != view.stamp for slot, view in leaves.items())


def allocation_evicted(seen: Observation, memory: Memory) -> bool:
    return bool(seen.evicted)


def out_of_pages(seen: Observation, memory: Memory) -> bool:
    return seen.refused == "OutOfPages"


def out_of_rows(seen: Observation, memory: Memory) -> bool:
    return seen.refused == "OutOfRows"


def _rows_taken(seen: Observation) -> list[RowView]:
    if seen.now.rows is None:
        return []
    had = {view.request for view in seen.before.rows or []}
    return [view for view in seen.now.rows if view.request in seen.requests and view.request not in had]


def row_reused(seen: Observation, memory: Memory) -> bool:
    generations = seen.now.row_generations
    return generations is not None and any(generations[view.row] > 0 for view in _rows_taken(seen))


def page_reused_while_old_row_names_it(seen: Observation, memory: Memory) -> bool:
    if not memory.stale_rows or not seen.write_sets:
        return False
    bound = {view.row for view in seen.now.rows or []}
    written = {slot // seen.now.page_size for write_set in seen.write_sets for slot in write_set}
    return any(not pages.isdisjoint(written) for row, pages in memory.stale_rows.items() if row not in bound)


def pool_exactly_full(seen: Observation, memory: Memory) -> bool:
    return seen.now.pools[FULL].free_pages == []


def tail_reused_without_new_page(seen: Observation, memory: Memory) -> bool:
    """The whole write set lay in an over-allocated tail."""
    if not seen.write_sets:
        return False
    views = [(_request(seen.before, name), ws) for name, ws in zip(seen.requests, seen.write_sets, strict=False)]
    return any(view is not None and view.committed_len + len(ws) <= view.allocated_len for view, ws in views)


def batch_of_two_or_more(seen: Observation, memory: Memory) -> bool:
    return len(seen.requests) > 1


def later_chunk_of_a_prefill(seen: Observation, memory: Memory) -> bool:
    """A chunk of the prompt is computed, and an earlier one was computed and kept."""
    for name in seen.requests:
        view = _request(seen.before, name)
        if view is not None and memory.matched_len.get(name, 0) < view.committed_len < memory.prompt_len.get(name, 0):
            return True
    return False


def draft_rejected_across_page_boundary(seen: Observation, memory: Memory) -> bool:
    """The last kept position lies in an earlier page than the last one that the pass computed."""
    before = _request(seen.before, seen.requests[0])
    if before is None or seen.n == 0 or seen.requests[0] in memory.abort_pending:
        return False
    end = before.committed_len + memory.pass_len.get(seen.requests[0], 0)
    page_size = seen.now.page_size
    return (before.committed_len + seen.n - 1) // page_size < (end - 1) // page_size


def pass_thrown_away(seen: Observation, memory: Memory) -> bool:
    return seen.n == 0 and seen.requests[0] not in memory.abort_pending


def pending_abort_landed(seen: Observation, memory: Memory) -> bool:
    return seen.requests[0] in memory.abort_pending


def abort_while_in_flight(seen: Observation, memory: Memory) -> bool:
    view = _request(seen.before, seen.requests[0])
    return view is not None and view.state == "IN_FLIGHT"


def retract_then_rematch(seen: Observation, memory: Memory) -> bool:
    return seen.requests[0] in memory.retracted


def match_of_whole_prompt_minus_one(seen: Observation, memory: Memory) -> bool:
    """Every unit that a match may use was found."""
    if not seen.matched_len:
        return False
    n_tokens = len(seen.fingerprints[seen.requests[0]])
    return seen.matched_len == n_tokens - (2 if memory.config.key_units == "bigram" else 1)


def match_ended_inside_prompt(seen: Observation, memory: Memory) -> bool:
    return bool(seen.matched_len) and not match_of_whole_prompt_minus_one(seen, memory)


def same_tokens_in_two_namespaces(seen: Observation, memory: Memory) -> bool:
    if seen.now.nodes is None or seen.now.nodes is seen.before.nodes:
        return False
    size = seen.now.page_size
    firsts = [tuple(view.units[:size]) for view in seen.now.nodes if view.parent == ROOT]
    return len(set(firsts)) < len(firsts)


def private_request_published_nothing(seen: Observation, memory: Memory) -> bool:
    """A request that had matched nothing ended with whole pages committed, and the tree is as it was."""
    view = _request(seen.before, seen.requests[0])
    if view is None or not memory.config.prefix_sharing or seen.now.nodes is None:
        return False
    n_units = view.committed_len - (memory.config.key_units == "bigram")
    return n_units // seen.now.page_size > view.protected_len == 0 and seen.now.nodes == seen.before.nodes


def token_of_31_bits_published(seen: Observation, memory: Memory) -> bool:
    """A token that fills its integer, such as engines give to images, has become part of a key."""
    if seen.now.nodes is None or seen.now.nodes is seen.before.nodes:
        return False
    lasts = [view.units[-1] for view in seen.now.nodes if view.units]  # an edge of none breaks law 7, if that is asked
    return any((unit if isinstance(unit, int) else unit[1]) >> 30 for unit in lasts)


def reset_with_old_handles_alive(seen: Observation, memory: Memory) -> bool:
    """Somebody may still remember a (row, generation) or (page, generation) from before the reset."""
    generations = seen.before.row_generations
    return generations is not None and any(generations)


Label = Callable[[Observation, Memory], bool]


class Asked(NamedTuple):
    """After which kinds of operation a label is asked, and how often a run must have reached it."""

    kinds: tuple[str, ...]
    least: float  # of 10,000 operations done; a run of fewer must still have reached it once


_PUBLISHING = ("checkpoint", "release", "retract")

LABELS: dict[Label, Asked] = {
    edge_split: Asked(("match", "peek", *_PUBLISHING), 15),
    split_at_page_boundary_inside_edge: Asked(("match", "peek", *_PUBLISHING), 10),
    edge_of_four_pages_split_behind_its_second: Asked(("match", "peek", *_PUBLISHING), 1),
    locked_edge_split: Asked(("match", "peek", *_PUBLISHING), 3),
    duplicate_pages_freed_at_checkpoint: Asked(("checkpoint",), 2),
    row_rewritten_to_canonical_slots: Asked(("checkpoint",), 2),
    partial_last_page_at_checkpoint: Asked(("checkpoint",), 40),
    partial_last_page_at_release: Asked(("release",), 80),
    partial_last_page_at_abort: Asked(("abort",), 3),
    eviction_made_parent_evictable: Asked(("alloc", "evict"), 15),
    eviction_skipped_locked_leaf: Asked(("alloc", "evict"), 5),
    **dict.fromkeys(VICTIM_CHOSEN.values(), Asked(("alloc", "evict"), 1)),
    eviction_found_nothing: Asked(("evict",), 5),
    peek_renewed_a_victim: Asked(("peek",), 30),
    allocation_evicted: Asked(("alloc",), 10),
    out_of_pages: Asked(("alloc",), 40),
    out_of_rows: Asked(("alloc",), 3),
    row_reused: Asked(("alloc",), 200),
    page_reused_while_old_row_names_it: Asked(("alloc",), 15),
    pool_exactly_full: Asked(("alloc",), 30),
    tail_reused_without_new_page: Asked(("alloc",), 1),
    batch_of_two_or_more: Asked(("alloc",), 40),
    later_chunk_of_a_prefill: Asked(("alloc",), 15),
    draft_rejected_across_page_boundary: Asked(("commit",), 2),
    pass_thrown_away: Asked(("commit",), 10),
    pending_abort_landed: Asked(("commit",), 4),
    abort_while_in_flight: Asked(("abort",), 5),
    retract_then_rematch: Asked(("match",), 10),
    match_of_whole_prompt_minus_one: Asked(("match",), 25),
    match_ended_inside_prompt: Asked(("match",), 25),
    same_tokens_in_two_namespaces: Asked(_PUBLISHING, 10),
    private_request_published_nothing: Asked(("release",), 0.5),
    token_of_31_bits_published: Asked(_PUBLISHING, 0.5),
    reset_with_old_handles_alive: Asked(("reset",), 4),
}
"""Each label, all of them required of a run. ``least`` is a quarter, or less, of what the least busy of the built-in
targets reaches over a minute; for the order of victims it allows for eight policies, each of which few cases have."""

_OF_REFUSALS = (out_of_pages, out_of_rows)

_BY_KIND: dict[str, list[Label]] = {}
for _label, _asked in LABELS.items():
    for _kind in _asked.kinds:
        _BY_KIND.setdefault(_kind, []).append(_label)


def name_of(label: Label) -> str:
    """Name of a label as tables print it."""
    return label.__name__.replace("_", " ")


def reached(seen: Observation, memory: Memory) -> list[str]:
    """Names of the labels that this operation reached, and move the memory on."""
    asked = _BY_KIND.get(seen.kind, []) if seen.refused is None else _OF_REFUSALS
    names = [name_of(label) for label in asked if label(seen, memory)]
    if seen.refused is None:
        _remember(seen, memory)
    return names


def _remember(seen: Observation, memory: Memory) -> None:
    if seen.kind == "alloc":
        for name, write_set in zip(seen.requests, seen.write_sets or [], strict=False):
            memory.pass_len[name] = len(write_set)
        return
    name = seen.requests[0] if seen.requests else ""
    if seen.kind == "match":
        memory.prompt_len[name] = len(seen.fingerprints[name])
        memory.matched_len[name] = seen.matched_len or 0
    elif seen.kind == "retract":
        memory.retracted.add(name)
    elif seen.kind == "abort" and abort_while_in_flight(seen, memory):
        memory.abort_pending.add(name)
        return
    elif seen.kind == "submit":
        memory.retracted.discard(name)
    elif seen.kind == "commit":
        memory.abort_pending.discard(name)
    if seen.kind in ("abort", "release", "retract", "commit") and seen.before is not seen.now:
        row = _row(seen.before, name)
        if row is not None and _row(seen.now, name) is None:
            memory.stale_rows[row.row] = _pages_still_named(seen, row)


def _pages_still_named(seen: Observation, row: RowView) -> set[int]:
    """Pages that a row names when it is given back: its own from before, but for duplicates.

    A publication on the way (release, retract) made the row name the canonical page in place of a duplicate.
    So a whole committed page that is free now is left out there, though an unpublished one stays named.
    """
    size = seen.now.page_size
    pages = [slot // size for slot in row.slots[::size]]
    view = _request(seen.before, row.request)
    if view is None or seen.kind in ("abort", "commit"):
        return set(pages)
    first, end = view.protected_len // size, view.committed_len // size
    free = seen.now.pools[FULL].free_pages or []
    return {page for i, page in enumerate(pages) if not (first <= i < end and page in free)}
