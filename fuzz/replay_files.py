"""Replays several stored traces, each in a process of its own, since a lane is chosen once in a process.

So a target that dies takes its own verdict with it and no other. What a target prints is not repeated; to see
it, replay its trace alone.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvlockstep.fuzz.exits import BROKEN, CLEAN, CRASHED, INTERRUPTED, UNKNOWN, USAGE, VIOLATION

VERDICTS = ("FAILED:", "DIFFERENT:", "FIXED:", "REFUSED-ALL:", "CLEAN:")

WORST_FIRST = (INTERRUPTED, VIOLATION, USAGE, BROKEN, CRASHED, UNKNOWN, CLEAN)
"""A violation is never hidden by what kept another trace from being run."""


def replay_each(files: Sequence[Path], options: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Replay the files side by side; yield verdict, exit code and complaint of each, in the order of the files."""
    pool = ThreadPoolExecutor(min(len(files), len(os.sched_getaffinity(0))))
    try:
        yield from pool.map(lambda file: _replay(file, options), files)
    finally:  # after Ctrl-C, which the processes that run have seen too, the others are not begun
        pool.shutdown(cancel_futures=True)


def worst(codes: Sequence[int]) -> int:
    """Return the exit code that stands for several."""
    return min(codes, key=WORST_FIRST.index)


def _replay(file: Path, options: Sequence[str]) -> tuple[str, int, str]:
    command = [sys.executable, "-P", "-m", "kvlockstep", "replay", "--quiet", *options, "--", str(file)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="backslashreplace")
    verdict = next((line for line in reversed(done.stdout.splitlines()) if line.startswith(VERDICTS)), "")
    code = done.returncode
    said_why = code in (USAGE, BROKEN, CRASHED, INTERRUPTED) and done.stderr
    if not verdict and not said_why:
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with status {code}"
        return "", CRASHED, f"{done.stderr}kvlockstep: {file}: the process that ran it {ending}, without a verdict\n"
    return verdict, code, done.stderr
