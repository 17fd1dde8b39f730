"""What the search gains by learning: operations until a planted fault shows, on the same seeds.

Three searches hunt each fault with each seed, side by side on the same machine:

- ``blind``: the kind of an operation is always drawn by weight (``Order.learn`` off);
- ``rarest``: now and then it is one that was tried least in the state at hand (``fuzz/search.py``);
- ``corpus``: the same, but it begins with a corpus (``fuzz/campaign/corpus.py``) that a campaign on the target without
  any fault has learned, as a later campaign or gate does.

The corpus was learned from other seeds than the hunts use, and it has never seen a fault. A fault that was not found
counts with the operations done in its time, so that the gain is not made larger by it. Operations do not depend on the
load of the machine, but for hunts that run out of time, and for how much a corpus has learned.

Run: python benchmarks/search_learns.py [--seeds 5] [--seconds 60] [--only FAULT ...] [--at-least OPERATIONS]
                                        [--learn 120] [--corpus FOLDER]
"""

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from math import exp, log
from os import getloadavg
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvlockstep.fuzz.campaign.folder import corpus_of
from kvlockstep.fuzz.crew import n_cores
from kvlockstep.fuzz.failures import traces_in
from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults.fault import Fault
from kvlockstep.fuzz.faults.hunt import Hunt, hunt
from kvlockstep.fuzz.faults.nursery import Ended, Nurseries
from kvlockstep.fuzz.trace import read_trace
from kvlockstep.fuzz.worker import Order, Stored

BLIND, RAREST, CORPUS = "blind", "rarest", "corpus"
SEARCHES = BLIND, RAREST, CORPUS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="gpu_impl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each hunt")
    parser.add_argument("--only", action="append", help="name of a fault; default: all of the target")
    parser.add_argument(
        "--at-least",
        type=int,
        default=0,
        help="show means also of faults that take the blind search so many operations",
    )
    parser.add_argument("--learn", type=int, default=120, help="seconds in which the corpus is learned by one worker")
    parser.add_argument("--corpus", type=Path, help="one that is there, instead")
    options = parser.parse_args()

    console = Console()
    faults = [f for f in FAULTS.values() if f.target == options.target and f.name in (options.only or FAULTS)]
    with tempfile.TemporaryDirectory(prefix="kvlockstep-corpus-") as made:
        corpus = options.corpus or learned(options.target, options.learn, Path(made))
        traces = [read_trace(path) for path in traces_in(corpus)]
        console.print(f"corpus: {len(traces)} traces, {sum(len(trace.ops) for trace in traces):,} operations")
        hunts = hunt_all(console, faults, options.seeds, options.seconds, corpus)
    print_table(console, faults, hunts)
    slow = [f for f in faults if median(h.operations for h in hunts[f.name, BLIND]) >= options.at_least]
    for what, group in (("all faults", faults), (f"those of {options.at_least:,} operations or more", slow)):
        for search in (RAREST, CORPUS):
            if group:
                console.print(f"{what}: {line_of(hunts, group, search)}")
    console.print(f"load {getloadavg()[0]:.1f} at the end, {n_cores()} cores")


def learned(target: str, seconds: int, out: Path) -> Path:
    """Run a campaign on the target as it is, and return the folder of its corpus."""
    command = [sys.executable, "-m", "kvlockstep", "fuzz", "--target", target, "--lanes", "torch", "--workers", "1"]
    subprocess.run(
        [*command, "--for", f"{seconds}s", "--base", "a corpus", "--out", str(out)], stdout=subprocess.DEVNULL
    )
    return corpus_of(out, target)


def hunt_all(
    console: Console, faults: Sequence[Fault], seeds: int, seconds: float, corpus: Path
) -> dict[tuple[str, str], list[Hunt]]:
    """Hunt each fault with each seed and search; return the hunts by fault and search."""
    nurseries = Nurseries()

    def look(asked: tuple[Fault, int, str]) -> Hunt:
        fault, seed, search = asked

        def start(order: Order, limit: float) -> Ended:
            stored = (Stored(str(corpus)),) if search == CORPUS else ()
            return nurseries.run(replace(order, learn=search != BLIND, stored=stored), limit)

        return hunt(fault, seed, seconds, 0.0, start=start)

    asked = list(product(faults, range(seeds), SEARCHES))
    hunts: dict[tuple[str, str], list[Hunt]] = defaultdict(list)
    with ThreadPoolExecutor(n_cores()) as pool:
        results = zip(asked, pool.map(look, asked), strict=True)
        for (fault, _, search), found in track(results, total=len(asked), console=console):
            hunts[fault.name, search].append(found)
    nurseries.close()
    return hunts


def gain(hunts: dict[tuple[str, str], list[Hunt]], fault: str, search: str) -> float:
    """Return the logarithm of how many times fewer operations a search took than the blind one."""
    both = zip(hunts[fault, BLIND], hunts[fault, search], strict=True)
    return mean(log(max(1, a.operations) / max(1, b.operations)) for a, b in both)


def line_of(hunts: dict[tuple[str, str], list[Hunt]], faults: Sequence[Fault], search: str) -> str:
    total = {s: sum(h.operations for f in faults for h in hunts[f.name, s]) for s in SEARCHES}
    mean_gain = exp(mean(gain(hunts, f.name, search) for f in faults))
    missed = {s: sum(not h.caught for f in faults for h in hunts[f.name, s]) for s in SEARCHES}
    return (
        f"{len(faults)}, {search}: geometric mean of the gain {mean_gain:.2f}, operations in all {total[search]:,} "
        f"instead of {total[BLIND]:,}, hunts without success {missed[search]} instead of {missed[BLIND]}"
    )


def print_table(console: Console, faults: Sequence[Fault], hunts: dict[tuple[str, str], list[Hunt]]) -> None:
    table = Table(title="median operations until found (slowest)", title_justify="left")
    for column in ("fault", *SEARCHES, f"gain {RAREST}", f"gain {CORPUS}"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for fault in faults:
        found = [[h.operations for h in hunts[fault.name, search]] for search in SEARCHES]
        gains = [f"{exp(gain(hunts, fault.name, search)):.2f}" for search in (RAREST, CORPUS)]
        table.add_row(fault.name, *(f"{median(one):,.0f} ({max(one):,})" for one in found), *gains)
    console.print(table)


if __name__ == "__main__":
    main()
