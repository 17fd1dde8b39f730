"""A witness runs cases of workers once more, and tells whether the same came of them: the check that cases replay.

It is a process that lives long and sees the cases of many workers, with another ``PYTHONHASHSEED`` than theirs; what
differs there depends on something that is in no trace. It reads a JSON line for each case, header and operations as
in a file, and answers each with the digest of all that was seen (``Lockstep.digest``).

``python -m kvlockstep.fuzz.campaign.witness TARGET LANE``; an empty lane is none.
"""

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.registry import Factory, choose_lane, factory_for
from kvlockstep.fuzz.trace import decode_header, decode_op
from kvlockstep.fuzz.worker import take_over_stdout

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


class Witnesses:
    """The witnesses of one campaign, one for each target and lane, started with the first case for it."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, str | None], _Process] = {}
        self._done: deque[Case] = deque()
        self.passed_over = 0

    def ask(self, case: Case) -> None:
        """Have a case run again. A witness that has died is replaced, and its cases count as passed over."""
        target, lane = case.target, case.lane
        found = self._processes.get((target, lane))
        if found is not None and found.process.poll() is not None:
            self.passed_over += len(found.waiting)
            found = None
        if found is None:
            found = self._processes[target, lane] = _start(target, lane)
            threading.Thread(target=self._follow, args=(found,), daemon=True).start()
        if len(found.waiting) >= MAX_WAITING:
            self.passed_over += 1
            return
        found.waiting.append(case)
        assert found.process.stdin is not None
        try:
            found.process.stdin.write(json.dumps({"lines": case.lines, "fault": case.fault}) + "\n")
            found.process.stdin.flush()
        except BrokenPipeError:  # it dies; the next one is asked of another
            found.process.wait()

    def take(self) -> list[Case]:
        """Return the cases that were run again since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def wait(self, seconds: float) -> None:
        """Wait until nothing waits any more, at most so long."""
        until = monotonic() + seconds
        while monotonic() < until and any(one.waiting and one.process.poll() is None for one in self._all()):
            sleep(0.05)

    def _all(self) -> list[_Process]:
        return list(self._processes.values())

    def close(self) -> None:
        """End every witness; what still waits is not run any more."""
        for one in self._all():
            one.process.kill()
            one.process.wait()
        self._processes.clear()

    def _follow(self, one: _Process) -> None:
        assert one.process.stdout is not None
        for line in one.process.stdout:
            case = one.waiting.popleft()
            case.again = json.loads(line)["digest"]
            self._done.append(case)


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
    """Answer until the input ends. A case that cannot be run has no digest."""
    report = take_over_stdout()
    choose_lane(lane or None)
    factories: dict[str | None, Factory] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        fault = asked["fault"]
        if fault not in factories:
            factories[fault] = factory_for(target, fault)
        report("again", digest=_digest_of(asked["lines"], factories[fault]))


def _digest_of(lines: Sequence[str], factory: Factory) -> str | None:
    from kvlockstep.fuzz.replay import run_ops

    header, ops = decode_header(lines[0], "case:1"), [decode_op(line, "case") for line in lines[1:]]
    run: Any = run_ops(header.config, ops, factory, digest=True)
    return f"{run.signature}" if run.signature is not None else run.digest


if __name__ == "__main__":
    main(*sys.argv[1:])
