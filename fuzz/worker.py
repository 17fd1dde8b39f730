"""One fuzzing process: one target on one lane, from one seed, until the budget is spent or a law is broken.

Started by ``crew.py`` with its order as one JSON argument; reports as JSON lines on what was standard
output when it started, so that a parent needs nothing but a pipe. What a target prints goes to standard
error. Operations are on disk before they run. A failure is stored as it was found before it is minimized, so
that an interrupted minimizer loses nothing. A worker ends when its parent does.
"""

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, cast

from hypothesis.errors import FlakyStrategyDefinition

from kvlockstep.fuzz.canary import RepeatsWriteSlot, look_for_canary
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import as_sentence, signature_of
from kvlockstep.fuzz.failures import current_path, store_failure
from kvlockstep.fuzz.label_needs import LARGER_PAGES, hidden_from_labels
from kvlockstep.fuzz.labels import Memory
from kvlockstep.fuzz.lockstep import Lockstep, Watcher
from kvlockstep.fuzz.minimize import Minimizer
from kvlockstep.fuzz.ops import Op, kind_of
from kvlockstep.fuzz.registry import Factory, TargetUnusable, cannot_be_seen, choose_lane, factory_for
from kvlockstep.fuzz.replay import failing_signature
from kvlockstep.fuzz.search import Search
from kvlockstep.fuzz.statistics import CaseWatcher, Statistics
from kvlockstep.fuzz.targets.base import Target, allowances_of, options_of, page_sizes_of
from kvlockstep.fuzz.trace import Header, Trace, TraceWriter
from kvlockstep.invariants import Snapshot, Violation
from kvlockstep.invariants.checks import HARNESS_PARTS, Check, Findings, unobserved

Report = Callable[..., None]

N_LOOKS = 200
"""Snapshots with requests and nodes, or with these hidden, after which it is known what a target shows."""

ENDING_S = 5.0
"""A worker whose parent is gone has this long to store what it has."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is told. ``seconds`` count from the first operation."""

    target: str
    lane: str | None
    seconds: float
    seed: int
    out: str
    name: str
    fault: str | None = None
    minimize_seconds: float = 30.0
    steps: int = 90  # operations in a case, at most
    canary: bool = True  # look for it first
    learn: bool = True  # let what was tried decide what is tried next
    without: int | None = None  # the law that is left out; see Lockstep


class CaseStopped(BaseException):
    """Ends the running case and the batch; not an Exception, so that Hypothesis neither replays nor shrinks it."""


class Worker:
    """Runs cases and reports. Implements `machine.Case`."""

    config: CacheConfig | None = None

    def __init__(self, order: Order, factory: Factory, report: Report) -> None:
        self.order = order
        self.factory = factory
        self.report = report
        probe = factory(CacheConfig())
        self.capabilities = probe.capabilities
        self.options = options_of(probe)
        self.page_sizes = page_sizes_of(probe)
        self.lane = getattr(probe, "lane", None)
        self.statistics = Statistics()
        self.search = Search() if order.learn else None
        self._target = probe
        self.ops: list[Op] = []
        self.header = self._header(CacheConfig())
        self.log = TraceWriter(current_path(Path(order.out), order.name), self.header)
        self._started: float | None = None
        self._next_report = 0.0
        self._distinct: set[int] = set()
        self._violation: Violation | None = None
        self._trouble: Exception | None = None
        self._minimizer: Minimizer | None = None
        self._interrupted = False
        self._unobserved: dict[str, Check] = {}
        self._hidden: set[str] = set()
        self._looks = 0
        self._parts_missing = [] if "kv" in self.capabilities else ["reads", "pool"]
        if not hasattr(probe, "read_slots"):
            self._parts_missing.append("pool")
        if max(self.page_sizes) == 1:
            self._hidden.add(LARGER_PAGES)
        self._spent = False

    def _header(self, config: CacheConfig) -> Header:
        return Header(config=config, why="", target=self.order.target, lane=self.lane, fault=self.order.fault)

    @property
    def elapsed(self) -> float:
        return monotonic() - self._started if self._started is not None else 0.0

    def start(self, config: CacheConfig) -> Lockstep:
        self._count_case()
        self.ops = []
        self.header = self._header(config)
        watch = CaseWatcher(self.statistics, Memory(config), self.search)
        with self._stopping_at_trouble():
            target = self._target = self._begin(config)
            self.statistics.allowances.update(dict.fromkeys(allowances_of(target), 0))
            return self._lockstep(config, target, watch)

    def _begin(self, config: CacheConfig) -> Target:
        """Make a target for a case, whose trace begins."""
        self.log.restart(self._header(config))
        return self.factory(config)

    def _lockstep(self, config: CacheConfig, target: Target, watch: Watcher | None = None) -> Lockstep:
        try:
            return Lockstep(config, target, log=self.log, watch=watch, without=self.order.without)
        except Exception as error:  # so far it has only looked at the target
            raise cannot_be_seen(self.order.target, config, error) from error

    @contextmanager
    def _stopping_at_trouble(self) -> Iterator[None]:
        """End the run at whatever is no violation; Hypothesis would run the case again and find something else."""
        try:
            yield
        except Exception as error:
            self._trouble = error
            raise CaseStopped from error

    def _count_case(self) -> None:
        if self.ops:
            self._distinct.add(hash((self.header.config, tuple(self.ops))))
            self.statistics.distinct_cases = len(self._distinct)

    def run(self, lockstep: Lockstep, op: Op) -> None:
        if self._started is None:
            self._started = monotonic()
        elapsed = self.elapsed
        if elapsed > self.order.seconds or self._interrupted:
            self._spent = True
            raise CaseStopped
        with self._stopping_at_trouble():
            if elapsed > self._next_report:
                self._next_report = elapsed + 1.0
                self.report("progress", **self.facts())
            self.ops.append(op)
            try:
                lockstep.run(op)
            except Violation as violation:
                self._violation = violation
                raise CaseStopped from violation
            if self._looks < N_LOOKS:
                self._look(lockstep.now)

    def _look(self, snapshot: Snapshot) -> None:
        """Note the parts that the target does not show, and the checks that cannot run without them."""
        self._looks += snapshot.requests != [] and snapshot.nodes != []
        parts = [part for part in HARNESS_PARTS if part not in self._parts_missing]
        self._unobserved.update((check.name, check) for check in unobserved(snapshot, parts))
        self._hidden |= hidden_from_labels(snapshot)

    def interrupt(self) -> None:
        """Come to an end after the operation at hand. May be called from a signal handler.

        An exception would be swallowed where Hypothesis is called back by the garbage collector.
        """
        self._interrupted = True
        if self._minimizer is not None:
            self._minimizer.deadline = 0.0

    def facts(self) -> dict[str, Any]:
        """What a report says of the run so far."""
        reached = {"reached": getattr(self._target, "reached", None)} if self.order.fault else {}
        return reached | {
            "seconds": self.elapsed,
            "statistics": self.statistics.to_json(),
            "unobserved": [[check.law, name, check.needs] for name, check in self._unobserved.items()],
            "hidden": sorted(self._hidden),
        }

    def fuzz(self) -> None:
        """Run cases until the budget is spent or one fails; then store and minimize the failure. The canary is first.

        Raises what the target's factory raises.
        """
        from kvlockstep.fuzz.machine import run_cases

        if self.order.canary:
            self._release_canary()
        batch = 0
        while not (self._spent or self._violation or self._trouble):
            try:
                run_cases(self, (self.order.seed << 20) + batch, n_cases=20, steps=self.order.steps)
            except (CaseStopped, FlakyStrategyDefinition):
                # a case that stops where an earlier one went on looks to Hypothesis like a test that draws at random
                if not (self._spent or self._violation or self._trouble):
                    raise
            batch += 1
        if self._trouble is not None:
            raise self._trouble
        if self._violation is not None:
            self._settle(self._violation)
        self._count_case()
        self.report("end", **self.facts())

    def _release_canary(self) -> None:
        """Look for the canary on targets of this factory, and report what came of it."""

        def start(config: CacheConfig) -> Lockstep:
            return self._lockstep(config, cast(Target, RepeatsWriteSlot(self._begin(config))))

        promised = self.capabilities, self.page_sizes, self.options
        self.report("canary", **asdict(look_for_canary(promised, start, self.order.seed)))

    def _settle(self, violation: Violation) -> None:
        found_after, n_done = self.elapsed, self.statistics.done
        ops, config = tuple(self.ops), self.header.config
        signature = signature_of(violation, kind_of(ops[-1]))
        law = type(violation).__name__
        header = replace(self._header(config), why=as_sentence(violation.headline), violates=law, signature=signature)
        found = Trace(header, list(ops))
        out = Path(self.order.out)
        self.report("violates", signature=signature)
        folder = store_failure(out, found, found, str(violation), self._still_fails)
        facts = {"signature": signature, "seconds": found_after, "operations": n_done, "found_len": len(ops)}
        self.report("found", folder=str(folder), text=str(violation), **facts)
        findings = self._findings_of(config, ops)
        facts["laws"] = list(dict.fromkeys(type(one).__name__ for one in findings.violations))
        facts["did_not_run"] = findings.did_not_run

        seconds = self.order.minimize_seconds
        minimizer = self._minimizer = Minimizer(config, ops, self.factory, signature, seconds=seconds)
        if self._interrupted:
            minimizer.deadline = 0.0
        ending = "minimized" if minimizer.run() else "interrupted" if self._interrupted else "time ran out"
        again = self._violation_of(minimizer.config, minimizer.ops)
        if again is None or signature_of(again, kind_of(minimizer.ops[-1])) != signature:
            ending, again = "did not fail again", violation
        shortest = Trace(replace(header, config=minimizer.config, why=as_sentence(again.headline)), list(minimizer.ops))
        text = str(again)
        folder = store_failure(out, shortest, found, text, self._still_fails)
        facts |= {"text": text, "law": law, "minimized_len": len(minimizer.ops), "ending": ending}
        self.report("failure", folder=str(folder), **facts)

    def _still_fails(self, stored: Trace) -> bool:
        """Run a trace of an earlier run or of another worker on this target, as it is now."""
        try:
            signature, _ = failing_signature(stored.header.config, stored.ops, self.factory)
        except TargetUnusable:  # it cannot be built in this size any more
            return False
        return signature == stored.header.signature

    def _violation_of(self, config: CacheConfig, ops: Sequence[Op]) -> Violation | None:
        """Run the minimized trace once more, for a text with its own numbers."""
        lockstep = Lockstep(config, self.factory(config), without=self.order.without)
        try:
            for op in ops:
                lockstep.run(op)
        except Violation as violation:
            return violation
        return None

    def _findings_of(self, config: CacheConfig, ops: Sequence[Op]) -> Findings:
        """Run the trace once more, and learn all that its last operation shows; nothing, if it does not come so far."""
        lockstep = Lockstep(config, self.factory(config), without=self.order.without)
        try:
            for op in ops[:-1]:
                lockstep.run(op)
        except Violation:  # otherwise than it was found, so it is no state to learn from
            return Findings()
        return lockstep.run_every_law(ops[-1])


def take_over_stdout() -> Report:
    """Keep standard output for reports, and let all else that is printed in this process go to standard error."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(event: str, **facts: Any) -> None:
        stream.write(json.dumps({"event": event, **facts}) + "\n")
        stream.flush()

    return report


def _end_with(parent: int) -> None:
    """Interrupt this process once its parent is gone, so that it stores what it has; then end it, heeded or not."""
    while os.getppid() == parent:
        sleep(0.5)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)
    sleep(ENDING_S)
    os._exit(1)


def main(argument: str) -> int:
    """Follow one order. Return 0 however the run ended, if it could say so; what was found is in the reports."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    report = take_over_stdout()
    try:
        _follow(Order(**json.loads(argument)), report)
    except (BrokenPipeError, KeyboardInterrupt):
        return 1  # nobody listens any more, or it was ended before it began
    return 0


def _follow(order: Order, report: Report) -> None:
    try:
        choose_lane(order.lane)
        worker = Worker(order, factory_for(order.target, order.fault), report)
        signal.signal(signal.SIGINT, lambda number, frame: worker.interrupt())
        report("ready", lane=worker.lane, capabilities=sorted(worker.capabilities))
        worker.fuzz()
    except TargetUnusable as error:
        report("unusable", text=str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        report("broken", text=f"could not write {error.filename or order.out}: {error.strerror or error}")
    except Exception as error:
        traceback.print_exc()
        report("broken", text=f"the harness failed in worker {order.name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
