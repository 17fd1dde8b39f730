"""Runs traces where they can do no harm: each in a process of its own, that may die, hang or eat memory.

What ends so is a failure like a violation, with a signature of the ward's own: ``Died.<kind>.<SIGSEGV or exit3>``,
``Hung.<kind>``, ``OutOfMemory.<kind>``, where the kind is that of the operation that did not come back, or ``start``
if the target could not even be made. A run costs a fork, about 20 ms; what keeps that so cheap, and what happens in
the other process, is in ``ward_keeper.py``.

A hang is known by a clock, and what an operation takes of the memory by looking now and then; so these two depend on
the machine, and a limit that is near to what an honest target needs makes an honest target fail.
"""

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Self, cast

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.costs import Cost
from kvlockstep.fuzz.describe import describe_config, describe_op, signature_of
from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.ops import Op, kind_of
from kvlockstep.fuzz.registry import TargetUnusable
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.targets.base import Target
from kvlockstep.fuzz.trace import Header, encode_header, encode_op
from kvlockstep.fuzz.ward_keeper import START_S, Ask, Charge
from kvlockstep.invariants import Violation

HANG_SECONDS = 60.0
MEMORY_BYTES = 2 << 30

START = "start"
"""Stands for the kind of an operation where none was begun."""

LISTEN_S = 0.2
"""So often does a waiting ward look whether it was interrupted."""

CLOSE_S = 5.0

HURRIED_S = 2.0
"""No limit is made shorter than this: a machine may be busy."""


class Died(Violation):
    """An operation ended the process. Nothing raises this; it has the name and the text of such an end."""


class Hung(Violation):
    """An operation did not come to an end. Nothing raises this."""


class OutOfMemory(Violation):
    """An operation took too much memory, or left too much behind. Nothing raises this."""


KINDS = (Died, Hung, OutOfMemory)


@dataclass(frozen=True, slots=True)
class Limits:
    """When an operation hangs, and how many resident bytes a process may have beyond what it begins with."""

    hang_seconds: float = HANG_SECONDS
    memory_bytes: int = MEMORY_BYTES

    def options(self) -> list[str]:
        """Say them on a command line."""
        return [f"--hang-seconds={self.hang_seconds!r}", f"--memory={self.memory_bytes >> 20}M"]


LIMITS = Limits()


class WardFailed(Exception):
    """The ward itself could not do its work; the text is one line."""


class WardClosed(Exception):
    """The ward was closed, by another thread or a signal handler, before the run came to an end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended. ``signature`` is that of a violation, or the ward's own; None if all operations ran.

    ``text`` says the failure as a verdict does. ``lacks`` is what the trace needs and the target does not promise;
    then nothing was run. ``statistics`` and ``digest`` are missing where the process did not live to say them.
    """

    signature: str | None
    steps: int  # operations begun, the failing one included
    text: str = ""
    slowest: float = 0.0  # seconds that a step took, of those that came to an end
    statistics: Statistics = field(default_factory=Statistics)
    digest: str | None = None
    lacks: tuple[str, ...] = ()
    cost: Cost | None = None  # of a run in this process


@dataclass(frozen=True, slots=True)
class Promises:
    """What a target promises, without the target."""

    capabilities: frozenset[str]
    options: tuple[str, ...]
    page_sizes: tuple[int, ...] | None


def is_of_ward(signature: str | None) -> bool:
    """Tell whether a signature is one that only a ward can find again."""
    return signature is not None and signature.partition(".")[0] in {kind.__name__ for kind in KINDS}


class Ward:
    """Runs traces on one target, a lane and a planted fault. Close it: it is a process as long as it is open.

    Raises TargetUnusable where the target cannot be had, also from every run.
    """

    def __init__(
        self,
        target: str,
        lane: str | None,
        fault: str | None = None,
        sanitize: int | None = None,
        *,
        limits: Limits = LIMITS,
    ) -> None:
        self.limits = limits
        self.last: Ended | None = None  # the last run
        self._closed = False
        self._ready = False  # it has imported what the target needs
        self._heard = b""
        self._folder = tempfile.TemporaryDirectory(prefix="kvlockstep-ward-", ignore_cleanup_errors=True)
        self.charge = Charge(target, lane, fault, self._folder.name, sanitize)
        try:
            self._process = self._start(python_for(target))
        except BaseException:
            self._folder.cleanup()
            raise
        try:
            ready = self._answer(START_S)
        except BaseException:
            self.close()
            raise
        if "unusable" in ready:
            self.close()
            raise TargetUnusable(ready["unusable"])
        self._ready = True

    def _start(self, python: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [python, "-P", "-m", "kvlockstep.fuzz.ward_keeper", json.dumps(asdict(self.charge))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",  # a second thread would not survive a fork
                "TMPDIR": self._folder.name,  # so that what it leaves behind goes with it
            },
            start_new_session=True,  # Ctrl-C is for us, who end it by closing the pipe
        )

    def run(self, config: CacheConfig, ops: Sequence[Op], *, outcomes: Path | None = None) -> Ended:
        """Run a trace from a fresh state, with all that can be said of it, and let be heard what the target prints.

        Raises TargetUnusable, WardFailed, WardClosed, and OSError where the ``outcomes`` cannot be written.
        """
        path = str(outcomes.absolute()) if outcomes is not None else None
        return self._run(config, ops, digest=True, outcomes=path)

    def judge(self, config: CacheConfig, ops: Sequence[Op]) -> tuple[str | None, int]:
        """Say what `failing_signature` would say of a trace, but in a process of its own. Raises as `run` does."""
        ended = self._run(config, ops, quiet=True)
        return ended.signature, ended.steps

    def make(self, config: CacheConfig) -> Target:
        """Return what a target of this config promises, in place of a target: for `lacking`, and for that alone."""
        watch = self._ask(config, (), quiet=True, look=True)
        said = watch["result"]
        if said is None:
            raise TargetUnusable(self._text_of(watch, config, ())[1])
        promises = Promises(frozenset(said["capabilities"]), tuple(said["options"]), said["page_sizes"])
        return cast(Target, promises)

    def _run(self, config: CacheConfig, ops: Sequence[Op], **ask: Any) -> Ended:
        watch = self._ask(config, ops, **ask)
        result, steps, slowest = watch["result"], watch["steps"], watch["slowest"]
        if watch["ending"]:
            signature, text = self._text_of(watch, config, ops)
            self.last = Ended(signature, steps, text, slowest)
        elif "lacks" in result:
            self.last = Ended(None, 0, lacks=tuple(result["lacks"]))
        else:
            statistics = Statistics.from_json(result["statistics"])
            self.last = Ended(result["signature"], steps, result["text"], slowest, statistics, result["digest"])
        return self.last

    def _text_of(self, watch: dict[str, Any], config: CacheConfig, ops: Sequence[Op]) -> tuple[str, str]:
        """Return signature and text of an end that is no violation."""
        ending, steps = watch["ending"], watch["steps"]
        kind, said = (kind_of(ops[steps - 1]), describe_op(ops[steps - 1])) if steps else (START, "")
        what = kind if steps else "making the target"
        failure: Violation
        if ending == "hung":
            failure = Hung(f"{what} did not come to an end within {self.limits.hang_seconds:g} s")
        elif ending == "memory":
            most = self.limits.memory_bytes
            got, expected = (-(-n_bytes >> 20) for n_bytes in (most + watch["excess"], most))
            failure = OutOfMemory(
                f"{what} brought the process to {got} MiB more than it began with, expected {expected}"
            )
        else:
            how = f"left with status {ending[4:]}" if ending.startswith("exit") else f"was ended by {ending}"
            failure = Died(f"the process {how} in {what}", roles=(ending,))
        lane = f" lane={self.charge.lane}" if self.charge.lane else ""
        failure.facts = [
            ("step", f"{steps - 1}: {said}" if steps else "none"),
            ("config", f"{describe_config(config)} target={self.charge.target}{lane}"),
        ]
        return signature_of(failure, kind), str(failure)

    def _ask(self, config: CacheConfig, ops: Sequence[Op], **ask: Any) -> dict[str, Any]:
        """Let the keeper run a trace. Return what it saw; an end of the ward's kinds has an ``ending``."""
        if self._closed:
            raise WardClosed
        assert self._process.stdin is not None
        order = json.dumps(asdict(Ask(len(ops), self.limits.hang_seconds, self.limits.memory_bytes, **ask)))
        lines = [order, encode_header(Header(config)), *map(encode_op, ops)]
        with suppress(BrokenPipeError):  # that it ended is seen when it does not answer
            self._process.stdin.write("".join(f"{line}\n" for line in lines).encode())
            self._process.stdin.flush()
        watch = self._answer(None)
        result = watch["result"] or {}
        if "unusable" in result:
            raise TargetUnusable(result["unusable"])
        if "unwritten" in result:
            raise OSError(result["unwritten"])
        if "broken" in result:
            raise WardFailed(f"a run in the ward failed: {result['broken']}")
        return watch

    def _answer(self, seconds: float | None) -> dict[str, Any]:
        """Wait for a line of the keeper."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        until = monotonic() + seconds if seconds is not None else None
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._heard:
            if self._closed:
                raise WardClosed
            if poll.poll(LISTEN_S * 1000):
                got = os.read(descriptor, 1 << 16)
                if not got:
                    raise self._died()
                self._heard += got
            elif until is not None and monotonic() > until:
                raise TargetUnusable(f"target {self.charge.target!r}: importing it did not end within {seconds:g} s")
        line, _, self._heard = self._heard.partition(b"\n")
        return cast(dict[str, Any], json.loads(line))

    def _died(self) -> Exception:
        status = self._process.wait()
        how = f"was ended by signal {-status}" if status < 0 else f"left with status {status}"
        if not self._ready:
            return TargetUnusable(f"target {self.charge.target!r}: the process that imports it {how}")
        return WardFailed(f"the process that keeps the ward {how}")

    def hurry(self, ended: Ended) -> None:
        """Let a step of a shorter trace hang sooner, as far as the steps of this one, which failed, allow it."""
        seconds = min(self.limits.hang_seconds, max(HURRIED_S, 3 * ended.slowest))
        self.limits = replace(self.limits, hang_seconds=seconds)

    def interrupt(self) -> None:
        """Let the run at hand, and every later one, raise WardClosed. May be called from a signal handler."""
        self._closed = True

    def close(self) -> None:
        """End the process with what it runs."""
        self._closed = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # it hangs in an import
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        finally:
            self._process.stdout.close()
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
