"""Starts one worker per lane, follows their reports, and draws the verdict of the run.

Workers are separate processes, so that a lane, a CUDA context or a segmentation fault stays with one of them.
A failure counts only if it replays in yet another process.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from queue import Empty, Queue
from time import monotonic
from typing import Any

from kvlockstep.fuzz.labels import LABELS, name_of
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.worker import Order

CLEAN, VIOLATION, USAGE, UNKNOWN, CRASHED, BROKEN, INTERRUPTED = 0, 1, 2, 10, 11, 12, 130

FLOOR_PER_MINUTE = {"torch": 10_000, "cuda": 10_000, "interpret": 1_000, None: 10_000}
"""Operations that a lane must have done, not refused, in a minute; less proves too little to be called clean."""

FLOOR_UNDER_PRESSURE = 0.2
"""Share of cases that must have evicted or been refused a row or pages."""


@dataclass(slots=True)
class WorkerState:
    """What the parent knows of one worker."""

    order: Order
    lane: str | None = None
    statistics: Statistics = field(default_factory=Statistics)
    seconds: float = 0.0
    ended: bool = False
    stage: str = "starting"
    failure: dict[str, Any] | None = None
    replays: bool | None = None
    trouble: str | None = None  # why this worker gave no verdict
    unusable: str | None = None
    broken: str | None = None
    exit_status: int | None = None


@dataclass(slots=True)
class Verdict:
    """The end of a run: exit code and the sentences that explain it."""

    code: int
    lines: list[str]


Progress = Callable[[Sequence[WorkerState]], None]


def run_workers(orders: Sequence[Order], progress: Progress, *, grace: float = 60.0) -> list[WorkerState]:
    """Run all orders side by side until each worker has ended. ``progress`` is called about once a second.

    A worker that says nothing for ``grace`` seconds is stopped and counts as hung. On KeyboardInterrupt the
    workers get a few seconds to report what they have; then the interrupt is raised again with the states
    in its ``args``.
    """
    states = [WorkerState(order) for order in orders]
    processes = [_start(order) for order in orders]
    events: Queue[tuple[int, dict[str, Any] | None]] = Queue()
    for index, process in enumerate(processes):
        threading.Thread(target=_pump, args=(index, process, events), daemon=True).start()
    heard = [monotonic()] * len(orders)
    open_pipes = len(orders)
    interrupted = False
    try:
        while open_pipes:
            try:
                open_pipes -= _take(events, states, heard)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                heard = [monotonic() - grace + 10.0] * len(orders)
            for state, process, last in zip(states, processes, heard, strict=True):
                patience = grace + (state.order.minimize_seconds if state.stage == "minimizing" else 0.0)
                if process.poll() is None and monotonic() - last > patience:
                    state.trouble = f"said nothing for {patience:.0f} s, stopped"
                    process.kill()
            progress(states)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    for state, process in zip(states, processes, strict=True):
        state.exit_status = process.returncode
        if not state.ended and not state.unusable and not state.broken and state.trouble is None and not interrupted:
            state.trouble = f"died with status {process.returncode}"
    if interrupted:
        raise KeyboardInterrupt(states)
    return states


def _start(order: Order) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "kvlockstep.fuzz.worker", json.dumps(asdict(order))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _pump(index: int, process: "subprocess.Popen[str]", events: "Queue[tuple[int, dict[str, Any] | None]]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        event = _report_in(line)
        if event is not None:
            events.put((index, event))
        elif line.strip():
            sys.stderr.write(line)  # a target that prints; its words are not a report
    events.put((index, None))


def _report_in(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _take(events: "Queue[tuple[int, dict[str, Any] | None]]", states: Sequence[WorkerState], heard: list[float]) -> int:
    """Take the events of about a second; return the number of pipes that closed."""
    until = monotonic() + 1.0
    closed = 0
    while (left := until - monotonic()) > 0:
        try:
            index, event = events.get(timeout=left)
        except Empty:
            break
        if event is None:
            closed += 1
            if closed == len(states):
                break
            continue
        heard[index] = monotonic()
        follow(states[index], event)
    return closed


def follow(state: WorkerState, event: dict[str, Any]) -> None:
    """Take one report of a worker into its state."""
    kind = event["event"]
    if "statistics" in event:
        state.statistics = Statistics.from_json(event["statistics"])
        state.seconds = event["seconds"]
    if kind == "ready":
        state.lane = event["lane"]
        state.stage = "running"
    elif kind == "found":
        state.stage = "minimizing"
        state.failure = event
    elif kind == "failure":
        state.stage = "running"
        state.failure = event
    elif kind == "unusable":
        state.unusable = event["text"]
    elif kind == "broken":
        state.broken = event["text"]
    elif kind == "end":
        state.ended = True
        state.stage = "ended"


def replays(trace_path: str) -> bool:
    """Run a stored trace in a fresh process; True if it fails there as its header says."""
    command = [sys.executable, "-m", "kvlockstep", "replay", "--quiet", trace_path]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    # a trace that fails in another way exits with 1 too
    return done.returncode == VIOLATION and any(line.startswith("FAILED:") for line in done.stdout.splitlines())


def verdict_of(states: Sequence[WorkerState], seconds: float) -> Verdict:
    """Draw the exit code of a run from what its workers reported (DESIGN section 5)."""
    failures = [state for state in states if state.failure]
    n_replayed = sum([bool(state.replays) for state in failures])
    if n_replayed:
        return Verdict(VIOLATION, [f"{n_replayed} of {len(states)} workers found a violation"])
    unusable = [state.unusable for state in states if state.unusable]
    if unusable:
        return Verdict(USAGE, sorted(set(unusable)))
    broken = [state.broken for state in states if state.broken]
    if broken:
        return Verdict(BROKEN, broken)
    troubled = [f"worker {state.order.name} {state.trouble}" for state in states if state.trouble]
    if troubled:
        return Verdict(CRASHED, troubled)
    if failures:
        return Verdict(UNKNOWN, ["a violation was found that did not replay in a fresh process"])
    missing = shortfalls(states, seconds)
    if missing:
        return Verdict(UNKNOWN, missing)
    return Verdict(CLEAN, ["clean: no law was broken, and every required state was reached"])


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
    lines += [f"never reached: {name_of(label)}" for label in LABELS if total.labels[name_of(label)] == 0]
    return lines


def merged(states: Sequence[WorkerState]) -> Statistics:
    """Add up the statistics of all workers."""
    total = Statistics()
    for state in states:
        total.add(state.statistics)
    return total
