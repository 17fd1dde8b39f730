"""``kvlockstep replay``: stored traces from a fresh state, on one target or several."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kvlockstep.fuzz.commands.chosen import Chosen, choose, read
from kvlockstep.fuzz.commands.look import Look, Timed, looking, record_of
from kvlockstep.fuzz.commands.options import limits_of_ward, sanitize_or_not
from kvlockstep.fuzz.commands.out_file import OUT_FILE, keep_apart
from kvlockstep.fuzz.exits import (
    CLEAN,
    CRASHED,
    UNKNOWN,
    USAGE,
    VIOLATION,
    Stop,
    complain,
    make_console,
    usable,
    writing,
)
from kvlockstep.fuzz.failures import replay_line
from kvlockstep.fuzz.outcomes import OutcomeLog
from kvlockstep.fuzz.registry import Factory, check_lane, targets_named
from kvlockstep.fuzz.replay_files import replay_each, replay_on_each, worst
from kvlockstep.fuzz.targets.base import allowances_of
from kvlockstep.fuzz.trace import Header, Trace, TraceWriter, write_trace
from kvlockstep.fuzz.trace_bounds import LANES
from kvlockstep.fuzz.ward import Ended, Limits, Ward, is_of_ward

console = make_console()


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--target", default=None, help="Instead of the one the trace was found on; several with commas, or 'all'."
)
@click.option("--lane", default=None, type=click.Choice(LANES), help="Instead of the one the trace was found on.")
@click.option("--fault", default=None, help="Instead of the one in the trace; 'none' plants nothing.")
@sanitize_or_not
@click.option("--write", default=None, type=OUT_FILE, help="Also write the trace again, as run; of one FILE.")
@click.option("--outcomes", default=None, hidden=True, type=click.Path(path_type=Path))
@looking
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
@limits_of_ward
def replay(
    files: tuple[Path, ...],
    target: str | None,
    lane: str | None,
    fault: str | None,
    sanitize: bool | None,
    write: Path | None,
    outcomes: Path | None,
    look: Look,
    quiet: bool,
    hang_seconds: float,
    memory: int,
) -> None:
    """Run stored traces from a fresh state: FAILED, FIXED, DIFFERENT, REFUSED-ALL or CLEAN.

    Of several traces the verdicts are printed, one a line; a violation among them gives the exit code. So it is with
    several targets. A target that does not promise what the trace asks of it CANNOT TAKE IT: alone that is wrong
    usage, among several no fault. The trees of SGLang are also compared with one another, operation by operation;
    where they differ, and their allowances do not say why, that is a violation.

    Large pools are checked whole every so many operations, and what is found then is looked for again, until the
    operation is known.

    A trace that is stored as Died, Hung or OutOfMemory runs in a process of its own, which may end as it did.
    """
    limits = Limits(hang_seconds, memory)
    keep_apart(files, {"--write": write, "--json": look.json})
    with usable():
        names = targets_named(target) if target is not None else []
        for name in names:
            if lane is not None:
                check_lane(name, lane)
    if len(files) * max(1, len(names)) > 1:
        for option, path in (("--write", write), ("--outcomes", outcomes)):
            if path is not None:
                expected, got = ("one target", len(names)) if len(files) == 1 else ("one FILE", len(files))
                raise Stop(f"{option} {path}: expected {expected} with it, got {got}", USAGE)
    if len(names) > 1:
        if fault not in (None, "none"):
            raise Stop(f"--fault {fault}: expected one target with it, got {len(names)}", USAGE)
        if sanitize:
            raise Stop(f"--sanitize: expected one target with it, got {len(names)}", USAGE)
        if look.json is not None and len(files) > 1:
            raise Stop(f"--json {look.json}: expected one FILE with it, got {len(files)}", USAGE)
        named = len(files) > 1
        sys.exit(worst([_replay_on_each(file, names, lane, fault, limits, look, named=named) for file in files]))
    if len(files) == 1:
        chosen = choose(files[0], names[0] if names else None, lane, fault, sanitize)
        sys.exit(_replay(chosen, write, outcomes, limits, look, quiet))
    if look.json is not None:
        raise Stop(f"--json {look.json}: expected one FILE with it, got {len(files)}", USAGE)
    given = {"--target": target, "--lane": lane, "--fault": fault}
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    options += limits.options() + look.options()
    if sanitize is not None:
        options.append("--sanitize" if sanitize else "--no-sanitize")
    codes = []
    for file, (verdict, code, complaint) in zip(files, replay_each(files, options), strict=True):
        codes.append(code)
        if verdict:
            console.print(f"{file}: {verdict}", soft_wrap=True)
        click.echo(complaint, err=True, nl=False)
    sys.exit(worst(codes))


def _replay_on_each(
    file: Path, names: list[str], lane: str | None, fault: str | None, limits: Limits, look: Look, *, named: bool
) -> int:
    """Run one stored trace on several targets, print a row of verdicts, and return the exit code."""
    try:
        trace = read(file)
    except Stop as stop:  # a violation in another file must not be hidden by this one
        return complain(str(stop), stop.code)
    options = limits.options() + look.options() + ([] if fault is None else [f"--fault={fault}"])
    done = replay_on_each(file, names, lane, options, trace.header.config.policy)
    if named:
        console.print(f"{file}:", soft_wrap=True)
    for line in done.lines:
        console.print(line, soft_wrap=True)
    look.write({"trace": str(file), "targets": done.records})
    click.echo(done.complaints, err=True, nl=False)
    return done.code


def _replay(chosen: Chosen, write: Path | None, outcomes: Path | None, limits: Limits, look: Look, quiet: bool) -> int:
    """Run one stored trace, print what came of it, and return the exit code."""
    file, trace, header, name = chosen.file, chosen.trace, chosen.trace.header, chosen.target
    if is_of_ward(header.signature):
        if look.check_every is not None:
            raise Stop(f"--check-every: {file} is stored as {header.signature}, and is checked as it was then", USAGE)
        ran = _run_in_ward(chosen, write, outcomes, limits)
    else:
        ran = _run_here(chosen, write, outcomes, look, quiet)
    if ran.lacks:
        console.print(f"CANNOT TAKE IT: needs {', '.join(ran.lacks)}, which {name} does not promise", soft_wrap=True)
        return USAGE
    from kvlockstep.fuzz.replay import refusals_of
    from kvlockstep.fuzz.replay import verdict_of as replay_verdict

    verdict = replay_verdict(header, ran)
    if ran.text and not quiet:
        console.print(ran.text, style="bold red", soft_wrap=True)
        console.print(f"  replay    {replay_line(file, name)}", soft_wrap=True)
    console.print(_verdict_line(verdict, header.signature, ran.signature, ran.steps, len(trace.ops)), soft_wrap=True)
    if not quiet and chosen.sanitize is not None:
        console.print(f"  sanitized from seed {chosen.sanitize}")
    if not quiet and ran.digest is not None:
        refusals = ", ".join(f"{count} {name}" for name, count in sorted(refusals_of(ran.statistics).items()))
        console.print(f"  ran       {ran.statistics.done} done, {ran.statistics.refused} refused", end="")
        console.print(f" ({refusals})" if refusals else "")
        console.print(f"  digest    {ran.digest}")
    if not quiet and ran.cost is not None:
        for line in ran.cost.lines():
            console.print(line)
    look.write(record_of(str(file), name, chosen.lane, verdict, ran))
    return {"FAILED": VIOLATION, "DIFFERENT": VIOLATION, "REFUSED-ALL": UNKNOWN}.get(verdict, CLEAN)


def _run_in_ward(chosen: Chosen, write: Path | None, outcomes: Path | None, limits: Limits) -> Ended:
    """Run a trace that may end its process in one of its own."""
    trace = chosen.trace
    writes = f"--outcomes {outcomes}" if outcomes else str(chosen.file)
    with usable(), writing(writes), _ward(chosen, limits) as ward:
        ran = ward.run(trace.header.config, trace.ops, outcomes=outcomes)
    if write is not None and not ran.lacks:
        with writing(f"--write {write}"):
            write_trace(write, Trace(trace.header, trace.ops[: ran.steps]))
    return ran


def _ward(chosen: Chosen, limits: Limits) -> Ward:
    return Ward(chosen.target, chosen.lane, chosen.fault, chosen.sanitize, limits=limits)


def _run_here(chosen: Chosen, write: Path | None, outcomes: Path | None, look: Look, quiet: bool) -> Ended:
    """Run a trace in this process."""
    factory, lacks = chosen.open()
    if lacks:  # a target that cannot be had must not cost the file that is written
        return Ended(None, 0, lacks=tuple(lacks))
    from kvlockstep.fuzz.replay import run_ops

    file, trace, header, name = chosen.file, chosen.trace, chosen.trace.header, chosen.target
    with (
        usable(),
        writing(f"--outcomes {outcomes}" if outcomes else f"--write {write}" if write else str(file)),
        _log(write, header) as log,
        _outcome_log(outcomes, name, factory, header) as watch,
    ):
        timed = Timed(watch, len(trace.ops), quiet)
        try:
            run = run_ops(
                header.config,
                trace.ops,
                factory,
                log=log,
                watch=timed.watch,
                digest=True,
                check_every=look.check_every,
                say=timed.say,
            )
        except SystemExit as left:
            raise Stop(f"{file}: target {name!r} left the process with status {left.code!r}", CRASHED) from left
    text = str(run.violation) if run.violation is not None else ""
    cost = timed.cost_of(run, header.config.page_size)
    return Ended(run.signature, run.steps, text, statistics=run.statistics, digest=run.digest, cost=cost)


@contextmanager
def _log(path: Path | None, header: Header) -> Iterator[TraceWriter | None]:
    """Open the file that a trace is written to as it runs, if there is one."""
    if path is None:
        yield None
        return
    with TraceWriter(path, header) as writer:
        yield writer


@contextmanager
def _outcome_log(path: Path | None, name: str, factory: Factory, header: Header) -> Iterator[OutcomeLog | None]:
    """Open the file that the outcomes of a trace are written to as it runs, if there is one."""
    if path is None:
        yield None
        return
    with OutcomeLog(path, name, allowances_of(factory(header.config))) as log:
        yield log


def _verdict_line(verdict: str, stored: str | None, got: str | None, steps: int, n_ops: int) -> str:
    if steps == 0:
        where = f"before the first of {n_ops} operations"
    else:
        where = f"at step {steps - 1}" + (
            f" of {n_ops} operations" if steps < n_ops else f", the last of {n_ops} operations"
        )
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
