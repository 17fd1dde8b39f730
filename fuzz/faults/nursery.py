"""The processes in which faults are hunted: each hunt has one of its own, which shares nothing with the others.

A process that begins from nothing spends seconds, with SGLang ten, on imports before its first operation. So there
is a nursery for each Python and lane: a process that imports what every hunt needs, once, and then forks a child
for each order that it reads. It runs nothing itself: a child begins where a fresh process would be after its
imports, and finds the same. A CUDA context does not survive a fork; on that lane each process begins from nothing.

Orders are JSON lines on standard input; for each child that ended a line with its folder and status is given back.
Reports of a child and what it prints lie in that folder. A nursery ends when its input does, and its children with it.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any

from kvlockstep.fuzz import worker
from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.registry import TargetUnusable, choose_lane, factory_for
from kvlockstep.fuzz.worker import Order

REPORTS, SAID = "reports.jsonl", "said.txt"
"""Files in the folder of an order: the reports of its process, and what that wrote to standard error."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process of one order ended. ``status`` is None if it was killed because its time was over."""

    status: int | None
    reports: str
    said: str


def in_fresh_process(order: Order, limit: float) -> Ended:
    """Follow an order in a process that begins from nothing; kill it after ``limit`` seconds. Raises TargetUnusable."""
    command = [python_for(order.target), "-P", "-m", "kvlockstep.fuzz.worker", json.dumps(asdict(order))]
    environ = _environment() | {"TMPDIR": order.out}  # so that what it leaves behind goes with its folder
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environ)
    except subprocess.TimeoutExpired:
        return Ended(None, "", "")
    return Ended(done.returncode, done.stdout, done.stderr)


def _environment() -> dict[str, str]:
    """As many hunts run as there are cores: a second thread would only be in the way, and not survive a fork."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


class Nurseries:
    """The nurseries of one command, each begun when it is first needed. May be used by several threads."""

    def __init__(self) -> None:
        self._nurseries: dict[tuple[str, str], _Nursery] = {}
        self._lock = threading.Lock()
        self._closed = False

    def run(self, order: Order, limit: float) -> Ended:
        """Follow an order in a child; kill it ``limit`` seconds after it was forked. Raises TargetUnusable."""
        if order.lane is None or order.lane == "cuda":
            return in_fresh_process(order, limit)
        key = python_for(order.target), order.lane
        with self._lock:
            if self._closed:
                return Ended(1, "", "the nurseries are closed")
            if key not in self._nurseries:
                self._nurseries[key] = _Nursery(*key)
        return self._nurseries[key].run(order, limit)

    def close(self) -> None:
        """End every nursery with its children; who waits for one is told that it died."""
        with self._lock:
            self._closed = True
            for nursery in self._nurseries.values():
                nursery.close()


class _Nursery:
    """The parent's end of one nursery."""

    def __init__(self, python: str, lane: str) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-P", "-m", "kvlockstep.fuzz.faults.nursery", lane],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the command, which ends us by closing the pipe
        )
        assert self._process.stdin is not None
        self._orders = self._process.stdin
        self._lock = threading.Lock()
        self._waiting: dict[str, SimpleQueue[Ended]] = {}  # by the folder of the order
        self._died: Ended | None = None
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def run(self, order: Order, limit: float) -> Ended:
        answer: SimpleQueue[Ended] = SimpleQueue()
        with self._lock:
            if self._died is not None:
                return self._died
            self._waiting[order.out] = answer
            with suppress(BrokenPipeError, ValueError):  # it died, or was closed: the listener is about to say so
                self._orders.write(json.dumps({"order": asdict(order), "limit": limit}) + "\n")
                self._orders.flush()
        return answer.get()

    def _listen(self) -> None:
        """Give each order its end, and once the nursery has died give that to all that wait."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            folder, status = json.loads(line)
            texts = [(Path(folder) / name).read_text(errors="replace") for name in (REPORTS, SAID)]
            self._waiting.pop(folder).put(Ended(status, *texts))
        status = self._process.wait()
        self._said.seek(0)
        with self._lock:
            self._died = Ended(status, "", self._said.read())
            for answer in self._waiting.values():
                answer.put(self._died)
        self._said.close()

    def close(self) -> None:
        with self._lock, suppress(BrokenPipeError):
            self._orders.close()
        self._listener.join()


@dataclass(slots=True)
class _Child:
    """The nursery's end of one hunt."""

    pid: int
    folder: str
    deadline: float
    overdue: bool = False


def main(lane: str) -> None:
    """Fork a child for each order on standard input until that ends; then kill those that run, and return."""
    choose_lane(lane)
    from kvlockstep.fuzz import machine  # noqa: F401, which a worker imports only when it begins

    answers = os.dup(1)
    os.dup2(2, 1)  # what an import prints is no answer
    children: dict[int, _Child] = {}  # by a descriptor that can be polled for their end
    poll = select.poll()
    poll.register(0, select.POLLIN)
    cut = b""
    while True:
        for descriptor, _ in poll.poll(_until_next(children)):
            if descriptor:
                poll.unregister(descriptor)
                child = children.pop(descriptor)
                os.write(answers, json.dumps([child.folder, _reap(descriptor, child)]).encode() + b"\n")
                continue
            got = os.read(0, 1 << 16)
            if not got:
                for child in children.values():
                    os.killpg(child.pid, signal.SIGKILL)
                return
            *lines, cut = (cut + got).split(b"\n")
            for line in lines:
                descriptor, child = _fork(**json.loads(line), ours=[answers, *children])
                poll.register(descriptor, select.POLLIN)
                children[descriptor] = child
        for child in children.values():
            if not child.overdue and monotonic() > child.deadline:
                child.overdue = True
                os.killpg(child.pid, signal.SIGKILL)


def _until_next(children: dict[int, _Child]) -> float | None:
    """Milliseconds until the time of some child is over; None if it is for none."""
    deadlines = [child.deadline for child in children.values() if not child.overdue]
    return max(1.0, (min(deadlines) - monotonic()) * 1000 + 1) if deadlines else None


def _reap(descriptor: int, child: _Child) -> int | None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it started, too
    _, status = os.waitpid(child.pid, 0)
    os.close(descriptor)
    return None if child.overdue else os.waitstatus_to_exitcode(status)


def _fork(order: dict[str, Any], limit: float, ours: Collection[int]) -> tuple[int, _Child]:
    """Fork a child that follows an order. ``ours`` are descriptors that it must not keep open."""
    with suppress(TargetUnusable):  # the child will come to that too, and can say so
        factory_for(order["target"])
    folder = order["out"]
    for name in (REPORTS, SAID):
        (Path(folder) / name).touch()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # here too, or it might be killed as a group before it is one
        return os.pidfd_open(pid), _Child(pid, folder, monotonic() + limit)
    status = 1
    try:
        os.setpgid(0, 0)
        for descriptor in ours:
            os.close(descriptor)
        for descriptor, path, mode in ((0, os.devnull, os.O_RDONLY), (1, REPORTS, os.O_WRONLY), (2, SAID, os.O_WRONLY)):
            os.dup2(os.open(os.path.join(folder, path), mode), descriptor)
        tempfile.tempdir = folder  # what it leaves behind goes with its folder
        status = worker.main(json.dumps(order))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # whatever waits for the end of this process was begun by the nursery


if __name__ == "__main__":
    main(sys.argv[1])
