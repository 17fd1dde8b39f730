"""The search learns: what a worker has tried decides what it tries next.

Drawn by weight alone, most operations of a run repeat what was tried often, and many an operation is never tried in
the state in which it would do harm. So a worker counts how often each kind of operation was tried in each class of
states (``states.py``), done or refused. One rule of the machine draws no kind: it takes one of those that were tried
least in the class at hand. What that is depends on the cases before and on nothing else, so the same seed makes the
same search; and what is seen of a target there has been compared with the model.

It reaches more transitions, not planted faults sooner (``benchmarks/search_learns.py``); what does that is the corpus
that is made of the transitions reached (``campaign/corpus.py``).
"""

from collections import Counter
from collections.abc import Sequence

from kvlockstep.fuzz.states import StateClass


class Search:
    """How often each kind of operation was tried in each class of states.

    >>> search, roomy = Search(), StateClass("roomy", "empty", "none", "none", "some")
    >>> for kind in ("submit", "submit", "peek"):
    ...     search.note(kind, roomy)
    >>> search.rarest_first(roomy, ("submit", "peek", "evict"))
    ['evict', 'peek', 'submit']
    """

    def __init__(self) -> None:
        self._tried: Counter[tuple[StateClass, str]] = Counter()

    def note(self, kind: str, before: StateClass) -> None:
        """Count an operation that was tried."""
        self._tried[before, kind] += 1

    def rarest_first(self, now: StateClass, kinds: Sequence[str]) -> list[str]:
        """Sort kinds of operations by how often they were tried in this class; those tried equally often stay put."""
        return sorted(kinds, key=lambda kind: self._tried[now, kind])
