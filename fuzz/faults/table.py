"""How hunts are shown: while they are done, and as a table with a few closing lines.

On a terminal a bar; elsewhere a line every few seconds. What did not go as it must has a line of its own at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvlockstep.fuzz.faults.hunt import Hunt, NullFault, Task
from kvlockstep.fuzz.faults.summary import FAILS, Summary, over_faults

WIDE = 112
"""Columns that hold the longest name of a fault, its numbers and the longest name of a law."""

STYLES = {"missed": "bold red", "false alarm": "bold red", "error": "bold yellow"}

N_SLOWEST = 3

Follow = Callable[[Task, Hunt], None]


@contextmanager
def following(console: Console, n_tasks: int, every: float = 5.0) -> Iterator[Follow]:
    """Show how far a command is; call what is given for each hunt that ended."""
    if not console.is_terminal:
        yield _PlainLines(console, n_tasks, every)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("hunts", total=n_tasks)

        def follow(task: Task, hunt: Hunt) -> None:
            if (line := _notice(task, hunt)) is not None:
                progress.console.print(line, soft_wrap=True)
            progress.advance(bar)

        yield follow


class _PlainLines:
    """A line every few seconds: how many hunts are done, and about how long the others will take."""

    def __init__(self, console: Console, n_tasks: int, every: float) -> None:
        self.console = console
        self.n_tasks = n_tasks
        self.n_done = 0
        self.every = every
        self._begun = monotonic()
        self._next = self._begun + every

    def __call__(self, task: Task, hunt: Hunt) -> None:
        self.n_done += 1
        if (line := _notice(task, hunt)) is not None:
            self.console.print(line, soft_wrap=True)
        spent = monotonic() - self._begun
        if self._begun + spent < self._next and self.n_done < self.n_tasks:
            return
        self._next = self._begun + spent + self.every
        left = spent / self.n_done * (self.n_tasks - self.n_done)
        after = f"about {_duration(left)} left" if left else f"in {_duration(spent)}"
        self.console.print(f"{self.n_done}/{self.n_tasks} hunts, {after}")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _notice(task: Task, hunt: Hunt) -> Text | None:
    """Say what is wrong with a hunt, if anything is. Where a law is left out, nothing is."""
    where = f"{hunt.fault}, seed {hunt.seed}"
    if hunt.trouble is not None:
        return Text(f"error: {where}: {hunt.trouble}", style=STYLES["error"])
    if isinstance(task.fault, NullFault):
        alarm = f"false alarm: {where}: {hunt.signature} after {hunt.operations:,} operations"
        return Text(alarm, style=STYLES["false alarm"]) if hunt.caught else None
    if hunt.caught or hunt.without is not None:
        return None
    return Text(f"missed: {where}: {_why_missed(hunt)}", style=STYLES["missed"])


def _why_missed(hunt: Hunt) -> str:
    if hunt.law is not None:
        return f"named by {hunt.law}, which may not name it"
    return f"not found within {hunt.seconds:g} s"


def print_results(console: Console, summaries: Sequence[Summary], seconds: float) -> None:
    """Print a table for each target, one line a fault, and what they come to.

    Names are never cut, for they are pasted; on a narrow terminal the laws stand below the table.
    """
    for target in dict.fromkeys(summary.fault.target for summary in summaries):
        _print_target(console, target, [summary for summary in summaries if summary.fault.target == target])
    if not summaries:
        return
    console.print(
        "medians over the seeds; ops: operations until it was found; s: seconds, max: of the slowest seed; "
        "min: length when minimized",
        soft_wrap=True,
    )
    planted = [summary for summary in summaries if not summary.is_null]
    for line in (*_closing_lines(planted, seconds), *_lines_on_nulls([one for one in summaries if one.is_null])):
        console.print(line, soft_wrap=True)


def _print_target(console: Console, target: str, summaries: Sequence[Summary]) -> None:
    narrow = console.width < WIDE
    title = f"faults of {target}"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, collapse_padding=True)
    for column in ("fault", "caught", "ops", "s", "max", "min"):
        table.add_column(column, justify="left" if column == "fault" else "right", no_wrap=True, overflow="fold")
    if not narrow:
        table.add_column("named by", overflow="fold")
    below = []
    for summary in sorted(summaries, key=lambda summary: not summary.is_null):
        named_by = _named_by(summary)
        cells = (
            _shown_name(summary),
            f"{len(summary.caught)}/{len(summary.hunts)}",
            _figure(summary.median_of("operations"), ",.0f"),
            _figure(summary.median_of("seconds"), ".1f"),
            _figure(summary.slowest, ".1f"),
            _figure(summary.median_of("minimized_len"), ".0f"),
        )
        table.add_row(*cells, *([] if narrow else [named_by]), style=STYLES.get(summary.verdict))
        if narrow:
            below.append(f"{_shown_name(summary)} named by: {named_by}")
    console.print(table)
    for line in below:
        console.print(line, soft_wrap=True)


def _shown_name(summary: Summary) -> str:
    return f"null (no patch), {summary.fault.lane}" if summary.is_null else summary.fault.name


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _named_by(summary: Summary) -> str:
    troubles = sorted({hunt.trouble for hunt in summary.hunts if hunt.trouble is not None})
    words = [*summary.laws, *(f"error: {trouble}" for trouble in troubles)]
    if summary.is_null:
        lasted = sum(hunt.seconds for hunt in summary.hunts)
        return "FALSE ALARM: " + ", ".join(words) if summary.caught else ", ".join(words) or f"nothing in {lasted:g} s"
    if any(hunt.law is None for hunt in summary.missed):
        words.append("not found")
    return ", ".join(words) + ("" if summary.fault.lane == "torch" else f" ({summary.fault.lane})")


def _closing_lines(planted: Sequence[Summary], seconds: float) -> Iterator[str]:
    if not planted:
        return
    n_hunts = sum(len(summary.hunts) for summary in planted)
    missed = [summary for summary in planted if summary.verdict == "missed"]
    errors = [summary for summary in planted if summary.in_trouble]
    n_caught = sum(summary.verdict == "caught" for summary in planted)
    yield (
        f"{_count(len(planted), 'fault')}, {_count(n_hunts, 'hunt')} of {seconds:g} s at most: "
        f"{n_caught} caught with every seed, "
        f"{len(missed)} missed, {len(errors)} with errors"
    )
    if over_faults(planted, "seconds") is not None:
        yield (
            f"median over faults: {_figure(over_faults(planted, 'seconds'), '.1f')} s, "
            f"{_figure(over_faults(planted, 'operations'), ',.0f')} operations, "
            f"{_figure(over_faults(planted, 'minimized_len'), '.0f')} when minimized"
        )
        slowest = sorted(planted, key=lambda summary: summary.slowest or 0.0, reverse=True)[:N_SLOWEST]
        yield "slowest seeds: " + ", ".join(f"{one.fault.name} {_figure(one.slowest, '.1f')} s" for one in slowest)
    for summary in missed:
        seeds = ", ".join(str(hunt.seed) for hunt in summary.missed)
        reasons = "; ".join(sorted({_why_missed(hunt) for hunt in summary.missed}))
        share = f"{len(summary.missed)} of {len(summary.hunts)}"
        yield f"missed: {summary.fault.name} with {share} seeds ({seeds}): {reasons}"
    for summary in errors:
        troubles = "; ".join(sorted({hunt.trouble for hunt in summary.in_trouble if hunt.trouble is not None}))
        yield f"error: {summary.fault.name}: {troubles}"


def _lines_on_nulls(nulls: Sequence[Summary]) -> Iterator[str]:
    if not nulls:
        return
    hunts = [hunt for summary in nulls for hunt in summary.hunts]
    alarms = sum(summary.verdict in FAILS for summary in nulls)
    spent = sum(hunt.seconds for hunt in hunts)
    found = _count(alarms, "false alarm") if alarms else "no false alarm"
    yield f"null fault: {_count(len(hunts), 'hunt')}, {spent:,.0f} s in all, {found}"


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}{'' if n == 1 else 's'}"
