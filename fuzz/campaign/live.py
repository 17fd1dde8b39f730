"""What a campaign shows while it runs: a table that stays in place on a terminal, a line now and then elsewhere."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvlockstep.fuzz.campaign.supervisor import Supervisor
from kvlockstep.fuzz.machine import WEIGHTS
from kvlockstep.fuzz.statistics import Statistics

OFTEN, SELDOM = 10.0, 60.0
"""Seconds between lines, in the first minutes and later."""

FIRST = 120.0

N_TOLD = 6
"""Events that stay in sight."""


class View:
    """Shows a supervisor. ``tell`` takes a line for people; ``tick`` is called about once a second."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self.console = console
        self.live = live
        self.supervisor: Supervisor | None = None
        self._told: deque[str] = deque(maxlen=N_TOLD)
        self._next_line = monotonic() + OFTEN
        self._reached: deque[tuple[float, int]] = deque()  # seconds, transitions: of the last minute

    def tell(self, line: str) -> None:
        if self.live is None:
            self.console.print(line, soft_wrap=True)
        else:
            self._told.append(line)

    def tick(self) -> None:
        supervisor = self.supervisor
        assert supervisor is not None, "a view is shown what it shows before it ticks"
        now = monotonic()
        if self.live is None and now < self._next_line:
            return
        total = Statistics()
        for statistics in supervisor.statistics_of_lanes():
            total.add(statistics)
        new = self._new_in_last_minute(supervisor.seconds, len(total.transitions))
        if self.live is not None:
            self.live.update(self._page(supervisor, total, new))
            return
        self._next_line = now + (OFTEN if supervisor.seconds < FIRST else SELDOM)
        self.console.print(line_of(supervisor, total, new), soft_wrap=True)

    def _new_in_last_minute(self, seconds: float, transitions: int) -> int:
        self._reached.append((seconds, transitions))
        while len(self._reached) > 1 and self._reached[0][0] < seconds - 60.0:
            self._reached.popleft()
        return transitions - self._reached[0][1]

    def _page(self, supervisor: Supervisor, total: Statistics, new: int) -> Group:
        workers = Table(box=SIMPLE_HEAD)
        for column in ("worker", "state", "operations/s", "unit", "starts", "deaths"):
            workers.add_column(column, justify="left" if column in ("worker", "state") else "right")
        progress = supervisor.progress
        for place in supervisor.places:
            stage = "given up" if place.given_up else place.state.stage if place.state is not None else "-"
            starts, deaths = progress.starts.get(place.name, 0), progress.deaths.get(place.name, 0)
            workers.add_row(place.name, stage, f"{place.rate:,.0f}", f"{place.unit}", f"{starts}", f"{deaths}")
        causes = Table(box=SIMPLE_HEAD)
        for column in ("cause", "times", "operations", "replays"):
            causes.add_column(column, justify="left" if column == "cause" else "right")
        for cause in progress.causes.values():
            replayed = {None: "?", True: "yes", False: "no"}[cause.replays]
            causes.add_row(cause.signature, f"{cause.times}", f"{cause.minimized_len}", replayed)
        parts: list[Text | Table] = [Text(line_of(supervisor, total, new)), workers]
        parts += [causes] if progress.causes else []
        dead = dead_rules(total)
        parts += [Text(f"never done: {', '.join(dead)}")] if dead else []
        return Group(*parts, *map(Text, self._told))


def line_of(supervisor: Supervisor, total: Statistics, new: int) -> str:
    """Say in one line how far a campaign is."""
    rate = sum(place.rate for place in supervisor.places)
    progress = supervisor.progress
    classes = len({state for _, before, after in total.transitions for state in (before, after)})
    parts = [
        f"{duration(supervisor.seconds)} of {duration(supervisor.settings.seconds)}",
        f"{total.done:,} operations ({rate:,.0f}/s)",
        f"{classes} classes of states, {len(total.transitions):,} transitions ({new} new in a minute)",
        f"causes: {len(progress.causes)}",
    ]
    if deaths := sum(progress.deaths.values()):
        parts.append(f"deaths: {deaths}")
    if progress.twins_differed:
        parts.append(f"flakes: {progress.twins_differed}")
    return "  ".join(parts)


def dead_rules(total: Statistics) -> Sequence[str]:
    """List the kinds of operations that were never done."""
    done = {kind for kind, outcome in total.outcomes if outcome == "done"}
    return [kind for kind in WEIGHTS if kind not in done]


def duration(seconds: float) -> str:
    """Write a time as people do.

    >>> duration(42), duration(150), duration(28800)
    ('42 s', '2:30 min', '8:00 h')
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole // 60 % 60:02} h"


@contextmanager
def shown(console: Console) -> Iterator[View]:
    """Show a campaign as long as the context lasts."""
    if not console.is_terminal:
        yield View(console, None)
        return
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        yield View(console, live)
