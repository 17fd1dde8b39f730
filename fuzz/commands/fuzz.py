"""``kvlockstep fuzz``: one run of some seconds, or a campaign (``commands/campaign.py``)."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import click

from kvlockstep.fuzz.campaign.supervisor import Bounds
from kvlockstep.fuzz.commands.campaign import Asked, print_verdict, read_duration, read_shard, read_size, run_campaign
from kvlockstep.fuzz.commands.on_ray import run_on_ray
from kvlockstep.fuzz.commands.options import accept_unobserved, targets_to_fuzz
from kvlockstep.fuzz.crew import WorkerState, n_cores, run_workers
from kvlockstep.fuzz.exits import (
    INTERRUPTED,
    UNKNOWN,
    USAGE,
    Seconds,
    Stop,
    make_console,
    usable,
    writing,
)
from kvlockstep.fuzz.failures import replay_line
from kvlockstep.fuzz.places import lanes_named, names_of, places_for
from kvlockstep.fuzz.registry import SANITIZED, check_fault, check_sanitizers, targets_named
from kvlockstep.fuzz.report import PlainProgress, print_failure, print_run
from kvlockstep.fuzz.trace_bounds import MAX_NUMBER
from kvlockstep.fuzz.verdict import by_target, remarks, replays, too_seldom, verdict_of
from kvlockstep.fuzz.worker import Order, end_with

console = make_console()

MAX_SEED = (1 << 63) - 1

LAST_WORDS_S = 8.0
"""A campaign whose parent is gone has so long to store what it has."""

LONG_ENOUGH = 300.0
"""Seconds in which every state has been reached that can be; after them more time is no advice."""


@click.command()
@targets_to_fuzz
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
            target,
            chosen,
            lasts,
            out=out,
            faults=faults,
            bounds=bounds,
            accepted=accepted_laws,
            sanitize=sanitize,
            **of_campaign,
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
            check_sanitizers(names, chosen)
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
    print_verdict(console, verdict)
    labels_only = len(verdict.lines) == len(too_seldom(shown))  # nothing else was missing
    if verdict.code == UNKNOWN and seconds < LONG_ENOUGH and labels_only:
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
