"""`gpu_impl` against the three trees of SGLang: the same work, in one process, by turns.

Trees of 64-token leaves under shared 64-token parents, and chains of 512-token edges; pages of 16; the ``torch`` lane;
one thread. Rounds go by turns over the trees, and of each round the medians are compared, so that a slow minute of the
machine hits all. What takes memory or a tree alone (a million leaves, bytes a leaf) runs in processes of its own.
The garbage collector is frozen everywhere.

Run in the environment of ``make sglang``, with nothing else on the machine; the plot needs Matplotlib there:

    .venv-sglang/bin/python benchmarks/against_sglang.py [--rounds 7] [--quick] [--write]

``--write`` puts the tables between the marks in ``README.md`` and ``docs/speed.md``, and the plot beside the latter.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter_ns
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["KVLOCKSTEP_LANE"] = "torch"
os.environ["TRITON_INTERPRET"] = "1"  # what SGLang's Triton kernels run in where there is no GPU; none is timed

from trees import TREES, P, Tree, tree_of
from written import machine, write_between_marks

OURS, RUST = TREES[0], TREES[-1]
ROOT = Path(__file__).resolve().parents[1]
SIBLINGS = 16  # leaves below one parent
LEAVES = (100, 1_000, 10_000, 100_000)
TOKENS = (100, 1_000, 10_000, 100_000, 1_000_000)
EDGE = 512  # tokens
CHAIN = 196  # edges of the reference row
MOST_NS = 300_000_000  # of one tree in one round
BENCHMARK = "benchmarks/against_sglang.py"

Figures = dict[str, dict[str, list[float]]]
"""Microseconds of each round: of each row, of each tree."""


# The work


def tokens_of_leaf(leaf: int) -> "array[int]":
    """Give the tokens of a leaf and of its parent, 64 each."""
    return array("q", [leaf // SIBLINGS + 1] * 64 + [(1 << 25) + leaf] * 64)


def planted(tree: Tree, n_leaves: int) -> None:
    for leaf in range(n_leaves):
        tree.insert(tokens_of_leaf(leaf), tree.pages(8))


def prompt(n_tokens: int) -> "array[int]":
    draw = random.Random(n_tokens)
    return array("q", [draw.randrange(100_000) for _ in range(n_tokens // P * P)])


def chained(tree: Tree, tokens: "array[int]") -> None:
    for end in range(EDGE, len(tokens) + 1, EDGE):
        tree.insert(tokens[:end], tree.pages(end // P))


# Timing


def timed(calls: Iterator[tuple[Callable[..., Any], tuple[Any, ...]]], most: int) -> float:
    """Give the median microseconds of ``most`` calls, fewer where they take too long; arguments are made before."""
    times: list[int] = []
    for call, arguments in calls:
        started = perf_counter_ns()
        call(*arguments)
        times.append(perf_counter_ns() - started)
        if len(times) == most or (len(times) >= 3 and sum(times) > MOST_NS):
            break
    return median(times) / 1000


def by_turns(row: str, figures: Figures, trees: dict[str, Any], measure: Callable[[Any], float], rounds: int) -> None:
    gc.collect()
    gc.freeze()
    gc.disable()
    for turn in range(rounds + 1):
        for name in TREES[turn % len(TREES) :] + TREES[: turn % len(TREES)]:
            microseconds = measure(trees[name])
            if turn:  # the first warms up
                figures.setdefault(row, {}).setdefault(name, []).append(microseconds)
    gc.enable()
    print(f"  {row}: " + ", ".join(f"{name} {median(figures[row][name]):.1f}" for name in TREES), flush=True)


def leaf_rows(figures: Figures, n_leaves: int, rounds: int) -> None:
    """Match, insert and evict one leaf among ``n_leaves``."""
    trees = {name: tree_of(name) for name in TREES}
    for tree in trees.values():
        planted(tree, n_leaves)

    def match(tree: Tree) -> float:
        draw = random.Random(7)
        return timed(((tree.match, (array("q", tokens_of_leaf(draw.randrange(n_leaves))),)) for _ in range(400)), 400)

    def insert(tree: Tree) -> float:
        draw = random.Random(8)

        def calls() -> Iterator[Any]:
            for i in range(100):
                tokens = tokens_of_leaf(draw.randrange(n_leaves))
                tokens[64:] = array("q", [(1 << 26) + n_blocks[tree] * 100 + i] * 64)
                yield tree.insert, (tokens, tree.pages(8))

        n_blocks[tree] += 1
        return timed(calls(), 100)

    n_blocks = Counter[Tree]()
    lengths = {name: len(tree.match(tokens_of_leaf(n_leaves - 1))) for name, tree in trees.items()}
    assert set(lengths.values()) == {128}, f"the trees do not agree: {lengths}"
    by_turns(f"match hit, {n_leaves:,} leaves", figures, trees, match, rounds)
    by_turns(f"insert of a new leaf, {n_leaves:,} leaves", figures, trees, insert, rounds)
    n_evictions = min(100, n_leaves // 2 // (rounds + 1))
    by_turns(
        f"evict one leaf of {n_leaves:,}",
        figures,
        trees,
        lambda tree: timed(((tree.evict, ()) for _ in range(n_evictions)), n_evictions),
        rounds,
    )


def path_rows(figures: Figures, n_tokens: int, rounds: int) -> None:
    """Match a long prompt that lies on one edge, and one on a chain of edges; lock and unlock the chain."""
    tokens = prompt(n_tokens)
    one = {name: tree_of(name) for name in TREES}
    for tree in one.values():
        tree.insert(tokens, tree.pages(len(tokens) // P))
    most = max(5, min(200, 20_000_000 // n_tokens))

    def match(tree: Tree) -> float:
        return timed(((tree.match, (array("q", tokens),)) for _ in range(most)), most)

    by_turns(f"match, {n_tokens:,} tokens on one edge", figures, one, match, rounds)
    if n_tokens < 1024:
        return
    n_edges = CHAIN if n_tokens == 100_000 else n_tokens // EDGE
    tokens = prompt(n_edges * EDGE)
    chains = {name: tree_of(name) for name in TREES}
    for tree in chains.values():
        chained(tree, tokens)
    by_turns(f"match, {n_tokens:,} tokens over {n_edges:,} edges", figures, chains, match, rounds)
    nodes = {tree: tree.node(tokens) for tree in chains.values()}
    by_turns(
        f"lock + unlock over {n_edges:,} edges",
        figures,
        chains,
        lambda tree: timed(((tree.lock_unlock, (nodes[tree],)) for _ in range(most)), most),
        rounds,
    )


def request_rows(figures: Figures, rounds: int) -> None:
    """A batch of eight prefills of 512 tokens, real allocators and rows; and a checkpoint after each."""
    from requests_of import passes_of

    sides = {name: passes_of(name) for name in TREES}
    for row, which in (("a batch of 8 prefills of 512 tokens", 0), ("checkpoint after a 512-token prefill", 1)):
        by_turns(row, figures, sides, lambda side, which=which: side.run(20)[which], rounds)


# Alone in a process


def alone(task: str, tree: str, n_leaves: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--alone", task, "--tree", tree, "--leaves", str(n_leaves)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"  {task}, {n_leaves:,} leaves, {tree}: {found}", flush=True)
    return found


def bytes_of_leaf(name: str, n_leaves: int) -> dict[str, float]:
    """What a tree takes of the process's memory for a leaf, 1/16 of a parent included; tokens and slots in it."""
    import psutil

    tree = tree_of(name)
    planted(tree, 1000)
    gc.collect()
    before = psutil.Process().memory_info().rss
    for leaf in range(1000, 1000 + n_leaves):
        tree.insert(tokens_of_leaf(leaf), tree.pages(8))
    gc.collect()
    return {"bytes": (psutil.Process().memory_info().rss - before) / n_leaves}


def many_leaves(name: str, n_leaves: int) -> dict[str, float]:
    """Match and evict in a tree of ``n_leaves`` alone; then touch every leaf, and evict on."""
    tree = tree_of(name)
    planted(tree, n_leaves)
    gc.collect()
    gc.freeze()
    gc.disable()
    draw = random.Random(7)
    keys = [tokens_of_leaf(draw.randrange(n_leaves)) for _ in range(2000)]
    found = {"match": timed(((tree.match, (key,)) for key in keys), 2000)}
    n_evictions = 10 if name != OURS else 1000
    found["evict"] = timed(((tree.evict, ()) for _ in range(n_evictions)), n_evictions)
    if name == OURS:
        for leaf in range(n_evictions, n_leaves):
            tree.match(tokens_of_leaf(leaf))
        times = []
        for _ in range(min(100_000, n_leaves // 2)):
            started = perf_counter_ns()
            tree.evict()
            times.append((perf_counter_ns() - started) / 1000)
        times.sort()
        found |= {"evict_p50": median(times), "evict_p99.9": times[int(len(times) * 0.999)], "evict_max": times[-1]}
    return {key: round(value, 2) for key, value in found.items()}


# What is printed


REFERENCE = (
    "match hit, 100,000 leaves",
    "insert of a new leaf, 100,000 leaves",
    "evict one leaf of 100,000",
    "match, 100,000 tokens on one edge",
    f"match, 100,000 tokens over {CHAIN} edges",
    f"lock + unlock over {CHAIN} edges",
    "a batch of 8 prefills of 512 tokens",
    "checkpoint after a 512-token prefill",
)


def ratio_to_rust(rounds: dict[str, list[float]]) -> list[float]:
    return sorted(theirs / ours for ours, theirs in zip(rounds[OURS], rounds[RUST], strict=True))


def table(figures: Figures, rows: tuple[str, ...] | list[str]) -> list[str]:
    lines = ["| microseconds | " + " | ".join(TREES) + " | Rust / ours (spread) |", "|---" * (len(TREES) + 2) + "|"]
    for row in rows:
        if row not in figures:
            continue
        ratios = ratio_to_rust(figures[row])
        cells = " | ".join(_number(median(figures[row][name])) for name in TREES)
        lines.append(f"| {row} | {cells} | {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def summary(figures: Figures) -> str:
    rows = [row for row in REFERENCE if row in figures and not row.startswith("evict")]
    mean = geometric_mean([median(ratio_to_rust(figures[row])) for row in rows])
    return f"Geometric mean over the {len(rows)} rows without evict: {mean:.2f} times as fast as the Rust core."


def plot(figures: Figures, big: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "kvlockstep", "font.size": 8}
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    panels: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("match hit, {:,} leaves", "match", LEAVES),
        ("evict one leaf of {:,}", "evict", LEAVES),
        ("insert of a new leaf, {:,} leaves", "", LEAVES),
        ("match, {:,} tokens on one edge", "", TOKENS),
    )
    for axis, (row, alone_key, sizes) in zip(axes.flat, panels, strict=True):
        for name in TREES:
            points = [(n, median(figures[row.format(n)][name])) for n in sizes if row.format(n) in figures]
            if alone_key and name in big:
                points.append((1_000_000, big[name][alone_key]))
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set(xscale="log", yscale="log", title=row.replace("{:,}", "n"), ylabel="microseconds", xlabel="n")
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    picture.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="the reference rows only")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md and docs/speed.md")
    parser.add_argument("--alone", choices=("bytes", "many"), help=argparse.SUPPRESS)
    parser.add_argument("--tree", choices=TREES, help=argparse.SUPPRESS)
    parser.add_argument("--leaves", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        task = bytes_of_leaf if options.alone == "bytes" else many_leaves
        print(json.dumps(task(options.tree, options.leaves)))
        return
    where = machine()
    print(where)
    figures: Figures = {}
    request_rows(figures, options.rounds)
    for n_tokens in (100_000,) if options.quick else TOKENS:
        path_rows(figures, n_tokens, options.rounds)
    for n_leaves in (100_000,) if options.quick else LEAVES:
        leaf_rows(figures, n_leaves, options.rounds)
    size = {name: alone("bytes", name, 100_000)["bytes"] for name in TREES}
    big = {} if options.quick else {name: alone("many", name, 1_000_000) for name in TREES}
    short = table(figures, REFERENCE)
    short.append("| memory for a leaf, bytes | " + " | ".join(f"{size[name]:,.0f}" for name in TREES) + " | |")
    short += ["", summary(figures), "", f"{where}; medians of {options.rounds} rounds."]
    print("\n".join(["", *short]))
    if options.quick:
        return
    long = table(figures, list(figures))
    long += ["", "A million leaves, each tree alone in a process, microseconds:", ""]
    long += ["| tree | match | evict | evict after all were touched: median, 99.9 %, most |", "|---|---|---|---|"]
    for name, found in big.items():
        last = "not measured" if name != OURS else ", ".join(f"{found[k]}" for k in list(found)[2:])
        long.append(f"| {name} | {found['match']} | {found['evict']} | {last} |")
    small = {"match": "match hit, 100 leaves", "evict": "evict one leaf of 100"}
    growth = {key: big[OURS][key] / median(figures[row][OURS]) for key, row in small.items()}
    long += ["", f"From 100 to 1,000,000 leaves: match x {growth['match']:.1f}, evict x {growth['evict']:.1f}."]
    print("\n".join(["", *long]))
    if options.write:
        write_between_marks(ROOT / "README.md", BENCHMARK, short)
        write_between_marks(ROOT / "docs" / "speed.md", BENCHMARK, [*short, "", *long])
        plot(figures, big, ROOT / "docs" / "speed.svg")


if __name__ == "__main__":
    main()
