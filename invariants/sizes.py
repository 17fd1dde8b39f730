"""Law 6: the sizes that the cache reports are those that a recount finds.

Not verified here: whether slots counted as free are anyone else's (law 1), and whether the lock
counts that part evictable from protected are right (law 5).
"""

from kvlockstep.invariants.index import PoolIndex, Seen
from kvlockstep.invariants.owners import operation
from kvlockstep.invariants.violation import Violation


class SizesDoNotRecount(Violation):
    """A reported size differs from a recount."""


class SizesDoNotAddUp(Violation):
    """Reported sizes and held pages do not add up to the pool."""


def available_recounts(seen: Seen) -> None:
    """``available`` is the slots of the free pages."""
    for pool in seen.now.pools.values():
        expected = len(pool.free) * pool.page_size
        if pool.view.available != expected:
            raise SizesDoNotRecount(
                f"available is {pool.view.available}, expected {expected}: "
                f"{len(pool.free)} free pages of {pool.page_size}",
                _facts(seen, pool),
                ("available",),
            )


def evictable_recounts(seen: Seen) -> None:
    """``evictable`` is the slots on nodes that nobody locks."""
    for name, pool in seen.now.pools.items():
        expected = seen.now.unlocked_slots(name)
        if pool.view.evictable != expected:
            raise SizesDoNotRecount(
                f"evictable is {pool.view.evictable}, expected {expected} on nodes with lock_ref 0",
                _facts(seen, pool),
                ("evictable",),
            )


def protected_recounts(seen: Seen) -> None:
    """``protected`` is the slots on nodes that somebody locks."""
    for name, pool in seen.now.pools.items():
        expected = sum(map(len, pool.edges)) - seen.now.unlocked_slots(name)
        if pool.view.protected != expected:
            raise SizesDoNotRecount(
                f"protected is {pool.view.protected}, expected {expected} on nodes with lock_ref above 0",
                _facts(seen, pool),
                ("protected",),
            )


def sizes_add_up(seen: Seen) -> None:
    """Available, evictable, protected and the pages held by requests, slack included, are the whole pool.

    A target that shows its sizes and not its free list loses pages here and nowhere else.
    """
    for pool in seen.now.pools.values():
        view = pool.view
        held = sum([len(pages) for pages in pool.tails.values()])
        total = (view.available or 0) + (view.evictable or 0) + (view.protected or 0) + held * pool.page_size
        if total != view.n_pages * pool.page_size:
            raise SizesDoNotAddUp(
                f"sizes add up to {total} slots, expected {view.n_pages * pool.page_size}",
                [*_facts(seen, pool), ("held", f"{held} pages of {pool.page_size} by requests")],
                ("too few",) if total < view.n_pages * pool.page_size else ("too many",),
            )


def _facts(seen: Seen, pool: PoolIndex) -> list[tuple[str, str]]:
    view = pool.view
    return [
        ("pool", pool.name),
        ("reported", f"available {view.available}, evictable {view.evictable}, protected {view.protected}"),
        ("after", operation(seen.observation)),
    ]
