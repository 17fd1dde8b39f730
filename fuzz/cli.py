"""The command line. Each command parses its arguments, calls one part, and turns the result into text and an exit code.

How a command ends, also in trouble, is in ``exits.py``.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as replaced
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import click
from rich.table import Table
from rich.text import Text

from kvlockstep.fuzz.campaign.supervisor import Bounds
from kvlockstep.fuzz.cli_bisect import bisect_command
from kvlockstep.fuzz.cli_blame import blame
from kvlockstep.fuzz.cli_campaign import Asked, read_duration, read_shard, read_size, run_campaign
from kvlockstep.fuzz.cli_check import check
from kvlockstep.fuzz.cli_faults import faults
from kvlockstep.fuzz.cli_gate import gate
from kvlockstep.fuzz.cli_look import Look, Timed, looking, record_of
from kvlockstep.fuzz.cli_merge import merge
from kvlockstep.fuzz.cli_options import accept_unobserved, sanitize_or_not
from kvlockstep.fuzz.cli_out import OUT_FILE, keep_apart
from kvlockstep.fuzz.cli_ray import run_on_ray
from kvlockstep.fuzz.cli_record import record
from kvlockstep.fuzz.cli_report import report
from kvlockstep.fuzz.cli_show import show
from kvlockstep.fuzz.cli_trace import Chosen, choose, named_by_user, read, seed_for
from kvlockstep.fuzz.cli_why import why
from kvlockstep.fuzz.cli_workload import trace as trace_commands
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.crew import WorkerState, n_cores, run_workers
from kvlockstep.fuzz.doctor import Finding, examine, targets_here
from kvlockstep.fuzz.environments import go_where_it_runs
from kvlockstep.fuzz.exits import (
    CLEAN,
    CRASHED,
    INTERRUPTED,
    UNKNOWN,
    USAGE,
    VIOLATION,
    Seconds,
    Stop,
    complain,
    make_console,
    run_and_exit,
    usable,
    writing,
)
from kvlockstep.fuzz.failures import replay_line
from kvlockstep.fuzz.minimize import Judge, Minimizer
from kvlockstep.fuzz.ops import Op
from kvlockstep.fuzz.outcomes import OutcomeLog
from kvlockstep.fuzz.places import lanes_named, names_of, places_for
from kvlockstep.fuzz.registry import (
    LANED,
    SANITIZED,
    Factory,
    check_fault,
    check_lane,
    check_sanitizer,
    choose_lane,
    factory_for,
    targets_named,
)
from kvlockstep.fuzz.replay_files import replay_each, replay_on_each, worst
from kvlockstep.fuzz.report import PlainProgress, print_failure, print_run
from kvlockstep.fuzz.targets.base import allowances_of
from kvlockstep.fuzz.trace import Header, Trace, TraceWriter, write_trace
from kvlockstep.fuzz.trace_bounds import LANES, MAX_NUMBER
from kvlockstep.fuzz.verdict import by_target, remarks, replays, too_seldom, verdict_of
from kvlockstep.fuzz.ward import HANG_SECONDS, MEMORY_BYTES, Ended, Limits, Ward, is_of_ward
from kvlockstep.fuzz.worker import Order, end_with

console = make_console()

RUNS_HERE = "Exit codes: 0 if some target can run here, 10 if none can."
EXIT_CODES = (
    "Exit codes: 0 clean; 1 a violation; 2 wrong usage or unreadable input; 10 unknown, too little was shown; "
    "11 a worker crashed or hung; 12 the harness failed or could not write; 130 interrupted."
)


MAX_SEED = (1 << 63) - 1

LAST_WORDS_S = 8.0
"""A campaign whose parent is gone has so long to store what it has."""

LONG_ENOUGH = 300.0
"""Seconds in which every state has been reached that can be; after them more time is no advice."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES, invoke_without_command=True)
@click.version_option(package_name="kvlockstep")
@click.pass_context
def commands(context: click.Context) -> None:
    """Model-based fuzzing of LLM KV caches."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
        sys.exit(USAGE)


@commands.command()
@click.option(
    "--target",
    default="gpu_impl",
    show_default=True,
    help="Built-in name, or package.module:factory; several with commas, or 'all'.",
)
@click.option(
    "--lanes", default="torch,interpret", show_default=True, help="One worker each; of cuda, interpret, torch."
)
@click.option("--seconds", default=60.0, show_default=True, type=Seconds(), help="From the first operation.")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, MAX_SEED),
    help="The same seed draws the same cases.",
)
@click.option("--out", default="out", show_default=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--fault", default=None, help="Plant a named fault first, to see it found.")
@click.option("--sanitize", is_flag=True, help="Watch what interpreted kernels do to memory; on lane interpret.")
@accept_unobserved
@click.option(
    "--for",
    "lasts",
    default=None,
    callback=read_duration,
    metavar="TIME",
    help="Run a campaign of so long: 8h, 90m, 45s.",
)
@click.option("--workers", default=None, type=click.IntRange(1, 4096), help="Of a campaign. Default: one a core.")
@click.option("--resume", is_flag=True, help="Go on with the campaign in OUT that was asked the same and did not end.")
@click.option(
    "--shard",
    default="1/1",
    show_default=True,
    callback=read_shard,
    metavar="I/N",
    help="The part of a campaign to do here, or auto.",
)
@click.option("--base", default=None, metavar="TEXT", help="Of the seeds of a campaign. Default: the date it begins.")
@click.option("--units", default=None, type=click.IntRange(1), help="End a campaign after so many of each worker, too.")
@click.option("--hang-seconds", default=60.0, show_default=True, type=Seconds(), help="For one operation, at most.")
@click.option(
    "--memory",
    default="4G",
    show_default=True,
    callback=read_size,
    metavar="SIZE",
    help="Of one worker of a campaign, at most.",
)
@click.option(
    "--store", default=None, metavar="URL", help="Where shards on several machines meet: a folder, or s3://..."
)
@click.option("--ray", default=None, metavar="ADDRESS", help="Run WORKERS shards on Ray: auto, local or HOST:PORT.")
@click.option("--end-with-parent", default=None, type=int, hidden=True, metavar="PID")
def fuzz(
    target: str,
    lanes: str,
    seconds: float,
    seed: int,
    out: Path,
    fault: str | None,
    sanitize: bool,
    accepted: tuple[str, ...],
    lasts: float | None,
    **of_campaign: Any,
) -> None:
    """Fuzz one or several targets against the reference model, each in processes of its own.

    Of several targets one that cannot be had here is not run, and then the run is not clean.

    With --for it is a campaign: workers that end or die are replaced, what is found is sorted by its cause, and
    everything is kept in OUT, which several campaigns may share.
    """
    if sanitize and not _is_given(click.get_current_context(), "lanes"):
        lanes = SANITIZED[1]
    chosen = lanes_named(lanes)
    if lasts is not None:
        _refuse_with_for(click.get_current_context())
        faults = tuple(one.strip() for one in (fault or "").split(",") if one.strip())
        accepted_laws = tuple(int(law) for law in accepted)
        bounds = Bounds(of_campaign.pop("hang_seconds"), of_campaign.pop("memory"))
        ray, parent = of_campaign.pop("ray"), of_campaign.pop("end_with_parent")
        if parent is not None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background process may have ignored
            Thread(target=end_with, args=(parent, LAST_WORDS_S), daemon=True).start()
        asked = Asked(
            target, chosen, lasts, out=out, faults=faults, bounds=bounds, accepted=accepted_laws, **of_campaign
        )
        sys.exit(run_campaign(console, asked) if ray is None else run_on_ray(console, asked, ray))
    _refuse_without_for(click.get_current_context())
    with usable():
        names = targets_named(target)
        if fault is not None and len(names) > 1:
            raise Stop(f"--fault {fault}: expected one target with it, got {len(names)}", USAGE)
        if fault is not None:
            check_fault(fault)
        if sanitize:
            for name in names:
                for lane in chosen:
                    check_sanitizer(name, lane)
    workers, not_run = places_for(console, names, chosen)
    _make_folder(out)
    orders = [
        Order(
            name,
            lane,
            seconds,
            seed * len(workers) + i,
            str(out),
            worker,
            fault,
            sanitize=seed & MAX_NUMBER if sanitize else None,
        )
        for i, ((name, lane), worker) in enumerate(zip(workers, names_of(workers), strict=True))
    ]
    fuzzed = ", ".join(dict.fromkeys(name for name, _ in workers))
    watched = ", under the sanitizer" if sanitize else ""
    console.print(
        f"fuzzing {fuzzed} for {seconds:g} s, workers: {', '.join(o.name for o in orders)}, seed {seed}{watched}",
        soft_wrap=True,
    )
    if len(orders) > n_cores():
        console.print(f"{len(orders)} workers share {n_cores()} cores, and with them the operations a second")
    with usable(), writing(f"output (what was found is under {out})"):
        sys.exit(_fuzz(orders, seconds, [int(law) for law in accepted], out, not_run))


def _refuse_with_for(context: click.Context) -> None:
    if _is_given(context, "sanitize"):
        raise Stop("--sanitize: not with --for; a run of --seconds has it", USAGE)
    for name in ("seconds", "seed"):
        if _is_given(context, name):
            raise Stop(f"--{name}: not with --for; a campaign has --for and --base", USAGE)


def _refuse_without_for(context: click.Context) -> None:
    of_a_campaign = ("workers", "resume", "shard", "base", "units", "hang_seconds", "memory", "store", "ray")
    for name in of_a_campaign:
        if _is_given(context, name):
            raise Stop(f"--{name.replace('_', '-')}: belongs to a campaign, say --for 8h with it", USAGE)


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE


def _fuzz(orders: list[Order], seconds: float, accepted: list[int], out: Path, not_run: Sequence[str] = ()) -> int:
    """Run the workers, print what they did and found, and return the exit code."""
    states, interrupted = run_workers(orders, PlainProgress(console, seconds))
    groups = {name: group for name, group in by_target(states).items() if not any(state.unusable for state in group)}
    shown = [state for group in groups.values() for state in group]
    if shown:
        print_run(console, shown)
    for name, group in groups.items():
        for line in remarks(group):
            console.print(f"{name}: {line}" if len(groups) > 1 else line, soft_wrap=True)
    interrupted = _settle_failures(states, check=not interrupted) or interrupted
    verdict = verdict_of(states, seconds, accepted, not_run)
    if interrupted:
        console.print(f"interrupted; what was found is under {out}", soft_wrap=True)
        return INTERRUPTED
    for line in verdict.lines:
        if verdict.code in (CLEAN, VIOLATION):
            console.print(line, soft_wrap=True)
        else:
            complain(line, verdict.code)
    if verdict.code == UNKNOWN:
        console.print("unknown: too little was shown to call this clean")
        if seconds < LONG_ENOUGH and len(verdict.lines) == len(too_seldom(shown)):  # nothing else was missing
            longer = min(LONG_ENOUGH, max(60.0, 4 * seconds))
            console.print(f"a longer run reaches more: --seconds {longer:.0f}")
    return verdict.code


def _settle_failures(states: list[WorkerState], *, check: bool) -> bool:
    """Replay each failure in a fresh process, and print it with the line to paste. True if that was interrupted."""
    interrupted = False
    shown: dict[str, str] = {}  # folder -> worker that it was shown for
    for state in states:
        if state.failure is None:
            continue
        folder = state.failure["folder"]
        path = Path(folder) / "trace.jsonl"
        if check and not interrupted:
            try:
                state.replays = replays(str(path), state.order.target)
            except KeyboardInterrupt:
                interrupted = True
        if folder in shown:
            console.print(f"worker {state.order.name} found the same as worker {shown[folder]}")
            continue
        shown[folder] = state.order.name
        print_failure(console, state)
        console.print(f"  replay    {replay_line(path, state.order.target)}", soft_wrap=True)
    return interrupted


def _make_folder(out: Path) -> None:
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)


def _limits(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say when a trace hangs and when it has too much memory."""
    hang = click.option(
        "--hang-seconds",
        default=HANG_SECONDS,
        show_default=True,
        type=Seconds(),
        help="Of a trace that died, hung or ran out of memory: an operation that takes longer hangs.",
    )
    memory = click.option(
        "--memory",
        default=f"{MEMORY_BYTES >> 20}M",
        show_default=True,
        callback=read_size,
        metavar="SIZE",
        help="Of such a trace: what it may have beyond what it begins with.",
    )
    return hang(memory(command))


@commands.command()
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
@_limits
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


@commands.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--target", default=None, help="Needed where the trace was found on a target that is not built in.")
@click.option("--fault", default=None, help="Instead of the one in the trace; 'none' plants nothing.")
@sanitize_or_not
@click.option("--seconds", default=60.0, show_default=True, type=Seconds())
@click.option("--out", default=None, type=OUT_FILE, help="Default: FILE with .min before its suffix.")
@_limits
def minimize(
    file: Path,
    target: str | None,
    fault: str | None,
    sanitize: bool | None,
    seconds: float,
    out: Path | None,
    hang_seconds: float,
    memory: int,
) -> None:
    """Shorten a failing trace; the same cause signature must stay. Goes on from OUT if that exists.

    A trace that is stored as Died, Hung or OutOfMemory is run in processes of their own, which may end as it did.
    """
    trace = read(file)
    out = out or _minimized_path(file)
    keep_apart([file], {"--out": out})
    name = named_by_user(target, trace.header.target, file)
    lane = trace.header.lane if trace.header.lane in LANED.get(name, ()) else None
    seed = seed_for(sanitize, trace.header.sanitize, name, lane)
    planted = trace.header.fault if fault is None else None if fault == "none" else fault
    trace.header = replaced(trace.header, sanitize=seed, fault=planted)
    if is_of_ward(trace.header.signature):
        with usable(), Ward(name, lane, trace.header.fault, seed, limits=Limits(hang_seconds, memory)) as ward:
            ended = ward.run(trace.header.config, trace.ops)
            ward.hurry(ended)
            _minimize(file, trace, name, ended.signature, ward.make, ward.judge, seconds, out)
    with usable():
        go_where_it_runs(name)
        choose_lane(lane)
    from kvlockstep.fuzz.replay import failing_signature

    with usable():
        factory = factory_for(name, trace.header.fault, seed)
        signature, _ = failing_signature(trace.header.config, trace.ops, factory)
    _minimize(file, trace, name, signature, factory, None, seconds, out)


def _minimize(
    file: Path,
    trace: Trace,
    name: str,
    signature: str | None,
    factory: Factory,
    judge: Judge | None,
    seconds: float,
    out: Path,
) -> NoReturn:
    """Shorten a trace that fails with this signature, and leave."""
    if signature is None:
        raise Stop(f"{file}: does not fail, so there is nothing to minimize; kvlockstep replay says more", USAGE)
    if trace.header.signature not in (None, signature):
        console.print(f"{file}: is stored as {trace.header.signature}, and fails as {signature}", soft_wrap=True)
    start = trace
    if out.is_file():
        earlier = read(out)
        if _cause(earlier.header, earlier.header.signature) != _cause(trace.header, signature):
            raise Stop(f"--out {out}: is another trace, of {earlier.header.signature}: name another file", USAGE)
        if len(earlier.ops) <= len(trace.ops):
            start = earlier
            console.print(f"going on from {out}: {len(earlier.ops)} operations", soft_wrap=True)
    header = replaced(start.header, signature=signature, violates=signature.partition(".")[0])

    def save(config: CacheConfig, ops: tuple[Op, ...]) -> None:
        with writing(f"--out {out}"):
            write_trace(out, Trace(replaced(header, config=config), list(ops)))

    search = Minimizer(
        start.header.config, tuple(start.ops), factory, signature, seconds=seconds, save=save, judge=judge
    )
    try:
        finished = search.run()
    except KeyboardInterrupt:
        best = out if out.exists() else file
        console.print(f"interrupted; the best so far is {best}; the same command goes on", soft_wrap=True)
        sys.exit(INTERRUPTED)
    state = "no shorter one found" if finished else "time ran out; the same command goes on"
    lengths = f"{len(trace.ops)} operations to {len(search.ops)}"
    console.print(f"{signature}: {lengths} in {search.tried} replays ({state})", soft_wrap=True)
    console.print(f"  replay    {replay_line(out, name)}", soft_wrap=True)
    sys.exit(CLEAN)


def _cause(header: Header, signature: str | None) -> tuple[object, ...]:
    """Give what a shorter trace has in common with the one that it was made from."""
    return signature, header.target, header.lane, header.fault, header.sanitize


def _minimized_path(file: Path) -> Path:
    name = file.name.removesuffix(".gz").removesuffix(".jsonl")
    return file.with_name(f"{name}.min.jsonl")


commands.add_command(bisect_command)
commands.add_command(blame)
commands.add_command(check)
commands.add_command(faults)
commands.add_command(gate)
commands.add_command(merge)
commands.add_command(record)
commands.add_command(report)
commands.add_command(show)
commands.add_command(trace_commands)
commands.add_command(why)


@commands.command(epilog=RUNS_HERE)
def targets() -> None:
    """List the targets and lanes that can run here, and why the others cannot."""
    sys.exit(_print_findings(targets_here()))


@commands.command(epilog=RUNS_HERE)
def doctor() -> None:
    """Examine this machine: Python, packages, cores, memory, targets, lanes."""
    sys.exit(_print_findings(examine()))


def _print_findings(findings: list[Finding]) -> int:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, "yes" if finding.works else Text("no", style="red"), finding.text)
    console.print(table)
    return CLEAN if any(finding.works and finding.is_target for finding in findings) else UNKNOWN


def main() -> None:
    """Run the command line; every expected trouble ends in one line and its exit code."""
    run_and_exit(commands)
