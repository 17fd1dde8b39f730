"""Which lines and branches of SGLang's cache a fuzzing run executes, and which it never does.

Measured are the files of the `RadixCache` and of the two allocators in full, and in ``common.py`` and
``allocation.py`` the functions that a request lives through. Each target gets the same time, in a process of its
own, because the three share these files.

Run in the environment of ``make sglang``:

    .venv-sglang/bin/python benchmarks/sglang_coverage.py [--seconds 300] [--seed 0]
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import coverage

TARGETS = ("sglang:radix", "sglang:unified-python", "sglang:unified-rust")
FILES = {
    "radix_cache.py": None,
    "allocator/token.py": None,
    "allocator/paged.py": None,
    "common.py": ("match_kv_cache", "checkpoint_kv_cache", "release_kv_cache", "_release_overallocated_kv_indices"),
    "allocation.py": (
        "alloc_for_extend",
        "alloc_for_decode_default",
        "alloc_for_spec_decode",
        "alloc_token_slots",
        "alloc_paged_token_slots_extend",
        "alloc_paged_token_slots_decode",
        "write_cache_indices",
    ),
}
"""Files of ``sglang.srt.mem_cache``; for some the functions that count, else all."""


def mem_cache() -> Path:
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        sys.exit("SGLang is not installed here: make sglang, then run this with .venv-sglang/bin/python")
    return Path(spec.origin).parent / "srt" / "mem_cache"


def measure(target: str, lane: str, seconds: float, seed: int, data: str) -> None:
    """Fuzz in this process while coverage looks on."""
    os.environ["KVLOCKSTEP_LANE"] = lane
    looker = coverage.Coverage(
        data_file=data, data_suffix=True, branch=True, include=[str(mem_cache() / file) for file in FILES]
    )
    looker.start()
    from kvlockstep.fuzz.registry import factory_for
    from kvlockstep.fuzz.worker import Order, Worker

    with tempfile.TemporaryDirectory() as out:
        worker = Worker(
            Order(target, lane, seconds, seed, out, "coverage"), factory_for(target), lambda event, **facts: None
        )
        worker.fuzz()
    looker.stop()
    looker.save()
    print(f"{target} on {lane}: {worker.statistics.done:,} operations done in {worker.elapsed:.0f} s")


def lines_of(path: Path, names: tuple[str, ...] | None) -> set[int]:
    """Lines of the functions that count."""
    tree = ast.parse(path.read_text())
    if names is None:
        return set(range(1, tree.body[-1].end_lineno or 0))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    missing = set(names) - {node.name for node in found}
    assert not missing, f"{path.name} has no {', '.join(sorted(missing))}"
    return {line for node in found for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def report(data: str) -> None:
    """Print for each file its share, and by function the lines never run and the branches never taken."""
    looker = coverage.Coverage(data_file=data, branch=True)
    looker.combine()
    for file, names in FILES.items():
        path = mem_cache() / file
        wanted = lines_of(path, names)
        _, statements, _, missing, _ = looker.analysis2(str(path))
        statements = [line for line in statements if line in wanted]
        missing = [line for line in missing if line in wanted]
        branches = looker._analyze(str(path)).missing_branch_arcs()
        share = 1 - len(missing) / len(statements)
        print(f"\n{file}: {len(statements) - len(missing)} of {len(statements)} lines, {share:.1%}")
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        gaps: dict[str, list[str]] = {}
        for line in missing:
            gaps.setdefault(_holder(functions, line), []).append(str(line))
        for line, ends in sorted(branches.items()):
            if line in wanted and line not in missing:
                taken = [f"{line}->{end}" for end in ends if end not in missing]
                gaps.setdefault(_holder(functions, line), []).extend(taken)
        for holder, places in gaps.items():
            if places:
                print(f"  {holder}: {' '.join(places)}")


def _holder(functions: list[ast.FunctionDef], line: int) -> str:
    inside = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
    return max(inside, key=lambda node: node.lineno).name if inside else "the module"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="for each target and lane")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", nargs=3, metavar=("TARGET", "LANE", "DATA"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure(*given.one[:2], given.seconds, given.seed, given.one[2])
        return
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "coverage")
        running = []
        for target, lane in [(target, lane) for target in TARGETS for lane in ("torch", "interpret")]:
            command = [sys.executable, "-P", __file__, "--seconds", str(given.seconds), "--seed", str(given.seed)]
            running.append(subprocess.Popen([*command, "--one", target, lane, data]))
        for process in running:
            if process.wait():
                sys.exit(f"a measuring process ended with status {process.returncode}")
        report(data)


if __name__ == "__main__":
    main()
