"""Judges mutants: each is fuzzed in a process of its own, and what becomes of it is one line of a file.

It is looked for as a planted fault is (`hunt.py`), with one difference: any law may name it, since nobody foresaw
what it breaks. A mutant that is not found is looked for once more, longer and from another seed. Files are read back,
so that a command that was interrupted goes on.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kvlockstep.fuzz.faults.fault import KINDS
from kvlockstep.fuzz.faults.hunt import Hunt, NullFault, hunt
from kvlockstep.fuzz.faults.mutants import DoesNotImport, Mutant
from kvlockstep.fuzz.faults.nursery import Ended, Nurseries
from kvlockstep.fuzz.worker import Order

GRACE = 20.0
"""Seconds beyond its budget after which a process is taken to hang."""

LONGER = 6
"""How many times the budget a mutant gets that was not found at first."""

Outcome = Literal["caught", "hung", "died", "unobserved", "no import", "survived", "trouble"]
FOUND: tuple[Outcome, ...] = ("caught", "hung", "died", "unobserved")
"""Nobody would overlook these: a run on a target that does not show what a law needs is never called clean.

A mutant that cannot be imported needed no harness; it is left out of the score.
"""


@dataclass(frozen=True, slots=True)
class Look:
    """One look for one mutant. ``text`` says more where no law was broken."""

    id: str
    seed: int
    budget: float  # seconds
    outcome: Outcome
    law: str | None = None
    operations: int = 0
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a person says of a mutant that survives: that it is none, or what would see it."""

    id: str
    verdict: Literal["equivalent", "blind spot"]
    reason: str


def look_for(mutant: Mutant, seed: int, budget: float, nurseries: Nurseries) -> Look:
    """Fuzz a mutant for ``budget`` seconds at most."""
    fault = NullFault(
        name=mutant.id, story=mutant.diff(), kind=KINDS[0], laws=(), lane="torch", target=mutant.target_name
    )

    ended = Ended(None, "", "")

    def start(order: Order, limit: float) -> Ended:
        nonlocal ended
        ended = nurseries.run(order, order.seconds + GRACE)
        return ended

    found = hunt(fault, seed, budget, minimize_seconds=0.0, start=start)
    return look_of(found, budget, unobserved_in(ended.reports))


def unobserved_in(reports: str) -> list[str]:
    """Return the checks that a run without a violation could not ask, because its target did not show something."""
    events = [json.loads(line) for line in reports.splitlines() if line.startswith('{"event": "end"')]
    return [name for event in events for _, name, _ in event["unobserved"]]


def look_of(found: Hunt, budget: float, unobserved: Sequence[str] = ()) -> Look:
    """Read off a hunt what became of the mutant."""
    if unobserved and found.law is None:
        return Look(found.fault, found.seed, budget, "unobserved", text=f"not shown: {', '.join(unobserved)}")
    outcome: Outcome = "caught" if found.law is not None else "survived"
    text = found.trouble or ""
    if found.law is None and text:
        outcome = "caught"  # a target that cannot be made is seen before the first operation
        for sign, meaning in _SIGNS.items():
            if sign in text:
                outcome = meaning
    return Look(found.fault, found.seed, budget, outcome, found.law, found.operations, found.seconds, text)


_SIGNS: dict[str, Outcome] = {
    "the process hung": "hung",
    "the process died": "died",
    "the harness failed": "trouble",
    DoesNotImport.__name__: "no import",
}


# A run over many


class Looks:
    """The looks of a run, in a file that grows by one line a look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, int, float], Look] = {}
        kept = path.read_bytes() if path.exists() else b""
        self._size = kept.rfind(b"\n") + 1  # the last line may be cut
        for line in kept[: self._size].splitlines():
            self._note(Look(**json.loads(line)))

    def _note(self, look: Look) -> None:
        self._found[look.id, look.seed, look.budget] = look

    def add(self, look: Look) -> None:
        self._note(look)
        self._path.touch()
        with self._path.open("r+b") as file:
            file.seek(self._size)
            file.truncate()
            file.write(json.dumps(asdict(look)).encode() + b"\n")
            self._size = file.tell()

    def get(self, id: str, seed: int, budget: float) -> Look | None:
        return self._found.get((id, seed, budget))

    def last(self, id: str, seed: int, budget: float) -> Look | None:
        """Return what became of a mutant in the end; None while it is to be looked for, or once more."""
        first = self.get(id, seed, budget)
        if first is None or first.outcome != "survived":
            return first
        return self.get(id, seed + 1, budget * LONGER)


def look_for_all(mutants: Sequence[Mutant], seed: int, budget: float, jobs: int, looks: Looks) -> Iterator[Look]:
    """Look for each mutant that has not been looked for yet, ``jobs`` at a time; yield and keep each look as it comes.

    Then look for those that survived with six times the budget and the next seed.
    """
    nurseries = Nurseries()
    pool = ThreadPoolExecutor(jobs)
    try:
        for again in (False, True):
            this_seed, this_budget = (seed + 1, budget * LONGER) if again else (seed, budget)
            due = [mutant for mutant in mutants if looks.get(mutant.id, this_seed, this_budget) is None]
            if again:
                due = [mutant for mutant in due if looks.last(mutant.id, seed, budget) is None]
            pending = [pool.submit(look_for, mutant, this_seed, this_budget, nurseries) for mutant in due]
            for future in as_completed(pending):
                looks.add(look := future.result())
                yield look
    finally:  # after Ctrl-C those that run are ended, and the others are not begun
        pool.shutdown(wait=False, cancel_futures=True)
        nurseries.close()
        pool.shutdown()


# The score


def read_verdicts(path: Path) -> dict[str, Verdict]:
    """Read the verdicts on survivors by id: a TOML file of ``[[mutant]]`` tables. Raises ValueError on a bad one."""
    found: dict[str, Verdict] = {}
    for table in tomllib.loads(path.read_text())["mutant"]:
        verdict = Verdict(**table)
        if verdict.verdict not in ("equivalent", "blind spot") or not verdict.reason or verdict.id in found:
            raise ValueError(f"{path.name}: {verdict.id}: expected one verdict, equivalent or blind spot, and a reason")
        found[verdict.id] = verdict
    return found


@dataclass(frozen=True, slots=True)
class Score:
    """How many of some mutants were found. ``n`` leaves out those that cannot be imported."""

    n: int
    n_found: int
    n_equivalent: int  # of those that survived
    n_left_out: int  # not imported, or the harness failed

    @property
    def of_all(self) -> float:
        return self.n_found / self.n if self.n else 1.0

    @property
    def without_equivalents(self) -> float:
        n = self.n - self.n_equivalent
        return self.n_found / n if n else 1.0


def score_of(looks: Iterable[Look], verdicts: Mapping[str, Verdict]) -> Score:
    """Count."""
    looks = list(looks)
    counted = [look for look in looks if look.outcome in (*FOUND, "survived")]
    survived = [look.id for look in counted if look.outcome == "survived"]
    n_equivalent = sum(id in verdicts and verdicts[id].verdict == "equivalent" for id in survived)
    return Score(len(counted), len(counted) - len(survived), n_equivalent, len(looks) - len(counted))
