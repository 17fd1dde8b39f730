"""``kvlockstep trace from-workload``: the trace of a request log (docs/workloads.md)."""

from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import click

from kvlockstep.fuzz.commands.out_file import OUT_FILE, keep_apart
from kvlockstep.fuzz.config import POLICIES, CacheConfig
from kvlockstep.fuzz.exits import USAGE, Stop, make_console, writing
from kvlockstep.fuzz.ops import Op
from kvlockstep.fuzz.trace import MAX_OPS, MAX_VALUES, Header, write_ops
from kvlockstep.fuzz.trace_bounds import BadLine
from kvlockstep.fuzz.workload import LogError, Logged, Room, Schedule, read_log

SAY_EVERY_S = 5.0


@click.group()
def trace() -> None:
    """Make traces."""


@trace.command("from-workload")
@click.argument("log", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=OUT_FILE, help="The trace; .gz at the end compresses it.")
@click.option("--requests", default=None, type=click.IntRange(1), help="The first so many. Default: all.")
@click.option("--slots", default=262_144, show_default=True, type=click.IntRange(1), help="Of the pool, in tokens.")
@click.option("--page-size", default=16, show_default=True, type=click.IntRange(2, 1024))
@click.option("--context", default=131_072, show_default=True, type=click.IntRange(1, 1 << 20), help="Tokens of a row.")
@click.option("--max-running", default=32, show_default=True, type=click.IntRange(1, 1 << 14), help="Rows.")
@click.option("--chunk", default=8192, show_default=True, type=click.IntRange(2), help="Tokens of a prompt in a step.")
@click.option("--policy", default="lru", show_default=True, type=click.Choice(POLICIES))
@click.option("--layers", default=2, show_default=True, type=click.IntRange(1, 256), help="Of KV, to be checked.")
@click.option("--option", "options", multiple=True, metavar="NAME", help="Of the target, to be on; may be repeated.")
def from_workload(
    log: Path,
    out: Path,
    requests: int | None,
    slots: int,
    page_size: int,
    context: int,
    max_running: int,
    chunk: int,
    policy: str,
    layers: int,
    options: tuple[str, ...],
) -> None:
    """Turn a request log in the format of Mooncake into a trace.

    Same prefix sharing, order of arrival, prefill in chunks, decode in batches, as an engine with a pool of this size
    would run it. Requests that would not fit an empty pool, or a row, are left out, and counted.
    """
    halvings = chunk // page_size
    if chunk % page_size or halvings & (halvings - 1):
        raise Stop(f"--chunk {chunk}: expected {page_size} (the page size) times a power of two", USAGE)
    if slots % page_size:
        raise Stop(f"--slots {slots}: expected whole pages of {page_size}", USAGE)
    n_pages = slots // page_size
    config = CacheConfig(
        page_size, n_pages, max_running, context, policy, layers=layers, options=tuple(sorted(set(options)))
    )
    try:
        config.validate()
    except ValueError as error:
        raise Stop(f"the cache cannot be: {error}", USAGE) from error
    if (excess := config.excess()) is not None:
        raise Stop(f"the cache is too large for this harness: {excess}: ask for less", USAGE)
    keep_apart([log], {"--out": out})
    schedule = Schedule(Room(page_size, n_pages, max_running, context, chunk))
    header = Header(config, why=f"The first {requests} requests of a log." if requests else "A request log.")
    counted = _Counted(log, schedule)
    try:
        with writing(f"--out {out}"):
            write_ops(out, header, counted.ops(_readable(log, requests)))
    except (LogError, BadLine) as error:
        raise Stop(str(error), USAGE) from error
    console = make_console()
    console.print(
        f"{out}: {counted.n_ops:,} operations, {schedule.requests:,} requests with {schedule.prompt_tokens:,} tokens "
        f"of prompts and {schedule.output_tokens:,} of outputs, {out.stat().st_size / 1e6:.1f} MB",
        soft_wrap=True,
    )
    if schedule.retractions:
        console.print(f"  retracted and admitted again: {schedule.retractions:,}")
    if schedule.too_long:
        console.print(f"  left out, longer than {context:,} positions or the pool: {schedule.too_long:,} requests")


def _readable(log: Path, n_requests: int | None) -> Iterator[Logged]:
    """Read the log; an error in that is wrong usage, and no trouble with writing."""
    try:
        yield from read_log(log, n_requests)
    except OSError as error:
        raise Stop(f"{log}: {error.strerror or error}", USAGE) from error


class _Counted:
    """Counts the operations of a schedule, holds them to the bounds of a trace, and says how far they are."""

    def __init__(self, log: Path, schedule: Schedule) -> None:
        self.n_ops = 0
        self._log = log
        self._schedule = schedule
        self._next = monotonic() + SAY_EVERY_S

    def ops(self, log: Iterator[Logged]) -> Iterator[Op]:
        """Pass the operations on. Raises Stop where a trace cannot hold them."""
        for op in self._schedule.ops(log):
            self.n_ops += 1
            n_values = self._schedule.prompt_tokens + self._schedule.output_tokens + self.n_ops
            if self.n_ops > MAX_OPS or n_values > MAX_VALUES:
                raise Stop(
                    f"{self._log}: after {self._schedule.requests:,} requests a trace is full "
                    f"({MAX_OPS:,} operations, {MAX_VALUES:,} tokens and operations): ask for fewer with --requests",
                    USAGE,
                )
            if monotonic() > self._next:
                self._next = monotonic() + SAY_EVERY_S
                click.echo(f"{self._schedule.requests:,} requests, {self.n_ops:,} operations", err=True)
            yield op
        if not self._schedule.requests:
            raise Stop(f"{self._log}: no request fits a row and the pool: see --context and --slots", USAGE)
