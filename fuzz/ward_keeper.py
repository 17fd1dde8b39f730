"""The process that keeps a ward (`ward.py`): it runs each trace in a child of its own, and watches how that ends.

It imports what the target needs, once, and then forks a child for each order; a child begins where a fresh process
would be after its imports. What a built-in target imports only when it is used is found by using one, a first child
ahead of the keeper. A CUDA context does not survive a fork: on that lane, and where an import has made one, each
child is a process that begins from nothing.

Orders come on standard input: a JSON line (`Ask`), then a trace of as many lines as that says. Each is answered with
a JSON line. A child notes each step in a file in memory before it runs, so that its end finds the step there; it
writes what it found behind that. A child ends with its process group; the keeper ends, and its child with it, when
its input does.
"""

import ctypes
import gc
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from struct import Struct
from time import monotonic
from typing import Any

import psutil

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Alloc, AllocItem, Checkpoint, Commit, Evict, Match, Op, Peek, Release, Submit
from kvlockstep.fuzz.outcomes import OutcomeLog
from kvlockstep.fuzz.registry import BUILT_IN, Factory, TargetUnusable, choose_lane, factory_for
from kvlockstep.fuzz.replay import run_ops, what_it_lacks
from kvlockstep.fuzz.targets.base import allowances_of, options_of
from kvlockstep.fuzz.trace_lines import Header, decode_header, decode_op, encode_header, encode_op

START_S = 120.0
"""A child that begins from nothing has so long for its imports, and a keeper for its own."""

LOOK_S = 0.02
"""So often is a running child looked at; that it ended is seen at once."""

WARM_S, WARM_BYTES = 10.0, 1 << 30
"""Limits of the first child."""

_SOME_OPS: tuple[Op, ...] = (
    Submit("r0", (1, 2)),
    Peek("r0"),
    Match("r0"),
    Alloc((AllocItem("r0", 2),)),
    Commit("r0", 2, (3,)),
    Checkpoint("r0"),
    Release("r0"),
    Evict(1),
)

PR_SET_PDEATHSIG = 1

_NOTES = Struct("qqq")
"""What a child notes: the step that it is about to run, from 1, with 0 for the making of the target; the resident
bytes that it may have; and the greatest number of them that it has seen."""


@dataclass(frozen=True, slots=True)
class Charge:
    """What a keeper is told when it begins."""

    target: str
    lane: str | None
    fault: str | None
    folder: str  # for what is written on the way; it goes with the keeper
    sanitize: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """The first line of an order. ``look`` asks what the target promises; nothing is run then."""

    n_ops: int
    hang_seconds: float
    memory_bytes: int
    quiet: bool = False  # what the target prints goes nowhere
    look: bool = False
    digest: bool = False  # and what the trace needs of the target, first
    outcomes: str | None = None  # where to write the outcomes


class NobodyWaits(Exception):
    """Who gave the order is gone."""


class TooMuchMemory(BaseException):
    """Ends a run after an operation that left too much behind; not an Exception, so that nobody handles it."""


class Notes:
    """The file in memory that a child and its keeper share. As the log of a lockstep it notes each step."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._step = 0
        self._allowed = self._most = 0
        self._process = psutil.Process()

    def begin(self, base: int, memory_bytes: int) -> None:
        """Note that the target is about to be made by a process that has ``base`` resident bytes, or more."""
        self._allowed = max(base, self._process.memory_info().rss) + memory_bytes
        self._note()

    def write(self, op: Op) -> None:
        self.check_memory()
        self._step += 1
        self._note()

    def check_memory(self) -> None:
        """Look at what the step before left behind, so that it is always the same one that had too much."""
        self._most = max(self._most, self._process.memory_info().rss)
        if self._most > self._allowed:
            self._note()
            raise TooMuchMemory

    def _note(self) -> None:
        os.pwrite(self.descriptor, _NOTES.pack(self._step, self._allowed, self._most), 0)

    def end(self, result: dict[str, Any]) -> None:
        os.pwrite(self.descriptor, json.dumps(result).encode(), _NOTES.size)


@dataclass(slots=True)
class Watch:
    """What the keeper sees of one child. ``ending`` is "hung", "memory", a signal, or "exit" with the status."""

    ending: str = ""
    steps: int = 0
    slowest: float = 0.0  # seconds that a step took, of those that came to an end
    excess: int = 0  # resident bytes above what was allowed
    result: dict[str, Any] | None = None


def main(argument: str) -> None:
    """Answer orders until standard input ends."""
    charge = Charge(**json.loads(argument))
    try:
        _serve(charge, argument)
    except NobodyWaits:
        return
    finally:
        shutil.rmtree(charge.folder, ignore_errors=True)


def _serve(charge: Charge, argument: str) -> None:
    answers = os.dup(1)  # a child has it too, but never longer than its keeper waits
    os.dup2(2, 1)  # what an import prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    def answer(body: dict[str, Any]) -> None:
        os.write(answers, json.dumps(body).encode() + b"\n")

    factory = None
    if charge.lane != "cuda":
        try:
            factory = _factory_for(charge)
        except TargetUnusable as error:
            answer({"unusable": str(error)})
            return
        if charge.target in BUILT_IN:
            _use_once(factory, charge.target)
    if _has_cuda_context():
        factory = None
    gc.collect()
    gc.freeze()  # or a collection in a child would copy every page of what was imported
    answer({"ready": True})
    orders = sys.stdin.buffer
    while first := orders.readline():
        ask = Ask(**json.loads(first))
        lines = [orders.readline() for _ in range(1 + ask.n_ops)]
        if not lines[-1].endswith(b"\n"):
            raise NobodyWaits
        notes = os.memfd_create("notes")
        if factory is None:
            pid = _begin_from_nothing(argument, first, lines, notes)
        else:
            pid = _fork(factory, charge.target, ask, lines, notes)
        answer(asdict(_watch(pid, notes, ask)))


def _factory_for(charge: Charge) -> Factory:
    choose_lane(charge.lane)
    return factory_for(charge.target, charge.fault, charge.sanitize)


def _use_once(factory: Factory, target: str) -> None:
    """Import what is imported only while a target is used, by using one; not, if that did not go well in a child."""
    config = CacheConfig()
    lines = [f"{line}\n".encode() for line in (encode_header(Header(config)), *map(encode_op, _SOME_OPS))]
    ask = Ask(len(_SOME_OPS), WARM_S, WARM_BYTES, quiet=True)
    notes = os.memfd_create("notes")
    watch = _watch(_fork(factory, target, ask, lines, notes), notes, ask)
    if watch.result is not None and watch.result.get("signature", "") is None:
        run_ops(config, _SOME_OPS, factory)


def _has_cuda_context() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _fork(factory: Factory, target: str, ask: Ask, lines: Sequence[bytes], notes: int) -> int:
    base = psutil.Process().memory_info().rss
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        with suppress(PermissionError, ProcessLookupError):  # it has done so itself, and gone on
            os.setpgid(pid, pid)  # here too, or it might be killed as a group before it is one
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        _end_with_keeper()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        status = _follow(factory, target, ask, lines, Notes(notes), base)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # whatever waits for the end of this process was begun by the keeper


def _end_with_keeper() -> None:
    """Let the kernel kill this process once its keeper has ended, however that was."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _begin_from_nothing(argument: str, first: bytes, lines: Sequence[bytes], notes: int) -> int:
    with tempfile.TemporaryFile() as order:
        order.write(first + b"".join(lines))
        order.seek(0)
        command = [sys.executable, "-P", "-m", "kvlockstep.fuzz.ward_keeper", argument, str(notes)]
        child = subprocess.Popen(command, stdin=order, stdout=2, pass_fds=[notes], process_group=0)
    child.returncode = 0  # it is waited for elsewhere
    return child.pid


def follow_from_nothing(argument: str, descriptor: int) -> int:
    """Be the child of one order, which is on standard input."""
    _end_with_keeper()
    charge = Charge(**json.loads(argument))
    notes = Notes(descriptor)
    first, *lines = sys.stdin.buffer.readlines()
    try:
        factory = _factory_for(charge)
    except TargetUnusable as error:
        notes.end({"unusable": str(error)})
        return 0
    return _follow(factory, charge.target, Ask(**json.loads(first)), lines, notes, 0)


def _follow(factory: Factory, target: str, ask: Ask, lines: Sequence[bytes], notes: Notes, base: int) -> int:
    """Run an order to its end in this process. Return the status to leave with, which says something if it is not 0."""
    os.dup2(os.open(os.devnull, os.O_WRONLY) if ask.quiet else 2, 1)
    if ask.quiet:
        os.dup2(1, 2)
    try:
        header = decode_header(lines[0].decode(), "order")
        ops = [decode_op(line.decode(), "order") for line in lines[1:]]
        notes.begin(base, ask.memory_bytes)
        if ask.look:
            probe = factory(header.config)
            notes.end(
                {
                    "capabilities": sorted(probe.capabilities),
                    "options": options_of(probe),
                    "page_sizes": getattr(probe, "page_sizes", None),
                }
            )
        else:
            notes.end(_run(factory, target, ask, header.config, ops, notes))
    except TargetUnusable as error:
        notes.end({"unusable": str(error)})
    except TooMuchMemory:
        notes.end({"memory": True})
    except SystemExit as left:  # the way of a target to end its process
        return left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except OSError as error:
        notes.end({"unwritten": f"{error.filename or 'output'}: {error.strerror or error}"})
    except Exception as error:
        traceback.print_exc()
        notes.end({"broken": f"{type(error).__name__}: {error}"})
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


def _run(
    factory: Factory, target: str, ask: Ask, config: CacheConfig, ops: Sequence[Op], notes: Notes
) -> dict[str, Any]:
    if ask.digest and (lacks := what_it_lacks(factory, config, ops)):
        return {"lacks": lacks}
    outcomes = ask.outcomes
    log = OutcomeLog(Path(outcomes), target, allowances_of(factory(config))) if outcomes else None
    with log or nullcontext():
        run = run_ops(config, ops, factory, log=notes, watch=log, digest=ask.digest)
    if run.violation is None:
        notes.check_memory()
    return {
        "signature": run.signature,
        "text": str(run.violation) if run.violation is not None else "",
        "statistics": run.statistics.to_json(),
        "digest": run.digest,
    }


def _watch(pid: int, notes: int, ask: Ask) -> Watch:
    """Wait for the end of a child; kill it if it hangs or has too much memory, or once nobody wants it any more."""
    watch = Watch()
    descriptor = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(0, select.POLLIN)
    step, since = -1, monotonic()
    try:
        while not (events := dict(poll.poll(LOOK_S * 1000))):
            now, (at, allowed, _) = monotonic(), _read(notes)
            if at != step:
                watch.slowest = max(watch.slowest, now - since) if step >= 0 else 0.0
                step, since = at, now
            limit = ask.hang_seconds if step >= 0 else max(ask.hang_seconds, START_S)
            if now - since > limit:
                watch.ending = "hung"
                break
            if step >= 0 and (excess := _resident(pid) - allowed) > 0:
                watch.ending, watch.excess = "memory", excess
                break
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it started, too
        _, status = os.waitpid(pid, 0)
        os.close(descriptor)
    if descriptor not in events and 0 in events:
        raise NobodyWaits
    watch.steps, allowed, most = _read(notes)
    code = os.waitstatus_to_exitcode(status)
    text = os.pread(notes, os.fstat(notes).st_size, _NOTES.size)
    os.close(notes)
    if not watch.ending and text:
        watch.result = json.loads(text)
        if "memory" in watch.result:
            watch.ending, watch.excess = "memory", most - allowed
    elif not watch.ending:
        watch.ending = f"exit{code}" if code >= 0 else _name_of(-code)
    return watch


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the many that are for real time
        return f"signal{number}"


def _read(notes: int) -> tuple[int, int, int]:
    """Read what a child has noted; the step is -1 as long as that is nothing."""
    data = os.pread(notes, _NOTES.size, 0)
    return _NOTES.unpack(data) if len(data) == _NOTES.size else (-1, 0, 0)


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has ended
        return 0


if __name__ == "__main__":  # each ends without what extensions have to say at the end
    if len(sys.argv) > 2:
        os._exit(follow_from_nothing(sys.argv[1], int(sys.argv[2])))
    main(sys.argv[1])
    os._exit(0)
