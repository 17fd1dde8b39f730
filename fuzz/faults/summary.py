"""What several hunts for one fault come to, and the results of a command as JSON.

A fault is *caught* if every hunt found it by a law that may name it, and *missed* if one did not. A hunt without a
verdict makes it an *error*, unless it is missed anyway. The null fault must not be caught: that is a *false alarm*.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from typing import Any, Literal

from kvlockstep.fuzz.faults.fault import Fault
from kvlockstep.fuzz.faults.hunt import Hunt, NullFault

Verdict = Literal["caught", "missed", "error", "false alarm", "not caught"]
"""``not caught`` is what the null fault must be."""

FAILS: tuple[Verdict, ...] = ("missed", "false alarm")


@dataclass(frozen=True, slots=True)
class Summary:
    """One fault and its hunts, by seed."""

    fault: Fault
    hunts: tuple[Hunt, ...]

    @property
    def caught(self) -> list[Hunt]:
        return [hunt for hunt in self.hunts if hunt.caught]

    @property
    def missed(self) -> list[Hunt]:
        return [hunt for hunt in self.hunts if not hunt.caught and hunt.trouble is None]

    @property
    def in_trouble(self) -> list[Hunt]:
        return [hunt for hunt in self.hunts if hunt.trouble is not None]

    @property
    def is_null(self) -> bool:
        return isinstance(self.fault, NullFault)

    @property
    def verdict(self) -> Verdict:
        if self.is_null:
            return "false alarm" if self.caught else "error" if self.in_trouble else "not caught"
        return "missed" if self.missed else "error" if self.in_trouble else "caught"

    @property
    def laws(self) -> list[str]:
        """The laws that named it, also those that may not."""
        return sorted({hunt.law for hunt in self.hunts if hunt.law is not None})

    def median_of(self, fact: Literal["operations", "seconds", "minimized_len"]) -> float | None:
        """Return the median over the seeds with which it was caught."""
        return float(median(getattr(hunt, fact) for hunt in self.caught)) if self.caught else None

    @property
    def slowest(self) -> float | None:
        return max((hunt.seconds for hunt in self.caught), default=None)


def summaries_of(faults: Sequence[Fault], hunts: Iterable[Hunt]) -> list[Summary]:
    """Put the hunts with nothing left out to their faults; a fault without any is not among the results."""
    of_fault: dict[str, list[Hunt]] = {fault.name: [] for fault in faults}
    for hunt in hunts:
        if hunt.without is None:
            of_fault[hunt.fault].append(hunt)
    found = [(fault, sorted(of_fault[fault.name], key=lambda hunt: hunt.seed)) for fault in faults]
    return [Summary(fault, tuple(hunts)) for fault, hunts in found if hunts]


def in_order(hunts: Iterable[Hunt]) -> list[Hunt]:
    """Sort hunts by their fault, seed and the law that was left out."""
    return sorted(hunts, key=lambda hunt: (hunt.fault, hunt.seed, -1 if hunt.without is None else hunt.without))


def over_faults(summaries: Sequence[Summary], fact: Literal["operations", "seconds", "minimized_len"]) -> float | None:
    """Return the median over faults of the median over their seeds."""
    medians = [of_fault for summary in summaries if (of_fault := summary.median_of(fact)) is not None]
    return median(medians) if medians else None


def results_of(summaries: Sequence[Summary], seeds: int, seconds: float, null_seconds: float) -> dict[str, Any]:
    """Return what a command found, for a JSON file: sorted, and without anything that another run would not repeat.

    Only seconds differ from run to run.
    """
    by_name = sorted(summaries, key=lambda summary: (summary.fault.target, summary.fault.name))
    return {
        "kvlockstep": version("kvlockstep"),
        "seeds": seeds,
        "seconds": seconds,
        "null_seconds": null_seconds,
        "faults": [
            {
                "fault": summary.fault.name,
                "target": summary.fault.target,
                "lane": summary.fault.lane,
                "kind": summary.fault.kind,
                "story": summary.fault.story,
                "bug": summary.fault.bug,
                "may_be_named_by": list(summary.fault.laws),
                "verdict": summary.verdict,
                "caught": len(summary.caught),
                "of": len(summary.hunts),
                "named_by": summary.laws,
                "operations": summary.median_of("operations"),
                "seconds": summary.median_of("seconds"),
                "slowest_seconds": summary.slowest,
                "minimized_len": summary.median_of("minimized_len"),
            }
            for summary in by_name
        ],
        "hunts": [asdict(hunt) for summary in by_name for hunt in summary.hunts],
    }
