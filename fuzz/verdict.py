"""Draws the verdict of a run from what its workers reported, and replays what they found.

A failure counts only if it replays in yet another process. Of a run on several targets each must have shown enough:
what one reached says nothing about another. The workers are followed in ``crew.py``.
"""

import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvlockstep.fuzz.crew import GRACE_S, WorkerState
from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.exits import BROKEN, CLEAN, CRASHED, UNKNOWN, USAGE, VIOLATION
from kvlockstep.fuzz.failures import replay_line
from kvlockstep.fuzz.label_needs import hidden_from, is_promised
from kvlockstep.fuzz.labels import LABELS, Label, name_of
from kvlockstep.fuzz.registry import SGLANG_TARGETS
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.target_check import CAPABILITIES
from kvlockstep.fuzz.ward import LIMITS, Limits

FLOOR_PER_MINUTE: dict[str | None, int] = {"torch": 10_000, "cuda": 10_000, "interpret": 1_000, None: 10_000}
"""Operations that a lane must have done, not refused, in a minute; less proves too little to be called clean."""

SGLANG_FLOOR_PER_MINUTE: dict[str | None, int] = {"torch": 2_000, "interpret": 300}
"""The same for the trees of SGLang, each of whose operations takes longer."""

FLOOR_UNDER_PRESSURE = 0.2
"""Share of cases that must have evicted or been refused a row or pages."""

CHARTER = (1, 2, 3)
"""The laws without which nothing is called clean."""


@dataclass(slots=True)
class Verdict:
    """The end of a run: exit code and the sentences that explain it."""

    code: int
    lines: list[str]


def replays(trace_path: str, target: str, limits: Limits = LIMITS) -> bool:
    """Run a stored trace in a fresh process; True if it fails there as its header says. Raises TargetUnusable.

    ``limits`` are for a failure that is a death or a hang.
    """
    words = ["replay", "--quiet", "--target", target, *limits.options(), trace_path]
    command = [python_for(target), "-P", "-m", "kvlockstep", *words]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=2 * GRACE_S + limits.hang_seconds,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return False
    # a trace that fails in another way exits with 1 too
    return done.returncode == VIOLATION and any(line.startswith("FAILED:") for line in done.stdout.splitlines())


def verdict_of(
    states: Sequence[WorkerState], seconds: float, accepted: Collection[int] = (), not_run: Sequence[str] = ()
) -> Verdict:
    """Draw the exit code of a run from what its workers reported.

    ``accepted`` are the charter laws that need not have been observed; ``not_run`` are targets that were asked for
    and have no worker. A run on several targets goes on without one that cannot be had, but is not clean.
    """
    failures = [state for state in states if state.failure]
    n_replayed = sum([bool(state.replays) for state in failures])
    unusable = sorted({state.unusable for state in states if state.unusable})
    missing_targets = {*not_run, *(state.order.target for state in states if state.unusable)}
    shown = [state for state in states if state.order.target not in missing_targets]
    not_shown = [f"not run: {', '.join(sorted(missing_targets))}"] if missing_targets else []
    broken = [_with_trace(state.broken, state) for state in states if state.broken]
    troubled = [_with_trace(f"worker {state.order.name} {state.trouble}", state) for state in states if state.trouble]
    if n_replayed:
        lines = [f"{n_replayed} of {len(states)} workers found a violation", *unusable, *broken, *troubled]
        return Verdict(VIOLATION, lines + not_shown if shown else lines)
    if unusable and not shown:
        return Verdict(USAGE, unusable)
    if broken:
        return Verdict(BROKEN, broken + troubled)
    if troubled:
        return Verdict(CRASHED, troubled)
    if failures:
        return Verdict(UNKNOWN, ["a violation was found that did not replay in a fresh process"])
    groups = by_target(shown)
    unseen = [(target, law) for target, group in groups.items() for law in unseen_laws(group)]
    on = {target: f" on {target}" if len(groups) > 1 else "" for target in groups}
    missing = [
        f"law {law} was not observed{on[target] or ' on this target'}: "
        f"--accept-unobserved {law} calls it clean all the same"
        for target, law in unseen
        if law not in accepted
    ]
    missing += shortfalls(shown, seconds) + unusable + not_shown
    if missing:
        return Verdict(UNKNOWN, missing)
    each = f", on each of {len(groups)} targets" if len(groups) > 1 else ""
    lines = [f"clean: no law was broken, and every required state was reached{each}"]
    lines += [
        f"clean but for law {law}{on[target]}: not observed, accepted by --accept-unobserved {law}"
        for target, law in unseen
    ]
    return Verdict(CLEAN, lines)


def by_target(states: Sequence[WorkerState]) -> dict[str, list[WorkerState]]:
    """Sort the workers of a run by their targets, in the order in which they were asked for."""
    groups: dict[str, list[WorkerState]] = {}
    for state in states:
        groups.setdefault(state.order.target, []).append(state)
    return groups


def _with_trace(text: str, state: WorkerState) -> str:
    """Add what a worker left behind to the reason why it has no verdict."""
    if state.violates and not state.failure:
        text += f"; it had found {state.violates}"
    if state.last_trace:
        text += f"; what it ran: {replay_line(state.last_trace, state.order.target)}"
    return text


def unseen_laws(states: Sequence[WorkerState]) -> list[int]:
    """List the charter laws that some worker could not check in full."""
    return sorted({law for state in states for law, _, _ in state.unobserved if law in CHARTER})


def shortfalls(states: Sequence[WorkerState], seconds: float) -> list[str]:
    """Say what a run without a violation did not reach, so that it must not be called clean."""
    lines = [blind for state in states if (blind := _blind(state)) is not None]
    for state in states:
        floor = int(_floor_per_minute(state) * seconds / 60)
        if state.statistics.done < floor:
            lines.append(
                f"worker {state.order.name}: {state.statistics.done} operations done, expected {floor} in {seconds:g} s"
            )
    groups = by_target(states)
    for target, group in groups.items():
        total = merged(group)
        share = total.cases_under_pressure / total.cases if total.cases else 0.0
        if share < FLOOR_UNDER_PRESSURE:
            where = f"{target}: " if len(groups) > 1 else ""
            lines.append(
                f"{where}{share:.0%} of cases evicted or were refused room, expected {FLOOR_UNDER_PRESSURE:.0%}"
            )
    return lines + too_seldom(states)


def _blind(state: WorkerState) -> str | None:
    """Say that a worker did not find the canary, so that it would not have found anything else; None if it did."""
    if state.canary is not None and state.canary.caught:
        return None
    canary = state.canary
    became = (
        f"{canary.operations} operations, {canary.law or 'no violation'}" if canary is not None else "it did not run"
    )
    return (
        f"worker {state.order.name}: the canary, a batch that ends in the slot it begins with, was not found: {became}"
    )


def _floor_per_minute(state: WorkerState) -> int:
    floors = SGLANG_FLOOR_PER_MINUTE if state.order.target in SGLANG_TARGETS else FLOOR_PER_MINUTE
    return floors.get(state.lane, min(floors.values()))


def too_seldom(states: Sequence[WorkerState]) -> list[str]:
    """Say which required labels were not reached often enough, on which target if there are several."""
    groups = by_target(states)
    where = {target: f"{target}: " if len(groups) > 1 else "" for target in groups}
    lines = []
    for target, group in groups.items():
        total = merged(group)
        for label, least in _short(group, total).items():
            n = total.labels[name_of(label)]
            too_few = (
                f"reached too seldom: {name_of(label)}, {n} times, expected {least} in {total.done:,} operations done"
            )
            lines.append(f"{where[target]}{too_few if n else f'never reached: {name_of(label)}'}")
    return lines


def labels_short(states: Sequence[WorkerState]) -> list[Label]:
    """List the required labels that the workers of some target did not reach often enough.

    What a target does not promise is not required of it, nor what cannot be told from the parts it shows.
    """
    short = {label for group in by_target(states).values() for label in _short(group, merged(group))}
    return [label for label in LABELS if label in short]


def _short(group: Sequence[WorkerState], total: Statistics) -> dict[Label, int]:
    """Give the labels that the workers of one target reached too seldom, each with what was expected of it."""
    expected = {label: max(1, int(asked.least * total.done / 10_000)) for label, asked in LABELS.items()}
    return {
        label: least
        for label, least in expected.items()
        if total.labels[name_of(label)] < least
        and any(_can_reach(label, state) and not hidden_from(label, state.hidden) for state in group)
    }


def _can_reach(label: Label, state: WorkerState) -> bool:
    return is_promised(label, state.capabilities, state.statistics.allowances)


def remarks(states: Sequence[WorkerState]) -> list[str]:
    """Say what a run could not show whatever it did: labels that cannot be told, features that were not drawn."""
    total, required = merged(states).labels, labels_short(states)
    lines = []
    for label in LABELS:
        needs = sorted({part for s in states if _can_reach(label, s) for part in hidden_from(label, s.hidden)})
        if needs and total[name_of(label)] == 0 and label not in required:
            lines.append(f"label not observable: {name_of(label)} (needs {', '.join(needs)})")
    promised = {capability for state in states for capability in state.capabilities}
    features = [name for name in CAPABILITIES if name not in ("kv", "victim_order")]
    lacking = [name for name in features if name not in promised]
    if promised:
        line = f"drawn: {', '.join(name for name in features if name in promised)}"
        line += f"; not drawn, because the target does not promise them: {', '.join(lacking)}" if lacking else ""
        lines.append(line)
    return lines


def merged(states: Sequence[WorkerState]) -> Statistics:
    """Add up the statistics of all workers."""
    total = Statistics()
    for state in states:
        total.add(state.statistics)
    return total
