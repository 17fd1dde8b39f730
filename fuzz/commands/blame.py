"""The command that tells the life of one thing of a cache through a trace, and which operation did the damage."""

from collections.abc import Callable
from pathlib import Path

import click

from kvlockstep.fuzz.commands.chosen import Chosen, choose
from kvlockstep.fuzz.exits import USAGE, Stop, make_console, usable
from kvlockstep.fuzz.registry import Factory
from kvlockstep.fuzz.trace_bounds import LANES
from kvlockstep.fuzz.ward import is_of_ward

EXIT_CODES = (
    "Exit codes: 0 it was told, whatever it says; 2 wrong usage, unreadable input, or no such thing in the trace; "
    "12 the harness failed or could not write; 130 interrupted."
)

LAWS = range(13)
"""What may be left out: 0 is the comparison with the model."""

Command = Callable[..., None]


def trace_options(command: Command) -> Command:
    """Add the options that say on what a trace is run, and with which laws."""
    options = (
        click.argument("file", metavar="FILE", type=click.Path(path_type=Path)),
        click.option("--target", default=None, help="Instead of the one the trace was found on."),
        click.option("--lane", default=None, type=click.Choice(LANES), help="Instead of the one of the trace."),
        click.option("--fault", default=None, help="Instead of the one in the trace; 'none' plants nothing."),
        click.option(
            "--without",
            multiple=True,
            metavar="LAW",
            callback=_read_laws,
            help="Leave out a law, 1 to 12, or the 'comparison' with the model; repeatable.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _read_laws(context: click.Context, param: click.Parameter, words: tuple[str, ...]) -> frozenset[int]:
    laws = {"comparison": 0} | {str(law): law for law in LAWS[1:]}
    for word in words:
        if word not in laws:
            raise click.BadParameter(f"{word!r}: expected a law, 1 to {LAWS[-1]}, or comparison", context, param)
    return frozenset(laws[word] for word in words)


def open_trace(file: Path, target: str | None, lane: str | None, fault: str | None) -> tuple[Chosen, Factory]:
    """Read a trace, fix the lane of this process, and find the target to run it on. Raises Stop."""
    chosen = choose(file, target, lane, fault)
    if is_of_ward(chosen.trace.header.signature):
        ends = f"ends its process ({chosen.trace.header.signature})"
        raise Stop(f"{file}: {ends}, which only kvlockstep replay takes care of", USAGE)
    return chosen, chosen.factory()


@click.command(epilog=EXIT_CODES)
@trace_options
@click.option("--slot", default=None, type=int)
@click.option("--page", default=None, type=int)
@click.option("--row", default=None, type=int)
@click.option("--request", default=None, metavar="NAME")
@click.option("--node", default=None, type=int, help="By the last number that it had.")
def blame(
    file: Path,
    target: str | None,
    lane: str | None,
    fault: str | None,
    without: frozenset[int],
    slot: int | None,
    page: int | None,
    row: int | None,
    request: str | None,
    node: int | None,
) -> None:
    """Tell the life of a slot, page, row, request or node in a trace, operation by operation, up to the violation.

    Without one of these options: of those that the violation names. At the end stands the cause: the operation that did
    the damage, which may lie long before the one at which a law noticed.
    """
    given = {"slot": slot, "page": page, "row": row, "request": request, "node": node}
    asked = {kind: value for kind, value in given.items() if value is not None}
    if len(asked) > 1:
        raise Stop(f"{' and '.join(f'--{kind}' for kind in asked)}: expected one of them", USAGE)
    chosen, factory = open_trace(file, target, lane, fault)
    trace = chosen.trace
    from kvlockstep.fuzz.blame import (
        NothingThere,
        cause_lines,
        hidden_cause,
        life_lines,
        seen_cause,
        thing_named,
        things_of,
    )
    from kvlockstep.fuzz.lenient import tell_without
    from kvlockstep.fuzz.lives import Lives

    config = trace.header.config
    with usable():
        story = tell_without(config, trace.ops, factory, without)
    lives = Lives(story)
    try:
        things = [thing_named(lives, kind, value) for kind, value in asked.items()] or things_of(lives)
    except NothingThere as error:
        raise Stop(f"{file}: {error}", USAGE) from error
    with usable():
        found = seen_cause(lives) or hidden_cause(lives, factory, without)
    console = make_console()
    for thing in things:
        for line in life_lines(lives, thing):
            console.print(line, soft_wrap=True)
        console.print()
    for line in cause_lines(lives, found, len(trace.ops)):
        console.print(line, soft_wrap=True)
