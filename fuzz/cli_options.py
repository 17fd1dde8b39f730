"""Options that several commands have."""

from collections.abc import Callable

import click

from kvlockstep.fuzz.verdict import CHARTER

Command = Callable[..., None]

sanitize_or_not = click.option(
    "--sanitize/--no-sanitize",
    "sanitize",
    default=None,
    help="Watch the interpreted kernels, or not, instead of as the trace was found. From its seed, else from 0.",
)
"""The option of commands that run a stored trace; they take it as ``sanitize``, None if nobody says."""


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
