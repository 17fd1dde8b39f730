"""Classes of states: what a cache is like before and after an operation, in a few words.

A `state_class` is coarse enough for a person: a run says in which classes each operation was never done. Two
operations of a kind that took a cache from one class to another made the same transition. The search prefers what was
tried least in the class at hand (``search.py``). Classes are read off a snapshot, so that they mean the same for each
target; what a target does not show is ``?``.
"""

from typing import NamedTuple

from kvlockstep.invariants import FULL, Snapshot

TIGHT = 2
"""Free pages that are few: a batch of three requests may well want more."""


class StateClass(NamedTuple):
    """One class, a word for each aspect."""

    pool: str  # full: no page free or evictable; evict: none free; tight: few free; roomy
    tree: str  # empty; free: nothing locked; locked: something is
    flying: str  # requests whose pass has not landed: none, one, more
    running: str  # requests that are running: none, some
    rows: str  # those free: none, some

    def __str__(self) -> str:
        flying, rows = f"{self.flying} in flight", f"{self.rows} rows free"
        return ", ".join((f"pool {self.pool}", f"tree {self.tree}", flying, f"{self.running} running", rows))

    def allows(self, kind: str) -> bool:
        """Tell whether an operation of this kind may be done here at all, as far as the class says."""
        if kind == "commit":
            return self.flying != "none"
        if kind in ("checkpoint", "release"):
            return self.running != "none"
        lives = self.tree == "locked" or self.flying in ("one", "more") or self.running == "some"
        return kind != "reset" or not lives


Transition = tuple[str, StateClass, StateClass]
"""Kind of an operation that was done, and the classes before and after it."""


def state_class(snapshot: Snapshot) -> StateClass:
    """Tell the class of a cache from what it shows."""
    return StateClass(_pool(snapshot), _tree(snapshot), *_requests(snapshot), _rows(snapshot))


def _pool(snapshot: Snapshot) -> str:
    pool = snapshot.pools[FULL]
    free = len(pool.free_pages) * snapshot.page_size if pool.free_pages is not None else pool.available
    if free is None:
        return "?"
    if free == 0:
        return "full" if pool.evictable == 0 else "evict"
    return "tight" if free <= TIGHT * snapshot.page_size else "roomy"


def _tree(snapshot: Snapshot) -> str:
    if snapshot.nodes is None:
        return "?"
    if not snapshot.nodes:
        return "empty"
    return "locked" if any(view.lock_ref > 0 for view in snapshot.nodes) else "free"


def _requests(snapshot: Snapshot) -> tuple[str, str]:
    if snapshot.requests is None:
        return "?", "?"
    states = [view.state for view in snapshot.requests]
    return ("none", "one", "more")[min(2, states.count("IN_FLIGHT"))], "some" if "RUNNING" in states else "none"


def _rows(snapshot: Snapshot) -> str:
    if snapshot.free_rows is None:
        return "?"
    return "some" if snapshot.free_rows else "none"
