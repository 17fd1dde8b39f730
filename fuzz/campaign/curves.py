"""Curves over the time of work as inline SVG: a line for each party, axes whose ticks a person would choose.

All that is drawn are numbers and names of ours. Colours are classes of the page that the curves stand in
(``page.html.jinja``), so that they follow its scheme; a party keeps its colour in every chart.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from kvlockstep.fuzz.campaign.live import duration
from kvlockstep.fuzz.campaign.record import PartyRecord, number_of

Point = tuple[float, float]

MOST_POINTS = 120
"""Points of a line, at most; a night of samples is thinned to so many."""

N_COLOURS = 8
"""Lines beyond these begin again with the first colour, and are dashed."""

WIDTH, HEIGHT = 520.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 32.0, 12.0, 40.0

_TIME_STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_N_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """What one party did."""

    name: str
    colour: int  # index of the party, in all charts
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: its title, what it counts, its lines as drawn, and the picture."""

    title: str
    unit: str
    lines: Sequence[Line]
    svg: Markup


def charts_of(parties: Sequence[PartyRecord]) -> list[Chart]:
    """Draw the curves of all parties."""
    return [
        _chart(title, unit, [Line(party.name, i, points(party.events)) for i, party in enumerate(parties)], steps=steps)
        for title, unit, points, steps in (
            ("Distinct transitions", "transitions", _of("transitions"), False),
            ("Classes of states", "classes", _of("classes"), False),
            ("Operations a second", "operations a second", rate_points, False),
            ("Causes of failure", "causes", _of("causes"), True),
            ("Memory of all workers, MiB", "MiB", lambda events: points_of(events, "memory_mib", choose=max), False),
        )
    ]


def _of(fact: str) -> Callable[[Sequence[dict[str, Any]]], list[Point]]:
    return lambda events: points_of(events, fact)


def points_of(
    events: Iterable[dict[str, Any]], fact: str, choose: Callable[[Sequence[float]], float] = lambda values: values[-1]
) -> list[Point]:
    """Return times and values of a fact in the samples of a journal, thinned to MOST_POINTS.

    Of samples that are drawn as one ``choose`` gives the value. Where a party was resumed after a kill, the time goes
    back to what was saved last: what was sampled behind it was lost, and is left out.

    >>> a, b, c = ({"event": "sample", "t": t, "done": t * 10} for t in (10, 20, 15))
    >>> points_of([a, b, c], "done")
    [(10, 100), (15, 150)]
    """
    points: list[Point] = []
    for event in events:
        if event["event"] not in ("sample", "begin"):
            continue
        while points and points[-1][0] >= event["t"]:
            points.pop()
        value = number_of(event.get(fact)) if event["event"] == "sample" else None
        if value is not None:
            points.append((event["t"], value))
    size = math.ceil(len(points) / MOST_POINTS)
    parts = [points[i : i + size] for i in range(0, len(points), size or 1)]
    return [(part[-1][0], choose([value for _, value in part])) for part in parts]


def rate_points(events: Iterable[dict[str, Any]]) -> list[Point]:
    """Return operations done a second, each between one drawn sample and the next."""
    rates = []
    before = 0.0, 0.0
    for t, done in points_of(events, "done"):
        if t > before[0] and done >= before[1]:
            rates.append((t, (done - before[1]) / (t - before[0])))
        before = t, done
    return rates


def _chart(title: str, unit: str, lines: Sequence[Line], *, steps: bool) -> Chart:
    points = [point for line in lines for point in line.points]
    x_ticks = time_ticks(max((t for t, _ in points), default=0.0))
    y_ticks = ticks(max((value for _, value in points), default=0.0))

    def place(point: Point) -> tuple[str, str]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / x_ticks[-1]
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * point[1] / y_ticks[-1]
        return f"{x:.1f}", f"{y:.1f}"

    head = Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}, against the time of work">')
    parts = [head.format(WIDTH, HEIGHT, title)]
    right, bottom = f"{WIDTH - RIGHT:.1f}", f"{HEIGHT - BOTTOM:.1f}"
    for value in y_ticks:
        _, y = place((0.0, value))
        grid = Markup('<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(LEFT, y, right, y)
        text = Markup('<text x="{}" y="{}" dy="0.35em" text-anchor="end">{}</text>')
        parts += [grid, text.format(LEFT - 8, y, number(value))]
    for t in x_ticks:
        x, _ = place((t, 0.0))
        tick = Markup('<line class="axis" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(x, bottom, x, HEIGHT - BOTTOM + 4)
        text = Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>')
        parts += [tick, text.format(x, HEIGHT - BOTTOM + 18, duration(t))]
    axis = Markup('<line class="axis" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(LEFT, bottom, right, bottom)
    label = Markup('<text class="label" x="{}" y="{}" text-anchor="end">time of work</text>')
    parts += [axis, label.format(right, HEIGHT - 5)]
    for line in lines:
        parts.append(_drawn(line, [place(point) for point in line.points], unit, steps=steps))
    if not points:
        parts.append(Markup('<text x="{}" y="{}">no samples</text>').format(LEFT + 12, HEIGHT / 2 - 10))
    return Chart(title, unit, lines, Markup("").join([*parts, Markup("</svg>")]))


def _drawn(line: Line, places: Sequence[tuple[str, str]], unit: str, *, steps: bool) -> Markup:
    """Draw a line, and on each of its points what is to be read there."""
    if not places:
        return Markup("")
    style = f"c{line.colour % N_COLOURS}" + (" dashed" if line.colour >= N_COLOURS else "")
    (x, y), *others = places
    way = f"M{x} {y}" + "".join(f"H{x}V{y}" if steps else f"L{x} {y}" for x, y in others)
    drawn = Markup('<path class="line {}" d="{}"/>').format(style, way)
    dot = Markup('<circle class="dot{} {}" cx="{}" cy="{}" r="5"><title>{}, {}: {} {}</title></circle>')
    alone = " alone" if len(places) == 1 else ""
    for (x, y), (t, value) in zip(places, line.points, strict=True):
        drawn += dot.format(alone, style, x, y, line.name, duration(t), number(value), unit)
    return drawn


def ticks(most: float) -> list[float]:
    """Return ticks from 0 on, the last of them not below ``most``, in steps of 1, 2 or 5 times a power of ten.

    >>> ticks(37)
    [0, 10, 20, 30, 40]
    >>> ticks(0)
    [0, 1]
    """
    step = 1.0
    while step * _N_TICKS < most:
        step *= 2.5 if str(int(step)).startswith("2") else 2
    n = max(1, math.ceil(most / step))
    return [int(step) * i for i in range(n + 1)]


def time_ticks(most: float) -> list[float]:
    """Return ticks for seconds, in steps that are round in seconds, minutes, hours or days.

    >>> [duration(t) for t in time_ticks(9000)]
    ['0 s', '30:00 min', '1:00 h', '1:30 h', '2:00 h', '2:30 h']
    """
    fits = [step for step in _TIME_STEPS if step * _N_TICKS >= most]
    step = fits[0] if fits else 86400 * math.ceil(most / _N_TICKS / 86400)
    return [step * i for i in range(max(1, math.ceil(most / step)) + 1)]


def number(value: float) -> str:
    """Write a number for a person: thousands apart, no more digits than say something."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"
