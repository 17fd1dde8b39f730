"""The worker processes of a run: started side by side, followed by their reports, ended together.

Workers are separate processes, so that a lane, a CUDA context or a segmentation fault stays with one of them, and
each runs with the Python that its target needs. Signals come to this process alone, which passes them on: a
worker in the middle of an import would answer Ctrl-C with a traceback. What the reports mean for the run is settled
in ``verdict.py``.
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import Any

from kvlockstep.fuzz.canary import Canary
from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.failures import keep_last_trace
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.worker import Order

GRACE_S = 60.0
"""A worker that says nothing for so long is hung, unless it shares its core with others: then so much longer."""

ENDING_S = 5.0
"""So long may a worker take to end after an interrupt; its own steps are far shorter."""

PIPE_S = 2.0
"""A pipe that is still open so long after its worker ended is held by somebody the worker left behind."""


@dataclass(slots=True)
class WorkerState:
    """What the parent knows of one worker."""

    order: Order
    lane: str | None = None
    capabilities: list[str] = field(default_factory=list)
    canary: Canary | None = None
    statistics: Statistics = field(default_factory=Statistics)
    seconds: float = 0.0
    ended: bool = False
    stage: str = "starting"
    violates: str | None = None  # signature of the violation that ended it
    failure: dict[str, Any] | None = None
    replays: bool | None = None
    unobserved: list[tuple[int, str, list[str]]] = field(default_factory=list)  # law, check, the parts it needs
    hidden: list[str] = field(default_factory=list)  # parts of the snapshot that the target does not show
    last_trace: Path | None = None  # where a worker that did not end well left off
    trouble: str | None = None  # why this worker gave no verdict
    unusable: str | None = None
    broken: str | None = None
    exit_status: int | None = None


Progress = Callable[[Sequence[WorkerState]], None]


Event = tuple[int, dict[str, Any] | None]
"""Index of a worker and its report; None when its pipe closed."""

INTERRUPT: Event = (-1, None)


def run_workers(
    orders: Sequence[Order], progress: Progress, *, grace: float = GRACE_S
) -> tuple[list[WorkerState], bool]:
    """Run all orders side by side until each worker has ended; return what is known of them, and if it was cut short.

    ``progress`` is called about once a second. On SIGINT or SIGTERM the workers get a few seconds to store what
    they have; on a second signal they are killed and KeyboardInterrupt is raised. One worker whose target cannot
    be had ends the others of that target too: the order is wrong. Raises TargetUnusable, with no process left, if
    the Python of a target is not there.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    grace *= max(1.0, len(orders) / n_cores())
    with _signals_into(events):
        crew = _Crew(orders, events)
        try:
            while crew.open_pipes:
                crew.take_events()
                crew.end_silent_ones(grace)
                progress(crew.states)
        finally:
            crew.end()
    return crew.states, crew.interrupted


def n_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class _Crew:
    """The worker processes of one run."""

    def __init__(self, orders: Sequence[Order], events: SimpleQueue[Event]) -> None:
        self.states = [WorkerState(order) for order in orders]
        self.interrupted = False
        self.events = events
        pythons = [python_for(order.target) for order in orders]
        self.processes = [_start(python, order) for python, order in zip(pythons, orders, strict=True)]
        for index, process in enumerate(self.processes):
            threading.Thread(target=_pump, args=(index, process, events), daemon=True).start()
        self.open_pipes = set(range(len(orders)))
        self._heard = [monotonic()] * len(orders)
        self._stopped_at: list[float | None] = [None] * len(orders)

    def take_events(self) -> None:
        """Take the events of about a second."""
        until = monotonic() + 1.0
        while self.open_pipes and (left := until - monotonic()) > 0:
            try:
                index, event = self.events.get(timeout=left)
            except Empty:
                return
            if index < 0:
                if self.interrupted:
                    raise KeyboardInterrupt
                self.interrupted = True
                self.stop()
            elif event is None:
                self.open_pipes.discard(index)
            else:
                self._heard[index] = monotonic()
                follow(self.states[index], event)
                if self.states[index].unusable:
                    self.stop(self.states[index].order.target)

    def stop(self, target: str | None = None) -> None:
        """Ask every worker, or those of one target, to end. One that has not begun has nothing to store: not asked."""
        for index, (state, process) in enumerate(zip(self.states, self.processes, strict=True)):
            if self._stopped_at[index] is None and target in (None, state.order.target):
                self._stopped_at[index] = monotonic()
                process.send_signal(signal.SIGKILL if state.stage == "starting" else signal.SIGINT)

    def end_silent_ones(self, grace: float) -> None:
        for index in sorted(self.open_pipes):
            state, process, stopped_at = self.states[index], self.processes[index], self._stopped_at[index]
            silent = monotonic() - self._heard[index]
            patience = grace + (state.order.minimize_seconds if state.stage == "minimizing" else 0.0)
            if process.poll() is not None:
                if silent > PIPE_S:
                    self.open_pipes.discard(index)
            elif state.ended:
                if silent > PIPE_S:
                    process.kill()
            elif stopped_at is not None and monotonic() - stopped_at > ENDING_S:
                process.kill()
            elif silent > patience:
                state.trouble = f"said nothing for {patience:.0f} s while {state.stage}, and was stopped"
                process.kill()

    def end(self) -> None:
        """Leave no process behind, and settle what became of each worker."""
        for state, process, stopped_at in zip(self.states, self.processes, self._stopped_at, strict=True):
            if process.poll() is None and state.ended:
                self._wait_for(process)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a target started, too
            state.exit_status = process.wait()
            settled = state.ended or state.unusable or state.broken or state.trouble
            if not settled and stopped_at is None:
                state.trouble = f"died: {_ending(state.exit_status)}"
            if state.trouble or state.broken or (state.violates and not state.failure):
                state.last_trace = keep_last_trace(Path(state.order.out), state.order.name)

    def _wait_for(self, process: "subprocess.Popen[str]") -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(PIPE_S)


@contextmanager
def _signals_into(events: SimpleQueue[Event]) -> Iterator[None]:
    """Turn Ctrl-C and a polite kill into an event, unless whoever started us has them ignored."""

    def note(number: int, frame: FrameType | None) -> None:
        events.put(INTERRUPT)  # a SimpleQueue may be put into from a signal handler

    before = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending(status: int) -> str:
    """Say how a process ended."""
    if status >= 0:
        return f"it left with status {status} in the middle of its work"
    name = signal.Signals(-status).name
    return f"killed by {name}" + (", by hand or for want of memory" if name == "SIGKILL" else "")


def _start(python: str, order: Order) -> "subprocess.Popen[str]":
    command = [python, "-P", "-m", "kvlockstep.fuzz.worker", json.dumps(asdict(order))]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def _pump(index: int, process: "subprocess.Popen[str]", events: SimpleQueue[Event]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):  # the last one of a worker that was killed may be cut
            events.put((index, json.loads(line)))
    events.put((index, None))


def follow(state: WorkerState, event: dict[str, Any]) -> None:
    """Take one report of a worker into its state."""
    kind = event["event"]
    if "statistics" in event:
        state.statistics = Statistics.from_json(event["statistics"])
        state.seconds = event["seconds"]
        state.unobserved = [(law, check, needs) for law, check, needs in event["unobserved"]]
        state.hidden = event["hidden"]
    if kind == "ready":
        state.lane = event["lane"]
        state.capabilities = event["capabilities"]
        state.stage = "running"
    elif kind == "canary":
        state.canary = Canary(event["law"], event["operations"], event["seconds"])
    elif kind == "violates":
        state.violates = event["signature"]
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
