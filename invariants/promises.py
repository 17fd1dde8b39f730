"""Law 12: what the cache promises: room it has is given, evict frees what was asked, a drained cache is idle.

Also that a refusal changes nothing (SPEC section 5), and that an eviction is reported as it happened.

Not verified here: that the victims are the ones that the policy names (the comparison with the
model), and refusals other than ``OutOfPages`` (likewise).
"""

from kvlockstep.invariants.agreement import compare
from kvlockstep.invariants.index import Index, Seen
from kvlockstep.invariants.owners import listing, operation
from kvlockstep.invariants.violation import Divergence, Violation


class AllocPromiseBroken(Violation):
    """``alloc`` refused for pages although free and evictable pages cover the need."""


class EvictPromiseBroken(Violation):
    """``evict`` freed less than it was asked and could."""


class EvictReportWrong(Violation):
    """The slots reported as evicted are not the nodes that left the tree."""


class IdleCountsWrong(Violation):
    """A cache without requests and nodes does not have all its pages and rows free."""


class RefusalChangedState(Violation):
    """A refused operation changed something."""


def alloc_gives_the_room_there_is(seen: Seen) -> None:
    """``alloc`` is refused for pages only where free and evictable pages do not cover its need."""
    observation = seen.observation
    if observation.kind != "alloc" or observation.refused != "OutOfPages" or observation.n < 0:
        return
    page_size = seen.now.page_size
    free, evictable = len(seen.before.full.free) * page_size, seen.before.unlocked_slots()
    if observation.n * page_size <= free + evictable:
        raise AllocPromiseBroken(
            f"OutOfPages for {observation.n} pages ({observation.n * page_size} slots), "
            f"expected success with {free} free and {evictable} evictable slots",
            [("refused", operation(observation))],
            ("free",) if observation.n * page_size <= free else ("evictable",),
        )


def evict_frees_what_was_asked(seen: Seen) -> None:
    """``evict(n)`` frees ``n`` slots or more, or all that can be evicted."""
    observation = seen.observation
    if observation.kind != "evict" or observation.refused is not None:
        return
    evictable = seen.before.unlocked_slots()
    freed = sum([len(slots) for slots in observation.evicted])
    if freed < min(observation.n, evictable):
        raise EvictPromiseBroken(
            f"evict {observation.n} freed {freed} slots, expected at least {min(observation.n, evictable)}",
            [("evictable", f"{evictable} slots before")],
            ("tree",),
        )


def evictions_are_reported(seen: Seen) -> None:
    """The freed slots, a list a node, are those of the nodes that left the tree."""
    observation = seen.observation
    if observation.kind not in ("alloc", "evict"):
        return
    kept = set(seen.now.full.tree_pages)
    edges = zip(seen.before.full.edges, seen.before.full.edge_pages, strict=True)
    expected = sorted([slots for slots, pages in edges if pages and pages[0] not in kept])
    got = sorted(observation.evicted)
    if expected != got:
        raise EvictReportWrong(
            f"{operation(observation)} reported {len(got)} evicted nodes, expected {len(expected)} that left the tree",
            [
                ("expected", "; ".join(listing(slots) for slots in expected) or "none"),
                ("got", "; ".join(listing(slots) for slots in got) or "none"),
            ],
            ("too few",) if len(got) < len(expected) else ("too many",) if len(got) > len(expected) else ("other",),
        )


def drained_cache_is_idle(seen: Seen) -> None:
    """Without requests and nodes, every page and every row is free, and the sizes say so."""
    now = seen.observation.now
    if now.requests or now.nodes:
        return
    for got, expected, what in _idle_counts(seen.now):
        if got is not None and got != expected:
            raise IdleCountsWrong(
                f"an empty cache has {got} {what}, expected {expected}",
                [("after", operation(seen.observation))],
                (what,),
            )


def _idle_counts(index: Index) -> list[tuple[int | None, int, str]]:
    now = index.snapshot
    counts = [(None if now.free_rows is None else len(now.free_rows), now.n_rows, "free rows")]
    for view in now.pools.values():
        counts += [
            (None if view.free_pages is None else len(view.free_pages), view.n_pages, "free pages"),
            (view.available, view.n_pages * now.page_size, "available slots"),
            (view.evictable, 0, "evictable slots"),
            (view.protected, 0, "protected slots"),
        ]
    return counts


def refusal_changes_nothing(seen: Seen) -> None:
    """A refused operation leaves the cache as it was; one that reports evictions may have evicted."""
    observation = seen.observation
    if observation.refused is None or observation.evicted or observation.before == observation.now:
        return
    try:
        compare(observation.before, observation.now, "before", "now")
    except Divergence as difference:
        raise RefusalChangedState(
            f"{operation(observation)} was refused ({observation.refused}) and changed the cache, expected no change",
            [("what", f"{type(difference).__name__}: {difference.headline}"), *difference.facts],
            (type(difference).__name__,),
        ) from None
