"""What the minimizer makes of failing traces: operations left, seconds, and replays of candidates.

``--zoo`` looks for each planted fault from scratch and minimizes the trace that it finds. ``--long`` makes traces of
2,000 operations or more whose first violation comes after operation 1,500, out of cases drawn one behind the other on
one cache that is never built anew; an operation that shows the fault too early is taken back. Each trace is minimized
on one core. Seconds depend on the load of the machine, operations and replays only where the time runs out.

Run: python benchmarks/minimizing.py --zoo --long [--only FAULT ...] [--seeds 1] [--seconds 60] [--jobs 1]
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

from hypothesis.errors import FlakyStrategyDefinition
from rich.console import Console
from rich.table import Table

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults.fault import Fault
from kvlockstep.fuzz.faults.hunt import Task, order_for
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.minimize import Minimizer
from kvlockstep.fuzz.ops import Abort, Commit, Op
from kvlockstep.fuzz.registry import Factory, choose_lane, factory_for
from kvlockstep.fuzz.replay import failing_signature
from kvlockstep.fuzz.trace import read_trace
from kvlockstep.fuzz.worker import CaseStopped, Worker
from kvlockstep.invariants import Violation

LONG = 2000
"""Operations of a long trace, at least."""

CLEAN = 1500
"""Operations of a long trace that come before its first violation, at least."""

NEED_THREE = (
    "third-request-gets-part-of-second",
    "late-free-takes-page-from-third",
    "match-trusts-pages-found-before",
    "path-remembered-by-node-number",
)
"""Faults that need three requests: of the last two no trace of 12 operations is known."""

CONFIGS = (
    CacheConfig(page_size=2, n_pages=12, n_rows=4, max_context_len=12),
    CacheConfig(page_size=1, n_pages=14, n_rows=3, max_context_len=9),
    CacheConfig(page_size=4, n_pages=10, n_rows=5, max_context_len=25, policy="lfu"),
)
"""Of long traces, by seed."""


class Minimized(NamedTuple):
    """What became of one trace. ``fails_at`` counts the operations up to the first violation."""

    fault: str
    seed: int
    length: int
    fails_at: int
    minimized: int
    seconds: float
    tried: int
    finished: bool


class Found(NamedTuple):
    """A trace that fails."""

    config: CacheConfig
    ops: Sequence[Op]


class OneLongCase:
    """Draws all cases on one lockstep, which goes on behind an early violation as if its operation had never been.

    Implements `machine.Case`.
    """

    def __init__(self, config: CacheConfig, factory: Factory) -> None:
        self.config = config
        self.factory = factory
        self.lockstep = Lockstep(config, factory(config))
        self.capabilities = self.lockstep.target.capabilities
        self.ops: list[Op] = []
        self.found = False

    def start(self, config: CacheConfig) -> Lockstep:
        return self.lockstep

    def run(self, lockstep: Lockstep, op: Op) -> None:
        if not self._is_clean(op):
            raise CaseStopped

    def _is_clean(self, op: Op) -> bool:
        """Run an operation; take it back if it violates too early."""
        self.ops.append(op)
        try:
            self.lockstep.run(op)
        except Violation:
            self.found = len(self.ops) > CLEAN
            if not self.found:
                self.ops.pop()
                self.lockstep = Lockstep(self.config, self.factory(self.config))
                for earlier in self.ops:
                    self.lockstep.run(earlier)
            return False
        return True

    def end_requests(self) -> None:
        """Abort what lives, or the next case, which begins with the same draws, might do the same in the same state."""
        for name in list(self.lockstep.model.requests):
            for op in (Abort(name), Commit(name, 0)):
                if not self.found and name in self.lockstep.model.requests:
                    self._is_clean(op)


def long_trace(fault: Fault, seed: int, factory: Factory) -> Found:
    """Draw a trace of at least LONG operations whose first violation comes after CLEAN of them."""
    config = CONFIGS[seed % len(CONFIGS)]
    case = OneLongCase(config, factory)
    batch = 0
    while not case.found:
        # a case that goes on where an earlier one stopped looks to Hypothesis like a test that draws at random
        with suppress(CaseStopped, FlakyStrategyDefinition):
            run_cases(case, (seed << 20) + batch, n_cases=20, steps=90)
        case.end_requests()
        batch += 1
    return Found(config, list(islice(cycle(case.ops), max(LONG, len(case.ops)))))


def found_trace(fault: Fault, seed: int, factory: Factory) -> Found:
    """Look for a fault from scratch; return the trace as it was found."""
    stored: list[Path] = []

    def note(event: str, **facts: Any) -> None:
        if event == "found":
            stored.append(Path(facts["folder"]))

    with tempfile.TemporaryDirectory(prefix="kvlockstep-minimizing-") as out:
        Worker(order_for(Task(fault, seed, 120.0), out, 0.0), factory, note).fuzz()
        assert stored, f"{fault.name} is found within 120 s"
        trace = read_trace(stored[0] / "original.jsonl")
    return Found(trace.header.config, trace.ops)


def minimized(make: Callable[[Fault, int, Factory], Found], seconds: float, asked: tuple[str, int]) -> Minimized:
    """Make a trace of a fault and minimize it in this process."""
    name, seed = asked
    factory = factory_for(FAULTS[name].target, name)
    config, ops = make(FAULTS[name], seed, factory)
    signature, fails_at = failing_signature(config, ops, factory)
    assert signature is not None, "the trace fails again"
    started = perf_counter()
    search = Minimizer(config, tuple(ops), factory, signature, seconds=seconds)
    finished = search.run()
    took = perf_counter() - started
    return Minimized(name, seed, len(ops), fails_at, len(search.ops), took, search.tried, finished)


def all_minimized(
    make: Callable[[Fault, int, Factory], Found], faults: Sequence[Fault], options: argparse.Namespace
) -> list[Minimized]:
    """Minimize a trace of each fault and seed, the faults of one lane in processes of their own."""
    results = []
    for lane in sorted({fault.lane for fault in faults}):
        asked = [(f.name, seed) for f in faults if f.lane == lane for seed in range(options.seeds)]
        with ProcessPoolExecutor(options.jobs, get_context("spawn"), choose_lane, (lane,)) as pool:
            results += list(pool.map(partial(minimized, make, options.seconds), asked))
    return sorted(results)


def print_table(console: Console, title: str, results: Sequence[Minimized]) -> None:
    table = Table(title=title, title_justify="left", box=None)
    for column in ("fault", "seed", "operations", "first violation", "minimized", "seconds", "replays", ""):
        table.add_column(column, justify="left" if column == "fault" else "right", no_wrap=True)
    for one in results:
        counts = one.seed, one.length, one.fails_at, one.minimized
        ending = "" if one.finished else "time ran out"
        table.add_row(one.fault, *map(str, counts), f"{one.seconds:.1f}", str(one.tried), ending)
    console.print(table)
    lengths, seconds = [one.minimized for one in results], [one.seconds for one in results]
    console.print(
        f"{len(results)} traces: {median(lengths):g} operations left in the median, {max(lengths)} at most; "
        f"{median(seconds):.1f} s in the median, {max(seconds):.1f} s at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", action="store_true", help="every fault of gpu_impl, found from scratch")
    parser.add_argument("--long", action="store_true", help="long traces of faults that need three requests")
    parser.add_argument("--only", action="append", choices=FAULTS, metavar="FAULT", help="these faults instead")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each trace")
    parser.add_argument("--jobs", type=int, default=1, help="traces at a time")
    options = parser.parse_args()
    if not (options.zoo or options.long):
        parser.error("nothing to do: give --zoo, --long, or both")

    console = Console(width=120, highlight=False)
    zoo = options.only or [fault.name for fault in FAULTS.values() if fault.target == "gpu_impl"]
    for wanted, title, make, names in (
        (options.zoo, "as found", found_trace, zoo),
        (options.long, "long traces", long_trace, options.only or NEED_THREE),
    ):
        if wanted:
            load = os.getloadavg()[0]
            results = all_minimized(make, [FAULTS[name] for name in names], options)
            print_table(console, title, results)
            console.print(
                f"load {load:.1f} before and {os.getloadavg()[0]:.1f} after, of {os.cpu_count()} cores, "
                f"{options.jobs} at a time\n"
            )


if __name__ == "__main__":
    main()
