"""``kvlockstep gate``: the check in front of a change. Regressions, canary, fresh cases seeded from the commit."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from kvlockstep.fuzz.campaign.ending import Outcome, states_of, verdict_of_party
from kvlockstep.fuzz.campaign.folder import FolderUnusable, Party, join
from kvlockstep.fuzz.campaign.live import shown
from kvlockstep.fuzz.campaign.seeds import Shard
from kvlockstep.fuzz.campaign.supervisor import Bounds, StoredRun, Supervisor
from kvlockstep.fuzz.commands.campaign import (
    Asked,
    commit_here,
    kinds_for,
    print_causes,
    print_verdict,
    read_shard,
    read_size,
    settings_for,
    spread,
)
from kvlockstep.fuzz.commands.options import accept_unobserved, targets_to_fuzz
from kvlockstep.fuzz.crew import run_workers
from kvlockstep.fuzz.exits import (
    BROKEN,
    CLEAN,
    INTERRUPTED,
    UNKNOWN,
    USAGE,
    VIOLATION,
    Seconds,
    Stop,
    complain,
    make_console,
    usable,
    writing,
)
from kvlockstep.fuzz.failures import keep_reserve, traces_in
from kvlockstep.fuzz.gate.known import KnownUnreadable, NoBase, Revision, checked_out, find_revision, read_known
from kvlockstep.fuzz.gate.outputs import Result, Stopped, annotations, said_of_stored, summary, write_junit
from kvlockstep.fuzz.places import lanes_named, n_workers
from kvlockstep.fuzz.report import print_run
from kvlockstep.fuzz.trace import TraceError, read_trace
from kvlockstep.fuzz.verdict import Verdict, remarks
from kvlockstep.fuzz.ward import is_of_ward

DEFAULT_REGRESSIONS = Path("regressions")

MINIMIZE_S = 30.0

SHORT_S = 60.0
"""A gate that had less time for fresh cases, and saw too little, is told that time is what it wants."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the result goes, beside standard output."""

    junit: Path | None
    annotate: bool
    summary: Path | None

    def hand_out(self, result: Result | Verdict) -> bool:
        """Write what was asked for; False if some of it could not be written, which is said."""
        if self.annotate:
            for line in annotations(result):
                click.echo(line)
        written = True
        for name, path, write in (("junit", self.junit, write_junit), ("summary", self.summary, _append_summary)):
            try:
                if path is not None:
                    write(path, result)
            except OSError as error:
                complain(f"--{name} {path}: {error.strerror or error}", BROKEN)
                written = False
        return written


def _append_summary(path: Path, result: Result | Verdict) -> None:
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(summary(result))


@click.command()
@targets_to_fuzz
@click.option("--lanes", default="torch,interpret", show_default=True, help="Of cuda, interpret, torch.")
@click.option("--seconds", default=120.0, show_default=True, type=Seconds(0.0), help="For fresh cases.")
@click.option(
    "--units",
    default=None,
    type=click.IntRange(1),
    help="End after so many of each worker, too: as many cases each time.",
)
@click.option("--workers", default=None, type=click.IntRange(1, 4096), help="Default: one a core, and one a lane.")
@click.option(
    "--base", default=None, metavar="REV", help="A failure that this revision has too is old, and does not block."
)
@click.option(
    "--known",
    default=None,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of cause signatures, one a line, that do not block.",
)
@click.option("--shard", default="1/1", show_default=True, callback=read_shard, metavar="I/N", help="Or auto.")
@click.option(
    "--regressions",
    default=None,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of traces that are run first. Default: regressions, if it is there.",
)
@click.option(
    "--corpus",
    default=None,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of a campaign or an earlier gate; begin with its corpus, and keep what is learned there.",
)
@click.option("--seed", "seed_base", default=None, metavar="TEXT", help="Default: the commit of the current folder.")
@click.option("--out", default="out", show_default=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--junit", default=None, type=click.Path(dir_okay=False, path_type=Path), help="Write a JUnit file.")
@click.option("--github", "annotate", is_flag=True, help="Print annotations for GitHub.")
@click.option(
    "--summary",
    "summary_file",
    default=None,
    envvar="GITHUB_STEP_SUMMARY",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append a summary in Markdown. Default: what GITHUB_STEP_SUMMARY names.",
)
@click.option("--fault", default=None, help="Plant a named fault first, to see the gate shut.")
@accept_unobserved
@click.option("--hang-seconds", default=60.0, show_default=True, type=Seconds(), help="For one operation, at most.")
@click.option("--memory", default="4G", show_default=True, callback=read_size, metavar="SIZE", help="Of one worker.")
@click.option("--report-only", is_flag=True, help="Say what was found, and exit 0.")
def gate(
    target: str,
    lanes: str,
    seconds: float,
    units: int | None,
    workers: int | None,
    base: str | None,
    known: Path | None,
    shard: Shard,
    regressions: Path | None,
    corpus: Path | None,
    seed_base: str | None,
    out: Path,
    junit: Path | None,
    annotate: bool,
    summary_file: Path | None,
    fault: str | None,
    accepted: tuple[str, ...],
    hang_seconds: float,
    memory: int,
    report_only: bool,
) -> None:
    """Check a change: stored traces, then a mistake that must be found, then fresh cases on all cores.

    The cases are drawn from the commit, so that the same commit gives the same ones. What blocks is a failure that
    replays in a fresh process and is neither known nor on the base.
    """
    console = make_console()
    outputs = Outputs(junit, annotate, summary_file)
    try:
        asked = Asked(
            target,
            lanes_named(lanes),
            seconds,
            workers,
            out,
            False,
            shard,
            seed_base or commit_here(),
            (fault,) if fault is not None else (),
            units,
            Bounds(hang_seconds, memory, MINIMIZE_S),
            tuple(int(law) for law in accepted),
        )
        code = _gate(console, asked, base, known, regressions, corpus, outputs)
    except Stop as stop:
        outputs.hand_out(Verdict(stop.code, [str(stop)]))
        code = complain(str(stop), stop.code)
    if report_only and code not in (CLEAN, INTERRUPTED, USAGE):
        console.print(f"--report-only: exit code 0 instead of {code}")
        code = CLEAN
    sys.exit(code)


def _gate(
    console: Console,
    asked: Asked,
    revision: str | None,
    known_file: Path | None,
    regressions: Path | None,
    corpus: Path | None,
    outputs: Outputs,
) -> int:
    traces = _regressions(regressions)
    try:
        known = read_known(known_file) if known_file is not None else frozenset[str]()
        base = find_revision(revision) if revision is not None else None
    except KnownUnreadable as error:
        raise Stop(f"--known {error}", USAGE) from error
    except NoBase as error:
        raise Stop(str(error), USAGE) from error
    kinds, not_run = kinds_for(console, asked)
    places = spread(kinds, asked.workers or n_workers(kinds))
    with writing(f"--out {asked.out}"):
        try:
            party = join(asked.out, settings_for(asked, kinds, len(places)), resume=False)
        except FolderUnusable as error:
            raise Stop(str(error), USAGE) from error
    with party, usable():
        with writing(f"--out {asked.out}"):
            keep_reserve(party.failures)
        if asked.base is None:
            console.print("no commit is known of this folder: the seeds come from the date; --seed TEXT fixes them")
        return _Gate(console, party, places, asked, _Rules(base, known), traces, corpus, not_run, outputs).run()


@dataclass(frozen=True, slots=True)
class _Rules:
    """What decides whether a cause blocks."""

    base: Revision | None
    known: Collection[str]

    def apply_known(self, party: Party) -> None:
        for cause in party.progress.causes.values():
            cause.known = cause.signature in self.known

    def apply_base(self, console: Console, party: Party, bounds: Bounds) -> None:
        """Run on the base what would block. What cannot be run there counts as new."""
        new = [cause for cause in party.progress.causes.values() if cause.replays and not cause.known]
        if self.base is None or not new:
            return
        try:
            with checked_out(self.base) as base:
                for cause in new:
                    trace = (party.failures / cause.folder / "trace.jsonl").resolve()
                    try:
                        cause.old = base.has_failure(trace, cause.target, bounds.in_ward)
                    except NoBase as error:
                        text = f"{cause.signature} could not be run on {self.base.name}, so it counts as new: {error}"
                        console.print(text, soft_wrap=True)
        except NoBase as error:
            console.print(f"{error}; so every failure counts as new", soft_wrap=True)

    def not_met(self, party: Party) -> list[str]:
        """List the known signatures that did not occur."""
        return sorted({*self.known} - {cause.signature for cause in party.progress.causes.values()})


def _regressions(folder: Path | None) -> Path | None:
    """Return the folder of stored traces, all of which can be read; None if there is none. Raises Stop."""
    if folder is None:
        folder = DEFAULT_REGRESSIONS if DEFAULT_REGRESSIONS.is_dir() else None
    if folder is None:
        return None
    try:
        for path in traces_in(folder):
            read_trace(path)
    except TraceError as error:
        raise Stop(str(error), USAGE) from error
    except OSError as error:
        raise Stop(f"--regressions {folder}: {error.strerror}: name a folder of traces", USAGE) from error
    return folder


@dataclass(slots=True)
class _Gate:
    """One gate at work."""

    console: Console
    party: Party
    places: Sequence[tuple[str, str | None, str]]
    asked: Asked
    rules: _Rules
    regressions: Path | None
    corpus: Path | None
    not_run: Sequence[str]
    outputs: Outputs

    def run(self) -> int:
        """Return the exit code; what was found is printed then, and handed out."""
        settings = self.party.settings
        self.console.print(
            f"gate on {', '.join(settings.targets)} for {self.asked.seconds:g} s, "
            f"workers: {', '.join(name for _, _, name in self.places)}, "
            f"seed base {settings.base}, shard {settings.shard}",
            soft_wrap=True,
        )
        stopped = Stopped()
        if self.outputs.annotate:
            click.echo(stopped.begin)
        try:
            result = self._work()
            self._print(result)
        finally:
            if self.outputs.annotate:
                click.echo(stopped.end)
        written = self.outputs.hand_out(result)
        return result.verdict.code if written or result.verdict.code in (VIOLATION, INTERRUPTED) else BROKEN

    def _work(self) -> Result:
        party, asked, bounds = self.party, self.asked, self.asked.bounds
        with shown(self.console) as view:
            supervisor = Supervisor(
                party,
                self.places,
                bounds,
                regressions=self.regressions,
                corpus=self.corpus,
                twins=False,
                told=view.tell,
            )
            view.supervisor = supervisor
            supervisor.begin(party.settings.started)

            def tick(states: Sequence[object]) -> None:
                supervisor.tick()
                view.tick()

            commands = supervisor.first_commands()
            _, interrupted = run_workers(
                commands, tick, grace=bounds.hang_seconds, job=supervisor, memory=bounds.memory
            )
            try:
                supervisor.settle()
            except KeyboardInterrupt:
                interrupted = True
        self.rules.apply_known(party)
        try:
            if not interrupted:
                self.rules.apply_base(self.console, party, bounds)
        except KeyboardInterrupt:
            interrupted = True
        given_up = [place.name for place in supervisor.places if place.given_up]
        full, unusable, deaths = supervisor.full, supervisor.unusable, [death.text for death in supervisor.unexplained]
        seconds = asked.seconds if asked.units is None else min(asked.seconds, party.progress.seconds)
        verdict = verdict_of_party(
            party.progress, seconds, Outcome(full, unusable, given_up, deaths, self.not_run, asked.accepted)
        )
        stored = supervisor.stored_runs
        if verdict.code != USAGE:
            stored = [*stored, *_left_out(supervisor)]
            verdict = _with_regressions(verdict, stored, party)
        if verdict.code == UNKNOWN and asked.seconds < SHORT_S:
            verdict.lines.insert(0, f"fresh cases had {asked.seconds:g} s: --seconds 120 reaches more")
        if interrupted:
            verdict = Verdict(INTERRUPTED, ["interrupted", *verdict.lines])
        supervisor.end(verdict.code, verdict.lines, interrupted=interrupted)
        texts = {cause.key: _text_of(party, cause.folder) for cause in party.progress.causes.values()}
        base = self.rules.base.name if self.rules.base is not None else None
        not_met = self.rules.not_met(party)
        return Result(party.settings, party.progress, stored, verdict, party.failures, base, texts, not_met)

    def _print(self, result: Result) -> None:
        console = self.console
        states = [state for state in states_of(result.progress) if state.statistics.cases]
        if states:
            print_run(console, states)
            for line in remarks(states):
                console.print(line, soft_wrap=True)
        for run in result.stored:
            if run.verdict != "clean":
                where = run.target if run.lane is None else f"{run.target} {run.lane}"
                said = f"{run.verdict}: {run.text}" if run.text else run.verdict
                console.print(f"regression {run.file} on {where}: {said}", soft_wrap=True)
        console.print(f"regressions: {said_of_stored(result.stored)}", soft_wrap=True)
        if result.not_met:
            console.print(f"known, not met: {', '.join(result.not_met)}", soft_wrap=True)
        print_causes(console, self.party)
        print_verdict(console, result.verdict)


def _left_out(supervisor: Supervisor) -> list[StoredRun]:
    """List the regressions that no worker came to."""
    if supervisor.regressions is None:
        return []
    came_to = {(run.target, run.lane, run.file) for run in supervisor.stored_runs}
    places = dict.fromkeys((place.target, place.lane) for place in supervisor.places)
    each = [(*place, path.name) for place in places for path in traces_in(supervisor.regressions)]
    return [StoredRun(*one, "not run", "") for one in each if one not in came_to]


def _with_regressions(verdict: Verdict, stored: Sequence[StoredRun], party: Party) -> Verdict:
    """Call nothing clean of which some regression was not run to its end, but for one that dies of what is known."""
    if verdict.code != CLEAN:
        return verdict
    deadly = {cause.target for cause in party.progress.causes.values() if cause.replays and is_of_ward(cause.signature)}
    endings = ("clean", "violates", "skipped")
    unclear = [r for r in stored if r.verdict not in endings and not (r.verdict == "died" and r.target in deadly)]
    if not unclear:
        return verdict
    return Verdict(UNKNOWN, [f"{len(unclear)} regressions were not run to their end", *verdict.lines[1:]])


def _text_of(party: Party, folder: str) -> str:
    """Return the message of a cause, without the line that replays it."""
    text = (party.failures / folder / "verdict.txt").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    return text.rpartition("\n  replay ")[0] or text
