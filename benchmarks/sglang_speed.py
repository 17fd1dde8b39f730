"""How fast the three SGLang targets fuzz, and whose time that is.

Every call from the adapter into SGLang is timed, the outermost one only; so is every call of the lockstep into the
adapter. What remains of the wall clock is the model, the laws, the content oracle and Hypothesis. Time that the
timers take (about a microsecond a call) counts as the caller's.

Run in the environment of ``make sglang``, with nothing else on the machine:

    .venv-sglang/bin/python benchmarks/sglang_speed.py [--seconds 30] [--lane torch]
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

TARGETS = ("sglang:radix", "sglang:unified-python", "sglang:unified-rust")
OF_ADAPTER = (
    "peek",
    "match",
    "alloc",
    "commit",
    "checkpoint",
    "release",
    "abort",
    "retract",
    "evict",
    "reset",
    "snapshot",
    "write_kv",
    "read_kv",
    "read_slots",
)
OF_ENGINE = (
    "Req",
    "alloc_for_decode",
    "alloc_for_extend",
    "alloc_for_spec_decode",
    "checkpoint_kv_cache",
    "release_kv_cache",
    "release_req",
    "build",
)
OF_CACHE = ("lock", "unlock", "evict", "reset", "evictable_size", "protected_size", "pretty_print")


class Stopwatch:
    """Adds up the time of the outermost timed call."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._inside = False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return function(*arguments, **named)
            self._inside = True
            self.calls += 1
            started = perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += perf_counter() - started
                self._inside = False

        return call


def measure(target: str, lane: str, seconds: float) -> None:
    os.environ["KVLOCKSTEP_LANE"] = lane
    from kvlockstep.fuzz.registry import factory_for
    from kvlockstep.fuzz.targets.sglang import engine as sgl
    from kvlockstep.fuzz.targets.sglang.target import SglangTarget
    from kvlockstep.fuzz.worker import Order, Worker

    engines, adapters = Stopwatch(), Stopwatch()
    for name in OF_ADAPTER:
        setattr(SglangTarget, name, adapters.timed(getattr(SglangTarget, name)))
    for name in OF_ENGINE:
        setattr(sgl, name, engines.timed(getattr(sgl, name)))
    for cache in (sgl.RadixCache, sgl.UnifiedRadixCache):
        for name in OF_CACHE:
            setattr(cache, name, engines.timed(getattr(cache, name)))
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    Req.init_next_round_input = engines.timed(Req.init_next_round_input)
    MHATokenToKVPool.set_kv_buffer = engines.timed(MHATokenToKVPool.set_kv_buffer)
    with tempfile.TemporaryDirectory() as out:
        factory = factory_for(target)
        worker = Worker(Order(target, lane, seconds, 0, out, "speed"), factory, lambda event, **facts: None)
        engines.seconds = adapters.seconds = 0.0
        worker.fuzz()
    wall, done = worker.elapsed, worker.statistics.done
    shares = (engines.seconds / wall, (adapters.seconds - engines.seconds) / wall, 1 - adapters.seconds / wall)
    print(
        f"| {target} | {lane} | {done / wall:,.0f} | {1e6 * wall / done:,.0f} | "
        + " | ".join(f"{share:.0%}" for share in shares)
        + " |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="for each target")
    parser.add_argument("--lane", default="torch", choices=("torch", "interpret"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure(given.one, given.lane, given.seconds)
        return
    load = os.getloadavg()[0]
    print(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {load:.1f}, Python {sys.version.split()[0]}"
    )
    print("| target | lane | operations done / s | us each | SGLang | adapter and snapshot | model, laws, draws |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for target in TARGETS:
        command = [sys.executable, "-P", __file__, "--one", target, "--lane", given.lane]
        subprocess.run([*command, "--seconds", str(given.seconds)], check=True)


if __name__ == "__main__":
    main()
