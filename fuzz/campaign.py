"""Draws the verdict of a run from what its workers reported, and replays what they found.

A failure counts only if it replays in yet another process. The workers are followed in ``crew.py``.
"""

import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvlockstep.fuzz.crew import GRACE_S, WorkerState
from kvlockstep.fuzz.exits import BROKEN, CLEAN, CRASHED, UNKNOWN, USAGE, VIOLATION
from kvlockstep.fuzz.failures import replay_line
from kvlockstep.fuzz.label_needs import hidden_from, is_promised
from kvlockstep.fuzz.labels import LABELS, Label, name_of
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.target_check import CAPABILITIES

FLOOR_PER_MINUTE = {"torch": 10_000, "cuda": 10_000, "interpret": 1_000, None: 10_000}
"""Operations that a lane must have done, not refused, in a minute; less proves too little to be called clean."""

FLOOR_UNDER_PRESSURE = 0.2
"""Share of cases that must have evicted or been refused a row or pages."""

CHARTER = (1, 2, 3)
"""The laws without which nothing is called clean."""


@dataclass(slots=True)
class Verdict:
    """The end of a run: exit code and the sentences that explain it."""

    code: int
    lines: list[str]


def replays(trace_path: str, target: str) -> bool:
    """Run a stored trace in a fresh process; True if it fails there as its header says."""
    command = [sys.executable, "-P", "-m", "kvlockstep", "replay", "--quiet", "--target", target, trace_path]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=GRACE_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return False
    # a trace that fails in another way exits with 1 too
    return done.returncode == VIOLATION and any(line.startswith("FAILED:") for line in done.stdout.splitlines())


def verdict_of(states: Sequence[WorkerState], seconds: float, accepted: Collection[int] = ()) -> Verdict:
    """Draw the exit code of a run from what its workers reported.

    ``accepted`` are the charter laws that need not have been observed.
    """
    failures = [state for state in states if state.failure]
    n_replayed = sum([bool(state.replays) for state in failures])
    unusable = sorted({state.unusable for state in states if state.unusable})
    broken = [_with_trace(state.broken, state) for state in states if state.broken]
    troubled = [_with_trace(f"worker {state.order.name} {state.trouble}", state) for state in states if state.trouble]
    if n_replayed:
        lines = [f"{n_replayed} of {len(states)} workers found a violation", *unusable, *broken, *troubled]
        return Verdict(VIOLATION, lines)
    if unusable:
        return Verdict(USAGE, unusable)
    if broken:
        return Verdict(BROKEN, broken + troubled)
    if troubled:
        return Verdict(CRASHED, troubled)
    if failures:
        return Verdict(UNKNOWN, ["a violation was found that did not replay in a fresh process"])
    unseen = unseen_laws(states)
    missing = [
        f"law {law} was not observed on this target: --accept-unobserved {law} calls it clean all the same"
        for law in unseen
        if law not in accepted
    ]
    missing += shortfalls(states, seconds)
    if missing:
        return Verdict(UNKNOWN, missing)
    lines = ["clean: no law was broken, and every required state was reached"]
    lines += [f"clean but for law {law}: not observed, accepted by --accept-unobserved {law}" for law in unseen]
    return Verdict(CLEAN, lines)


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
    lines = []
    for state in states:
        floor = int(FLOOR_PER_MINUTE.get(state.lane, 1_000) * seconds / 60)
        if state.statistics.done < floor:
            lines.append(
                f"worker {state.order.name}: {state.statistics.done} operations done, expected {floor} in {seconds:g} s"
            )
    total = merged(states)
    share = total.cases_under_pressure / total.cases if total.cases else 0.0
    if share < FLOOR_UNDER_PRESSURE:
        lines.append(f"{share:.0%} of cases evicted or were refused room, expected {FLOOR_UNDER_PRESSURE:.0%}")
    lines += [f"never reached: {name_of(label)}" for label in labels_at_zero(states)]
    return lines


def labels_at_zero(states: Sequence[WorkerState]) -> list[Label]:
    """List the required labels that no worker reached.

    What a target does not promise is not required of it, nor what cannot be told from the parts it shows.
    """
    total = merged(states).labels
    return [
        label
        for label in LABELS
        if total[name_of(label)] == 0
        and any(is_promised(label, state.capabilities) and not hidden_from(label, state.hidden) for state in states)
    ]


def remarks(states: Sequence[WorkerState]) -> list[str]:
    """Say what a run could not show whatever it did: labels that cannot be told, features that were not drawn."""
    total, required = merged(states).labels, labels_at_zero(states)
    lines = []
    for label in LABELS:
        needs = sorted({p for s in states if is_promised(label, s.capabilities) for p in hidden_from(label, s.hidden)})
        if needs and total[name_of(label)] == 0 and label not in required:
            lines.append(f"label not observable: {name_of(label)} (needs {', '.join(needs)})")
    promised = {capability for state in states for capability in state.capabilities}
    features = [name for name in CAPABILITIES if name != "kv"]
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
