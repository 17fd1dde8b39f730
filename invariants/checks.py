"""All checks, in the order they run: the charter's laws 1, 2 and 3 first, then 4 to 12.

The two on padding, of law 9, come right after the charter's: they speak of owners too, and what
they find would otherwise first show as sizes that do not add up.

The first violation is raised and the rest is not looked at: later checks may rely on earlier ones. To learn
which laws speak for a defect, `run_every_check` looks on, and lists the checks that then could not run.
A check names the parts of a snapshot that it needs; where one of them is not observed it does not
run, and `unobserved` lists it, so that nobody counts it as passed.

Not verified here: that the checks find what they claim to; the tests show each of them fire.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache

from kvlockstep.invariants import (
    content,
    in_flight,
    lengths,
    locks,
    ownership,
    paths,
    promises,
    sizes,
    tree_shape,
    writes,
)
from kvlockstep.invariants.index import Index, Seen
from kvlockstep.invariants.snapshot import Observation, Snapshot
from kvlockstep.invariants.violation import Violation

HARNESS_PARTS = ("fingerprints", "reads", "pool")
"""Parts that come from the harness and the KV itself: fingerprints of tokens, reads through rows, the whole pool."""


@dataclass(frozen=True, slots=True)
class Check:
    """One claim of a law, the classes of violation that it raises, and the parts that it needs to see."""

    law: int
    violations: tuple[type[Violation], ...]
    function: Callable[[Seen], None]
    needs: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def claim(self) -> str:
        """What holds, in one sentence."""
        return (self.function.__doc__ or "").strip().splitlines()[0]


_PAGES = ("free_pages", "nodes", "rows", "requests")
_ROWS = ("rows", "free_rows")
_PATHS = ("requests", "anchors", "nodes")

CHECKS: tuple[Check, ...] = (
    Check(1, (ownership.PageOutOfRange,), ownership.every_page_exists, _PAGES),
    Check(1, (ownership.PageOwnedTwice,), ownership.no_page_has_two_owners, _PAGES),
    Check(1, (ownership.PageLeaked,), ownership.no_page_is_lost, _PAGES),
    Check(1, (ownership.RowOutOfRange,), ownership.every_row_exists, _ROWS),
    Check(1, (ownership.RowOwnedTwice,), ownership.no_row_has_two_owners, _ROWS),
    Check(1, (ownership.RowLeaked,), ownership.no_row_is_lost, _ROWS),
    Check(1, (ownership.RowHolderWrong,), ownership.rows_and_requests_name_each_other, ("rows", "requests")),
    Check(2, (paths.AnchorOffTree,), paths.every_anchor_hangs_on_the_root, _PATHS),
    Check(2, (paths.ProtectedLenOffPath,), paths.protected_length_is_path_length, _PATHS),
    Check(2, (paths.RowOffCanonicalPath,), paths.row_starts_with_canonical_slots, (*_PATHS, "rows")),
    Check(3, (writes.WriteSlotRepeated,), writes.no_write_slot_repeats, ()),
    Check(3, (writes.WriteSlotIllegal,), writes.write_sets_are_row_segments, ("rows", "requests")),
    Check(3, (writes.WriteSlotIllegal,), writes.write_slots_belong_to_the_request, _PAGES),
    Check(9, (writes.PaddingOwned,), writes.padding_page_is_nobodys, _PAGES),
    Check(9, (writes.PaddingOwned,), writes.padding_row_is_nobodys, _ROWS),
    Check(4, (lengths.LengthsOutOfOrder,), lengths.lengths_are_ordered, ("requests",)),
    Check(4, (lengths.RowOverrun,), lengths.rows_are_long_enough, ("requests", "max_context_len")),
    Check(4, (lengths.RowLengthWrong,), lengths.rows_name_allocated_positions, ("requests", "rows")),
    Check(4, (lengths.TailRepeatsSlot,), lengths.tail_names_each_slot_once, ("requests", "rows")),
    Check(4, (lengths.PageNotConsecutive,), lengths.pages_are_consecutive, ("rows",)),
    Check(5, (locks.LockCountWrong,), locks.lock_counts_equal_live_locks, _PATHS),
    Check(5, (locks.RootLocked,), locks.root_is_not_counted, ("root_lock_ref",)),
    Check(6, (sizes.SizesDoNotRecount,), sizes.available_recounts, ("available", "free_pages")),
    Check(6, (sizes.SizesDoNotRecount,), sizes.evictable_recounts, ("evictable", "nodes")),
    Check(6, (sizes.SizesDoNotRecount,), sizes.protected_recounts, ("protected", "nodes")),
    Check(6, (sizes.SizesDoNotAddUp,), sizes.sizes_add_up, ("available", "evictable", "protected", "rows", "requests")),
    Check(7, (tree_shape.LinksDisagree,), tree_shape.parents_lead_to_the_root, ("nodes",)),
    Check(7, (tree_shape.LinksDisagree,), tree_shape.children_name_their_parent, ("nodes", "children")),
    Check(7, (tree_shape.NamespaceMixed,), tree_shape.children_keep_the_namespace, ("nodes",)),
    Check(7, (tree_shape.EdgeMalformed,), tree_shape.edges_are_whole_pages, ("nodes",)),
    Check(7, (tree_shape.SiblingsShareFirstPage,), tree_shape.siblings_start_with_different_pages, ("nodes",)),
    Check(7, (tree_shape.PageOnTwoEdges,), tree_shape.no_page_is_on_two_edges, ("nodes",)),
    Check(
        7,
        (tree_shape.EvictableSetWrong,),
        tree_shape.evictable_nodes_are_unlocked_leaves,
        ("nodes", "evictable_nodes"),
    ),
    Check(8, (content.ContentWrong,), content.reads_return_what_was_computed, ("reads",)),
    Check(9, (writes.SlotChangedOutsideWriteSet,), writes.only_the_write_set_changed, ("pool",)),
    Check(10, (content.MatchTooLong,), content.match_leaves_a_token_to_compute, ("fingerprints",)),
    Check(10, (content.MatchedUncommitted,), content.match_returns_committed_prefix, (*_PATHS, "fingerprints")),
    Check(10, (content.MatchedUncommitted,), content.peek_finds_a_committed_prefix, ("nodes", "fingerprints")),
    Check(11, (in_flight.InFlightDisturbed,), in_flight.requests_in_flight_keep_their_row, ("rows", "requests")),
    Check(
        11, (in_flight.InFlightDisturbed,), in_flight.requests_in_flight_keep_their_write_slots, ("rows", "requests")
    ),
    Check(11, (in_flight.InFlightDisturbed,), in_flight.requests_in_flight_keep_their_pages, _PAGES),
    Check(11, (in_flight.GenerationLowered,), in_flight.page_generations_never_fall, ("page_generations",)),
    Check(11, (in_flight.GenerationLowered,), in_flight.row_generations_never_fall, ("row_generations",)),
    Check(
        11,
        (in_flight.GenerationNotRaised,),
        in_flight.pages_given_back_have_a_new_generation,
        (*_PAGES, "page_generations"),
    ),
    Check(
        11,
        (in_flight.GenerationNotRaised,),
        in_flight.rows_given_back_have_a_new_generation,
        ("rows", "row_generations"),
    ),
    Check(12, (promises.AllocPromiseBroken,), promises.alloc_gives_the_room_there_is, ("free_pages", "nodes")),
    Check(12, (promises.EvictPromiseBroken,), promises.evict_frees_what_was_asked, ("nodes",)),
    Check(12, (promises.EvictReportWrong,), promises.evictions_are_reported, ("nodes",)),
    Check(12, (promises.IdleCountsWrong,), promises.drained_cache_is_idle, ("requests", "nodes")),
    Check(12, (promises.RefusalChangedState,), promises.refusal_changes_nothing, ()),
)


def run_checks(observation: Observation, before: Index | None = None) -> Index:
    """Raise the first violation of a law, in the order of CHECKS; where none is found, return the index of ``now``.

    Who runs one operation after the other hands that index back as the next one's ``before``, which
    saves building it again.
    """
    seen = Seen(observation, before)
    for check in _that_need_none_of(_missing_in(observation)):
        check.function(seen)
    return seen.now


@dataclass(slots=True)
class Findings:
    """Every violation of one step, in the order of CHECKS, and the checks that a broken snapshot made crash."""

    violations: list[Violation] = field(default_factory=list)
    did_not_run: list[str] = field(default_factory=list)  # "name of the check: what it raised"


def run_every_check(observation: Observation, without: int | None = None) -> Findings:
    """Run every check, also behind the first violation; those of the law ``without`` are left out.

    A check may rely on laws that come before it. One that crashes where such a law does not hold says nothing of
    its own law: it did not run.
    """
    findings = Findings()
    seen = Seen(observation)
    for check in _that_need_none_of(_missing_in(observation)):
        if check.law == without:
            continue
        try:
            check.function(seen)
        except Violation as violation:
            findings.violations.append(violation)
        except Exception as error:
            findings.did_not_run.append(f"{check.name}: {type(error).__name__}: {error}")
    return findings


def _missing_in(observation: Observation) -> frozenset[str]:
    missing = hidden_parts(observation.now)
    if not observation.fingerprints:
        missing.add("fingerprints")
    return frozenset(missing)


@lru_cache(maxsize=64)
def _that_need_none_of(missing: frozenset[str]) -> tuple[Check, ...]:
    return tuple(check for check in CHECKS if missing.isdisjoint(check.needs))


def unobserved(snapshot: Snapshot, harness_parts: Collection[str] = HARNESS_PARTS) -> list[Check]:
    """List the checks that cannot run on such a snapshot: to be reported as skipped, never as passed.

    ``harness_parts`` are those of HARNESS_PARTS that this run has; a target without KV has no reads.
    """
    missing = hidden_parts(snapshot) | (set(HARNESS_PARTS) - set(harness_parts))
    return [check for check in CHECKS if not missing.isdisjoint(check.needs)]


def hidden_parts(snapshot: Snapshot) -> set[str]:
    """Name the parts that a snapshot does not show. Those of HARNESS_PARTS are none of its own."""
    shown: list[tuple[str, object]] = [
        ("rows", snapshot.rows),
        ("free_rows", snapshot.free_rows),
        ("row_generations", snapshot.row_generations),
        ("requests", snapshot.requests),
        ("nodes", snapshot.nodes),
        ("evictable_nodes", snapshot.evictable_nodes),
        ("root_lock_ref", snapshot.root_lock_ref),
        ("max_context_len", snapshot.max_context_len),
    ]
    for view in snapshot.pools.values():
        shown += [
            ("free_pages", view.free_pages),
            ("page_generations", view.page_generations),
            ("available", view.available),
            ("evictable", view.evictable),
            ("protected", view.protected),
        ]
    missing = {name for name, part in shown if part is None}
    if None in [request.anchor for request in snapshot.requests or ()]:
        missing.add("anchors")
    if None in [node.children for node in snapshot.nodes or ()]:
        missing.add("children")
    return missing
