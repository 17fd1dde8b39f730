"""``kvlockstep minimize``: a shorter trace with the same cause."""

import sys
from dataclasses import replace as replaced
from pathlib import Path
from typing import NoReturn

import click

from kvlockstep.fuzz.commands.chosen import fault_for, named_by_user, read, seed_for
from kvlockstep.fuzz.commands.options import limits_of_ward, sanitize_or_not
from kvlockstep.fuzz.commands.out_file import OUT_FILE, keep_apart
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.environments import go_where_it_runs
from kvlockstep.fuzz.exits import CLEAN, INTERRUPTED, USAGE, Seconds, Stop, make_console, usable, writing
from kvlockstep.fuzz.failures import replay_line
from kvlockstep.fuzz.minimize import Judge, Minimizer
from kvlockstep.fuzz.ops import Op
from kvlockstep.fuzz.registry import LANED, Factory, choose_lane, factory_for
from kvlockstep.fuzz.trace import Header, Trace, write_trace
from kvlockstep.fuzz.ward import Limits, Ward, is_of_ward

console = make_console()


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--target", default=None, help="Needed where the trace was found on a target that is not built in.")
@click.option("--fault", default=None, help="Instead of the one in the trace; 'none' plants nothing.")
@sanitize_or_not
@click.option("--seconds", default=60.0, show_default=True, type=Seconds())
@click.option("--out", default=None, type=OUT_FILE, help="Default: FILE with .min before its suffix.")
@limits_of_ward
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
    planted = fault_for(fault, trace.header.fault, file)
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
