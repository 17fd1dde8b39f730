"""What the search gains by learning: operations until a planted fault shows, with and without it, on the same seeds.

Both sides hunt each fault from scratch with each seed, side by side on the same machine. Where the one lets the search
choose a kind of operation (``fuzz/search.py``), the other (``Order.learn`` off) draws it by weight.
A fault that was not found counts with the operations done in its time, so that the gain is not made larger by it.
Operations do not depend on the load of the machine, but for hunts that run out of time.

Run: python benchmarks/search_learns.py [--seeds 5] [--seconds 60] [--only FAULT ...] [--at-least OPERATIONS]
"""

import argparse
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import exp, log
from statistics import mean, median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvlockstep.fuzz.crew import n_cores
from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults.fault import Fault
from kvlockstep.fuzz.faults.hunt import Hunt, hunt
from kvlockstep.fuzz.faults.nursery import Ended, Nurseries
from kvlockstep.fuzz.worker import Order


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="gpu_impl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each hunt")
    parser.add_argument("--only", action="append", help="name of a fault; default: all of the target")
    parser.add_argument(
        "--at-least", type=int, default=0, help="show means also of faults that take so many operations"
    )
    options = parser.parse_args()

    faults = [f for f in FAULTS.values() if f.target == options.target and f.name in (options.only or FAULTS)]
    nurseries = Nurseries()

    def look(asked: tuple[Fault, int, bool]) -> Hunt:
        fault, seed, learn = asked

        def start(order: Order, limit: float) -> Ended:
            return nurseries.run(replace(order, learn=learn), limit)

        return hunt(fault, seed, options.seconds, 0.0, start=start)

    asked = [(f, seed, learn) for f in faults for seed in range(options.seeds) for learn in (False, True)]
    hunts: dict[tuple[str, bool], list[Hunt]] = defaultdict(list)
    console = Console()
    with ThreadPoolExecutor(n_cores()) as pool:
        for (fault, _, learn), found in track(
            zip(asked, pool.map(look, asked), strict=True), total=len(asked), console=console
        ):
            hunts[fault.name, learn].append(found)
    nurseries.close()

    table = Table(title="median operations until found (slowest)", title_justify="left")
    for column in ("fault", "without", "with", "gain", "missed without", "missed with"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    gains: dict[str, float] = {}
    for fault in faults:
        without, learned = hunts[fault.name, False], hunts[fault.name, True]
        both = zip(without, learned, strict=True)
        gains[fault.name] = mean(log(max(1, a.operations) / max(1, b.operations)) for a, b in both)
        table.add_row(
            fault.name,
            *(
                f"{median(h.operations for h in side):,.0f} ({max(h.operations for h in side):,})"
                for side in (without, learned)
            ),
            f"{exp(gains[fault.name]):.2f}",
            *(f"{sum(not h.caught for h in side)}" for side in (without, learned)),
        )
    console.print(table)
    hard = [f.name for f in faults if median(h.operations for h in hunts[f.name, False]) >= options.at_least]
    for what, names in (("all faults", list(gains)), (f"those of {options.at_least:,} operations or more", hard)):
        if names:
            total = [sum(h.operations for n in names for h in hunts[n, learn]) for learn in (False, True)]
            console.print(
                f"{what}: {len(names)}, geometric mean of the gain {exp(mean(gains[n] for n in names)):.2f}, "
                f"operations in all {total[0]:,} without and {total[1]:,} with"
            )


if __name__ == "__main__":
    main()
