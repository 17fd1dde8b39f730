"""How a command ends: exit codes, and the one line on standard error that goes with expected trouble.

A full disk, a closed pipe, Ctrl-C and wrong usage are expected; a traceback means a bug of the harness.
"""

import math
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EPIPE
from io import TextIOWrapper
from typing import Any, NoReturn

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from kvlockstep.fuzz.describe import printable
from kvlockstep.fuzz.registry import TargetUnusable

CLEAN, VIOLATION, USAGE, UNKNOWN, CRASHED, BROKEN, INTERRUPTED = 0, 1, 2, 10, 11, 12, 130


WIDTH_OF_FILES = 120
"""Columns of an output that is no terminal: room for every column of every table, and readable in a log."""


class Stop(Exception):
    """End the command with one clear line and an exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class PipeConsole(Console):
    """A console that lets a closed pipe surface; Rich would leave with exit code 1, which means a violation.

    What a file or a target says is printed so that it cannot move the cursor or turn the line around.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(EPIPE, os.strerror(EPIPE))


def width_of_output() -> int | None:
    """Return the columns of an output that has none of its own, as a file or a pipe; None to ask the terminal."""
    if os.environ.get("COLUMNS", "").isdigit() or (sys.stdout is not None and sys.stdout.isatty()):
        return None
    return WIDTH_OF_FILES


def make_console() -> PipeConsole:
    """Return the console of a command. Paths, signatures and names are printed as they are: their brackets are none."""
    return PipeConsole(highlight=False, markup=False, emoji=False, width=width_of_output())


class Seconds(click.FloatRange):
    """A time that comes to an end: neither ``inf`` nor ``nan``, which is in every range."""

    def __init__(self, least: float = 0.1) -> None:
        super().__init__(least, 30 * 24 * 3600)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is not a time", param, ctx)
        return seconds


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Name what could not be written; the error of a full disk names no file."""
    try:
        yield
    except OSError as error:
        raise Stop(f"{what}: {error.strerror or error}", BROKEN) from error


@contextmanager
def usable() -> Iterator[None]:
    """Turn a target that cannot be had into wrong usage."""
    try:
        yield
    except TargetUnusable as error:
        raise Stop(str(error), USAGE) from error


def run_and_exit(commands: click.Command, name: str = "kvlockstep") -> NoReturn:
    """Run the command line; every expected trouble ends in one line and its exit code."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a target says may not fit the terminal
    with _cancelled_as_interrupted():
        code = _exit_code(commands, name)
    try:
        sys.stdout.flush()
    except OSError as error:
        if code != BROKEN:
            code = _cannot_print(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter would try once more, and say so
    sys.exit(code)


@contextmanager
def _cancelled_as_interrupted() -> Iterator[None]:
    """Let a polite kill do what Ctrl-C does: what a command has is stored, and what it would leave behind cleared away.

    Whoever started the command may have had it ignored.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit_code(commands: click.Command, name: str) -> int | str | None:
    try:
        # not commands.main, which leaves with 1, a violation, when a pipe is closed
        with commands.make_context(name, sys.argv[1:]) as context:
            commands.invoke(context)
    except SystemExit as done:
        return done.code
    except click.exceptions.Exit as done:
        return done.exit_code
    except Stop as stop:
        return complain(str(stop), stop.code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return USAGE
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "kvlockstep"
        return complain(f"{error.format_message().rstrip('.')}; {command} --help says more", USAGE)
    except (KeyboardInterrupt, click.Abort):
        return complain("interrupted", INTERRUPTED)
    except OSError as error:
        return _cannot_print(error)
    except Exception as error:
        traceback.print_exc()
        return complain(f"the harness failed, this is its own bug: {type(error).__name__}: {error}", BROKEN)
    return CLEAN


def _cannot_print(error: OSError) -> int:
    return complain(f"{error.filename or 'output'}: {error.strerror or error}", BROKEN)


def complain(text: str, code: int) -> int:
    with suppress(OSError):
        click.echo(f"kvlockstep: {printable(text)}", err=True)
    return code
