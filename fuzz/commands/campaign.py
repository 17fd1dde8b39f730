"""``kvlockstep fuzz --for 8h``: the run that lasts, on many workers, which can be resumed and shared."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from platform import node
from typing import Protocol

import click
from rich.console import Console

from kvlockstep.fuzz.campaign.ending import Outcome, grouped, states_of, verdict_of_party
from kvlockstep.fuzz.campaign.folder import Cause, FolderUnusable, Party, Progress, Settings, join
from kvlockstep.fuzz.campaign.live import duration, shown
from kvlockstep.fuzz.campaign.seeds import NoShard, Shard, parse_shard
from kvlockstep.fuzz.campaign.store import Link, Store, StoreUnusable
from kvlockstep.fuzz.campaign.supervisor import Bounds, Supervisor
from kvlockstep.fuzz.crew import run_workers
from kvlockstep.fuzz.exits import CLEAN, INTERRUPTED, UNKNOWN, USAGE, VIOLATION, Stop, complain, usable, writing
from kvlockstep.fuzz.failures import environment, keep_reserve, replay_line
from kvlockstep.fuzz.places import PlaceOf, n_workers, names_of, places_for
from kvlockstep.fuzz.registry import check_fault, check_sanitizers, targets_named
from kvlockstep.fuzz.report import print_run
from kvlockstep.fuzz.verdict import Verdict, remarks

MIN_SECONDS, MAX_SECONDS = 0.1, 30 * 24 * 3600.0

_DURATION = r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?"


def read_duration(context: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Read a time such as ``8h``, ``90m``, ``1h30m``, ``45s`` or ``45``; in seconds. Raises BadParameter."""
    if value is None:
        return None
    seconds_only = re.fullmatch(r"[\d.]+", value) is not None  # what 8h30 means, nobody can say
    found = re.fullmatch(_DURATION, f"{value}s" if seconds_only else value) if value else None
    if found is None:
        raise click.BadParameter(f"{value!r} is not a time such as 8h, 90m or 45s", context, param)
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not MIN_SECONDS <= total <= MAX_SECONDS:
        raise click.BadParameter(f"{value!r}: expected a time from {MIN_SECONDS} s to 30 days", context, param)
    return total


def read_size(context: click.Context, param: click.Parameter, value: str) -> int:
    """Read a size such as ``4G`` or ``512M``; in bytes. Raises BadParameter."""
    found = re.fullmatch(r"([1-9]\d{0,5})([MG])", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a size such as 4G or 512M", context, param)
    return int(found[1]) << {"M": 20, "G": 30}[found[2]]


def read_shard(context: click.Context, param: click.Parameter, value: str) -> Shard:
    """Read ``I/N`` or ``auto``. Raises BadParameter."""
    try:
        return parse_shard(value)
    except NoShard as error:
        raise click.BadParameter(str(error), context, param) from error


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a campaign."""

    target: str
    lanes: list[str]
    seconds: float
    workers: int | None
    out: Path
    resume: bool
    shard: Shard
    base: str | None
    faults: tuple[str, ...]
    units: int | None
    bounds: Bounds
    accepted: tuple[int, ...]
    store: str | None = None  # where shards on several machines meet
    sanitize: bool = False


def kinds_for(console: Console, asked: Asked) -> tuple[list[PlaceOf], list[str]]:
    """Return the targets and lanes of a campaign, and the targets that cannot be run here. Raises Stop."""
    with usable():
        names = targets_named(asked.target)
        if asked.faults and len(names) > 1:
            raise Stop(f"--fault {','.join(asked.faults)}: expected one target with it, got {len(names)}", USAGE)
        for fault in asked.faults:
            check_fault(fault)
        if asked.sanitize:
            check_sanitizers(names, asked.lanes)
    return places_for(console, names, asked.lanes)


def run_campaign(console: Console, asked: Asked) -> int:
    """Run one party to its end, print what it did and found, and return the exit code."""
    kinds, not_run = kinds_for(console, asked)
    places = spread(kinds, asked.workers or n_workers(kinds))
    store = reached(asked.store) if asked.store is not None else None
    goes_on = store is not None and asked.base is not None and not asked.resume
    with writing(f"--out {asked.out}"):
        try:
            settings = settings_for(asked, kinds, len(places))
            same_base = goes_on or (asked.resume and asked.base is not None)
            party = join(asked.out, settings, resume=asked.resume, same_base=same_base)
        except FolderUnusable as error:
            raise Stop(str(error), USAGE) from error
    with party, usable():
        link = _link(console, store, party, asked) if store is not None else None
        _announce(console, party, asked)
        try:
            return _run(console, party, places, asked, not_run, link)
        except FolderUnusable as error:  # what other parties left is read when the work begins
            raise Stop(str(error), USAGE) from error


def reached(url: str) -> Store:
    """Return the store of that name, which is there and can be written to. Raises Stop."""
    try:
        store = Store(url)
        store.check(write=True)
    except StoreUnusable as error:
        raise Stop(f"--store {error}", USAGE) from error
    return store


def _link(console: Console, store: Store, party: Party, asked: Asked) -> Link:
    """Take over what the store has for this party."""
    link = Link(store, party)
    with writing(f"--out {asked.out}"):
        try:
            told = link.pull()
        except (StoreUnusable, FolderUnusable) as error:
            raise Stop(f"--store {error}", USAGE) from error
    if told is not None:
        console.print(told, soft_wrap=True)
    return link


def spread(kinds: Sequence[PlaceOf], workers: int) -> list[tuple[str, str | None, str]]:
    """Give each worker a target and a lane, by turns, and a name."""
    if workers < len(kinds):
        raise Stop(f"--workers {workers}: expected at least one for each target and lane, {len(kinds)}", USAGE)
    places = [kinds[i % len(kinds)] for i in range(workers)]
    return [(target, lane, name) for (target, lane), name in zip(places, names_of(places), strict=True)]


def settings_for(asked: Asked, kinds: Sequence[PlaceOf], workers: int) -> Settings:
    """Return what a party that begins now is asked to do."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Settings(
        tuple(dict.fromkeys(target for target, _ in kinds)),
        tuple(asked.lanes),
        workers,
        asked.seconds,
        asked.shard,
        asked.base or now,
        now,
        asked.faults,
        asked.units,
        environment(),
        node(),
        commit_here(),
        asked.sanitize,
    )


def commit_here() -> str | None:
    """Return the commit that the current folder is at; None if it is in no checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "--verify", "--quiet", "HEAD"], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def _announce(console: Console, party: Party, asked: Asked) -> None:
    settings, progress = party.settings, party.progress
    went_on = f", goes on after {duration(progress.seconds)}" if progress.units or progress.seconds else ""
    console.print(
        f"party {party.number} of the campaign in {party.campaign}{went_on}: {', '.join(settings.targets)} for "
        f"{duration(asked.seconds)} on {settings.workers} workers, shard {settings.shard}, seed base {settings.base}"
        f"{', under the sanitizer' if settings.sanitize else ''}",
        soft_wrap=True,
    )
    if asked.resume and not went_on:
        console.print("nothing that could be resumed was found, so it begins", soft_wrap=True)


def _run(
    console: Console,
    party: Party,
    places: Sequence[tuple[str, str | None, str]],
    asked: Asked,
    not_run: Sequence[str],
    link: Link | None,
) -> int:
    with writing(f"--out {asked.out}"):
        keep_reserve(party.failures)
    with shown(console) as view:
        sync = link.sync if link is not None else None
        supervisor = Supervisor(party, places, asked.bounds, corpus=party.campaign, told=view.tell, sync=sync)
        view.supervisor = supervisor
        supervisor.begin(datetime.now(UTC).isoformat("T", "seconds"))

        def tick(states: Sequence[object]) -> None:
            supervisor.tick()
            view.tick()

        _, interrupted = run_workers(
            supervisor.first_commands(),
            tick,
            grace=asked.bounds.hang_seconds,
            job=supervisor,
            memory=asked.bounds.memory,
        )
        supervisor.settle()
    if link is not None:
        link.finish()
    outcome = Outcome(
        supervisor.full or (link.nothing_stored if link is not None else None),
        supervisor.unusable,
        [place.name for place in supervisor.places if place.given_up],
        [death.text for death in supervisor.unexplained if not death.from_outside],
        not_run,
        asked.accepted,
        twins=True,
    )
    verdict = verdict_of_party(party.progress, party.progress.seconds, outcome)
    code = INTERRUPTED if interrupted else verdict.code
    supervisor.end(code, verdict.lines, interrupted=interrupted)
    print_end(console, party, verdict, interrupted=interrupted)
    if link is not None:
        link.finish()
        console.print(link.said, soft_wrap=True)
    return code


class Found(Protocol):
    """A party, or a campaign that was made of shards."""

    @property
    def campaign(self) -> Path: ...

    @property
    def failures(self) -> Path: ...

    @property
    def progress(self) -> Progress: ...


def print_end(console: Console, party: Found, verdict: Verdict, *, interrupted: bool) -> None:
    states = [state for state in states_of(party.progress) if state.statistics.cases]
    if states:
        print_run(console, states)
        for line in remarks(states):
            console.print(line, soft_wrap=True)
    print_causes(console, party)
    progress = party.progress
    console.print(
        f"cases run twice: {progress.twins_compared}, different: {progress.twins_differed}; "
        f"workers started {sum(progress.starts.values())} times, died {sum(progress.deaths.values())} times",
        soft_wrap=True,
    )
    where = shlex.quote(str(party.campaign))
    if not interrupted:
        print_verdict(console, verdict)
    else:
        console.print(f"interrupted; the same command with --resume goes on; what was found is under {where}")
    console.print(f"kvlockstep report {where} shows what was tried, and what was not", soft_wrap=True)


def print_causes(console: Console, party: Found) -> None:
    """Print each cause of failure: the law with its numbers, the line that replays it, and its other forms."""
    for shortest, *others in grouped(party.progress.causes.values()):
        _print_form(console, party, shortest)
        for cause in others:
            again = _replay_of(party, cause)
            said = f"  also as   {cause.signature}, {cause.minimized_len} operations, met {cause.times} times: {again}"
            console.print(said, soft_wrap=True)


def _print_form(console: Console, party: Found, cause: Cause) -> None:
    if not cause.folder:
        console.print(f"{cause.signature}: its traces did not reach the store", style="bold red", soft_wrap=True)
        return
    path = party.failures / cause.folder / "verdict.txt"
    try:
        text = path.read_text(encoding="utf-8").rstrip("\n")
    except OSError as error:
        text = f"{cause.signature}: what was stored of it cannot be read: {path}: {error.strerror}"
    head, _, _ = text.rpartition("\n  replay ")
    console.print(head or text, style="bold red", soft_wrap=True)
    found = f"after {cause.operations:,} operations and {cause.seconds:.0f} s by worker {cause.worker}"
    lengths = f"{cause.minimized_len} operations, minimized from {cause.found_len}"
    console.print(f"  found     {found}; {lengths}; met {cause.times} times", soft_wrap=True)
    if not cause.replays:
        console.print("  warning   did not replay in a fresh process: counted apart, not as a failure")
    console.print(f"  replay    {_replay_of(party, cause)}", soft_wrap=True)


def _replay_of(party: Found, cause: Cause) -> str:
    if not cause.folder:
        return "its traces did not reach the store"
    return replay_line(party.failures / cause.folder / "trace.jsonl", cause.target)


def print_verdict(console: Console, verdict: Verdict) -> None:
    """Print the sentences of a verdict: what is as it should be, and violations, on standard output."""
    for line in verdict.lines:
        if verdict.code in (CLEAN, VIOLATION):
            console.print(line, soft_wrap=True)
        else:
            complain(line, verdict.code)
    if verdict.code == UNKNOWN:
        console.print("unknown: too little was shown to call this clean")
