"""What each law is worth: which faults would be missed without it.

The step at which a fault shows breaks one law or several. Where it breaks several, leaving one of them out changes
nothing. Where it is a single one, the hunt is done again without that law, to see whether another one catches the
fault later. A group is a law with all of its checks, the comparison with the model with all of its classes, or
what the target raises; the last cannot be left out, for a target that raised shows nothing to go on with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvlockstep.fuzz.faults.fault import Fault
from kvlockstep.fuzz.faults.hunt import Hunt, NullFault, Task, is_divergence
from kvlockstep.fuzz.lockstep import COMPARISON, TargetRaised
from kvlockstep.invariants.checks import CHECKS

RAISED = -1
"""Stands among the numbers of the laws for what the target raises."""

GROUPS = (*sorted({check.law for check in CHECKS}), COMPARISON, RAISED)

_NAMES = {COMPARISON: "the model", RAISED: "TargetRaised"}

_LAW_OF = {violation.__name__: check.law for check in CHECKS for violation in check.violations}


@dataclass(frozen=True, slots=True)
class Worth:
    """What one group is worth, in names of faults, each list sorted.

    Of those in ``only_law`` some seed broke no other law, whether or not the model differed too; of those in
    ``only_one`` it did not. ``missed`` are those of the latter that were not found again without the group, with one
    seed at least, and ``unknown`` those whose hunt was not done or gave no verdict.
    """

    group: str
    breaks: list[str]
    only_law: list[str]
    only_one: list[str]
    missed: list[str]
    unknown: list[str]


def group_of(law: str) -> int:
    """Return the number of the group that a class of violation belongs to."""
    if law == TargetRaised.__name__:
        return RAISED
    return COMPARISON if is_divergence(law) else _LAW_OF[law]


def groups_of(hunt: Hunt) -> set[int]:
    """Return the groups that the step breaks at which a fault was found."""
    named = hunt.laws or ((hunt.law,) if hunt.law is not None else ())
    return {group_of(law) for law in named}


def second_tasks(faults: Sequence[Fault], hunts: Iterable[Hunt], seconds: float) -> list[Task]:
    """Return the hunts to be done again, each without the single law that found its fault.

    Before: ``hunts`` are for some of ``faults``, of which the null faults have nothing to lose.
    """
    by_name = {fault.name: fault for fault in faults}
    tasks = []
    for hunt in hunts:
        groups = groups_of(hunt)
        fault = by_name[hunt.fault]
        if hunt.caught and len(groups) == 1 and RAISED not in groups and not isinstance(fault, NullFault):
            tasks.append(Task(fault, hunt.seed, seconds, groups.pop()))
    return sorted(tasks, key=lambda task: (task.seed, task.fault.name))


def worth_of_each(first: Iterable[Hunt], second: Iterable[Hunt]) -> list[Worth]:
    """Put the hunts for planted faults with everything and those without a law together."""
    found = [hunt for hunt in first if hunt.caught]
    again = {(hunt.fault, hunt.seed, hunt.without): hunt for hunt in second}
    worths = []
    for group in GROUPS:
        breaks = sorted({hunt.fault for hunt in found if group in groups_of(hunt)})
        alone = [hunt for hunt in found if groups_of(hunt) == {group}]
        missed, unknown = set(), set()
        for hunt in alone if group != RAISED else ():
            without = again.get((hunt.fault, hunt.seed, group))
            if without is None or without.trouble is not None:
                unknown.add(hunt.fault)
            elif not without.caught:
                missed.add(hunt.fault)
        beside = {COMPARISON} - {group}
        only_law = sorted({hunt.fault for hunt in found if groups_of(hunt) - beside == {group}})
        only_one = sorted({hunt.fault for hunt in alone})
        name = _NAMES.get(group, f"law {group}")
        worths.append(Worth(name, breaks, only_law, only_one, sorted(missed), sorted(unknown)))
    return worths


def print_ablation(console: Console, worths: Sequence[Worth]) -> None:
    """Print one line a group, and by name the faults that would be missed without it."""
    table = Table(
        title="what each law is worth, in faults",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        collapse_padding=True,
    )
    for column in ("law", "break it", "no other law", "nor the model", "missed without"):
        table.add_column(column, justify="left" if column == "law" else "right", no_wrap=True)
    table.add_column("", overflow="fold")
    for worth in worths:
        only_law = "-" if worth.group == _NAMES[COMPARISON] else str(len(worth.only_law))
        cells = (str(len(worth.breaks)), only_law, str(len(worth.only_one)))
        if worth.group == _NAMES[RAISED]:
            table.add_row(worth.group, *cells, "-", "cannot be left out")
        else:
            table.add_row(worth.group, *cells, str(len(worth.missed)), _remark(worth))
    console.print(table)
    console.print(
        "no other law, nor the model: is broken, or differs, at the first sign; "
        "missed without: nothing else found those last ones in the same time",
        soft_wrap=True,
    )


def _remark(worth: Worth) -> str:
    parts = [", ".join(worth.missed)] if worth.missed else []
    if not worth.breaks:
        parts.append("no fault breaks it")
    elif not worth.only_law:
        parts.append("never without another law")
    elif not worth.only_one:
        parts.append("the model always differs too")
    elif not worth.missed and not worth.unknown:
        parts.append("found later by others")
    if worth.unknown:
        parts.append(f"no verdict: {', '.join(worth.unknown)}")
    return "; ".join(parts)
