"""Looks for planted faults from scratch, and says which are caught, by which law, and at what cost.

Each fault and seed gets a process of its own: no example database, no corpus, no stored trace. The clock
starts at the first operation.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.faults.fault import Fault
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.worker import Order, Worker
from kvlockstep.invariants import Divergence, agreement

GRACE = 60.0
"""Seconds for the start of a process and its last step; one that takes longer hangs in an operation."""

_VERDICTS = {"failure", "unusable", "broken", "end"}
"""The reports of a worker that could say how its run ended."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """How one fault was looked for with one seed. ``trouble`` says why there is no verdict.

    A fault of SGLang that was not caught, and whose code no operation reached, was "never reached", not missed.
    """

    fault: str
    seed: int
    caught: bool  # by a law that may name it
    law: str | None = None
    signature: str | None = None
    operations: int = 0  # executed until it was found
    seconds: float = 0.0
    found_len: int = 0
    minimized_len: int = 0
    trouble: str | None = None


def hunt(fault: Fault, seed: int, seconds: float, minimize_seconds: float = 10.0) -> Hunt:
    """Fuzz one faulty target in a fresh process until the fault shows or the time is over. Raises TargetUnusable."""
    with tempfile.TemporaryDirectory(prefix="kvlockstep-hunt-") as out:
        order = Order(fault.target, fault.lane, seconds, seed, out, "hunt", fault.name, minimize_seconds)
        command = [python_for(fault.target), "-P", "-m", "kvlockstep.fuzz.worker", json.dumps(asdict(order))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + minimize_seconds + GRACE)
        except subprocess.TimeoutExpired:
            return Hunt(fault.name, seed, False, trouble="the process hung")
    events = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"event"'):  # anything else is what the target printed
            event = json.loads(line)
            events[event["event"]] = event
    if not events.keys() & _VERDICTS:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return Hunt(fault.name, seed, False, trouble=f"the process died: {last[0]}")
    return _hunt_of(fault, seed, seconds, events)


def hunt_here(fault: Fault, seed: int, seconds: float, minimize_seconds: float = 10.0) -> Hunt:
    """Do the same in this process, which has imported the target: SGLang takes longer to import than most hunts do.

    It finds what a fresh process finds. But a target that hangs hangs here. Raises TargetUnusable.
    """
    events = {}

    def note(event: str, **facts: Any) -> None:
        events[event] = facts

    with tempfile.TemporaryDirectory(prefix="kvlockstep-hunt-") as out:
        order = Order(fault.target, fault.lane, seconds, seed, out, "hunt", fault.name, minimize_seconds)
        Worker(order, factory_for(fault.target, fault.name), note).fuzz()
    return _hunt_of(fault, seed, seconds, events)


def _hunt_of(fault: Fault, seed: int, seconds: float, events: dict[str, dict[str, Any]]) -> Hunt:
    """Read a hunt off the last report of each kind that its worker made."""
    if "failure" in events:
        found = events["failure"]
        return Hunt(
            fault.name,
            seed,
            may_name(fault, found["law"]),
            found["law"],
            found["signature"],
            found["operations"],
            found["seconds"],
            found["found_len"],
            found["minimized_len"],
        )
    for event in ("unusable", "broken"):
        if event in events:
            return Hunt(fault.name, seed, False, trouble=events[event]["text"])
    trouble = "never reached" if events["end"].get("reached") == 0 else None
    return Hunt(fault.name, seed, False, seconds=seconds, trouble=trouble)


def may_name(fault: Fault, law: str) -> bool:
    """Tell whether a violation of this class counts as having found the fault."""
    differs = issubclass(getattr(agreement, law, object), Divergence)
    return law in fault.laws or (differs and "Divergence" in fault.laws)


def hunt_all(faults: Iterable[Fault], seeds: Iterable[int], seconds: float, jobs: int) -> Iterator[Hunt]:
    """Look for every fault with every seed, ``jobs`` at a time; yield each result as it comes."""
    pool = ThreadPoolExecutor(jobs)
    try:
        pending = [pool.submit(hunt, fault, seed, seconds) for fault in faults for seed in seeds]
        for future in as_completed(pending):
            yield future.result()
    finally:  # after Ctrl-C, which the hunts that run have seen too, the others are not begun
        pool.shutdown(cancel_futures=True)
