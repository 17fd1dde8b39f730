"""What one lockstep operation costs, all laws and the content oracle included, against an empty Hypothesis rule.

Both sides run in this process, interleaved, with the same machine and the same draws; the empty side returns
where the other builds the operation and runs it. Torch lane, 64 pages of 16 tokens, 100 steps a case. Only
operations that were done count, so the time of refused ones is in the figure:

    cost = (time of all steps / operations done) / (time of an empty step)

Run: python benchmarks/lockstep_step.py [--blocks 9] [--cases 15]
"""

import argparse
import gc
import os
import platform
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["KVLOCKSTEP_LANE"] = "torch"

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.draws import token_at
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import CacheMachine, run_cases, run_machine
from kvlockstep.fuzz.ops import Alloc, AllocItem, Commit, Match, Op, Release, Submit
from kvlockstep.fuzz.registry import factory_for

CONFIG = CacheConfig(page_size=16, n_pages=64, n_rows=8, max_context_len=192)
STEPS = 100


class MeasuredCase:
    """Counts what was done, and how full the cache was on the way."""

    config = CONFIG

    def __init__(self) -> None:
        self.factory = factory_for("gpu_impl")
        self.capabilities = self.factory(CONFIG).capabilities
        self.done = self.steps = self.live = self.pages_held = 0
        self.start_seconds = 0.0

    def start(self, config: CacheConfig) -> Lockstep:
        """Fill the cache as a busy one is; the time that takes is kept apart."""
        started = perf_counter()
        lockstep = Lockstep(config, self.factory(config))
        for op in busy_cache():
            assert lockstep.run(op).refused is None, f"{op} belongs to a legal start"
        self.start_seconds += perf_counter() - started
        return lockstep

    def without_starts(self, call: Callable[..., None], *arguments: object) -> float:
        """Time a call, less what filling the caches of its cases took; both machines start their cases alike."""
        gc.collect()
        before, started = self.start_seconds, perf_counter()
        call(*arguments)
        return perf_counter() - started - (self.start_seconds - before)

    def run(self, lockstep: Lockstep, op: Op) -> None:
        outcome = lockstep.run(op)
        self.steps += 1
        self.done += outcome.refused is None
        self.live += len(lockstep.now.requests or [])
        self.pages_held += CONFIG.n_pages - len(lockstep.now.pools["full"].free_pages or [])


def busy_cache() -> Iterator[Op]:
    """Publish eight prompts of four pages, and leave five requests running on prompts of two."""
    for i in range(13):
        name, length = f"r{i % 5}", 64 if i < 8 else 32
        yield Submit(name, tuple(token_at(100 + i, pos) for pos in range(length)))
        yield Match(name)
        yield Alloc((AllocItem(name, length),))
        yield Commit(name, length, (1,))
        if i < 8:
            yield Release(name)


class EmptyMachine(CacheMachine):
    """The same rules and draws, and nothing done with them."""

    n_steps = 0

    def act(self, kind: str, drawn: dict[str, int]) -> None:
        EmptyMachine.n_steps += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9, help="measured pairs, after one to warm up")
    parser.add_argument("--cases", type=int, default=15, help="cases in a block")
    arguments = parser.parse_args()

    measured = MeasuredCase()
    empty = type("EmptyMachineOfCase", (EmptyMachine,), {"case": measured})
    per_done, per_empty, ratios = [], [], []
    for block in range(arguments.blocks + 1):
        before = measured.done
        real_seconds = measured.without_starts(run_cases, measured, block, arguments.cases, STEPS)
        before_empty = EmptyMachine.n_steps
        empty_seconds = measured.without_starts(run_machine, empty, block, arguments.cases, STEPS)
        if block == 0:
            continue
        per_done.append(real_seconds / (measured.done - before))
        per_empty.append(empty_seconds / (EmptyMachine.n_steps - before_empty))
        ratios.append(per_done[-1] / per_empty[-1])

    print(f"machine    {platform.processor() or platform.machine()}, Python {platform.python_version()}, one thread")
    print(f"load       {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores, last minute")
    print(f"cases      {arguments.blocks} blocks of {arguments.cases} cases of {STEPS} steps, page_size=16 n_pages=64")
    print(
        f"on average {measured.live / measured.steps:.1f} live requests, "
        f"{measured.pages_held / measured.steps / CONFIG.n_pages:.0%} of the pool held, "
        f"{measured.done / measured.steps:.0%} of the operations done"
    )
    print(f"empty step {median(per_empty) * 1e6:.0f} us")
    print(f"lockstep   {median(per_done) * 1e6:.0f} us a done operation: {1 / median(per_done):,.0f} a second")
    print(f"multiple   {median(ratios):.2f} (median; lowest {min(ratios):.2f}, highest {max(ratios):.2f})")


if __name__ == "__main__":
    main()
