"""Finds out what a worker died of: runs the trace that it left in a ward, stores and minimizes what happens there.

Started with its order as one JSON argument; reports as a worker does, JSON lines on what was standard output when it
started (``fuzz/worker.py``): ``violates``, ``found`` and ``failure``; ``again`` where the cause is known;
``unreproduced`` where nothing happens any more; and ``end`` in any case; ``unusable`` or ``broken`` where that cannot
be found out. What is found is stored before it is minimized. On SIGINT the search for a shorter trace stops, and the
best is stored. The process ends when its parent does, and what it runs with it.
"""

import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import as_sentence
from kvlockstep.fuzz.failures import store_failure
from kvlockstep.fuzz.minimize import Minimizer, Ops
from kvlockstep.fuzz.registry import TargetUnusable
from kvlockstep.fuzz.trace import Header, Trace, TraceError, read_trace
from kvlockstep.fuzz.ward import HANG_SECONDS, MEMORY_BYTES, Ended, Limits, Ward, WardClosed
from kvlockstep.fuzz.worker import Report, end_with, take_over_stdout


@dataclass(frozen=True, slots=True)
class PostmortemOrder:
    """What to look into: ``trace`` is what a worker left behind, ``name`` says who reports."""

    target: str
    lane: str | None
    trace: str
    out: str
    name: str
    fault: str | None = None
    minimize_seconds: float = 60.0
    hang_seconds: float = HANG_SECONDS  # an operation that takes longer hangs
    memory_bytes: int = MEMORY_BYTES  # more than the target began with
    known: tuple[str, ...] = ()  # signatures that are reported as met ``again``, and not minimized


class Postmortem:
    """Looks into one trace. ``interrupt`` may be called from a signal handler."""

    def __init__(self, order: PostmortemOrder, report: Report) -> None:
        self.order = order
        self.report = report
        self.best: tuple[CacheConfig, Ops, str] | None = None  # what was minimized so far, with its text
        self._ward: Ward | None = None
        self._interrupted = False

    def interrupt(self) -> None:
        """Come to an end with what there is."""
        self._interrupted = True
        if self._ward is not None:
            self._ward.interrupt()

    def run(self) -> None:
        """Run the trace, and report. Raises TraceError, and what a ward raises."""
        started = monotonic()
        order = self.order
        trace = read_trace(order.trace, allow_cut_tail=True)
        limits = Limits(order.hang_seconds, order.memory_bytes)
        with Ward(order.target, order.lane, order.fault, trace.header.sanitize, limits=limits) as ward:
            self._ward = ward
            if self._interrupted:  # before there was a ward
                return
            try:
                ended = ward.run(trace.header.config, trace.ops)
            except WardClosed:
                return
            if ended.lacks:
                raise TargetUnusable(f"target {order.target!r} does not promise {', '.join(ended.lacks)}")
            if ended.signature is None:
                self.report("unreproduced", trace=order.trace)
                return
            if ended.signature in order.known:
                self.report("again", signature=ended.signature, length=ended.steps)
                return
            self._settle(ward, trace, ended, monotonic() - started)

    def _settle(self, ward: Ward, trace: Trace, ended: Ended, seconds: float) -> None:
        order, signature = self.order, ended.signature
        assert signature is not None, "it failed"
        law = signature.partition(".")[0]
        config, ops = trace.header.config, tuple(trace.ops[: ended.steps])
        header = Header(config, "", law, signature, order.target, order.lane, order.fault, trace.header.sanitize)
        found = self._as_trace(header, (config, ops, ended.text))
        self.report("violates", signature=signature)
        out = Path(order.out)
        folder = store_failure(out, found, found, ended.text, self._still_fails)
        facts = {"signature": signature, "seconds": seconds, "operations": ended.steps, "found_len": len(ops)}
        self.report("found", folder=str(folder), text=ended.text, **facts)

        ending = self._minimize(ward, ended, config, ops)
        config, ops, text = self.best or (config, ops, ended.text)
        folder = store_failure(out, self._as_trace(header, (config, ops, text)), found, text, self._still_fails)
        facts |= {"text": text, "law": law, "laws": [law], "did_not_run": []}
        self.report("failure", folder=str(folder), minimized_len=len(ops), ending=ending, **facts)

    def _as_trace(self, header: Header, failure: tuple[CacheConfig, Ops, str]) -> Trace:
        config, ops, text = failure
        return Trace(replace(header, config=config, why=as_sentence(_headline(text))), list(ops))

    def _minimize(self, ward: Ward, ended: Ended, config: CacheConfig, ops: Ops) -> str:
        """Look for the best trace, and return how that came to its end."""
        signature, limits = ended.signature, ward.limits
        assert signature is not None, "it failed"

        def save(config: CacheConfig, ops: Ops) -> None:
            assert ward.last is not None, "it was run there just now"
            self.best = config, ops, ward.last.text

        try:
            ward.hurry(ended)
            search = Minimizer(
                config, ops, ward.make, signature, seconds=self.order.minimize_seconds, save=save, judge=ward.judge
            )
            finished = search.run()
            if self.best is None:
                return "did not fail again" if search.tried else "time ran out"
            if ward.limits != limits:  # what was only slow is no hang, and the text is to name the limit
                ward.limits = limits
                if ward.judge(search.config, search.ops)[0] != signature:
                    self.best = None
                    return "did not fail again"
                save(search.config, search.ops)
        except WardClosed:
            return "interrupted"
        return "minimized" if finished else "time ran out"

    def _still_fails(self, stored: Trace) -> bool:
        """Run a trace of an earlier run; one that cannot be run any more for an interrupt has the benefit of doubt."""
        assert self._ward is not None, "it is there before anything is stored"
        try:
            signature, _ = self._ward.judge(stored.header.config, stored.ops)
        except WardClosed:
            return True
        except TargetUnusable:  # it cannot be built in this size any more
            return False
        return signature == stored.header.signature


def _headline(text: str) -> str:
    """Return the first line of a verdict without the law."""
    return text.partition("\n")[0].partition(": ")[2]


def main(argument: str) -> int:
    """Follow one order. Return 0 however that ended, if it could be said."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    report = take_over_stdout()
    try:
        _follow(PostmortemOrder(**json.loads(argument)), report)
        report("end")
    except (BrokenPipeError, KeyboardInterrupt):
        return 1  # nobody listens any more, or it was ended before it began
    return 0


def _follow(order: PostmortemOrder, report: Report) -> None:
    postmortem = Postmortem(order, report)
    signal.signal(signal.SIGINT, lambda number, frame: postmortem.interrupt())
    try:
        postmortem.run()
    except TargetUnusable as error:
        report("unusable", text=str(error))
    except BrokenPipeError:
        raise
    except TraceError as error:
        report("broken", text=str(error))
    except OSError as error:
        report("broken", text=f"could not write {error.filename or order.out}: {error.strerror or error}")
    except Exception as error:
        traceback.print_exc()
        report("broken", text=f"the harness failed in {order.name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
