"""A witness runs cases of workers once more, and tells whether the same came of them: the check that cases replay.

It is a process that lives long and sees the cases of many workers, with another ``PYTHONHASHSEED`` than theirs; what
differs there depends on something that is in no trace. It reads a JSON line for each case, header and operations as
in a file, and answers each with the digest of all that was seen (``Lockstep.digest``).

``python -m kvlockstep.fuzz.campaign.witness TARGET LANE``; an empty lane is none.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic, sleep

from kvlockstep.fuzz.describe import signature_of
from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import kind_of
from kvlockstep.fuzz.registry import Factory, choose_lane, factory_for
from kvlockstep.fuzz.trace import decode_header, decode_op
from kvlockstep.fuzz.worker import end_with, take_over_stdout
from kvlockstep.invariants import Violation

HASH_SEED = "20011"
"""Of the hashes in a witness; that of workers is the one of whoever started the campaign, or drawn by Python."""

MAX_WAITING = 50
"""Cases that wait for a witness; one more is passed over, so that a slow witness is not a leak."""


@dataclass(slots=True)
class Case:
    """A case that a worker ran: lines of its trace, and the digest that it gave there."""

    target: str
    lane: str | None
    fault: str | None
    lines: list[str]
    digest: str
    again: str | None = None  # the digest that it gave when it was run again; None: it could not be run


@dataclass(slots=True)
class _Process:
    process: "subprocess.Popen[str]"
    waiting: deque[Case] = field(default_factory=deque)
    asked: SimpleQueue[str | None] = field(default_factory=SimpleQueue)  # lines on their way; None is the last
    since: float = field(default_factory=monotonic)  # when the first of those that wait had its turn
    hangs: bool = False

    def end(self) -> None:
        """Kill it, with what a target started in it; what still waits is not run any more."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.asked.put(None)


class Witnesses:
    """The witnesses of one campaign, one for each target and lane, started with the first case for it.

    One that takes longer than ``patience`` for a case, its imports included, is killed; and that case differs, for in a
    worker it came to an end.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._lock = threading.Lock()  # of what waits
        self._processes: dict[tuple[str, str | None], _Process] = {}
        self._done: deque[Case] = deque()

    def ask(self, case: Case) -> None:
        """Have a case run again, unless too many wait. A witness that has died is replaced, and its cases are not."""
        target, lane = case.target, case.lane
        found = self._processes.get((target, lane))
        if found is not None and found.process.poll() is not None:
            found.end()
            found = None
        if found is None:
            found = self._processes[target, lane] = _start(target, lane)
            for follow in (self._follow, _feed):
                threading.Thread(target=follow, args=(found,), daemon=True).start()
        if len(found.waiting) >= MAX_WAITING:
            return
        with self._lock:
            if not found.waiting:
                found.since = monotonic()
            found.waiting.append(case)
        found.asked.put(json.dumps({"lines": case.lines, "fault": case.fault}) + "\n")

    def take(self) -> list[Case]:
        """Return the cases that were run again since the last call, and those that a witness hung in."""
        for one in self._all():
            with self._lock:
                at_work = one.waiting and one.process.poll() is None
                if at_work and not one.hangs and monotonic() - one.since > self.patience:
                    one.hangs = True
                    self._done.append(one.waiting.popleft())  # its ``again`` is None
            if one.hangs:
                one.end()
        return [self._done.popleft() for _ in range(len(self._done))]

    def wait(self, seconds: float) -> None:
        """Wait until nothing waits any more, at most so long."""
        until = monotonic() + seconds
        while monotonic() < until and any(one.waiting and one.process.poll() is None for one in self._all()):
            sleep(0.05)

    def _all(self) -> list[_Process]:
        return list(self._processes.values())

    def close(self) -> None:
        """End every witness."""
        for one in self._all():
            one.end()
        self._processes.clear()

    def _follow(self, one: _Process) -> None:
        assert one.process.stdout is not None
        for line in one.process.stdout:
            with self._lock:
                if one.hangs or not line.endswith("\n"):  # the last one of a witness that was killed may be cut
                    return
                case = one.waiting.popleft()
                one.since = monotonic()
            case.again = json.loads(line)["digest"]
            self._done.append(case)


def _feed(one: _Process) -> None:
    """Write what a witness is asked. A thread may wait for one that is slow, the campaign may not."""
    assert one.process.stdin is not None
    with suppress(BrokenPipeError):  # it is dead; what waits for it is passed over
        for line in iter(one.asked.get, None):
            one.process.stdin.write(line)
            one.process.stdin.flush()


def _start(target: str, lane: str | None) -> _Process:
    command = [python_for(target), "-P", "-m", "kvlockstep.fuzz.campaign.witness", target, lane or ""]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONHASHSEED": HASH_SEED},
    )
    return _Process(process)


def main(target: str, lane: str) -> None:
    """Answer until the input ends, or the parent is gone. A case that cannot be run has no digest."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    report = take_over_stdout()
    choose_lane(lane or None)
    factories: dict[str | None, Factory] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        fault = asked["fault"]
        if fault not in factories:
            factories[fault] = factory_for(target, fault)
        report("again", digest=_digest_of(asked["lines"], factories[fault]))


def _digest_of(lines: Sequence[str], factory: Factory) -> str:
    config = decode_header(lines[0], "case:1").config
    lockstep = Lockstep(config, factory(config), digest=True)
    for line in lines[1:]:
        op = decode_op(line, "case")
        try:
            lockstep.run(op)
        except Violation as violation:
            return signature_of(violation, kind_of(op))
    return lockstep.digest()


if __name__ == "__main__":
    with suppress(BrokenPipeError, KeyboardInterrupt):  # nobody listens any more
        main(*sys.argv[1:])
