"""``kvlockstep gate``: the check in front of a change. Regressions, canary, fresh cases seeded from the commit."""

import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from kvlockstep.fuzz.campaign.ending import Outcome, states_of, verdict_of_party
from kvlockstep.fuzz.campaign.folder import FolderUnusable, Party, join
from kvlockstep.fuzz.campaign.live import shown
from kvlockstep.fuzz.campaign.seeds import Shard
from kvlockstep.fuzz.campaign.supervisor import Bounds, Supervisor
from kvlockstep.fuzz.cli_campaign import (
    Asked,
    commit_here,
    print_causes,
    print_verdict,
    read_shard,
    read_size,
    settings_for,
    spread,
)
from kvlockstep.fuzz.crew import n_cores, run_workers
from kvlockstep.fuzz.exits import (
    CLEAN,
    INTERRUPTED,
    USAGE,
    Seconds,
    Stop,
    make_console,
    usable,
    writing,
)
from kvlockstep.fuzz.failures import keep_reserve, traces_in
from kvlockstep.fuzz.gate.known import Base, KnownUnreadable, NoBase, checked_out, read_known
from kvlockstep.fuzz.gate.outputs import Result, annotations, summary, write_junit
from kvlockstep.fuzz.places import lanes_named, places_for
from kvlockstep.fuzz.registry import check_fault, targets_named
from kvlockstep.fuzz.report import print_run
from kvlockstep.fuzz.trace import TraceError, read_trace
from kvlockstep.fuzz.verdict import CHARTER, Verdict, remarks

DEFAULT_REGRESSIONS = Path("regressions")


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the result goes, beside standard output."""

    junit: Path | None
    annotate: bool
    summary: Path | None


@click.command()
@click.option(
    "--target",
    default="gpu_impl",
    show_default=True,
    help="Built-in name, or package.module:factory; several with commas, or 'all'.",
)
@click.option("--lanes", default="torch,interpret", show_default=True, help="Of cuda, interpret, torch.")
@click.option("--seconds", default=120.0, show_default=True, type=Seconds(), help="For fresh cases.")
@click.option("--workers", default=None, type=click.IntRange(1, 4096), help="Default: one a core, and one a lane.")
@click.option("--base", default=None, metavar="REV", help="A failure that this revision has too does not block.")
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
@click.option(
    "--accept-unobserved",
    "accepted",
    multiple=True,
    type=click.Choice([str(law) for law in CHARTER]),
    metavar="LAW",
    help="A law of the charter (1, 2, 3) that the target need not show to be called clean.",
)
@click.option("--hang-seconds", default=60.0, show_default=True, type=Seconds(), help="For one operation, at most.")
@click.option("--memory", default="4G", show_default=True, callback=read_size, metavar="SIZE", help="Of one worker.")
@click.option("--report-only", is_flag=True, help="Say what was found, and exit 0.")
def gate(
    target: str,
    lanes: str,
    seconds: float,
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
        None,
        Bounds(hang_seconds, memory, minimize_seconds=30.0),
        tuple(int(law) for law in accepted),
    )
    code = _gate(console, asked, base, known, regressions, corpus, Outputs(junit, annotate, summary_file))
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
    with usable():
        names = targets_named(asked.target)
        if asked.faults and len(names) > 1:
            raise Stop(f"--fault {asked.faults[0]}: expected one target with it, got {len(names)}", USAGE)
        for fault in asked.faults:
            check_fault(fault)
    traces = _regressions(regressions)
    try:
        known = read_known(known_file) if known_file is not None else frozenset[str]()
    except KnownUnreadable as error:
        raise Stop(f"--known {error}", USAGE) from error
    kinds, not_run = places_for(console, names, asked.lanes)
    places = spread(kinds, asked.workers or max(n_cores(), len(kinds)))
    with ExitStack() as stack:
        try:
            base = stack.enter_context(checked_out(revision)) if revision is not None else None
        except NoBase as error:
            raise Stop(str(error), USAGE) from error
        stack.enter_context(usable())
        with writing(f"--out {asked.out}"):
            try:
                party = stack.enter_context(join(asked.out, settings_for(asked, kinds, len(places)), resume=False))
                keep_reserve(party.failures)
            except FolderUnusable as error:
                raise Stop(str(error), USAGE) from error
        if asked.base is None:
            console.print("this folder is in no git checkout: the seeds come from the date; --seed TEXT fixes them")
        return _run(console, party, places, asked, _Rules(base, known), traces, corpus, not_run, outputs)


@dataclass(frozen=True, slots=True)
class _Rules:
    """What decides whether a cause blocks."""

    base: Base | None
    known: Collection[str]

    def apply(self, console: Console, party: Party) -> None:
        for cause in party.progress.causes.values():
            cause.known = cause.signature in self.known
            if self.base is None or cause.known or not cause.replays:
                continue
            there = self.base.has_failure((party.failures / cause.folder / "trace.jsonl").resolve(), cause.target)
            if there is None:
                console.print(f"{cause.signature} could not be run on {self.base.revision}, so it counts as new")
            cause.old = there is True


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


def _run(
    console: Console,
    party: Party,
    places: Sequence[tuple[str, str | None, str]],
    asked: Asked,
    rules: _Rules,
    regressions: Path | None,
    corpus: Path | None,
    not_run: Sequence[str],
    outputs: Outputs,
) -> int:
    names = ", ".join(name for _, _, name in places)
    console.print(
        f"gate on {', '.join(party.settings.targets)} for {asked.seconds:g} s, workers: {names}, "
        f"seed base {party.settings.base}, shard {party.settings.shard}",
        soft_wrap=True,
    )
    with shown(console) as view:
        supervisor = Supervisor(
            party, places, asked.bounds, regressions=regressions, corpus=corpus, twins=False, told=view.tell
        )
        view.supervisor = supervisor
        supervisor.begin(party.settings.started)

        def tick(states: Sequence[object]) -> None:
            supervisor.tick()
            view.tick()

        grace, memory = asked.bounds.hang_seconds, asked.bounds.memory
        _, interrupted = run_workers(supervisor.first_commands(), tick, grace=grace, job=supervisor, memory=memory)
        supervisor.settle()
    if not interrupted:
        rules.apply(console, party)
    given_up = [place.name for place in supervisor.places if place.given_up]
    outcome = Outcome(supervisor.full, supervisor.unusable, given_up, supervisor.unexplained, not_run, asked.accepted)
    verdict = verdict_of_party(party.progress, asked.seconds, outcome)
    if interrupted:
        verdict = Verdict(INTERRUPTED, ["interrupted", *verdict.lines])
    supervisor.end(verdict.code, verdict.lines, interrupted=interrupted)
    texts = {cause.key: _text_of(party, cause.folder) for cause in party.progress.causes.values()}
    base = rules.base.revision if rules.base is not None else None
    result = Result(party.settings, party.progress, supervisor.stored_runs, verdict, party.failures, base, texts)
    _print(console, party, result)
    _hand_out(console, result, outputs)
    return verdict.code


def _text_of(party: Party, folder: str) -> str:
    """Return the message of a cause, without the line that replays it."""
    text = (party.failures / folder / "verdict.txt").read_text(encoding="utf-8").rstrip("\n")
    return text.rpartition("\n  replay ")[0] or text


def _print(console: Console, party: Party, result: Result) -> None:
    states = [state for state in states_of(party.progress) if state.statistics.cases]
    if states:
        print_run(console, states)
        for line in remarks(states):
            console.print(line, soft_wrap=True)
    for run in result.stored:
        if run.verdict != "clean":
            where = run.target if run.lane is None else f"{run.target} {run.lane}"
            console.print(f"regression {run.file} on {where}: {run.verdict}: {run.text}", soft_wrap=True)
    n_clean = sum(run.verdict == "clean" for run in result.stored)
    console.print(f"regressions: {len(result.stored)} run or skipped, {n_clean} clean")
    print_causes(console, party)
    print_verdict(console, result.verdict)


def _hand_out(console: Console, result: Result, outputs: Outputs) -> None:
    """Write the files that were asked for. What cannot be written does not change what was found: it is said."""
    if outputs.annotate:
        for line in annotations(result):
            click.echo(line)
    if outputs.junit is not None:
        with writing(f"--junit {outputs.junit}"):
            outputs.junit.parent.mkdir(parents=True, exist_ok=True)
            write_junit(outputs.junit, result)
    if outputs.summary is not None:
        with writing(f"--summary {outputs.summary}"), outputs.summary.open("a", encoding="utf-8") as file:
            file.write(summary(result))
