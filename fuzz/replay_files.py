"""Replays several stored traces, or one on several targets, each in a process of its own, since a lane is chosen once.

So a target that dies takes its own verdict with it and no other. What a target prints is not repeated; to see
it, replay its trace alone.

The trees of SGLang are one cache in three forms: what they gave is compared as well (``outcomes.py``).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvlockstep.fuzz.costs import Cost
from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.exits import BROKEN, CLEAN, CRASHED, INTERRUPTED, UNKNOWN, USAGE, VIOLATION
from kvlockstep.fuzz.outcomes import Comparison, compare_outcomes, read_outcomes
from kvlockstep.fuzz.registry import LANED, SGLANG_TARGETS, TargetUnusable

CANNOT_TAKE_IT = "CANNOT TAKE IT:"

VERDICTS = ("FAILED:", "DIFFERENT:", "FIXED:", "REFUSED-ALL:", "CLEAN:", CANNOT_TAKE_IT)

NOT_RUN, NO_VERDICT = "NOT RUN:", "NO VERDICT:"
"""Stand where a verdict would: of a target that cannot be had here, and of one that died or hung."""

WORST_FIRST = (INTERRUPTED, VIOLATION, USAGE, BROKEN, CRASHED, UNKNOWN, CLEAN)
"""A violation is never hidden by what kept another trace from being run."""


def replay_each(files: Sequence[Path], options: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Replay the files side by side; yield verdict, exit code and complaint of each, in the order of the files."""
    yield from _side_by_side([(sys.executable, file, options) for file in files])


def worst(codes: Sequence[int]) -> int:
    """Return the exit code that stands for several."""
    return min(codes, key=WORST_FIRST.index)


@dataclass(frozen=True, slots=True)
class OnTargets:
    """What one trace gave on several targets: a line each, what it complained of, the exit code, records for JSON.

    Where the cache was not seen whole after each operation, what it took stands in the lines too.
    """

    lines: list[str]
    complaints: str
    code: int
    records: list[dict[str, Any]]


def replay_on_each(
    file: Path, targets: Sequence[str], lane: str | None, options: Sequence[str], policy: str
) -> OnTargets:
    """Replay a trace on several targets side by side, and compare the trees of SGLang among them.

    ``lane`` is torch if it is None. ``policy`` is that of the trace. The exit code is the worst of those that took
    the trace; that one was not run is unknown, and wrong usage if none was.
    """
    with TemporaryDirectory(prefix="kvlockstep-replay-") as folder:
        rows: dict[str, tuple[str, int, str]] = {}
        runs: dict[str, tuple[str, Path, Sequence[str]]] = {}
        outcomes = {target: Path(folder) / f"{i}.jsonl" for i, target in enumerate(targets)}
        costs = {target: Path(folder) / f"{i}.json" for i, target in enumerate(targets)}
        for target in targets:
            try:
                python = python_for(target)
            except TargetUnusable as error:
                rows[target] = f"{NOT_RUN} {error}", UNKNOWN, ""
                continue
            chosen = lane or ("torch" if target in LANED else None)
            on_lane = [f"--lane={chosen}"] if chosen else []
            runs[target] = (
                python,
                file,
                [
                    f"--target={target}",
                    *on_lane,
                    f"--outcomes={outcomes[target]}",
                    f"--json={costs[target]}",
                    *options,
                ],
            )
        rows.update(zip(runs, map(_in_a_row, _side_by_side([*runs.values()])), strict=True))
        records = [json.loads(costs[target].read_text("utf-8")) for target in targets if costs[target].exists()]
        trees = [read_outcomes(outcomes[target]) for target in targets if target in SGLANG_TARGETS]
    ran = [tree for tree in trees if tree is not None]
    comparison = compare_outcomes(ran, policy, "SGLang trees") if len(ran) > 1 else Comparison()
    lines = _aligned({target: rows[target][0] for target in targets}) + comparison.lines
    lines += _costs_of(records)
    taken = [code for verdict, code, _ in rows.values() if not verdict.startswith(CANNOT_TAKE_IT)]
    if any(not verdict.startswith((CANNOT_TAKE_IT, NOT_RUN)) for verdict, _, _ in rows.values()):
        code = worst([*taken, CLEAN if comparison.agree else VIOLATION])
    else:
        code = USAGE
    return OnTargets(lines, "".join(rows[target][2] for target in targets), code, records)


def _costs_of(records: Sequence[dict[str, Any]]) -> list[str]:
    """Say what each replay took, if any was of a pool so large that it was not seen whole each time."""
    costs = {record["target"]: Cost.from_json(record) for record in records if "check_every" in record}
    if all(cost.check_every == 1 for cost in costs.values()):
        return []
    widest = max(map(len, costs))
    return [f"{target:<{widest}}  {cost.row()}" for target, cost in costs.items()]


def _in_a_row(done: tuple[str, int, str]) -> tuple[str, int, str]:
    """Give a replay without a verdict the words that stand in its place in a row.

    A complaint of wrong usage is the reason why a target was not run, for the rest of the command is as it should be.
    """
    verdict, code, complaint = done
    if not verdict and code != USAGE:
        return f"{NO_VERDICT} exit code {code}", code, complaint
    if verdict:
        return done
    return f"{NOT_RUN} {complaint.strip().removeprefix('kvlockstep: ')}", UNKNOWN, ""


def _aligned(verdicts: dict[str, str]) -> list[str]:
    """Put targets, verdicts and what belongs to them into columns."""
    parts = {target: verdict.partition(": ") for target, verdict in verdicts.items()}
    widest, word = max(map(len, parts)), max(len(verdict[0]) for verdict in parts.values())
    return [f"{target:<{widest}}  {head:<{word}}  {rest}".rstrip() for target, (head, _, rest) in parts.items()]


def _side_by_side(runs: Sequence[tuple[str, Path, Sequence[str]]]) -> Iterator[tuple[str, int, str]]:
    """Run several replays, as many at a time as there are cores; yield what each gave, in their order."""
    pool = ThreadPoolExecutor(max(1, min(len(runs), len(os.sched_getaffinity(0)))))
    try:
        yield from pool.map(lambda run: _replay(*run), runs)
    finally:  # after Ctrl-C, which the processes that run have seen too, the others are not begun
        pool.shutdown(cancel_futures=True)


def _replay(python: str, file: Path, options: Sequence[str]) -> tuple[str, int, str]:
    command = [python, "-P", "-m", "kvlockstep", "replay", "--quiet", *options, "--", str(file)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="backslashreplace")
    verdict = next((line for line in reversed(done.stdout.splitlines()) if line.startswith(VERDICTS)), "")
    code = done.returncode
    said_why = code in (USAGE, BROKEN, CRASHED, INTERRUPTED) and done.stderr
    if not verdict and not said_why:
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with status {code}"
        return "", CRASHED, f"{done.stderr}kvlockstep: {file}: the process that ran it {ending}, without a verdict\n"
    return verdict, code, done.stderr
