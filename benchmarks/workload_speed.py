"""A request log end to end: what the operations of its trace take, on `gpu_impl` and on the trees of SGLang.

Every call of a target is timed and nothing else; the model does not run. The drivers in ``fuzz/targets`` turn tokens
and slots into lists of ints, on every side, and that is in the figures. The traces are those of
``kvlockstep trace from-workload`` (docs/workloads.md); SGLang's is made with ``--option no_speculation``, and has the
same operations. Targets run one after another, each in a process of its own.

    .venv-sglang/bin/python benchmarks/workload_speed.py GPU_IMPL_TRACE SGLANG_TRACE [--target NAME,...]
"""

import argparse
import gc
import os
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["KVLOCKSTEP_LANE"] = "torch"

from kvlockstep.fuzz.ops import Commit, Match, Op, Submit, kind_of
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.targets.base import Refused
from kvlockstep.fuzz.trace import TraceReader

OURS = "gpu_impl"
TARGETS = (OURS, "sglang:radix", "sglang:unified-python", "sglang:unified-rust")


WARM_UP = 500  # operations that a first cache gets, so that imports and first calls are in no figure


class Drive:
    """The calls that operations make on one target, timed by kind."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._submitted: dict[str, Submit] = {}
        self._tokens: dict[str, list[int]] = {}
        self.seconds, self.calls, self.matched = Counter[str](), Counter[str](), 0

    def do(self, op: Op) -> None:
        if isinstance(op, Submit):
            self._submitted[op.request], self._tokens[op.request] = op, list(op.tokens)
            return
        kind, arguments = kind_of(op), self._arguments(op)
        method = getattr(self._target, kind)
        started = perf_counter()
        try:
            value = method(*arguments)
        except Refused:
            value = None
        else:
            if isinstance(op, Commit):
                self._tokens[op.request] += op.sampled
        self.seconds[kind] += perf_counter() - started
        self.calls[kind] += 1
        self.matched += value if isinstance(op, Match) and value else 0

    def _arguments(self, op: Op) -> tuple[Any, ...]:
        if isinstance(op, Match):
            asked = self._submitted[op.request]
            return op.request, list(self._tokens[op.request]), asked.namespace, asked.priority, asked.private
        return tuple(getattr(op, field) for field in op.__slots__)

    def line(self) -> str:
        kinds = sorted(self.calls)
        parts = ", ".join(f"{kind} {1e6 * self.seconds[kind] / self.calls[kind]:.0f}" for kind in kinds)
        total = f"{sum(self.seconds.values()):.1f} s in {sum(self.calls.values()):,} calls"
        return f"{total}, {self.matched:,} tokens found; microseconds a call: {parts}"


def run(name: str, file: Path) -> None:
    """Run the trace on one target and print its line."""
    factory = factory_for(name)
    with TraceReader(file) as reader:
        warm = Drive(factory(reader.header.config))
        for op in islice(reader, WARM_UP):
            warm.do(op)
    with TraceReader(file) as reader:
        drive = Drive(factory(reader.header.config))
        gc.freeze()
        for op in reader:
            drive.do(op)
    print(f"{name}: {drive.line()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ours", type=Path)
    parser.add_argument("sglang", type=Path)
    parser.add_argument("--target", default=",".join(TARGETS))
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.target.split(",")
    if options.alone:
        run(names[0], options.ours if names[0] == OURS else options.sglang)
        return
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    for name in names:
        command = [sys.executable, __file__, str(options.ours), str(options.sglang), "--target", name, "--alone"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
