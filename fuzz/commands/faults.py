"""The command that looks for every planted fault from scratch: chooses them, hunts, keeps what is done, and prints it.

What it found lies in a folder: ``hunts.jsonl`` with each hunt as soon as it ended, which the same command goes on
from, and at the end ``faults.json`` with all that the table is made of.
"""

import json
import sys
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvlockstep.fuzz.crew import n_cores
from kvlockstep.fuzz.environments import python_for
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
from kvlockstep.fuzz.files import replace_file
from kvlockstep.fuzz.registry import TargetUnusable

if TYPE_CHECKING:  # most commands start without the catalogue of faults
    from kvlockstep.fuzz.faults.fault import Fault
    from kvlockstep.fuzz.faults.hunt import Hunt, Task
    from kvlockstep.fuzz.faults.journal import Journal
    from kvlockstep.fuzz.faults.summary import Summary

EXIT_CODES = (
    "Exit codes: 0 every fault was caught with every seed; 1 one was missed, or a false alarm; 2 wrong usage; "
    "10 a target cannot run here; 12 a hunt gave no verdict, or a file could not be written; 130 interrupted."
)


@click.command(epilog=EXIT_CODES)
@click.option("--target", default=None, help="Only faults of this target; several with commas. Default: all.")
@click.option(
    "--only", multiple=True, help="Name of a fault, or 'null' for the null faults; may be given several times."
)
@click.option("--sample", default=None, type=click.IntRange(min=1), help="So many of each kind and target only.")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(min=1), help="Hunts for each fault.")
@click.option("--seconds", default=60.0, show_default=True, type=Seconds(), help="For each hunt, at most.")
@click.option("--null-seconds", default=None, type=Seconds(), help="For each hunt without a fault. Default: the same.")
@click.option("--jobs", default=None, type=click.IntRange(min=1), help="At the same time. Default: one a core.")
@click.option("--ablation", is_flag=True, help="Also leave out each law that alone found a fault, and look again.")
@click.option(
    "--out",
    default="out/faults",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="For hunts.jsonl, from which the same command goes on, and faults.json.",
)
@click.option("--fresh", is_flag=True, help="Do all hunts anew.")
def faults(
    target: str | None,
    only: tuple[str, ...],
    sample: int | None,
    seeds: int,
    seconds: float,
    null_seconds: float | None,
    jobs: int | None,
    ablation: bool,
    out: Path,
    fresh: bool,
) -> None:
    """Plant each known bug and look for it from scratch, in a process of its own; exit 1 if one is missed.

    The null fault plants nothing, and must not be caught. Bugs of a target that cannot be had here are not looked
    for, and said; then the exit code is 10. An interrupted command goes on when it is given again.
    """
    from kvlockstep.fuzz.faults.ablation import second_tasks
    from kvlockstep.fuzz.faults.summary import results_of, summaries_of
    from kvlockstep.fuzz.faults.table import print_results
    from kvlockstep.fuzz.faults.zoo import NULL, choose, tasks_for

    console = make_console()
    with usable():
        chosen = choose(target, only, sample)
        here, reasons = _that_run_here(chosen, insisted=set(only) - {NULL})
    for reason in reasons:
        complain(f"not looked for: {reason}", UNKNOWN)
    if not here:
        sys.exit(UNKNOWN)
    tasks = tasks_for(here, seeds, seconds, null_seconds or seconds)
    n_asked, interrupted = len(tasks), False
    first: list[Hunt] = []
    second: list[Hunt] = []
    with _journal_in(out, fresh=fresh) as journal:
        try:
            _do(console, journal, tasks, jobs or n_cores(), first, out)
            if ablation:
                again = second_tasks(here, first, seconds)
                n_asked += len(again)
                console.print(f"{len(again)} hunts found their fault by a single law: once more without it")
                _do(console, journal, again, jobs or n_cores(), second, out)
        except KeyboardInterrupt:
            interrupted = True
        summaries = summaries_of(here, first)
        results = results_of(summaries, seeds, seconds, null_seconds or seconds)
        print_results(console, summaries, seconds)
        if ablation:
            planted = [hunt for summary in summaries if not summary.is_null for hunt in summary.hunts]
            results["ablation"] = _ablate(console, planted, second)
        with writing(f"--out {out}"):
            replace_file(out / "faults.json", json.dumps(results, indent=1) + "\n")
    if interrupted:
        n_done = len(first) + len(second)
        console.print(f"interrupted with {n_done} of {n_asked} hunts done; the same command goes on", soft_wrap=True)
        sys.exit(INTERRUPTED)
    sys.exit(_exit_code(summaries, second, some_not_run=bool(reasons)))


def _that_run_here(faults: "Sequence[Fault]", insisted: Collection[str]) -> "tuple[list[Fault], list[str]]":
    """Return the faults whose target can be had here, and why the others cannot.

    Raises TargetUnusable if one of those is ``insisted`` on.
    """
    reasons: dict[str, str] = {}
    for target in dict.fromkeys(fault.target for fault in faults):
        try:
            python_for(target)
        except TargetUnusable as error:
            if any(fault.target == target and fault.name in insisted for fault in faults):
                raise
            reasons[target] = str(error)
    return [fault for fault in faults if fault.target not in reasons], list(reasons.values())


def _journal_in(out: Path, *, fresh: bool) -> "Journal":
    from kvlockstep.fuzz.faults.journal import Journal, JournalUnusable

    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        try:
            return Journal(out / "hunts.jsonl", fresh=fresh)
        except JournalUnusable as error:
            raise Stop(str(error), USAGE) from error


def _do(
    console: Console, journal: "Journal", tasks: "Sequence[Task]", jobs: int, hunts: "list[Hunt]", out: Path
) -> None:
    """Do the hunts that were not done earlier; each that is done is in ``hunts``, also when this is interrupted."""
    from kvlockstep.fuzz.faults.hunt import hunt_all
    from kvlockstep.fuzz.faults.table import following

    earlier = {index: done for index, task in enumerate(tasks) if (done := journal.done(task)) is not None}
    hunts += earlier.values()
    left = [task for index, task in enumerate(tasks) if index not in earlier]
    if earlier:
        console.print(f"{len(earlier)} of {len(tasks)} hunts were done earlier: {journal.path}", soft_wrap=True)
    if not left:
        return
    with following(console, len(left)) as follow, closing(hunt_all(left, jobs)) as results:
        for task, hunt in results:
            with writing(f"--out {out}"):
                journal.add(task, hunt)
            hunts.append(hunt)
            follow(task, hunt)


def _ablate(console: Console, first: "Sequence[Hunt]", second: "Sequence[Hunt]") -> dict[str, Any]:
    """Print what each law is worth, and return it for the JSON file."""
    from kvlockstep.fuzz.faults.ablation import print_ablation, worth_of_each
    from kvlockstep.fuzz.faults.summary import in_order

    worths = worth_of_each(first, second)
    print_ablation(console, worths)
    return {"laws": [asdict(worth) for worth in worths], "hunts": [asdict(hunt) for hunt in in_order(second)]}


def _exit_code(summaries: "Sequence[Summary]", second: "Sequence[Hunt]", *, some_not_run: bool) -> int:
    from kvlockstep.fuzz.faults.summary import FAILS

    if any(summary.verdict in FAILS for summary in summaries):
        return VIOLATION
    in_trouble = [hunt for summary in summaries for hunt in summary.in_trouble]
    in_trouble += [hunt for hunt in second if hunt.trouble is not None]
    if in_trouble:
        hunts = "1 hunt" if len(in_trouble) == 1 else f"{len(in_trouble)} hunts"
        return complain(f"no verdict: {hunts} ended in an error", BROKEN)
    return UNKNOWN if some_not_run else CLEAN
