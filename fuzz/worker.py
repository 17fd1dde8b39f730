"""One fuzzing process: one target on one lane, from one seed, until the budget is spent or a law is broken.

Started by ``campaign.py`` with its order as one JSON argument; reports as JSON lines on standard output, so
that a parent needs nothing but a pipe. Operations are on disk before they run. A failure is stored as it was
found before it is minimized, so that an interrupted minimizer loses nothing.
"""

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from hypothesis.errors import FlakyStrategyDefinition

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import signature_of
from kvlockstep.fuzz.failures import store_failure
from kvlockstep.fuzz.labels import Memory
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.minimize import Minimizer
from kvlockstep.fuzz.ops import Op, kind_of
from kvlockstep.fuzz.registry import Factory, TargetUnusable, choose_lane, factory_for
from kvlockstep.fuzz.statistics import CaseWatcher, Statistics
from kvlockstep.fuzz.trace import Header, Trace, TraceWriter
from kvlockstep.invariants import Violation


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
    steps: int = 60  # operations in a case, at most


class CaseStopped(BaseException):
    """Ends the running case and the batch; not an Exception, so that Hypothesis neither replays nor shrinks it."""


class Worker:
    """Runs cases and reports. Implements `machine.Case`."""

    config: CacheConfig | None = None

    def __init__(self, order: Order, factory: Factory) -> None:
        self.order = order
        self.factory = factory
        probe = factory(CacheConfig())
        self.capabilities = probe.capabilities
        self.lane = getattr(probe, "lane", None)
        self.statistics = Statistics()
        self.ops: list[Op] = []
        self.header = self._header(CacheConfig())
        self.log = TraceWriter(Path(order.out) / f"{order.name}.current.jsonl", self.header)
        self._started: float | None = None
        self._next_report = 0.0
        self._distinct: set[int] = set()
        self._violation: Violation | None = None
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
        self.log.restart(self.header)
        watch = CaseWatcher(self.statistics, Memory(config))
        return Lockstep(config, self.factory(config), log=self.log, watch=watch)

    def _count_case(self) -> None:
        if self.ops:
            self._distinct.add(hash((self.header.config, tuple(self.ops))))
            self.statistics.distinct_cases = len(self._distinct)

    def run(self, lockstep: Lockstep, op: Op) -> None:
        if self._started is None:
            self._started = monotonic()
        elapsed = self.elapsed
        if elapsed > self.order.seconds:
            self._spent = True
            raise CaseStopped
        if elapsed > self._next_report:
            self._next_report = elapsed + 1.0
            report("progress", seconds=elapsed, statistics=self.statistics.to_json())
        self.ops.append(op)
        try:
            lockstep.run(op)
        except Violation as violation:
            self._violation = violation
            raise CaseStopped from violation

    def fuzz(self) -> None:
        """Run cases until the budget is spent or one fails; then store and minimize the failure."""
        from kvlockstep.fuzz.machine import run_cases

        batch = 0
        while not self._spent and self._violation is None:
            try:
                run_cases(self, (self.order.seed << 20) + batch, n_cases=100, steps=self.order.steps)
            except (CaseStopped, FlakyStrategyDefinition):
                # a case that stops where an earlier one went on looks to Hypothesis like a test that draws at random
                if not self._spent and self._violation is None:
                    raise
            batch += 1
        if self._violation is not None:
            self._settle(self._violation)
        self._count_case()
        report("end", seconds=self.elapsed, statistics=self.statistics.to_json())

    def _settle(self, violation: Violation) -> None:
        found_after, n_done = self.elapsed, self.statistics.done
        ops, config = tuple(self.ops), self.header.config
        signature = signature_of(violation, kind_of(ops[-1]))
        law = type(violation).__name__
        header = replace(self._header(config), why=violation.headline, violates=law, signature=signature)
        found = Trace(header, list(ops))
        out = Path(self.order.out)
        folder = store_failure(out, found, found, str(violation))
        report("found", signature=signature, folder=str(folder), seconds=found_after, operations=n_done)

        minimizer = Minimizer(config, ops, self.factory, signature, seconds=self.order.minimize_seconds)
        finished = minimizer.run()
        again = self._violation_of(minimizer.config, minimizer.ops) or violation
        shortest = Trace(replace(header, config=minimizer.config, why=again.headline), list(minimizer.ops))
        text = str(again)
        folder = store_failure(out, shortest, found, text)
        report(
            "failure",
            signature=signature,
            folder=str(folder),
            text=text,
            law=law,
            seconds=found_after,
            operations=n_done,
            found_len=len(ops),
            minimized_len=len(minimizer.ops),
            minimized_fully=finished,
        )

    def _violation_of(self, config: CacheConfig, ops: Sequence[Op]) -> Violation | None:
        """Run the minimized trace once more, for a text with its own numbers."""
        lockstep = Lockstep(config, self.factory(config))
        try:
            for op in ops:
                lockstep.run(op)
        except Violation as violation:
            return violation
        return None


def report(event: str, **facts: Any) -> None:
    """Write one JSON line to standard output, apart from what a target may have printed without ending its line."""
    sys.stdout.write("\n" + json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def main(argument: str) -> int:
    """Follow one order. Return 0 however the run ended; what was found is in the reports."""
    order = Order(**json.loads(argument))
    try:
        choose_lane(order.lane)
        worker = Worker(order, factory_for(order.target, order.fault))
    except TargetUnusable as error:
        report("unusable", text=str(error))
        return 0
    report("ready", lane=worker.lane, order=asdict(order))
    try:
        worker.fuzz()
    except TargetUnusable as error:
        report("unusable", text=str(error))
    except KeyboardInterrupt:
        report("end", seconds=worker.elapsed, statistics=worker.statistics.to_json())
    except OSError as error:
        report("broken", text=f"could not write {error.filename or order.out}: {error.strerror or error}")
    except Exception as error:
        traceback.print_exc()
        report("broken", text=f"the harness failed in worker {order.name}: {type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
