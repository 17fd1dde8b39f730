"""What a run tried and reached: operations by outcome, state labels, transitions, allowances, cases, distinct traces.

Plain counters that add up over cases and workers and travel as JSON.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvlockstep.fuzz.labels import Memory, reached
from kvlockstep.fuzz.ops import Op
from kvlockstep.fuzz.search import Search
from kvlockstep.fuzz.states import StateClass, Transition, state_class
from kvlockstep.invariants import Observation, Snapshot


@dataclass(slots=True)
class Statistics:
    """Counts over any number of cases."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, "done" or the refusal)
    labels: Counter[str] = field(default_factory=Counter)
    transitions: Counter[Transition] = field(default_factory=Counter)  # of operations done
    cases: int = 0
    cases_under_pressure: int = 0  # those that evicted, or were refused a row or pages
    distinct_cases: int = 0
    allowances: Counter[str] = field(default_factory=Counter)  # operations that used one; 0 for declared ones unused

    @property
    def done(self) -> int:
        """Operations that were done, not refused."""
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome == "done")

    @property
    def refused(self) -> int:
        return sum(self.outcomes.values()) - self.done

    def add(self, other: "Statistics") -> None:
        self.outcomes.update(other.outcomes)
        self.labels.update(other.labels)
        self.transitions.update(other.transitions)
        self.cases += other.cases
        self.cases_under_pressure += other.cases_under_pressure
        self.distinct_cases += other.distinct_cases
        self.allowances.update(other.allowances)

    def to_json(self) -> dict[str, Any]:
        outcomes: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in sorted(self.outcomes.items()):
            outcomes.setdefault(kind, {})[outcome] = count
        return {
            "outcomes": outcomes,
            "labels": dict(sorted(self.labels.items())),
            "transitions": [[*transition, count] for transition, count in sorted(self.transitions.items())],
            "cases": self.cases,
            "cases_under_pressure": self.cases_under_pressure,
            "distinct_cases": self.distinct_cases,
            "allowances": dict(sorted(self.allowances.items())),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Statistics":
        outcomes = {(kind, outcome): n for kind, row in data["outcomes"].items() for outcome, n in row.items()}
        transitions = {(kind, StateClass(*a), StateClass(*b)): n for kind, a, b, n in data["transitions"]}
        return cls(
            Counter(outcomes),
            Counter(data["labels"]),
            Counter(transitions),
            data["cases"],
            data["cases_under_pressure"],
            data["distinct_cases"],
            Counter(data["allowances"]),
        )


class CaseWatcher:
    """Counts one case into ``statistics``, and for the ``search`` what was tried where: a ``watch`` of a Lockstep.

    ``note`` is told of each transition that was made.
    """

    def __init__(
        self,
        statistics: Statistics,
        memory: Memory,
        search: Search | None = None,
        note: Callable[[Transition], None] | None = None,
    ) -> None:
        self.statistics = statistics
        self.memory = memory
        self.search = search
        self.note = note
        self.under_pressure = False
        self._last: tuple[Snapshot, StateClass] | None = None
        statistics.cases += 1

    def __call__(self, op: Op, seen: Observation) -> None:
        self.statistics.outcomes[seen.kind, seen.refused or "done"] += 1
        self.statistics.labels.update(reached(seen, self.memory))
        self.statistics.allowances.update(seen.allowed)
        before, after = self._class_of(seen.before), self._class_of(seen.now)
        if seen.refused is None:
            transition = seen.kind, before, after
            self.statistics.transitions[transition] += 1
            if self.note is not None:
                self.note(transition)
        if self.search is not None:
            self.search.note(seen.kind, before)
        if not self.under_pressure and (seen.evicted or seen.refused in ("OutOfPages", "OutOfRows")):
            self.under_pressure = True
            self.statistics.cases_under_pressure += 1

    def _class_of(self, snapshot: Snapshot) -> StateClass:
        """Tell the class of a snapshot; the one after an operation is the one before the next."""
        if self._last is None or self._last[0] is not snapshot:
            self._last = snapshot, state_class(snapshot)
        return self._last[1]
