"""What a second worker adds to a campaign, against what a second copy of a plain Python loop adds on the same machine.

Each round runs, one after another: one loop, two loops side by side, a campaign of one worker, a campaign of two. Of a
campaign counts the middle: operations between the first sample after its start and the last before its end. Two cores
that share a cache or a power budget do not give twice the work to anybody; the loops say how much there is to be had.

Run: python benchmarks/campaign_scaling.py [--rounds 3] [--seconds 40] [--lane torch]
"""

import argparse
import subprocess
import sys
import tempfile
from os import getloadavg
from pathlib import Path
from statistics import median

from kvlockstep.fuzz.campaign.folder import journal_of
from kvlockstep.fuzz.crew import n_cores

LOOP = """
import sys, time
until = time.monotonic() + float(sys.argv[1])
n = 0
while time.monotonic() < until:
    for i in range(10_000):
        i * i
    n += 1
print(n)
"""

STARTING_S = 12.0
"""Samples before that see workers start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=50, help="for each campaign")
    parser.add_argument("--lane", default="torch")
    options = parser.parse_args()

    ratios = []
    for number in range(options.rounds):
        one, two = loops(1), loops(2)
        alone, both = campaign(1, options.seconds, options.lane), campaign(2, options.seconds, options.lane)
        ratios.append((both / alone) / (two / one))
        print(
            f"round {number + 1}: loops {two / one:.2f}, campaign {both / alone:.2f} "
            f"({alone:,.0f} and {both:,.0f} operations/s), ratio {ratios[-1]:.3f}, load {getloadavg()[0]:.1f}",
            flush=True,
        )
    print(f"median ratio {median(ratios):.3f} of {options.rounds} rounds on {n_cores()} cores, lane {options.lane}")


def loops(copies: int) -> int:
    """Return how often that many copies of the loop went round in ten seconds, together."""
    command = [sys.executable, "-c", LOOP, "10"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(copies)]
    return sum(int(process.communicate()[0]) for process in started)


def campaign(workers: int, seconds: int, lane: str) -> float:
    """Return the operations done a second by a campaign on `gpu_impl`, in the middle of it."""
    with tempfile.TemporaryDirectory(prefix="kvlockstep-scaling-") as out:
        words = f"fuzz --for {seconds}s --lanes {lane} --workers {workers} --base scaling --out {out}".split()
        subprocess.run(
            [sys.executable, "-m", "kvlockstep", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        samples = [event for event in journal_of(Path(out), 1) if event["event"] == "sample"]
    middle = [sample for sample in samples if STARTING_S < sample["t"] < seconds]
    first, last = middle[0], middle[-1]
    return float(last["done"] - first["done"]) / float(last["t"] - first["t"])


if __name__ == "__main__":
    main()
