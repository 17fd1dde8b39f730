"""Options that several commands have."""

from collections.abc import Callable

import click

from kvlockstep.fuzz.commands.campaign import read_size
from kvlockstep.fuzz.exits import Seconds
from kvlockstep.fuzz.verdict import CHARTER
from kvlockstep.fuzz.ward import HANG_SECONDS, MEMORY_BYTES

Command = Callable[..., None]

sanitize_or_not = click.option(
    "--sanitize/--no-sanitize",
    "sanitize",
    default=None,
    help="Watch the interpreted kernels, or not, instead of as the trace was found. From its seed, else from 0.",
)
"""The option of commands that run a stored trace; they take it as ``sanitize``, None if nobody says."""

targets_to_fuzz = click.option(
    "--target",
    default="gpu_impl",
    show_default=True,
    help="Built-in name, or package.module:factory; several with commas, or 'all'.",
)
"""The option of commands that draw cases; they take it as ``target``."""


def accept_unobserved(command: Command) -> Command:
    """Add the option that accepts laws that could not be observed; the command takes them as ``accepted``."""
    return click.option(
        "--accept-unobserved",
        "accepted",
        multiple=True,
        type=click.Choice([str(law) for law in CHARTER]),
        metavar="LAW",
        help="A law of the charter (1, 2, 3) that need not be observed to call it clean.",
    )(command)


def limits_of_ward(command: Command) -> Command:
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
