"""Tables and progress for people: in colour on a terminal, plain lines elsewhere."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvlockstep.fuzz.crew import WorkerState
from kvlockstep.fuzz.label_needs import PARTS_OF_NODES
from kvlockstep.fuzz.labels import LABELS, name_of
from kvlockstep.fuzz.ops import OPS
from kvlockstep.fuzz.states import StateClass
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.targets.base import REFUSALS
from kvlockstep.fuzz.verdict import by_target, labels_short, merged

NARROW = 60
"""Columns below which a table has no room for sentences."""

FIRST_COLUMN = 42
"""Columns of the longest label or fact that stands before the figures of the workers."""

BETWEEN_COLUMNS = 3

FEW = 2
"""Workers of whom there is room for words in a line of progress."""


EVERY_S = 5.0
"""Between two lines of progress."""


class PlainProgress:
    """One line every few seconds, on any kind of output."""

    def __init__(self, console: Console, seconds: float) -> None:
        self.console = console
        self.seconds = seconds
        self._next = monotonic() + EVERY_S

    def __call__(self, states: Sequence[WorkerState]) -> None:
        if monotonic() < self._next:
            return
        self._next = monotonic() + EVERY_S
        parts = []
        for state in states:
            rate = state.statistics.done / state.seconds if state.seconds else 0.0
            done = f"{state.statistics.done:,}"
            if len(states) <= FEW:
                parts.append(f"{state.order.name} {state.stage} {done} done ({rate:,.0f}/s)")
            else:
                stage = "" if state.stage == "running" else f" {state.stage}"
                parts.append(f"{state.order.name}{stage} {done} ({rate:,.0f}/s)")
        spent = max((state.seconds for state in states), default=0.0)
        self.console.print(f"{spent:4.0f}/{self.seconds:g} s  " + "  ".join(parts), highlight=False, soft_wrap=True)


def print_run(console: Console, states: Sequence[WorkerState]) -> None:
    """Print the closing tables of a fuzz run: workers, operations by outcome, state labels, allowances if any."""
    groups = by_target(states)
    parts = _side_by_side(console, states)
    for part in parts:
        workers = _table("workers", ["", *map(_heading, part)])
        facts = [_facts_of(state) for state in part]
        for name in facts[0]:
            workers.add_row(name, *(of_worker[name] for of_worker in facts))
        console.print(workers)

    total = merged(states)
    _print_operations(console, total)
    missed = labels_short(states)
    for part in parts:
        labels = _table("state labels", ["label", *map(_heading, part)])
        for label in LABELS:
            name = name_of(label)
            style = "bold red" if label in missed else None
            labels.add_row(name, *(f"{state.statistics.labels[name]:,}" for state in part), style=style)
        console.print(labels)
    _print_transitions(console, total)
    if total.allowances:
        _print_allowances(console, groups)
    for target, group in groups.items():
        for line in unobserved_lines(group):
            console.print(f"{target}: {line}" if len(groups) > 1 else line, soft_wrap=True)


def _side_by_side(console: Console, states: Sequence[WorkerState]) -> list[Sequence[WorkerState]]:
    """Part the workers into as many as one table holds beside its first column; two it holds on any terminal."""
    widest = max((len(line) for state in states for line in (*_heading(state).split("\n"), "interpret")), default=0)
    n = max(2, (console.width - FIRST_COLUMN) // (widest + BETWEEN_COLUMNS))
    return [states[i : i + n] for i in range(0, len(states), n)]


def _heading(state: WorkerState) -> str:
    """Give the name of a worker, its lane on a line of its own where the target stands before it."""
    name, lane = state.order.name, state.order.lane
    return f"{name.removesuffix(f'-{lane}')}\n{lane}" if lane is not None and name.endswith(f"-{lane}") else name


def _print_allowances(console: Console, groups: dict[str, list[WorkerState]]) -> None:
    """Print how often each target used the allowances that it declares; one that it does not declare is a dash."""
    counts = {target: merged(group).allowances for target, group in groups.items()}
    counts = {target: count for target, count in counts.items() if count}
    table = _table("allowances used", ["allowance", *(counts if len(groups) > 1 else ["operations"])])
    for name in sorted({name for count in counts.values() for name in count}):
        table.add_row(name, *(f"{count[name]:,}" if name in count else "-" for count in counts.values()))
    console.print(table)


def _print_operations(console: Console, total: Statistics) -> None:
    """Print how the operations of each kind ended; on a narrow terminal the reasons stand below the table."""
    narrow = console.width < NARROW
    table = _table("operations by outcome", ["operation", "done", "refused"], wrap=False)
    if not narrow:
        table.add_column("refused because", overflow="fold")
    below = []
    for op in OPS:
        kind = op.__name__.lower()
        reasons = {r.__name__: total.outcomes[kind, r.__name__] for r in REFUSALS}
        because = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
        cells = [kind, f"{total.outcomes[kind, 'done']:,}", f"{sum(reasons.values()):,}"]
        table.add_row(*cells, *([] if narrow else [because]))
        if narrow and because:
            below.append(f"{kind} refused: {because}")
    console.print(table)
    for line in below:
        console.print(line)


@dataclass(frozen=True, slots=True)
class Reach:
    """Where operations of one kind were done: distinct transitions, and the classes of states that they began in.

    ``never`` is the state that operations began in most often, of those that this one never began in.
    """

    kind: str
    distinct: int
    begun_in: int
    never: StateClass | None
    never_met: int = 0  # operations that began in ``never``


def reaches_of(total: Statistics) -> tuple[list[Reach], int]:
    """Return where each operation was done, and how many classes of states operations began in."""
    met: Counter[StateClass] = Counter()
    for (_, before, _), count in total.transitions.items():
        met[before] += count
    reaches = []
    for op in OPS:
        kind = op.__name__.lower()
        of_kind = [before for (name, before, _) in total.transitions if name == kind]
        begun_in = set(of_kind)
        never = [state for state in met if state not in begun_in and state.allows(kind)]
        example = max(never, key=lambda state: (met[state], state), default=None)
        reaches.append(Reach(kind, len(of_kind), len(begun_in), example, met[example] if example else 0))
    return reaches, len(met)


def _print_transitions(console: Console, total: Statistics) -> None:
    """Print how many distinct transitions each operation made, and where it was never done."""
    if not total.transitions:
        return
    reaches, n_classes = reaches_of(total)
    narrow = console.width < NARROW
    title = f"transitions: {len(total.transitions):,} distinct, between {n_classes} classes of states"
    table = _table(title, ["operation", "distinct", "begun in"], wrap=False)
    if not narrow:
        table.add_column("most frequent state it was never done in", overflow="fold")
    for reach in reaches:
        cells = [reach.kind, f"{reach.distinct:,}", f"{reach.begun_in}"]
        never = f"{reach.never} ({reach.never_met:,})" if reach.never else "-"
        table.add_row(*cells, *([] if narrow else [never]))
    console.print(table)


def unobserved_lines(states: Sequence[WorkerState]) -> list[str]:
    """Say which checks could not run on what the targets show; they were skipped, not passed."""
    checks = sorted({(law, check, ", ".join(needs)) for state in states for law, check, needs in state.unobserved})
    lines = [f"not observed: law {law}, {check.replace('_', ' ')} (needs {needs})" for law, check, needs in checks]
    hidden = {part for state in states for part in state.hidden}
    lines += [
        f"not observed: the comparison with the model, {part} of nodes (needs {' and '.join(fields)})"
        for part, fields in PARTS_OF_NODES.items()
        if part in hidden
    ]
    return lines


def _facts_of(state: WorkerState) -> dict[str, str]:
    counts = state.statistics
    share = counts.cases_under_pressure / counts.cases if counts.cases else 0.0
    return {
        "lane": state.lane or "-",
        "canary found after": f"{state.canary.operations} ops" if state.canary and state.canary.caught else "-",
        "seconds": f"{state.seconds:.1f}",
        "operations done": f"{counts.done:,}",
        "operations done a second": f"{counts.done / state.seconds if state.seconds else 0:,.0f}",
        "operations refused": f"{counts.refused:,}",
        "cases": f"{counts.cases:,}",
        "distinct cases": f"{counts.distinct_cases:,}",
        "cases that evicted or were refused room": f"{share:.0%}",
    }


def _table(title: str, columns: Sequence[str], *, wrap: bool = True) -> Table:
    """Make a table of text in the first column, which may ``wrap`` on a narrow terminal, and numbers in the others."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=i > 0 or not wrap, overflow="fold")
    return table


def print_failure(console: Console, state: WorkerState) -> None:
    """Print law, facts and how it was found."""
    failure = state.failure
    assert failure is not None
    console.print(failure["text"], style="bold red", soft_wrap=True)
    lengths = f"{failure.get('minimized_len', failure['found_len'])} operations"
    if "minimized_len" in failure:
        lengths += f", minimized from {failure['found_len']}"
    if (ending := failure.get("ending", "interrupted")) != "minimized":
        lengths += f" ({ENDINGS[ending]})"
    cost = f"after {failure['operations']:,} operations and {failure['seconds']:.1f} s"
    console.print(f"  found     {cost} by worker {state.order.name}; {lengths}", soft_wrap=True)
    if state.replays is False:
        console.print("  warning   did not replay in a fresh process: counted apart, not as a failure", soft_wrap=True)


ENDINGS = {
    "time ran out": "time ran out; kvlockstep minimize goes on",
    "interrupted": "interrupted; kvlockstep minimize goes on",
    "did not fail again": "it did not fail when run again",
}
"""Why a search for a shorter trace was not finished."""
