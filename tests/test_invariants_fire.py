"""Every check fires on the defect that it is for, on honest snapshots edited here, of each side.

``DEFECTS`` names the observation that is edited, how, and the violation that must follow; the rest of
the observation stays honest (`recount`), so that no other law fires first.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvlockstep.invariants import FULL, ROOT, Observation, RequestView, RowView
from kvlockstep.invariants.checks import CHECKS, run_checks, unobserved
from kvlockstep.invariants.content import ContentWrong, MatchedUncommitted, MatchTooLong
from kvlockstep.invariants.in_flight import GenerationLowered, GenerationNotRaised, InFlightDisturbed
from kvlockstep.invariants.index import Seen
from kvlockstep.invariants.lengths import (
    LengthsOutOfOrder,
    PageNotConsecutive,
    RowLengthWrong,
    RowOverrun,
    TailRepeatsSlot,
)
from kvlockstep.invariants.locks import LockCountWrong, RootLocked
from kvlockstep.invariants.ownership import (
    PageLeaked,
    PageOutOfRange,
    PageOwnedTwice,
    RowHolderWrong,
    RowLeaked,
    RowOutOfRange,
    RowOwnedTwice,
)
from kvlockstep.invariants.paths import AnchorOffTree, ProtectedLenOffPath, RowOffCanonicalPath
from kvlockstep.invariants.promises import (
    AllocPromiseBroken,
    EvictPromiseBroken,
    EvictReportWrong,
    IdleCountsWrong,
    RefusalChangedState,
)
from kvlockstep.invariants.sizes import SizesDoNotAddUp, SizesDoNotRecount
from kvlockstep.invariants.tree_shape import (
    EdgeMalformed,
    EvictableSetWrong,
    LinksDisagree,
    NamespaceMixed,
    PageOnTwoEdges,
    SiblingsShareFirstPage,
)
from kvlockstep.invariants.violation import Violation
from kvlockstep.invariants.writes import (
    PaddingOwned,
    SlotChangedOutsideWriteSet,
    WriteSlotIllegal,
    WriteSlotRepeated,
)

SIDES = ("hand-built", "reference", "gpu_impl")
P = 2

Recount = Callable[[object], None]


@dataclass(frozen=True)
class Defect:
    """One way to break an honest observation, and the violation that names it."""

    violation: type[Violation]
    on: str
    edit: Callable[[Observation, Recount], None]

    @property
    def name(self) -> str:
        return self.edit.__name__


DEFECTS: list[Defect] = []


def breaks(violation: type[Violation], on: str) -> Callable[..., Callable[[Observation, Recount], None]]:
    """Enter an edit in the table."""

    def enter(edit: Callable[[Observation, Recount], None]) -> Callable[[Observation, Recount], None]:
        DEFECTS.append(Defect(violation, on, edit))
        return edit

    return enter


# Finding things in any honest observation of the story


def full(seen):
    return seen.now.pools[FULL]


def request(seen, name) -> RequestView:
    return next(view for view in seen.now.requests if view.request == name)


def row(seen, name) -> RowView:
    return next(view for view in seen.now.rows if view.request == name)


def node(seen, node_id):
    return next(view for view in seen.now.nodes if view.node == node_id)


def anchor(seen, name):
    return node(seen, request(seen, name).anchor)


def is_leaf(seen, view):
    return all(child.parent != view.node for child in seen.now.nodes)


def unlocked_leaf(seen, inner=True):
    """An unlocked leaf, below another node or (``inner=False``) at the root."""
    return next(
        view for view in seen.now.nodes if not view.lock_ref and is_leaf(seen, view) and (view.parent != ROOT) == inner
    )


def same_page_positions(seen, name):
    """Two neighbouring positions of a request's tail that lie on one page."""
    pos = next(pos for pos in range(request(seen, name).protected_len, len(row(seen, name).slots)) if pos % P)
    return pos - 1, pos


def tail_page(seen, name):
    return row(seen, name).slots[request(seen, name).protected_len] // P


def give_away(seen, page):
    """Put a free page out of the free list, as if someone had taken it."""
    full(seen).free_pages.remove(page)


# Law 1


@breaks(PageOutOfRange, "match")
def free_list_names_a_page_beyond_the_pool(seen, recount):
    full(seen).free_pages.append(full(seen).n_pages + 1)


@breaks(PageOwnedTwice, "checkpoint")
def canonical_page_is_freed_instead_of_duplicate(seen, recount):
    full(seen).free_pages.append(anchor(seen, "r1").slots[FULL][0] // P)


@breaks(PageOwnedTwice, "release")
def partial_page_is_freed_twice(seen, recount):
    full(seen).free_pages.append(full(seen).free_pages[-1])


@breaks(PageOwnedTwice, "alloc")
def two_tails_share_a_page(seen, recount):
    page = tail_page(seen, "r2")
    start = request(seen, "r3").protected_len
    row(seen, "r3").slots[start:] = [page * P, page * P + 1]


@breaks(PageOwnedTwice, "alloc")
def tail_page_is_still_free(seen, recount):
    full(seen).free_pages.append(tail_page(seen, "r2"))


@breaks(PageOwnedTwice, "commit")
def one_slot_in_the_middle_of_a_page_is_anothers(seen, recount):
    _, pos = same_page_positions(seen, "r1")
    row(seen, "r1").slots[pos] = row(seen, "r2").slots[-1]


@breaks(PageLeaked, "release")
def partial_page_is_not_freed(seen, recount):
    freed = next(page for page in full(seen).free_pages if page not in seen.before.pools[FULL].free_pages)
    full(seen).free_pages.remove(freed)


@breaks(PageLeaked, "evict")
def evicted_page_is_not_freed(seen, recount):
    full(seen).free_pages.remove(seen.evicted[0][0] // P)
    recount(seen.now)


@breaks(RowOutOfRange, "match")
def free_list_names_a_row_beyond_the_table(seen, recount):
    seen.now.free_rows.append(seen.now.n_rows + 1)


@breaks(RowOwnedTwice, "alloc")
def row_is_handed_out_and_still_free(seen, recount):
    seen.now.free_rows.append(row(seen, "r2").row)


@breaks(RowOwnedTwice, "alloc")
def two_requests_get_one_row(seen, recount):
    seen.now.free_rows.append(row(seen, "r3").row)
    row(seen, "r3").row = request(seen, "r3").row = row(seen, "r2").row


@breaks(RowLeaked, "release")
def row_is_not_given_back(seen, recount):
    freed = next(free for free in seen.now.free_rows if free not in seen.before.free_rows)
    seen.now.free_rows.remove(freed)


@breaks(RowHolderWrong, "alloc")
def row_is_held_for_a_request_that_names_another(seen, recount):
    request(seen, "r2").row, request(seen, "r3").row = request(seen, "r3").row, request(seen, "r2").row


@breaks(RowHolderWrong, "alloc")
def request_in_flight_has_no_row(seen, recount):
    seen.now.free_rows.append(row(seen, "r3").row)
    full(seen).free_pages.append(tail_page(seen, "r3"))
    seen.now.rows.remove(row(seen, "r3"))
    request(seen, "r3").row = None


@breaks(RowHolderWrong, "match")
def request_names_a_row_that_nobody_holds(seen, recount):
    request(seen, "r2").row = seen.now.free_rows[0]


# Law 2


@breaks(AnchorOffTree, "match")
def anchor_left_the_tree(seen, recount):
    request(seen, "r2").anchor = 9999


@breaks(ProtectedLenOffPath, "checkpoint")
def lock_does_not_move_to_the_published_end(seen, recount):
    request(seen, "r1").anchor = anchor(seen, "r1").parent
    recount(seen.now)


@breaks(RowOffCanonicalPath, "checkpoint")
def row_keeps_a_foreign_page_for_the_prefix(seen, recount):
    page = unlocked_leaf(seen).slots[FULL]
    row(seen, "r1").slots[: len(page)] = page


@breaks(RowOffCanonicalPath, "commit")
def slots_of_the_prefix_are_swapped(seen, recount):
    slots = row(seen, "r1").slots
    slots[0], slots[1] = slots[1], slots[0]


# Law 3


@breaks(WriteSlotRepeated, "alloc")
def write_set_repeats_a_slot_across_two_requests(seen, recount):
    seen.write_sets[1][0] = seen.write_sets[0][0]


@breaks(WriteSlotIllegal, "alloc")
def write_set_is_not_in_row_order(seen, recount):
    seen.write_sets[0].reverse()


@breaks(WriteSlotIllegal, "alloc")
def write_set_of_one_request_is_missing(seen, recount):
    seen.write_sets.pop()


@breaks(WriteSlotIllegal, "alloc")
def write_set_lies_in_the_protected_prefix(seen, recount):
    view = request(seen, "r3")
    view.committed_len = view.protected_len - P
    seen.write_sets[1] = row(seen, "r3").slots[view.committed_len : view.committed_len + 2]


@breaks(WriteSlotIllegal, "alloc")
def write_set_lies_in_the_protected_prefix_where_the_free_list_is_hidden(seen, recount):
    write_set_lies_in_the_protected_prefix(seen, recount)
    full(seen).free_pages = None


@breaks(WriteSlotIllegal, "alloc")
def request_without_row_gets_a_write_set(seen, recount):
    seen.requests[0] = "r9"


@breaks(WriteSlotIllegal, "alloc")
def write_set_lies_on_the_padding_page(seen, recount):
    full(seen).free_pages.append(tail_page(seen, "r3"))
    recount(seen.now)
    row(seen, "r3").slots[request(seen, "r3").protected_len :] = seen.write_sets[1] = [0, 1]


# Law 9, padding


@breaks(PaddingOwned, "match")
def padding_page_is_free(seen, recount):
    full(seen).free_pages.append(0)
    recount(seen.now)


@breaks(PaddingOwned, "match")
def padding_row_is_free(seen, recount):
    seen.now.free_rows.append(0)


@breaks(PaddingOwned, "commit")
def padding_row_is_handed_out(seen, recount):
    seen.now.free_rows.append(row(seen, "r3").row)
    row(seen, "r3").row = request(seen, "r3").row = 0


# Law 4


@breaks(LengthsOutOfOrder, "commit")
def more_is_committed_than_allocated(seen, recount):
    request(seen, "r3").committed_len = request(seen, "r3").allocated_len + 1


@breaks(LengthsOutOfOrder, "commit")
def less_is_committed_than_protected(seen, recount):
    request(seen, "r3").committed_len = request(seen, "r3").protected_len - 1


@breaks(RowOverrun, "commit")
def request_outgrows_its_row(seen, recount):
    seen.now.max_context_len = request(seen, "r1").allocated_len - 1


@breaks(RowLengthWrong, "commit")
def allocated_length_is_rounded_up(seen, recount):
    view = request(seen, "r1")
    view.allocated_len = -(-view.allocated_len // P) * P


@breaks(TailRepeatsSlot, "commit")
def tail_names_one_slot_for_two_positions(seen, recount):
    first, second = same_page_positions(seen, "r1")
    row(seen, "r1").slots[second] = row(seen, "r1").slots[first]


@breaks(TailRepeatsSlot, "commit")
def tail_names_one_page_twice(seen, recount):
    slots, start = row(seen, "r1").slots, request(seen, "r1").protected_len
    full(seen).free_pages.append(slots[start + P] // P)
    slots[start + P] = slots[start]
    recount(seen.now)


@breaks(PageNotConsecutive, "commit")
def slots_of_a_tail_page_are_swapped(seen, recount):
    first, second = same_page_positions(seen, "r1")
    slots = row(seen, "r1").slots
    slots[first], slots[second] = slots[second], slots[first]


# Law 5


@breaks(LockCountWrong, "match")
def only_the_last_node_is_locked(seen, recount):
    above = next(view for view in seen.now.nodes if view.node == anchor(seen, "r1").parent)
    above.lock_ref -= 1


@breaks(LockCountWrong, "release")
def lock_is_forgotten_at_release(seen, recount):
    leaf = unlocked_leaf(seen)
    leaf.lock_ref = 1


@breaks(LockCountWrong, "release")
def lock_count_is_negative(seen, recount):
    unlocked_leaf(seen).lock_ref = -1


@breaks(RootLocked, "match")
def root_is_counted(seen, recount):
    seen.now.root_lock_ref = 2


# Law 6


@breaks(SizesDoNotRecount, "evict")
def freed_slots_are_not_counted_as_available(seen, recount):
    full(seen).available -= P


@breaks(SizesDoNotRecount, "evict")
def evicted_slots_stay_counted_as_evictable(seen, recount):
    full(seen).evictable += P


@breaks(SizesDoNotRecount, "checkpoint")
def published_slots_are_not_counted_as_protected(seen, recount):
    full(seen).protected -= P


@breaks(SizesDoNotAddUp, "evict")
def slots_vanish_where_the_free_list_is_hidden(seen, recount):
    full(seen).free_pages = None
    full(seen).available -= P


# Law 7


@breaks(LinksDisagree, "match")
def parent_left_the_tree(seen, recount):
    unlocked_leaf(seen).parent = 9999


@breaks(LinksDisagree, "match")
def node_is_its_own_parent(seen, recount):
    leaf = unlocked_leaf(seen)
    leaf.parent = leaf.node


@breaks(LinksDisagree, "match")
def two_nodes_have_one_id(seen, recount):
    unlocked_leaf(seen).node = unlocked_leaf(seen, inner=False).node
    seen.now.evictable_nodes = None


@breaks(LinksDisagree, "match")
def parent_does_not_list_its_child(seen, recount):
    recount(seen.now)
    leaf = unlocked_leaf(seen)
    node(seen, leaf.parent).children.remove(leaf.node)


@breaks(LinksDisagree, "match")
def child_is_listed_by_two_parents(seen, recount):
    recount(seen.now)
    unlocked_leaf(seen, inner=False).children.append(unlocked_leaf(seen).node)


@breaks(NamespaceMixed, "match")
def child_belongs_to_another_namespace(seen, recount):
    unlocked_leaf(seen).namespace = ("lora-b", None, ())


@breaks(EdgeMalformed, "match")
def edge_has_one_unit_more_than_slots(seen, recount):
    leaf = unlocked_leaf(seen)
    leaf.units = [*leaf.units, 77]


@breaks(EdgeMalformed, "match")
def edge_is_empty(seen, recount):
    leaf = unlocked_leaf(seen)
    full(seen).free_pages.append(leaf.slots[FULL][0] // P)
    leaf.units, leaf.slots[FULL] = [], []
    recount(seen.now)


@breaks(EdgeMalformed, "match")
def slots_of_an_edge_are_swapped(seen, recount):
    unlocked_leaf(seen).slots[FULL].reverse()


@breaks(EdgeMalformed, "match")
def edge_is_no_whole_pages(seen, recount):
    leaf = unlocked_leaf(seen)
    leaf.units, leaf.slots[FULL] = leaf.units[:1], leaf.slots[FULL][:1]
    recount(seen.now)
    full(seen).protected = None


@breaks(SiblingsShareFirstPage, "match")
def two_siblings_start_with_the_same_page(seen, recount):
    leaf = unlocked_leaf(seen)
    sibling = next(view for view in seen.now.nodes if view.parent == leaf.parent and view is not leaf)
    leaf.units = list(sibling.units[:P])


@breaks(PageOnTwoEdges, "match")
def one_page_is_on_two_edges_where_the_free_list_is_hidden(seen, recount):
    full(seen).free_pages = None
    unlocked_leaf(seen).slots[FULL] = list(unlocked_leaf(seen, inner=False).slots[FULL])


@breaks(EvictableSetWrong, "match")
def inner_node_is_offered_for_eviction(seen, recount):
    seen.now.evictable_nodes.append(unlocked_leaf(seen).parent)


@breaks(EvictableSetWrong, "match")
def leaf_is_not_offered_for_eviction(seen, recount):
    seen.now.evictable_nodes.remove(unlocked_leaf(seen).node)


# Law 8


@breaks(ContentWrong, "commit")
def request_reads_what_another_wrote(seen, recount):
    seen.reads[1].got[-1] = seen.reads[0].expected[-1]


@breaks(ContentWrong, "commit")
def gather_stops_one_position_early(seen, recount):
    seen.reads[0].got.pop()


# Law 9, bytes


@breaks(SlotChangedOutsideWriteSet, "commit")
def pass_writes_one_slot_too_far(seen, recount):
    seen.pool_got[unlocked_leaf(seen).slots[FULL][0]] ^= 1


@breaks(SlotChangedOutsideWriteSet, "commit")
def pool_is_read_short(seen, recount):
    seen.pool_got.pop()


# Law 10


@breaks(MatchTooLong, "match")
def match_leaves_no_token_to_compute(seen, recount):
    seen.fingerprints["r2"] = seen.fingerprints["r2"][:4]


@breaks(MatchTooLong, "match")
def match_ends_inside_a_page(seen, recount):
    seen.matched_len -= 1


@breaks(MatchTooLong, "match")
def match_of_pairs_leaves_no_pair_to_compute(seen, recount):
    seen.key_units = "bigram"
    for view in seen.now.nodes:
        view.units = list(zip(view.units, view.units[1:] + view.units[:1], strict=True))
    seen.fingerprints["r2"] = seen.fingerprints["r2"][:5]


@breaks(MatchedUncommitted, "match")
def match_returns_slots_that_no_pass_wrote(seen, recount):
    del seen.written[anchor(seen, "r2").slots[FULL][-1]]


@breaks(MatchedUncommitted, "match")
def match_ignores_the_namespace(seen, recount):
    seen.fingerprints["r2"] = [value ^ 1 for value in seen.fingerprints["r2"]]


@breaks(MatchedUncommitted, "peek")
def peek_finds_what_no_pass_wrote(seen, recount):
    del seen.written[anchor(seen, "r2").slots[FULL][0]]


@breaks(MatchedUncommitted, "peek")
def peek_finds_more_than_the_tree_holds(seen, recount):
    seen.matched_len += P
    seen.fingerprints["r3"] = seen.fingerprints["r3"] + [5, 6, 7]


# Law 11


@breaks(InFlightDisturbed, "checkpoint")
def row_of_a_request_in_flight_is_another(seen, recount):
    old, new = request(seen, "r2").row, seen.now.free_rows[0]
    row(seen, "r2").row = request(seen, "r2").row = new
    seen.now.free_rows[0] = old


@breaks(InFlightDisturbed, "checkpoint")
def request_in_flight_is_gone(seen, recount):
    full(seen).free_pages += sorted({slot // P for slot in row(seen, "r2").slots[request(seen, "r2").protected_len :]})
    seen.now.free_rows.append(row(seen, "r2").row)
    seen.now.rows.remove(row(seen, "r2"))
    seen.now.requests.remove(request(seen, "r2"))
    recount(seen.now)


@breaks(InFlightDisturbed, "checkpoint")
def row_of_a_request_in_flight_was_given_back(seen, recount):
    seen.now.row_generations[row(seen, "r2").row] += 1


@breaks(InFlightDisturbed, "checkpoint")
def row_of_a_request_in_flight_is_rewritten(seen, recount):
    taken, slots, start = full(seen).free_pages[0], row(seen, "r2").slots, request(seen, "r2").protected_len
    give_away(seen, taken)
    full(seen).free_pages.append(slots[start] // P)
    slots[start : start + P] = [taken * P, taken * P + 1]


@breaks(InFlightDisturbed, "evict")
def locked_prefix_of_a_request_in_flight_is_evicted(seen, recount):
    gone = seen.evicted[0][0] // P
    seen.holds["r2"].page_generations[gone] = full(seen).page_generations[gone]


@breaks(InFlightDisturbed, "checkpoint")
def page_of_a_request_in_flight_was_given_back(seen, recount):
    full(seen).page_generations[tail_page(seen, "r2")] += 1


@breaks(GenerationLowered, "reset")
def page_generation_is_reset(seen, recount):
    page = full(seen).free_pages[0]
    seen.before.pools[FULL].page_generations[page] = full(seen).page_generations[page] + 1


@breaks(GenerationLowered, "reset")
def row_generation_is_reset(seen, recount):
    seen.before.row_generations[1] = seen.now.row_generations[1] + 1


@breaks(GenerationNotRaised, "release")
def freed_tail_page_keeps_its_generation(seen, recount):
    freed = next(page for page in full(seen).free_pages if page not in seen.before.pools[FULL].free_pages)
    full(seen).page_generations[freed] = seen.before.pools[FULL].page_generations[freed]


@breaks(GenerationNotRaised, "evict")
def evicted_page_keeps_its_generation(seen, recount):
    page = seen.evicted[0][0] // P
    full(seen).page_generations[page] = seen.before.pools[FULL].page_generations[page]


@breaks(GenerationNotRaised, "reset")
def pages_of_the_tree_keep_their_generation_at_reset(seen, recount):
    full(seen).page_generations = list(seen.before.pools[FULL].page_generations)


@breaks(GenerationNotRaised, "release")
def released_row_keeps_its_generation(seen, recount):
    seen.now.row_generations = list(seen.before.row_generations)


# Law 12


@breaks(AllocPromiseBroken, "refused")
def room_is_refused_that_eviction_would_make(seen, recount):
    pool = seen.before.pools[FULL]
    seen.n = len(pool.free_pages) + pool.evictable // P


@breaks(EvictPromiseBroken, "evict")
def eviction_stops_early(seen, recount):
    seen.n = seen.before.pools[FULL].evictable


@breaks(EvictReportWrong, "evict")
def eviction_reports_a_node_that_stayed(seen, recount):
    seen.evicted.append(list(unlocked_leaf(seen, inner=False).slots[FULL]))


@breaks(EvictReportWrong, "alloc")
def alloc_hides_an_eviction(seen, recount):
    leaf = unlocked_leaf(seen)
    page = leaf.slots[FULL][0] // P
    seen.now.nodes.remove(leaf)
    full(seen).free_pages.append(page)
    full(seen).page_generations[page] += 1
    recount(seen.now)


@breaks(IdleCountsWrong, "reset")
def empty_cache_is_short_of_slots_where_only_available_shows(seen, recount):
    full(seen).free_pages = full(seen).protected = None
    full(seen).available -= P


@breaks(RefusalChangedState, "refused")
def refused_alloc_raises_a_generation(seen, recount):
    full(seen).page_generations[full(seen).free_pages[0]] += 1


@breaks(RefusalChangedState, "refused")
def refused_alloc_stamps_a_path(seen, recount):
    oldest = min(seen.now.nodes, key=lambda view: view.stamp)
    oldest.stamp = max(view.stamp for view in seen.now.nodes) + 1


@breaks(RefusalChangedState, "refused")
def refused_alloc_takes_a_page(seen, recount):
    slots = row(seen, "r1").slots
    while len(slots) % P:
        slots.append(slots[-1] + 1)
    page = full(seen).free_pages[0]
    give_away(seen, page)
    slots.append(page * P)
    request(seen, "r1").allocated_len = len(slots)
    recount(seen.now)


@pytest.mark.parametrize("side", SIDES)
def test_no_law_fires_on_honest_observations(told, side):
    for observation in told(side).values():
        run_checks(observation)


@pytest.mark.parametrize("part", ["children", "anchor"])
@pytest.mark.parametrize("side", SIDES)
def test_no_law_fires_where_one_node_or_request_hides_a_link(told, side, part):
    """A target may show parents and no children, or requests and not what they lock."""
    for observation in told(side).values():
        views = (observation.now.nodes if part == "children" else observation.now.requests)[:1]
        for view in views:
            setattr(view, part, None)

        run_checks(observation)

        needs = {"children": "children", "anchor": "anchors"}[part]
        skipped = {check.name for check in unobserved(observation.now)}
        assert not views or skipped == {check.name for check in CHECKS if needs in check.needs}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{d.violation.__name__}_fires_on_{d.name}")
@pytest.mark.parametrize("side", SIDES)
def test_law(told, recount, side, defect):
    seen = told(side)[defect.on]

    defect.edit(seen, recount)

    with pytest.raises(Violation) as caught:
        run_checks(seen)
    assert type(caught.value) is defect.violation, str(caught.value)
    assert caught.value.roles, "a cause signature needs roles"


def test_every_violation_of_a_check_has_a_defect():
    claimed = {violation for check in CHECKS for violation in check.violations}

    assert claimed == {defect.violation for defect in DEFECTS}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check_fires_by_itself_on_some_defect(told, recount, check):
    fired = []
    for defect in DEFECTS:
        seen = copy.deepcopy(told("hand-built")[defect.on])
        defect.edit(seen, recount)
        if defect.violation in check.violations and check not in unobserved(seen.now):
            try:
                check.function(Seen(seen))
            except check.violations:
                fired.append(defect.name)

    assert fired
