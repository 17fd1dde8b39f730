"""A request log end to end: what the operations of its trace take, on `gpu_impl` and on the trees of SGLang.

Every call of a target is timed and nothing else; the model does not run. The drivers in ``fuzz/targets`` turn tokens
and slots into lists of ints, on every side, and that is in the figures. The traces are those of
``kvlockstep trace from-workload`` (docs/workloads.md); SGLang's is made with ``--option no_speculation``, and has the
same operations. In each round the targets take turns, each in a process of its own.

    .venv-sglang/bin/python benchmarks/workload_speed.py GPU_IMPL_TRACE SGLANG_TRACE [--rounds 3] [--write]

``--write`` puts the table between its marks in ``docs/speed.md``.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["KVLOCKSTEP_LANE"] = "torch"

from written import machine, write_between_marks

from kvlockstep.fuzz.ops import Commit, Match, Op, Submit, kind_of
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.targets.base import Refused
from kvlockstep.fuzz.trace import TraceReader

ROOT = Path(__file__).resolve().parents[1]
OURS = "gpu_impl"
TARGETS = (OURS, "sglang:radix", "sglang:unified-python", "sglang:unified-rust")
KINDS = ("match", "alloc", "commit", "checkpoint", "release")
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
        refused, value = False, None
        started = perf_counter()
        try:
            value = method(*arguments)
        except Refused:
            refused = True
        self.seconds[kind] += perf_counter() - started
        self.calls[kind] += 1
        if isinstance(op, Commit) and not refused:
            self._tokens[op.request] += op.sampled
        self.matched += value if isinstance(op, Match) and value else 0

    def _arguments(self, op: Op) -> tuple[Any, ...]:
        if isinstance(op, Match):
            asked = self._submitted[op.request]
            return op.request, list(self._tokens[op.request]), asked.namespace, asked.priority, asked.private
        return tuple(getattr(op, field) for field in op.__slots__)

    def figures(self) -> dict[str, float]:
        """Give seconds and calls in all, tokens found, and microseconds a call of each kind."""
        calls = {kind: 1e6 * self.seconds[kind] / self.calls[kind] for kind in KINDS if self.calls[kind]}
        return {"seconds": self.seconds.total(), "calls": self.calls.total(), "found": self.matched} | calls


def run(name: str, file: Path) -> dict[str, float]:
    """Run the trace on one target, in this process."""
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
    return drive.figures()


def table(rounds: dict[str, list[dict[str, float]]]) -> list[str]:
    """Lay out the medians, and of the seconds the ratio to ours in each round; all have to find the same."""
    did = {(figures["calls"], figures["found"]) for each in rounds.values() for figures in each}
    if len(did) > 1:
        sys.exit(f"the targets do not do the same (calls, tokens found): {sorted(did)}")
    lines = ["| target | seconds | times ours (spread) | " + " | ".join(KINDS) + " |", "|---" * (3 + len(KINDS)) + "|"]
    for name, each in rounds.items():
        ratios = [one["seconds"] / ours["seconds"] for one, ours in zip(each, rounds[OURS], strict=True)]
        cells = [name, f"{median(one['seconds'] for one in each):.1f}"]
        cells.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        cells += [f"{median(one[kind] for one in each):.0f}" for kind in KINDS]
        lines.append("| " + " | ".join(cells) + " |")
    calls, found = did.pop()
    return [*lines, "", f"{calls:,.0f} calls, {found:,.0f} tokens found by each; kinds in microseconds a call."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ours", type=Path)
    parser.add_argument("sglang", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into docs/speed.md")
    parser.add_argument("--alone", choices=TARGETS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(run(options.alone, options.ours if options.alone == OURS else options.sglang)))
        return
    where = machine()
    print(where, flush=True)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in TARGETS}
    for _ in range(options.rounds):
        for name in TARGETS:
            command = [sys.executable, __file__, str(options.ours), str(options.sglang), "--alone", name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rounds[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{name}: {rounds[name][-1]['seconds']:.1f} s", flush=True)
    lines = [*table(rounds), "", f"{where}; medians of {options.rounds} rounds."]
    print("\n".join(lines))
    if options.write:
        write_between_marks(ROOT / "docs" / "speed.md", "benchmarks/workload_speed.py", lines)


if __name__ == "__main__":
    main()
