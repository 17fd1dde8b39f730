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
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import Any, Protocol

import psutil

from kvlockstep.fuzz.canary import Canary
from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.failures import keep_last_trace
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.worker import ROOT_S, Order

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
    memory: int = 0  # bytes that it holds
    ended: bool = False
    stage: str = "starting"
    violates: str | None = None  # signature of the violation that it has met last
    failure: dict[str, Any] | None = None
    replays: bool | None = None
    unobserved: list[tuple[int, str, list[str]]] = field(default_factory=list)  # law, check, the parts it needs
    hidden: list[str] = field(default_factory=list)  # parts of the snapshot that the target does not show
    last_trace: Path | None = None  # where a worker that did not end well left off
    trouble: str | None = None  # why this worker gave no verdict
    unusable: str | None = None
    broken: str | None = None
    disk_full: bool = False
    killed: bool = False  # by SIGKILL, and not by the crew
    exit_status: int | None = None


Progress = Callable[[Sequence[WorkerState]], None]


class Job(Protocol):
    """What decides on the work of a crew whose members are replaced."""

    def hear(self, state: WorkerState, event: dict[str, Any]) -> None:
        """Take a report of a worker, which is in its state already."""

    def next_order(self, state: WorkerState) -> "Command | None":
        """Return what is to be done by the process that takes the place of one that has ended; None: nothing."""

    def wants_end(self) -> bool:
        """Tell whether all are to end now, with what they have."""


WORKER = "kvlockstep.fuzz.worker"

NVIDIA = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU of the machine; there is none without its driver."""


@dataclass(frozen=True, slots=True)
class Command:
    """A process to be started in a crew: its order, and the module that follows it if that is not the worker."""

    order: Order
    module: str = WORKER
    argument: str | None = None  # of the module; None: the order
    patience: float = 0.0  # seconds that it may be silent, beyond what others may


Event = tuple[int, dict[str, Any] | None]
"""Number of a process and its report; None when its pipe closed."""

INTERRUPT: Event = (-1, None)


def run_workers(
    orders: Sequence[Order | Command],
    progress: Progress,
    *,
    grace: float = GRACE_S,
    job: Job | None = None,
    memory: int | None = None,
) -> tuple[list[WorkerState], bool]:
    """Run all orders side by side until each worker has ended; return what is known of them, and if it was cut short.

    ``progress`` is called about once a second. On SIGINT or SIGTERM the workers get a few seconds to store what
    they have; on a second signal they are killed and KeyboardInterrupt is raised. One worker whose target cannot
    be had ends the others of that target too: the order is wrong. A worker that grows beyond ``memory`` bytes, with
    what it started, is killed. A ``job`` may have the place of one that ended taken by another; the states returned
    are those of the last in each place, unless there is none. Raises TargetUnusable, with no process left, if
    the Python of a target is not there.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    load = max(1.0, len(orders) / n_cores())
    with _signals_into(events):
        crew = _Crew([one if isinstance(one, Command) else Command(one) for one in orders], events, job, memory)
        try:
            while crew.members:
                crew.take_events()
                crew.end_silent_ones(grace * load, max(grace, GRACE_S) * load)
                progress(crew.states)
                if job is not None and job.wants_end():
                    crew.stop()
        finally:
            crew.end()
    return crew.states, crew.interrupted


def n_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpus() -> list[str]:
    """Name the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` does."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number in range(len(list(NVIDIA.iterdir())) if NVIDIA.is_dir() else 0)]


@dataclass(slots=True)
class _Member:
    """A process of a crew, in its place."""

    place: int
    state: WorkerState
    process: "subprocess.Popen[str]"
    heard: float
    patience: float
    memory: int | None
    stopped_at: float | None = None
    said: int = 0  # events, counted by the thread that reads them
    taken: int = 0

    @property
    def silent(self) -> float:
        """Seconds since it was heard last; none, where this process has not come to what it said."""
        return monotonic() - self.heard if self.said == self.taken else 0.0


class _Crew:
    """The worker processes of one run."""

    def __init__(
        self, commands: Sequence[Command], events: SimpleQueue[Event], job: Job | None, memory: int | None
    ) -> None:
        self.states = [WorkerState(command.order) for command in commands]  # by place
        self.members: dict[int, _Member] = {}  # by number, that of no other process of the run
        self.interrupted = False
        self.events = events
        self.job = job
        self.memory = memory
        self._numbers = count()
        pythons = [python_for(command.order.target) for command in commands]
        for place, (python, command) in enumerate(zip(pythons, commands, strict=True)):
            self._start(place, python, command)

    def _start(self, place: int, python: str, command: Command) -> None:
        number, process = next(self._numbers), _start(python, command)
        memory = self.memory if command.module == WORKER else None  # others hold what they run themselves
        member = _Member(place, self.states[place], process, monotonic(), command.patience, memory)
        self.members[number] = member
        threading.Thread(target=_pump, args=(number, member, self.events), daemon=True).start()

    def take_events(self) -> None:
        """Take the events of about a second."""
        until = monotonic() + 1.0
        while self.members and (left := until - monotonic()) > 0:
            try:
                number, event = self.events.get(timeout=left)
            except Empty:
                return
            if number < 0:
                if self.interrupted:
                    raise KeyboardInterrupt
                self.interrupted = True
                self.stop()
            elif number not in self.members:
                continue  # it was given up before its pipe closed
            elif event is None:
                self._replace(number)
            else:
                member = self.members[number]
                member.heard = monotonic()
                member.taken += 1
                follow(member.state, event)
                if self.job is not None:
                    self.job.hear(member.state, event)
                if member.state.unusable:
                    self.stop(member.state.order.target)

    def stop(self, target: str | None = None) -> None:
        """Ask every worker, or those of one target, to end. One that has not begun has nothing to store: not asked."""
        for member in self.members.values():
            if member.stopped_at is None and target in (None, member.state.order.target):
                member.stopped_at = monotonic()
                member.process.send_signal(signal.SIGKILL if member.state.stage == "starting" else signal.SIGINT)

    def end_silent_ones(self, grace: float, starting: float) -> None:
        """Kill whoever hangs, does not end when told to, or has grown too large.

        A worker may import and build for ``starting`` seconds, however little an operation may take.
        """
        for number, member in list(self.members.items()):
            state, process, stopped_at = member.state, member.process, member.stopped_at
            silent = member.silent
            patience = (grace if state.stage != "starting" else starting) + member.patience
            patience += state.order.minimize_seconds + ROOT_S if state.stage == "minimizing" else 0.0
            if process.poll() is not None:
                if silent > PIPE_S:
                    self._replace(number)
            elif state.ended:
                if silent > PIPE_S:
                    process.kill()
            elif stopped_at is not None and monotonic() - stopped_at > ENDING_S:
                process.kill()
            elif silent > patience:
                state.trouble = f"said nothing for {patience:.0f} s while {state.stage}, and was stopped"
                process.kill()
            elif member.memory is not None and (size := _size_of(process.pid)) > member.memory:
                state.trouble = f"grew to {size >> 20:,} MiB, more than {member.memory >> 20:,}, and was stopped"
                process.kill()

    def _replace(self, number: int) -> None:
        """Settle what became of a process that has ended, and start the next one in its place, if there is one."""
        member = self.members.pop(number)
        self._settle(member)
        if self.job is None or self.interrupted or member.stopped_at is not None:
            return
        command = self.job.next_order(member.state)
        if command is not None:
            self.states[member.place] = WorkerState(command.order)
            self._start(member.place, python_for(command.order.target), command)

    def _settle(self, member: _Member) -> None:
        state, process = member.state, member.process
        if process.poll() is None and state.ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(PIPE_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a target started, too
        state.exit_status = process.wait()
        settled = state.ended or state.unusable or state.broken or state.trouble
        if not settled and member.stopped_at is None:
            state.trouble = f"died: {_ending(state.exit_status)}"
            state.killed = state.exit_status == -signal.SIGKILL
        if state.trouble or state.broken or (state.violates and not state.failure):
            logs = Path(state.order.logs or state.order.out)
            state.last_trace = keep_last_trace(logs, state.order.name)

    def end(self) -> None:
        """Leave no process behind, and settle what became of each worker."""
        for member in self.members.values():
            self._settle(member)


def _size_of(pid: int) -> int:
    """Return the bytes of memory that a process holds, with those that it started; 0 if it is gone."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


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


def _start(python: str, command: Command) -> "subprocess.Popen[str]":
    argument = command.argument or json.dumps(asdict(command.order))
    return subprocess.Popen(
        [python, "-P", "-m", command.module, argument],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=_variables(command.order),
    )


def _variables(order: Order) -> dict[str, str]:
    """Return the environment of a process: each worker of a campaign on a GPU has one, by turns."""
    here = gpus() if order.lane == "cuda" and order.plan is not None else []
    if not here or order.plan is None:
        return dict(os.environ)
    return os.environ | {"CUDA_VISIBLE_DEVICES": here[order.plan.slot % len(here)]}


def _pump(number: int, member: _Member, events: SimpleQueue[Event]) -> None:
    assert member.process.stdout is not None
    for line in member.process.stdout:
        if line.endswith("\n"):  # the last one of a worker that was killed may be cut
            member.said += 1
            events.put((number, json.loads(line)))
    member.said += 1
    events.put((number, None))


def follow(state: WorkerState, event: dict[str, Any]) -> None:
    """Take one report of a worker into its state."""
    kind = event["event"]
    if "statistics" in event:
        state.statistics = Statistics.from_json(event["statistics"])
        state.seconds = event["seconds"]
        state.memory = event.get("memory", 0)
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
        state.disk_full = event.get("full", False)
    elif kind == "end":
        state.ended = True
        state.stage = "ended"
