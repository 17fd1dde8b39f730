"""What a campaign left on disk, read as a whole: its parties, their failures merged by cause, their workers.

Read without a lock, so that a campaign at work can be looked at; each file is whole at any time (``folder.py``). What
the folder says is taken for what it is: texts of strangers' targets, and facts that may be missing.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

from kvlockstep.fuzz.campaign.ending import states_of
from kvlockstep.fuzz.campaign.folder import (
    Cause,
    FolderUnusable,
    Progress,
    Settings,
    is_running,
    journal_of,
    numbers_of,
    progress_of,
    settings_of,
)
from kvlockstep.fuzz.crew import WorkerState

Event = dict[str, Any]

SLOW = 0.5
"""Share of the median of its like below which a worker is called slow."""


@dataclass(frozen=True)
class PartyRecord:
    """What one party left behind."""

    number: int
    settings: Settings | None  # None: it was killed before it wrote them
    progress: Progress
    events: Sequence[Event]
    running: bool

    @property
    def name(self) -> str:
        return f"party {self.number}"

    @cached_property
    def since_begin(self) -> Sequence[Event]:
        """The events since the party was started, or resumed, for the last time."""
        begun = [i for i, event in enumerate(self.events) if event["event"] == "begin"]
        return self.events[begun[-1] :] if begun else self.events

    @cached_property
    def end(self) -> Event | None:
        """Its last word, ``end`` or ``interrupted``; None if it is at work, or was killed."""
        last = [event for event in self.since_begin if event["event"] in ("end", "interrupted")]
        return last[-1] if last and not self.running else None

    @property
    def end_code(self) -> int | None:
        """The exit code that it ended with; None if it did not come to its end."""
        code = self.end.get("code") if self.end is not None and self.end["event"] == "end" else None
        return code if isinstance(code, int) else None

    @property
    def state(self) -> str:
        if self.running:
            return "running"
        if self.end is None:
            return "killed before its end"
        return "interrupted" if self.end["event"] == "interrupted" else f"ended, exit code {self.end_code}"

    @property
    def end_lines(self) -> list[str]:
        """What it said at its end."""
        lines = self.end.get("lines") if self.end is not None else None
        return [str(line) for line in lines] if isinstance(lines, list) else []

    def named(self, event: str) -> Iterator[Event]:
        return (one for one in self.events if one["event"] == event)


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause, as all parties know it: the shortest trace, the earliest time, the sum of the times."""

    cause: Cause
    parties: tuple[int, ...]

    @property
    def is_new(self) -> bool:
        """Neither named by --known nor there on the base."""
        return not (self.cause.known or self.cause.old)


@dataclass(frozen=True, slots=True)
class Death:
    """A worker process that died, and what came of looking into it."""

    party: int
    t: float
    worker: str
    unit: Any
    how: str
    trace: str | None  # name of the file, in the folder of the party
    verdict: str | None  # of the post-mortem; None: there was none

    @property
    def is_explained(self) -> bool:
        """The post-mortem died of something too, and that is a cause like any other."""
        no_cause = ("did not happen again", "could not be held")
        return self.verdict is not None and not self.verdict.startswith(no_cause)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker, through all its processes."""

    party: int
    name: str
    unit: int | None
    starts: int
    deaths: int
    rate: float | None  # operations a second, the mean of all samples
    of_median: float | None  # share of the median rate of the workers of the same target and lane
    given_up: str | None  # why

    @property
    def is_slow(self) -> bool:
        return self.of_median is not None and self.of_median < SLOW


@dataclass(frozen=True)
class Record:
    """A campaign. Build one with `read_record`."""

    folder: Path
    parties: Sequence[PartyRecord]

    @cached_property
    def states_of_parties(self) -> dict[int, list[WorkerState]]:
        """What each lane of each party did, in the form that verdicts are drawn from."""
        return {party.number: list(map(partial(_named, party), states_of(party.progress))) for party in self.parties}

    @cached_property
    def states(self) -> list[WorkerState]:
        return [state for states in self.states_of_parties.values() for state in states]

    @cached_property
    def findings(self) -> list[Finding]:
        """All causes, those to look at first first: new ones before known ones, those that replay, short traces."""
        by_key: dict[str, list[tuple[PartyRecord, Cause]]] = {}
        for party in self.parties:
            for cause in party.progress.causes.values():
                by_key.setdefault(cause.key, []).append((party, cause))
        return sorted(map(_merged_finding, by_key.values()), key=_rank)

    @cached_property
    def deaths(self) -> list[Death]:
        return [death for party in self.parties for death in _deaths_of(party)]

    @cached_property
    def workers(self) -> list[WorkerRecord]:
        return [worker for party in self.parties for worker in _workers_of(party)]

    @property
    def running(self) -> bool:
        return any(party.running for party in self.parties)

    def file_named(self, text: str, party: int) -> Path | None:
        """Find the trace that an event names among those of the party and the flakes; None if it is gone."""
        name = re.split(r"[/\\]", text)[-1]
        folders = (self.folder / "parties" / f"{party:04}", self.folder / "flakes")
        found = [path for folder in folders if name and (path := folder / name).is_file()]
        return found[0] if found else None

    def folder_of(self, cause: Cause) -> Path | None:
        """Return the folder of a failure; None if there is none of that name."""
        if cause.folder in ("", ".", "..") or re.search(r"[/\\\0]", cause.folder):
            return None
        path = self.folder / "failures" / cause.folder
        return path if path.is_dir() else None


def read_record(folder: Path) -> Record:
    """Read a campaign. Raises FolderUnusable, which names the file, and the line if it is one of a journal."""
    numbers = numbers_of(folder)
    if not numbers:
        raise FolderUnusable(f"{folder}: no campaign is in it: name what kvlockstep fuzz was given as --out")
    return Record(folder, [_read_party(folder, number) for number in numbers])


def _read_party(folder: Path, number: int) -> PartyRecord:
    running = _is_running(folder, number)  # first: one that ends meanwhile may still be called running, never killed
    path = folder / "parties" / f"{number:04}"
    name = "party.json"
    try:
        settings = settings_of(folder, number)
        name = "progress.json"
        progress = progress_of(folder, number)
        _check(progress)
        name = "journal.jsonl"
        events = list(_checked(journal_of(folder, number), path / name))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise FolderUnusable(f"{path / name}: not what a campaign writes: name another folder") from error
    return PartyRecord(number, settings, progress, events, running)


def _check(progress: Progress) -> None:
    """Raise TypeError, KeyError or ValueError if a part of it is not of the type that the rest of this counts on."""
    numbers: list[Any] = [progress.seconds, progress.twins_compared, progress.twins_differed]
    for counts in (progress.units, progress.starts, progress.deaths):
        numbers += counts.values()
    for state in states_of(progress):
        numbers += [state.seconds, state.statistics.cases, *state.statistics.outcomes.values()]
    for cause in progress.causes.values():
        numbers += [cause.seconds, cause.operations, cause.found_len, cause.minimized_len, cause.times]
        _rank(Finding(cause, ()))
    if None in map(number_of, numbers):
        raise TypeError("a number is none")


def _is_running(folder: Path, number: int) -> bool:
    try:
        return is_running(folder, number)
    except OSError:  # a copy that cannot be written to, in which nobody can be at work
        return False


def _checked(events: Iterable[Event], path: Path) -> Iterator[Event]:
    """Pass on events whose time is one and whose name is one; each line of a journal is an event."""
    for line_number, event in enumerate(events, 1):
        if number_of(event["t"]) is None or not isinstance(event["event"], str):
            raise FolderUnusable(f"{path}:{line_number}: no event of a campaign: delete this line")
        yield event


def number_of(value: Any) -> float | None:
    """Return a fact that is a finite number, and None for any other."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _named(party: PartyRecord, state: WorkerState) -> WorkerState:
    return replace(state, order=replace(state.order, name=f"{state.order.name}, {party.name}"))


def _merged_finding(known: Sequence[tuple[PartyRecord, Cause]]) -> Finding:
    causes = [cause for _, cause in known]
    shortest = min(causes, key=lambda cause: cause.minimized_len)
    first = min(causes, key=lambda cause: cause.seconds)
    tried = [cause.replays for cause in causes if cause.replays is not None]
    merged = replace(
        shortest,
        lane=first.lane,
        worker=first.worker,
        seconds=first.seconds,
        operations=first.operations,
        times=sum(cause.times for cause in causes),
        replays=any(tried) if tried else None,
        known=any(cause.known for cause in causes),
        old=any(cause.old for cause in causes),
    )
    return Finding(merged, tuple(party.number for party, _ in known))


def _rank(finding: Finding) -> tuple[bool, int, int, str]:
    cause = finding.cause
    by_replay = {True: 0, None: 1, False: 2}
    return not finding.is_new, by_replay[cause.replays], int(cause.minimized_len), cause.key


def _deaths_of(party: PartyRecord) -> list[Death]:
    """List the deaths of a party, each with the verdict of the first post-mortem of the worker that followed it."""
    deaths: list[Death] = []
    unsettled: dict[str, int] = {}
    for event in party.events:
        worker = str(event.get("worker", "?"))
        if event["event"] == "death":
            trace = event.get("trace")
            unsettled[worker] = len(deaths)
            how, unit = str(event.get("how", "?")), event.get("unit")
            deaths.append(
                Death(party.number, event["t"], worker, unit, how, str(trace) if trace is not None else None, None)
            )
        elif event["event"] == "postmortem" and worker in unsettled:
            index = unsettled.pop(worker)
            deaths[index] = replace(deaths[index], verdict=str(event.get("verdict", "?")))
    return deaths


def _workers_of(party: PartyRecord) -> list[WorkerRecord]:
    progress = party.progress
    sums: dict[str, list[float]] = {}
    for sample in party.named("sample"):
        rates = sample.get("rates")
        for worker, value in rates.items() if isinstance(rates, dict) else ():
            if (rate := number_of(value)) is not None:
                sums.setdefault(worker, []).append(rate)
    means = {worker: sum(rates) / len(rates) for worker, rates in sums.items()}
    like: dict[str, list[float]] = {}
    for worker, mean in means.items():
        like.setdefault(_lane_in(worker), []).append(mean)
    given_up = {
        str(e.get("worker", "?")): str(e.get("why", "?")) for e in party.since_begin if e["event"] == "given up"
    }
    names = sorted({*progress.starts, *progress.deaths, *progress.units, *means, *given_up}, key=_by_number)
    return [
        WorkerRecord(
            party.number,
            name,
            progress.units.get(name),
            progress.starts.get(name, 0),
            progress.deaths.get(name, 0),
            means.get(name),
            means[name] / of if name in means and (of := median(like[_lane_in(name)])) > 0 else None,
            given_up.get(name),
        )
        for name in names
    ]


def _lane_in(worker: str) -> str:
    """Return what the workers of one target and lane share: the name without its number.

    >>> _lane_in("radix-torch-12")
    'radix-torch'
    """
    return re.sub(r"-[0-9]+$", "", worker)


def _by_number(worker: str) -> tuple[str, int, str]:
    number = re.search(r"[0-9]{1,9}$", worker)
    return _lane_in(worker), int(number[0]) if number else 0, worker
