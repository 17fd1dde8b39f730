"""How closely ``replay`` looks at a cache, and what it writes of what that took."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from kvlockstep.fuzz.commands.out_file import OUT_FILE
from kvlockstep.fuzz.costs import Cost, Progress, peak_bytes
from kvlockstep.fuzz.exits import writing
from kvlockstep.fuzz.files import replace_file
from kvlockstep.fuzz.ops import Op
from kvlockstep.fuzz.outcomes import OutcomeLog
from kvlockstep.fuzz.ward import Ended
from kvlockstep.invariants import Observation

if TYPE_CHECKING:
    from kvlockstep.fuzz.replay import Run


@dataclass(frozen=True, slots=True)
class Look:
    """``check_every`` None: as the size of the cache asks."""

    check_every: int | None
    json: Path | None

    def options(self) -> list[str]:
        """Say it to a replay in another process, but for the file, which has one writer."""
        return [] if self.check_every is None else [f"--check-every={self.check_every}"]

    def write(self, record: dict[str, Any]) -> None:
        """Write a record to the file, if there is one. Raises Stop."""
        if self.json is not None:
            with writing(f"--json {self.json}"):
                replace_file(self.json, json.dumps(record, indent=1) + "\n")


def looking(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options; the command takes them as ``look``."""

    @click.option(
        "--check-every",
        default=None,
        type=click.IntRange(1),
        metavar="K",
        help="See the whole cache every K operations. Default: 1, and a 256th of the slots of a large pool.",
    )
    @click.option(
        "--json",
        "json_file",
        default=None,
        type=OUT_FILE,
        help="Also write what came of it to a file.",
    )
    @wraps(command)
    def with_look(*arguments: Any, check_every: int | None, json_file: Path | None, **options: Any) -> None:
        command(*arguments, look=Look(check_every, json_file), **options)

    return with_look


class Timed:
    """Watches one run in this process: how long it takes, and, unless it is to be quiet, how far it is."""

    def __init__(self, log: OutcomeLog | None, n_ops: int, quiet: bool) -> None:
        self._log = log
        self._quiet = quiet
        self._progress = None if quiet else Progress(n_ops, self.say)
        self._start = monotonic()

    def say(self, text: str) -> None:
        """Print a line on standard error."""
        if not self._quiet:
            click.echo(text, err=True)

    def watch(self, op: Op, seen: Observation) -> None:
        for one in (self._log, self._progress):
            if one is not None:
                one(op, seen)

    def cost_of(self, run: "Run", page_size: int) -> Cost:
        """Add up what a run took that has just ended."""
        return Cost(
            run.every,
            run.steps,
            run.statistics.refused,
            run.tally.prompt_tokens,
            run.tally.matched_tokens,
            run.tally.evicted_slots // page_size,
            round(monotonic() - self._start, 3),
            peak_bytes(),
        )


def record_of(file: str, target: str, lane: str | None, verdict: str, ran: Ended) -> dict[str, Any]:
    """Say one replay as JSON does."""
    record: dict[str, Any] = {"trace": file, "target": target, "lane": lane, "verdict": verdict}
    record |= {"signature": ran.signature, "steps": ran.steps, "digest": ran.digest}
    return record | (ran.cost.to_json() if ran.cost is not None else {})
