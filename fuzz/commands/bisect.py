"""The command that finds the first bad commit of a repository for a trace. The search is in ``bisect.py``."""

import shlex
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

from kvlockstep.fuzz.bisect import CannotBisect, Checkouts, Found, Step, add_worktree, bisect, find_commit
from kvlockstep.fuzz.exits import CLEAN, UNKNOWN, USAGE, Stop, make_console, usable
from kvlockstep.fuzz.registry import BUILT_IN, check_name
from kvlockstep.fuzz.trace import TraceError, TraceReader

EXIT_CODES = (
    "Exit codes: 0 the first bad commit was found; 2 wrong usage, unreadable input, or GOOD and BAD are not good and "
    "bad; 10 commits that cannot be run leave several; 12 the harness failed; 130 interrupted."
)


@click.command(name="bisect", epilog=EXIT_CODES)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("commits", metavar="GOOD..BAD")
@click.option("--target", default=None, help="Instead of the one the trace was found on.")
@click.option(
    "--command",
    "shell_command",
    default=None,
    metavar="WORDS",
    help="Run by the shell in each checkout in place of the replay, as where something is to be built first; "
    "{file} is the trace. It prints what kvlockstep replay prints.",
)
@click.option("--keep", is_flag=True, help="Leave a checkout of the first bad commit, and say where it is.")
def bisect_command(file: Path, commits: str, target: str | None, shell_command: str | None, keep: bool) -> None:
    """Find the first bad commit of the repository in this folder: the first on which a trace fails as stored.

    Each commit is checked out into a folder of its own and imported from there; the checkout at hand is not touched.
    A planted fault of the trace is left out. A commit that cannot be run, or on which the trace fails in another way,
    is skipped. GOOD and BAD are tried first.
    """
    console = make_console()
    good, dots, bad = commits.partition("..")
    if not (good and dots and bad) or bad.startswith("."):
        raise Stop(f"{commits}: expected GOOD..BAD, two commits with two dots between them", USAGE)
    try:
        with TraceReader(file) as reader:
            header = reader.header
    except TraceError as error:
        raise Stop(str(error), USAGE) from error
    if target is None and header.target not in BUILT_IN and shell_command is None:
        remedy = f"to import that, say --target {header.target}"
        raise Stop(f"{file}: found on target {header.target!r}; {remedy}", USAGE)
    with usable():
        check_name(target or header.target)
    try:
        judge = Checkouts(file, target or header.target, shell_command)
        for name in (good, bad):
            find_commit(name)
        console.print(
            f"looking for the first commit in {good}..{bad} on which {_fails(header.signature)}", soft_wrap=True
        )
        found = bisect(good, bad, judge, lambda step: _print_step(console, step))
        code = _print_end(console, found)
        if keep and code == CLEAN:
            folder = Path(tempfile.mkdtemp(prefix="kvlockstep-bisect-")).resolve() / "bad"
            add_worktree(folder, found.bad[0].commit)
            console.print(f"  kept      {folder}", soft_wrap=True)
            words = f"git worktree remove --force {shlex.quote(str(folder))}"
            console.print(f"  remove    {words}", soft_wrap=True)
    except CannotBisect as error:
        raise Stop(str(error), USAGE) from error
    sys.exit(code)


def _fails(signature: str | None) -> str:
    return f"the trace fails with {signature}" if signature else "the trace fails"


def _print_step(console: Console, step: Step) -> None:
    word = "skipped" if step.tried.worth == "skip" else step.tried.worth
    line = f"{step.commit.short} {word}: {step.tried.line}"
    if step.tried.line.startswith("DIFFERENT:"):
        line += "; it fails in another way, which says nothing of this failure"
    if step.left is not None:
        n_commits, n_steps = step.left
        line += f" [{n_commits} {'commit' if n_commits == 1 else 'commits'} left after it, about {n_steps} "
        line += "step]" if n_steps == 1 else "steps]"
    console.print(line, soft_wrap=True)


def _print_end(console: Console, found: Found) -> int:
    """Say what was found, and return the exit code."""
    if len(found.candidates) > 1:
        console.print(
            f"unknown: commits that were skipped leave {len(found.candidates)}, the first bad one is among them:"
        )
        for commit in found.candidates:
            console.print(f"  {commit.commit} {commit.date} {commit.subject}", soft_wrap=True)
        code = UNKNOWN
    else:
        commit = found.candidates[0]
        console.print(f"first bad commit: {commit.commit}", soft_wrap=True)
        console.print(f"  date      {commit.date}", soft_wrap=True)
        console.print(f"  subject   {commit.subject}", soft_wrap=True)
        code = CLEAN
    for word, (commit, tried) in (("bad", found.bad), ("good", found.good)):
        console.print(f"  {word:<9} {commit.short} {tried.line}", soft_wrap=True)
    return code
