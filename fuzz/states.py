"""Classes of states: what a cache is like before and after an operation, in a few words.

A `state_class` is coarse enough for a person: a run says in which classes each operation was never tried. Two
operations that took a cache from one class to another made the same transition. A `Situation` looks closer: at the
request of the operation, at the batch, at the policy and at the labels that were reached. The search goes back to
the rarest situations (``search.py``). Both are read off an `Observation`, so that they mean the same for each target;
what a target does not show is the class ``?``.
"""

from collections.abc import Collection
from typing import NamedTuple

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.invariants import FULL, Observation, RequestView, Snapshot

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


Situation = tuple[object, ...]
"""What the search tells apart; compared and counted, never shown."""


def situation_of(
    seen: Observation, labels: Collection[str], config: CacheConfig, before: StateClass, after: StateClass
) -> Situation:
    """Describe an operation more closely than its transition does."""
    requests = {view.request: view for view in seen.before.requests or ()}
    of_op = tuple(sorted(_alignment(requests.get(name), seen.before.page_size) for name in seen.requests))
    evicted = (config.policy, min(len(seen.evicted), 2)) if seen.evicted else ()
    switches = (min(config.page_size, 2), config.key_units, config.prefix_sharing)
    return (seen.kind, seen.refused, of_op, evicted, switches, tuple(sorted(labels)), before, after)


def _alignment(view: RequestView | None, page_size: int) -> tuple[object, ...]:
    """Describe where a request stands: at a page boundary or not, with a tail or not, with a locked prefix or not."""
    if view is None:
        return ()
    has_tail = -(-view.allocated_len // page_size) > -(-view.committed_len // page_size)
    return (view.state, view.committed_len % page_size == 0, has_tail, view.protected_len > 0)
