"""Runs stored traces on one lane, each with its planted fault, without it, and on the model.

A lane is chosen once a process, so whoever wants another lane than its own starts this module with
``python -m kvlockstep.fuzz.regressions LANE FOLDER WRITE`` and reads one JSON line a file. ``WRITE`` is a
folder that receives each trace again, as it was run.

What is right or wrong about a result is for the caller to say.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from kvlockstep.fuzz.registry import choose_lane, factory_for
from kvlockstep.fuzz.replay import run_ops
from kvlockstep.fuzz.trace import TraceWriter, read_trace


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one stored trace did in this process. A signature is None where every law held."""

    file: str
    with_fault: str | None  # signature on the target of the trace
    fault_steps: int  # operations run with the fault, the failing one included
    without_fault: str | None
    on_model: str | None  # the model as the target: its own snapshots against the laws
    digest: str  # of the run without the fault


def replay_stored(path: Path, write: Path | None = None) -> Replayed:
    """Run the trace three times, each from a fresh state. Raises TraceError and TargetUnusable."""
    trace = read_trace(path)
    header, config = trace.header, trace.header.config
    log = TraceWriter(write / path.name, header) if write else None
    try:
        red = run_ops(config, trace.ops, factory_for(header.target, header.fault), log=log)
    finally:
        if log is not None:
            log.close()
    green = run_ops(config, trace.ops, factory_for(header.target), digest=True)
    model = run_ops(config, trace.ops, factory_for("reference"))
    assert green.digest is not None
    return Replayed(path.name, red.signature, red.steps, green.signature, model.signature, green.digest)


def main(lane: str, folder: str, write: str) -> None:
    choose_lane(lane)
    for path in sorted(Path(folder).glob("*.jsonl")):
        sys.stdout.write(json.dumps(asdict(replay_stored(path, Path(write)))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
