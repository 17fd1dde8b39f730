"""The command line. Each command parses its arguments, calls one part, and turns the result into text and an exit code.

Exit codes: 0 clean, 1 a violation, 2 wrong usage or unreadable input, 10 unknown, 11 a worker died without a
verdict, 12 the harness could not do its own work, 130 interrupted.
"""

import json
import os
import shutil
import sys
from dataclasses import asdict
from dataclasses import replace as replaced
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvlockstep.fuzz.campaign import (
    BROKEN,
    CLEAN,
    INTERRUPTED,
    UNKNOWN,
    USAGE,
    VIOLATION,
    WorkerState,
    replays,
    run_workers,
    verdict_of,
)
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.doctor import Finding, examine, targets_here
from kvlockstep.fuzz.failures import replay_line
from kvlockstep.fuzz.ops import Op
from kvlockstep.fuzz.registry import LANED, LANES, TargetUnusable, choose_lane, factory_for
from kvlockstep.fuzz.report import PlainProgress, print_failure, print_hunts, print_run
from kvlockstep.fuzz.trace import Trace, TraceError, TraceWriter, read_trace, write_trace
from kvlockstep.fuzz.worker import Order

console = Console(highlight=False)


class Stop(Exception):
    """End the command with one clear line and an exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvlockstep")
def commands() -> None:
    """Model-based fuzzing of LLM KV caches."""


@commands.command()
@click.option("--target", default="gpu_impl", show_default=True, help="Built-in name, or package.module:factory.")
@click.option(
    "--lanes", default="torch,interpret", show_default=True, help="One worker each; of cuda, interpret, torch."
)
@click.option(
    "--seconds", default=60.0, show_default=True, type=click.FloatRange(min=0.1), help="From the first operation."
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="The same seed draws the same cases."
)
@click.option("--out", default="out", show_default=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--fault", default=None, help="Plant a named fault first, to see it found.")
def fuzz(target: str, lanes: str, seconds: float, seed: int, out: Path, fault: str | None) -> None:
    """Fuzz a target against the reference model."""
    chosen = [lane.strip() for lane in lanes.split(",") if lane.strip()]
    if not chosen or any(lane not in LANES for lane in chosen):
        raise Stop(f"--lanes {lanes!r}: expected one or more of {', '.join(LANES)}", USAGE)
    names: list[str | None] = [*chosen] if target in LANED else [None]
    _make_folder(out)
    orders = [
        Order(target, lane, seconds, seed * len(names) + i, str(out), lane or "worker", fault)
        for i, lane in enumerate(names)
    ]
    console.print(f"fuzzing {target} for {seconds:g} s, workers: {', '.join(o.name for o in orders)}, seed {seed}")
    interrupted = False
    try:
        states = run_workers(orders, PlainProgress(console, seconds))
    except KeyboardInterrupt as interrupt:
        if not interrupt.args:
            raise
        states, interrupted = interrupt.args[0], True
    if not any(state.unusable for state in states):
        print_run(console, states)
    _settle_failures(states, check=not interrupted)
    verdict = verdict_of(states, seconds)
    if interrupted:
        console.print(f"interrupted; what was found is under {out}")
        sys.exit(INTERRUPTED)
    for line in verdict.lines:
        if verdict.code in (CLEAN, VIOLATION):
            console.print(line)
        else:
            click.echo(f"kvlockstep: {line}", err=True)
    if verdict.code == UNKNOWN:
        console.print("unknown: too little was reached to call this clean")
    sys.exit(verdict.code)


def _settle_failures(states: list[WorkerState], *, check: bool) -> None:
    """Replay each failure in a fresh process, print it, and end with the line to paste."""
    shown: dict[str, str] = {}  # folder -> worker that it was shown for
    for state in states:
        if state.failure is None:
            continue
        folder = state.failure["folder"]
        path = Path(folder) / "trace.jsonl"
        if check:
            state.replays = replays(str(path))
        if folder in shown:
            console.print(f"worker {state.order.name} found the same as worker {shown[folder]}")
            continue
        shown[folder] = state.order.name
        print_failure(console, state)
        console.print(f"  replay    {replay_line(path)}", soft_wrap=True)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Stop(f"--out {out}: {error.strerror}", BROKEN) from error


@commands.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--target", default=None, help="Instead of the one the trace was found on.")
@click.option("--lane", default=None, type=click.Choice(LANES), help="Instead of the one the trace was found on.")
@click.option("--fault", default=None, help="Instead of the one in the trace; 'none' plants nothing.")
@click.option(
    "--write", default=None, type=click.Path(path_type=Path), help="Also write the trace again, as it was run."
)
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
def replay(
    file: Path, target: str | None, lane: str | None, fault: str | None, write: Path | None, quiet: bool
) -> None:
    """Run a stored trace from a fresh state: FAILED, FIXED, DIFFERENT, REFUSED-ALL or CLEAN."""
    trace = _read(file)
    header = trace.header
    name = target or header.target
    # a lane is promised by the trace only for the target it was found on
    _choose_lane(lane or (header.lane if name == header.target and name in LANED else None))
    from kvlockstep.fuzz.replay import refusals_of, run_ops
    from kvlockstep.fuzz.replay import verdict_of as replay_verdict

    planted = None if fault == "none" else fault or (header.fault if name == header.target else None)
    log = TraceWriter(write, header) if write else None
    try:
        run = run_ops(header.config, trace.ops, factory_for(name, planted), log=log, digest=True)
    except TargetUnusable as error:
        raise Stop(str(error), USAGE) from error
    finally:
        if log is not None:
            log.close()
    verdict = replay_verdict(header, run)
    if run.violation is not None and not quiet:
        console.print(str(run.violation), markup=False, style="bold red")
        console.print(f"  replay    {replay_line(file)}", soft_wrap=True)
    console.print(_verdict_line(verdict, header.signature, run.signature, run.steps, len(trace.ops)), soft_wrap=True)
    if not quiet:
        refusals = ", ".join(f"{count} {name}" for name, count in sorted(refusals_of(run.statistics).items()))
        console.print(f"  ran       {run.statistics.done} done, {run.statistics.refused} refused", end="")
        console.print(f" ({refusals})" if refusals else "")
        console.print(f"  digest    {run.digest}")
    sys.exit({"FAILED": VIOLATION, "DIFFERENT": VIOLATION, "REFUSED-ALL": UNKNOWN}.get(verdict, CLEAN))


def _verdict_line(verdict: str, stored: str | None, got: str | None, steps: int, n_ops: int) -> str:
    where = f"at operation {steps - 1} of {n_ops}"
    match verdict:
        case "FAILED":
            return f"FAILED: {got} {where}" + (", as stored" if stored else "")
        case "DIFFERENT":
            return f"DIFFERENT: {got} {where}, stored was {stored}"
        case "FIXED":
            return f"FIXED: {n_ops} operations without a violation, stored was {stored}"
        case "REFUSED-ALL":
            return f"REFUSED-ALL: none of {n_ops} operations was done, so nothing was shown"
        case _:
            return f"CLEAN: {n_ops} operations without a violation"


def _choose_lane(lane: str | None) -> None:
    try:
        choose_lane(lane)
    except TargetUnusable as error:
        raise Stop(str(error), USAGE) from error


def _read(file: Path) -> Trace:
    try:
        return read_trace(file)
    except TraceError as error:
        raise Stop(str(error), USAGE) from error
    except OSError as error:
        raise Stop(f"{file}: {error.strerror}", USAGE) from error


@commands.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(min=0.1))
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Default: FILE with .min before its suffix.")
def minimize(file: Path, seconds: float, out: Path | None) -> None:
    """Shorten a failing trace; the same cause signature must stay. Goes on from OUT if that exists."""
    trace = _read(file)
    out = out or _minimized_path(file)
    _choose_lane(trace.header.lane if trace.header.target in LANED else None)
    from kvlockstep.fuzz.minimize import Minimizer
    from kvlockstep.fuzz.replay import failing_signature

    try:
        factory = factory_for(trace.header.target, trace.header.fault)
        signature, _ = failing_signature(trace.header.config, trace.ops, factory)
    except TargetUnusable as error:
        raise Stop(str(error), USAGE) from error
    if signature is None:
        raise Stop(f"{file}: does not fail, so there is nothing to minimize; kvlockstep replay says more", USAGE)
    start = trace
    if out.exists():
        earlier = _read(out)
        if earlier.header.signature == signature and len(earlier.ops) <= len(trace.ops):
            start = earlier
            console.print(f"going on from {out}: {len(earlier.ops)} operations")
    header = replaced(start.header, signature=signature, violates=signature.partition(".")[0])

    def save(config: CacheConfig, ops: tuple[Op, ...]) -> None:
        write_trace(out, Trace(replaced(header, config=config), list(ops)))

    search = Minimizer(start.header.config, tuple(start.ops), factory, signature, seconds=seconds, save=save)
    try:
        finished = search.run()
    except KeyboardInterrupt:
        console.print(f"interrupted; the best so far is {out}")
        sys.exit(INTERRUPTED)
    state = "no shorter one found" if finished else "time ran out; the same command goes on"
    console.print(f"{signature}: {len(trace.ops)} operations to {len(search.ops)} in {search.tried} replays ({state})")
    console.print(f"  replay    {replay_line(out)}", soft_wrap=True)
    sys.exit(CLEAN)


def _minimized_path(file: Path) -> Path:
    name = file.name.removesuffix(".gz").removesuffix(".jsonl")
    return file.with_name(f"{name}.min.jsonl")


@commands.command()
@click.option("--only", multiple=True, help="Name of a fault; may be given several times. Default: all.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1), help="Fresh processes for each.")
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(min=0.1), help="For each.")
@click.option("--jobs", default=None, type=click.IntRange(min=1), help="At the same time. Default: one a core.")
@click.option("--json", "json_path", default=None, type=click.Path(path_type=Path), help="Also write results here.")
def faults(only: tuple[str, ...], seeds: int, seconds: float, jobs: int | None, json_path: Path | None) -> None:
    """Plant each known bug and look for it from scratch; exit 1 if one is missed."""
    from kvlockstep.fuzz.faults import FAULTS
    from kvlockstep.fuzz.faults.hunt import hunt_all

    for name in only:
        if name not in FAULTS:
            raise Stop(f"unknown fault {name!r}: expected one of {', '.join(FAULTS)}", USAGE)
    chosen = [FAULTS[name] for name in only] if only else list(FAULTS.values())
    results = []
    for result in hunt_all(chosen, range(seeds), seconds, jobs or len(os.sched_getaffinity(0))):
        results.append(result)
        state = result.law or result.trouble or "not found"
        console.print(f"{len(results)}/{len(chosen) * seeds}  {result.fault} seed {result.seed}: {state}")
    print_hunts(console, chosen, results)
    if json_path:
        json_path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    sys.exit(CLEAN if all(result.caught for result in results) else VIOLATION)


@commands.command()
def targets() -> None:
    """List the targets and lanes that can run here, and why the others cannot."""
    _print_findings(targets_here())


@commands.command()
def doctor() -> None:
    """Examine this machine: Python, packages, cores, targets, lanes."""
    findings = examine()
    _print_findings(findings)
    console.print(f"terminal {shutil.get_terminal_size().columns} columns, working folder {os.getcwd()}")


def _print_findings(findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False)
    for finding in findings:
        table.add_row(finding.subject, "yes" if finding.works else "[red]no[/red]", finding.text)
    console.print(table)


def main() -> None:
    """Run the command line; every expected trouble ends in one line and its exit code."""
    try:
        commands.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except Stop as stop:
        click.echo(f"kvlockstep: {stop}", err=True)
        sys.exit(stop.code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("kvlockstep: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except OSError as error:
        click.echo(f"kvlockstep: {error.filename or 'output'}: {error.strerror or error}", err=True)
        sys.exit(BROKEN)
