"""The page of a campaign: one HTML file that needs no script and no other file, the same for the same folder.

Start reading in ``page.html.jinja``, which has the sections in their order; what stands in them is put together here
from the record of the campaign (``record.py``), the advice (``advice.py``) and the curves (``curves.py``). Texts come
from strangers' targets: each is escaped where it is put in, and what cannot be printed is written out.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvlockstep.fuzz.campaign.advice import (
    Advice,
    accepted_laws,
    first_thing,
    law_of,
    line_for,
    not_reached,
    nothing_done,
)
from kvlockstep.fuzz.campaign.curves import N_COLOURS, charts_of, number
from kvlockstep.fuzz.campaign.ending import number_of_causes
from kvlockstep.fuzz.campaign.live import duration
from kvlockstep.fuzz.campaign.record import SLOW, Death, Event, Finding, PartyRecord, Record
from kvlockstep.fuzz.crew import WorkerState
from kvlockstep.fuzz.describe import printable
from kvlockstep.fuzz.failures import PAGE, TRACE, VERDICT, meaning_in, show_line
from kvlockstep.fuzz.labels import LABELS, name_of
from kvlockstep.fuzz.ops import OPS
from kvlockstep.fuzz.report import ENDINGS, Reach, reaches_of, unobserved_lines
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.targets.base import REFUSALS
from kvlockstep.fuzz.verdict import by_target, labels_short, merged, remarks, unseen_laws

Shown = TypeVar("Shown")

MOST_ROWS = 400
"""Rows of a table of what happened; of more, the first and the last are shown, and the page says so."""

MOST_FOUND = 5
"""Causes that are told at the top; the table of failures has them all."""

MOST_OF_A_VERDICT = 1 << 16
"""Characters of a verdict that are shown."""

FILES = (PAGE, TRACE, "original.jsonl", VERDICT, "environment.json", "replay.sh")
"""Of the folder of a failure, in the order in which they are linked."""

COUNTED_ELSEWHERE = ("sample", "start")
"""Events that are not listed: the curves and the table of workers are made of them."""


@dataclass(frozen=True, slots=True)
class Link:
    """A file, as it is reached from the page."""

    name: str
    href: str


@dataclass(frozen=True, slots=True)
class FailureRow:
    """What the page says of one cause."""

    finding: Finding
    law: str
    ending: str | None  # why the search for a shorter trace was not finished
    line: str | None
    show: str | None  # the line that draws it, where no picture lies in its folder
    links: Sequence[Link]
    verdict: str | None
    said: str  # what it means; where that is not known, what the check said, or its name
    picture: Link | None


@dataclass(frozen=True, slots=True)
class Reached:
    """What the workers of one target reached, and what they did not."""

    target: str
    labels: Sequence[tuple[str, int, bool]]  # name, count, too seldom
    reaches: Sequence[Reach]
    n_classes: int
    unseen: Sequence[int]  # laws of the charter
    lines: Sequence[str]  # checks that were not observed, features that were not drawn


@dataclass(frozen=True, slots=True)
class Row:
    """Something that happened: when, to whom, and the facts."""

    party: int
    t: float
    event: str
    facts: Sequence[tuple[str, str]]


def page_of(record: Record, page: Path) -> tuple[str, Advice]:
    """Return the text of the page, with links as they are from where it lies, and what it says to do first."""
    advice = first_thing(record)
    states = record.states
    total = merged(states)
    deaths, deaths_left = _some(record.deaths)
    events, events_left = _some(_events_of(record))
    failures = [_failure_row(record, finding, page) for finding in record.findings]
    flakes = [(party.number, event) for party in record.parties for event in party.named("flake")]
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_printable)
    environment.filters |= {"duration": duration, "number": number, "percent": "{:.0%}".format}
    template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    text = environment.from_string(template).render(
        name=record.folder.resolve().name,
        record=record,
        advice=advice,
        versions=_versions_of(record),
        states=states,
        total=total,
        accepted=sorted(accepted_laws(record)),
        share=_share,
        operations=[(kind, total.outcomes[kind, "done"], _refusals(total, kind)) for kind in _kinds()],
        charts=charts_of(record.parties),
        n_colours=N_COLOURS,
        failures=failures,
        found=_first_forms(failures)[:MOST_FOUND],
        found_left=max(0, len(_first_forms(failures)) - MOST_FOUND),
        causes=number_of_causes([finding.cause for finding in record.findings]),
        missing=nothing_done(record),
        not_reached=not_reached(record),
        reached=[_reached(target, group) for target, group in by_target(states).items()],
        deaths=[(death, _trace_link(record, death, page)) for death in deaths],
        deaths_left=deaths_left,
        slow=SLOW,
        flakes=[(party, event, _link_of(record, event, party, page)) for party, event in flakes],
        unsteady=[finding.cause for finding in record.findings if finding.cause.replays is False],
        events=events,
        events_left=events_left,
    )
    return text, advice


def _printable(value: Any) -> Any:
    """Write out what is no character to be seen, so that no text can turn the page around, or not be written at all."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return printable(value)


def _some(rows: Sequence[Shown]) -> tuple[Sequence[Shown], int]:
    """Return the rows that are shown, and how many are not."""
    if len(rows) <= MOST_ROWS:
        return rows, 0
    half = MOST_ROWS // 2
    return [*rows[:half], *rows[-half:]], len(rows) - 2 * half


def _versions_of(record: Record) -> list[tuple[str, list[int]]]:
    """List the versions that parties ran with, and which parties; those that ran with the same are listed once."""
    parties: dict[str, list[int]] = {}
    for party in record.parties:
        if party.settings is not None and party.settings.environment:
            versions = ", ".join(f"{name} {version}" for name, version in sorted(party.settings.environment.items()))
            parties.setdefault(versions, []).append(party.number)
    return list(parties.items())


def _kinds() -> list[str]:
    return [op.__name__.lower() for op in OPS]


def _refusals(total: Statistics, kind: str) -> list[tuple[str, int]]:
    reasons = [(refusal.__name__, total.outcomes[kind, refusal.__name__]) for refusal in REFUSALS]
    return [(reason, count) for reason, count in reasons if count]


def _share(state: WorkerState) -> float:
    """Return the share of cases that evicted, or were refused room."""
    counts = state.statistics
    return counts.cases_under_pressure / counts.cases if counts.cases else 0.0


def _failure_row(record: Record, finding: Finding, page: Path) -> FailureRow:
    cause = finding.cause
    folder = record.folder_of(cause)
    links = [_link(folder / name, page) for name in FILES if (folder / name).is_file()] if folder is not None else []
    ending = ENDINGS.get(cause.minimize_ending, cause.minimize_ending) if cause.minimize_ending != "minimized" else None
    verdict = _text_of(folder / VERDICT) if folder is not None else None
    line, show = line_for(record, cause), None
    if folder is not None and line is not None and not (folder / PAGE).is_file():
        show = show_line(folder / TRACE, cause.target)
    said = meaning_in(verdict or "") or (verdict or cause.signature).partition("\n")[0]
    picture = next((link for link in links if link.name == PAGE), None)
    return FailureRow(finding, law_of(cause), ending, line, show, links, verdict, said, picture)


def _first_forms(failures: Sequence[FailureRow]) -> list[FailureRow]:
    """Of each cause return the form that stands first."""
    first: dict[tuple[str, str, str | None], FailureRow] = {}
    for failure in failures:
        first.setdefault(failure.finding.cause.root_key, failure)
    return list(first.values())


def _text_of(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8", errors="backslashreplace") as file:
            return file.read(MOST_OF_A_VERDICT).expandtabs()
    except OSError:
        return None


def _link(path: Path, page: Path) -> Link:
    return Link(path.name, quote(os.path.relpath(path, page.parent), safe="/"))


def _trace_link(record: Record, death: Death, page: Path) -> Link | None:
    path = record.file_named(death.trace, death.party) if death.trace is not None else None
    return _link(path, page) if path is not None else None


def _link_of(record: Record, event: Event, party: int, page: Path) -> Link | None:
    path = record.file_named(str(event.get("trace", "")), party)
    return _link(path, page) if path is not None else None


def _reached(target: str, group: Sequence[WorkerState]) -> Reached:
    total = merged(group)
    short = labels_short(group)
    labels = [(name_of(label), total.labels[name_of(label)], label in short) for label in LABELS]
    return Reached(target, labels, *reaches_of(total), unseen_laws(group), unobserved_lines(group) + remarks(group))


def _events_of(record: Record) -> list[Row]:
    """List what is worth a line, party by party, in the order of the journals."""
    return [
        Row(party.number, event["t"], event["event"], [(name, _said(value)) for name, value in _facts(event)])
        for party in record.parties
        for event in party.events
        if event["event"] not in COUNTED_ELSEWHERE
    ]


def _facts(event: Event) -> Iterable[tuple[str, Any]]:
    """Return all that an event says; of a cause only its name and place, which the table of failures has in full."""
    wanted = ("signature", "target", "fault", "worker", "unit") if event["event"] == "cause" else event
    return [(n, event[n]) for n in wanted if n in event and n not in ("t", "event") and event[n] not in (None, [])]


def _said(value: Any) -> str:
    """Write a fact of any kind for a person."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    return json.dumps(value, ensure_ascii=False)


def parties_line(parties: Sequence[PartyRecord]) -> str:
    """Say in which state the parties of a campaign are."""
    return ", ".join(f"{party.name} {party.state}" for party in parties)
