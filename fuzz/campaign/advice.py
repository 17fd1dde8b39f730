"""The one thing to do first about a campaign: the most urgent of what it shows, with a line to paste.

The rules are tried in order; the first that speaks is the answer. What a person has to look at comes before what was
not shown, and that before what a longer run might reach.
"""

import math
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvlockstep.fuzz.campaign.ending import number_of_causes
from kvlockstep.fuzz.campaign.folder import Cause, Settings
from kvlockstep.fuzz.campaign.record import Record
from kvlockstep.fuzz.exits import CLEAN
from kvlockstep.fuzz.exits import UNKNOWN as UNSHOWN
from kvlockstep.fuzz.failures import replay_line
from kvlockstep.fuzz.registry import LANED
from kvlockstep.fuzz.report import reaches_of
from kvlockstep.fuzz.trace import TraceError
from kvlockstep.fuzz.trace_lines import decode_header
from kvlockstep.fuzz.verdict import by_target, merged, shortfalls, too_seldom, unseen_laws
from kvlockstep.invariants.checks import CHECKS

VIOLATION = "violation"
TROUBLE = "trouble"
UNKNOWN = "unknown"
CLEAR = "clean"


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do first, in one sentence; ``line`` is what to paste, None where there is nothing to do."""

    kind: str  # of the verdict: VIOLATION, TROUBLE, UNKNOWN or CLEAR
    verdict: str
    sentence: str
    line: str | None = None


Rule = Callable[[Record], Advice | None]


def first_thing(record: Record) -> Advice:
    """Return what the first rule says that says anything."""
    return next(advice for rule in _RULES if (advice := rule(record)) is not None)


def law_of(cause: Cause) -> str:
    """Name the law that a failure breaks, with its number in the specification if it has one."""
    numbers = sorted({check.law for check in CHECKS for kind in check.violations if kind.__name__ == cause.law})
    return f"law {', '.join(map(str, numbers))}, {cause.law}" if numbers else cause.law


def line_for(record: Record, cause: Cause) -> str | None:
    """Return the line that replays a failure; None if its trace is gone."""
    folder = record.folder_of(cause)
    if folder is None or not (folder / "trace.jsonl").is_file():
        return None
    return replay_line(folder / "trace.jsonl", cause.target)


def line_for_trace(record: Record, text: str | None, party: int) -> str | None:
    """Return the line that replays a trace that an event names; None if it is gone or cannot be read."""
    path = record.file_named(text, party) if text is not None else None
    if path is None:
        return None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            target = decode_header(file.readline(), f"{path}:1").target
    except (OSError, TraceError):
        return None
    return replay_line(path, target or "gpu_impl")


def nothing_done(record: Record) -> list[str]:
    """List targets and lanes that were asked for, and on which no operation was done."""
    done = {(s.order.target, s.lane) for s in record.states if s.statistics.done}
    missing: dict[str, None] = {}
    for party in record.parties:
        if party.settings is None:
            continue
        for target in party.settings.targets:
            lanes: list[str | None] = [x for x in party.settings.lanes if x in LANED.get(target, ())]
            for lane in lanes or [None]:
                if not any(t == target and lane in (None, here) for t, here in done):
                    missing[f"{target} on lane {lane}" if lane is not None else target] = None
    return list(missing)


def accepted_laws(record: Record) -> set[int]:
    """Return the laws that need not have been observed, as the parties that ended clean say themselves."""
    lines = [line for party in record.parties if party.end_code == CLEAN for line in party.end_lines]
    return {law for law in (1, 2, 3) if any(f"accepted by --accept-unobserved {law}" in line for line in lines)}


def not_reached(record: Record) -> list[str]:
    """Say what was not reached often enough: labels, and what else a run must have shown to be called clean."""
    lines = []
    for party in record.parties:
        states = record.states_of_parties[party.number]
        labels = too_seldom(states)
        of_lanes = [line for line in shortfalls(states, party.progress.seconds) if line not in labels]
        lines += [line if f"{party.name}:" in line else f"{party.name}: {line}" for line in of_lanes]
    return lines + too_seldom(record.states)


def never_done(record: Record) -> list[str]:
    """Name the state in which each operation of each target was never done, the most frequent one first."""
    groups = by_target(record.states)
    found = []
    for target, group in groups.items():
        where = f" on {target}" if len(groups) > 1 else ""
        for reach in reaches_of(merged(group))[0]:
            if reach.never is not None:
                met = f"where {reach.never_met:,} operations began"
                found.append((-reach.never_met, f"{reach.kind}{where} was never done with {reach.never}, {met}"))
    return [text for _, text in sorted(found, key=lambda one: one[0])]


def _broken_law(record: Record) -> Advice | None:
    causes = [finding.cause for finding in record.findings if finding.is_new and finding.cause.replays]
    if not causes:
        return None
    cause = causes[0]
    length = f"{cause.minimized_len} operation" + ("s" if cause.minimized_len != 1 else "")
    return Advice(
        VIOLATION,
        f"Violation: {number_of_causes(causes)}.",
        f"Replay {cause.signature} on {_place(cause)}: {law_of(cause)}, in {length}.",
        line_for(record, cause) or _look(record),
    )


def _untried_failure(record: Record) -> Advice | None:
    causes = [finding.cause for finding in record.findings if finding.is_new and finding.cause.replays is None]
    if not causes:
        return None
    cause = causes[0]
    return Advice(
        VIOLATION,
        "A failure was found; whether it replays in a fresh process was not tried yet.",
        f"Replay {cause.signature} on {_place(cause)}: {law_of(cause)}.",
        line_for(record, cause) or _look(record),
    )


def _place(cause: Cause) -> str:
    return f"{cause.target} with the planted fault {cause.fault}" if cause.fault else cause.target


def _full_disk(record: Record) -> Advice | None:
    for party in record.parties:
        for event in party.since_begin:
            if event["event"] == "disk full":
                return Advice(
                    TROUBLE,
                    "Unfinished: the disk was full.",
                    f"Make room for {party.name}, and give its command again: {event.get('what', 'the disk was full')}",
                    f"df -h {shlex.quote(_shown(record.folder))}",
                )
    return None


def _given_up(record: Record) -> Advice | None:
    gone = [worker for worker in record.workers if worker.given_up is not None]
    if not gone:
        return None
    first = gone[0]
    traces = [d.trace for d in record.deaths if (d.party, d.worker) == (first.party, first.name) and d.trace]
    line = line_for_trace(record, traces[-1], first.party) if traces else None
    count = "a worker was" if len(gone) == 1 else f"{len(gone)} workers were"
    return Advice(
        TROUBLE,
        f"Not clean: {count} given up.",
        f"See why worker {first.name} of party {first.party} cannot work: {first.given_up}",
        line or "kvlockstep doctor",
    )


def _flaky(record: Record) -> Advice | None:
    """Something did not happen twice: a case, a failure, or the death of a worker."""
    for party in record.parties:
        for event in party.named("flake"):
            line = line_for_trace(record, str(event.get("trace", "")), party.number)
            sentence = f"Find out what the case {event.get('trace', '?')} depends on beside its operations."
            return Advice(TROUBLE, "Not clean: a case did not give the same twice.", sentence, line or _look(record))
        if party.progress.twins_differed:
            sentence = f"Look at the cases that differed: {party.progress.twins_differed} of {party.name}."
            return Advice(TROUBLE, "Not clean: a case did not give the same twice.", sentence, _look(record))
    for finding in record.findings:
        if finding.is_new and finding.cause.replays is False:
            sentence = f"Find out what {finding.cause.signature} on {_place(finding.cause)} depends on."
            verdict = "Not clean: a failure was found that did not replay in a fresh process."
            return Advice(TROUBLE, verdict, sentence, line_for(record, finding.cause) or _look(record))
    for death in record.deaths:
        if not death.is_explained:
            sentence = f"See what worker {death.worker} of party {death.party} was doing: {death.how}"
            line = line_for_trace(record, death.trace, death.party)
            return Advice(TROUBLE, "Not clean: a worker died, of what is not known.", sentence, line or _look(record))
    return None


def _not_run(record: Record) -> Advice | None:
    missing = nothing_done(record)
    if not missing and any(state.statistics.done for state in record.states):
        return None
    what = ", ".join(missing) or "anything that was asked for"
    return Advice(UNKNOWN, "Unknown: not all was run.", f"See why nothing was done on {what}.", "kvlockstep doctor")


def _unseen_law(record: Record) -> Advice | None:
    accepted = accepted_laws(record)
    for target, group in by_target(record.states).items():
        for law in unseen_laws(group):
            if law in accepted:
                continue
            parts = sorted(
                {p for state in group for number, _, needs in state.unobserved if number == law for p in needs}
            )
            return Advice(
                UNKNOWN,
                f"Unknown: law {law} was not observed on {target}.",
                f"Let {target} show what law {law} is checked on: {', '.join(parts)}.",
                f"kvlockstep fuzz --target {shlex.quote(target)}",
            )
    return None


def _too_seldom(record: Record) -> Advice | None:
    lines = not_reached(record)
    if not lines:
        return None
    how, line = _more(record)
    more = f", and {len(lines) - 1} more" if len(lines) > 1 else ""
    return Advice(UNKNOWN, "Unknown: too little was reached.", f"{how}: {lines[0]}{more}.", line)


def _bad_end(record: Record) -> Advice | None:
    """A party says itself that it is not clean, of something that no rule before knows."""
    for party in record.parties:
        if party.end_code not in (None, CLEAN):
            said = party.end_lines[0] if party.end_lines else "it said no more"
            kind, word = (UNKNOWN, "Unknown") if party.end_code == UNSHOWN else (TROUBLE, "Not clean")
            verdict = f"{word}: {party.name} ended with exit code {party.end_code}."
            return Advice(kind, verdict, f"See what it was: {said}", _look(record))
    return None


def _untried_transition(record: Record) -> Advice | None:
    never = never_done(record)
    if not never:
        return None
    how, line = _more(record)
    return Advice(CLEAR, _clean(record), f"{how}, if there is time: {never[0]}.", line)


def _nothing(record: Record) -> Advice:
    return Advice(CLEAR, _clean(record), "There is nothing to do.")


def _clean(record: Record) -> str:
    """Say that nothing was found, and what that does not cover."""
    text = "Clean: no law was broken, and every required state was reached"
    if record.findings:
        text += f", but for {len(record.findings)} known " + ("cause" if len(record.findings) == 1 else "causes")
    if accepted := sorted(accepted_laws(record)):
        text += f", but for law {', '.join(map(str, accepted))}: not observed, and accepted"
    unended = [party for party in record.parties if party.end_code is None]
    if unended:
        text += "; so far: " + ", ".join(f"{party.name} {_how(party.state)}" for party in unended)
    return f"{text}."


def _how(state: str) -> str:
    return f"is {state}" if state == "running" else f"was {state}"


def _more(record: Record) -> tuple[str, str | None]:
    """Say how more is reached, with the line for it: a party goes on that is not at its end, or one runs for longer."""
    if record.running:
        return "Let it run on", None
    asked = [(party, party.settings) for party in record.parties if party.settings is not None]
    unended = [(party, settings) for party, settings in asked if not party.progress.ended]
    if unended:
        party, settings = unended[0]
        return f"Let {party.name} go on to its end", shlex.join([*_command(record, settings), "--resume"])
    line = shlex.join(_command(record, asked[0][1], longer=2)) if asked else None
    return "Run it for longer", line


def _command(record: Record, settings: Settings, longer: int = 1) -> list[str]:
    """Return the command that asks for the same."""
    said = {
        "--target": ",".join(settings.targets),
        "--lanes": ",".join(settings.lanes),
        "--for": _time(longer * settings.seconds),
        "--workers": f"{settings.workers}",
        "--shard": f"{settings.shard}" if settings.shard.total > 1 else "",
        "--fault": ",".join(settings.faults),
        "--units": f"{longer * settings.units}" if settings.units is not None else "",
        "--out": _shown(record.folder),
    }
    words = [word for name, value in said.items() if value for word in (name, value)]
    return ["kvlockstep", "fuzz", *words, *(["--sanitize"] if settings.sanitize else [])]


def _time(seconds: float) -> str:
    """Write a time as the command line takes it.

    >>> _time(28800), _time(5400), _time(45)
    ('8h', '90m', '45s')
    """
    whole = math.ceil(seconds)
    unit, size = next((unit, size) for unit, size in (("h", 3600), ("m", 60), ("s", 1)) if whole % size == 0)
    return f"{whole // size}{unit}"


def _look(record: Record) -> str:
    return f"ls -l {shlex.quote(_shown(record.folder))}"


def _shown(path: Path) -> str:
    """Return a path as a person would type it, seen from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


_RULES: tuple[Rule, ...] = (
    _broken_law,
    _untried_failure,
    _full_disk,
    _given_up,
    _flaky,
    _not_run,
    _unseen_law,
    _too_seldom,
    _bad_end,
    _untried_transition,
    _nothing,
)
