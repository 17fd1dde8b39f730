"""Looks for planted faults from scratch, and says which are caught, by which law, and at what cost.

Each fault and seed gets a process of its own (`nursery.py`): no example database, no corpus, no stored trace. The
clock starts at the first operation.
"""

import json
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from kvlockstep.fuzz.faults.fault import Fault
from kvlockstep.fuzz.faults.nursery import Ended, Nurseries, in_fresh_process
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.worker import Order, Worker
from kvlockstep.invariants import Divergence, agreement

GRACE = 60.0
"""Seconds for the start of a process and its last step; one that takes longer hangs in an operation."""

MINIMIZE_S = 10.0

_VERDICTS = {"failure", "unusable", "broken", "end"}
"""The reports of a worker that could say how its run ended."""

Start = Callable[[Order, float], Ended]
"""Follows an order in a process of its own, for so many seconds at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NullFault(Fault):
    """No fault: nothing is planted. Whatever is found all the same is a false alarm."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """How one fault was looked for with one seed. ``trouble`` says why there is no verdict.

    A fault whose code no operation reached was "never reached": neither caught, whatever was found, nor missed.
    ``laws`` are all that the step at which it was found breaks, in the order of the checks, the model last.
    """

    fault: str
    seed: int
    caught: bool  # by a law that may name it; where a law is left out, or nothing was planted, by any
    law: str | None = None
    signature: str | None = None
    operations: int = 0  # executed until it was found
    seconds: float = 0.0
    found_len: int = 0
    minimized_len: int = 0
    trouble: str | None = None
    laws: tuple[str, ...] = ()
    did_not_run: tuple[str, ...] = ()  # checks that could not be asked at that step
    reached: int | None = None  # how often the code of the fault ran, where that is counted
    without: int | None = None  # the law that was left out


@dataclass(frozen=True, slots=True)
class Task:
    """A hunt that is to be done. ``without`` is the number of a law that is left out; see Lockstep."""

    fault: Fault
    seed: int
    seconds: float
    without: int | None = None


def hunt(
    fault: Fault,
    seed: int,
    seconds: float,
    minimize_seconds: float = MINIMIZE_S,
    *,
    without: int | None = None,
    start: Start = in_fresh_process,
) -> Hunt:
    """Fuzz one faulty target in its own process until the fault shows or the time is over. Raises TargetUnusable."""
    if without is not None:
        minimize_seconds = 0.0  # the trace may fail earlier by the law that is left out
    with tempfile.TemporaryDirectory(prefix="kvlockstep-hunt-") as out:
        order = order_for(Task(fault, seed, seconds, without), out, minimize_seconds)
        ended = start(order, seconds + minimize_seconds + GRACE)
    if ended.status is None:
        return Hunt(fault.name, seed, False, trouble="the process hung", without=without)
    events = [
        json.loads(line)
        for line in ended.reports.splitlines(keepends=True)
        if line.startswith('{"event"') and line.endswith("\n")  # the target may print, and a line of the dead be cut
    ]
    if not _VERDICTS.intersection(event["event"] for event in events):
        last = ended.said.strip().splitlines()[-1:] or [f"exit status {ended.status}"]
        return Hunt(fault.name, seed, False, trouble=f"the process died: {last[0]}", without=without)
    return _hunt_of(Task(fault, seed, seconds, without), events)


def hunt_here(fault: Fault, seed: int, seconds: float, minimize_seconds: float = MINIMIZE_S) -> Hunt:
    """Do the same in this process, which has imported the target: SGLang takes longer to import than most hunts do.

    It finds what a fresh process finds. But a target that hangs hangs here. Raises TargetUnusable.
    """
    events: list[dict[str, Any]] = []

    def note(event: str, **facts: Any) -> None:
        events.append({"event": event, **facts})

    task = Task(fault, seed, seconds)
    with tempfile.TemporaryDirectory(prefix="kvlockstep-hunt-") as out:
        order = order_for(task, out, minimize_seconds)
        Worker(order, factory_for(order.target, order.fault), note).fuzz()
    return _hunt_of(task, events)


def order_for(task: Task, out: str, minimize_seconds: float) -> Order:
    """Return what a worker is told that shall do this hunt in the folder ``out``."""
    fault = task.fault
    return Order(
        fault.target,
        fault.lane,
        task.seconds,
        task.seed,
        out,
        "hunt",
        None if isinstance(fault, NullFault) else fault.name,
        minimize_seconds,
        canary=False,  # the fault itself shows whether anything is found
        without=task.without,
    )


def _hunt_of(task: Task, events: Sequence[dict[str, Any]]) -> Hunt:
    """Read a hunt off the reports of its worker."""
    fault, last = task.fault, {event["event"]: event for event in events}
    reached = next((event["reached"] for event in reversed(events) if event.get("reached") is not None), None)
    trouble = next((last[event]["text"] for event in ("unusable", "broken") if event in last), None)
    if trouble is None and reached == 0:
        trouble = "never reached"
    if "failure" not in last:
        spent = task.seconds if trouble in (None, "never reached") else 0.0
        return Hunt(fault.name, task.seed, False, seconds=spent, trouble=trouble, reached=reached, without=task.without)
    found = last["failure"]
    by_any = task.without is not None or isinstance(fault, NullFault)
    return Hunt(
        fault.name,
        task.seed,
        trouble is None and (by_any or may_name(fault, found["law"])),
        found["law"],
        found["signature"],
        found["operations"],
        found["seconds"],
        found["found_len"],
        found["minimized_len"],
        trouble,
        tuple(found.get("laws", ())),
        tuple(found.get("did_not_run", ())),
        reached,
        task.without,
    )


def may_name(fault: Fault, law: str) -> bool:
    """Tell whether a violation of this class counts as having found the fault."""
    return law in fault.laws or (is_divergence(law) and "Divergence" in fault.laws)


def is_divergence(law: str) -> bool:
    """Tell whether a class of violation is one of the comparison with the model."""
    return issubclass(getattr(agreement, law, object), Divergence)


def hunt_all(tasks: Sequence[Task], jobs: int) -> Generator[tuple[Task, Hunt], None, None]:
    """Do every hunt, ``jobs`` at a time, begun in order; yield each as it ends. Raises TargetUnusable."""
    nurseries = Nurseries()

    def do(task: Task) -> Hunt:
        return hunt(task.fault, task.seed, task.seconds, without=task.without, start=nurseries.run)

    pool = ThreadPoolExecutor(jobs)
    try:
        pending = {pool.submit(do, task): task for task in tasks}
        for future in as_completed(pending):
            yield pending[future], future.result()
    finally:  # after Ctrl-C the hunts that run are ended, and the others are not begun
        pool.shutdown(wait=False, cancel_futures=True)
        nurseries.close()
        pool.shutdown()
