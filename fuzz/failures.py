"""The folder of one failure: named by its cause signature, complete in itself, put in place in one step.

``trace.jsonl`` is the shortest trace known for the signature, ``original.jsonl`` the one that was found,
``verdict.txt`` the message, ``environment.json`` where it was found. A second failure with the same
signature replaces the folder only if its trace is shorter.
"""

import json
import os
import platform
import shlex
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvlockstep.fuzz.trace import Trace, read_trace, write_trace


def replay_line(trace_path: Path) -> str:
    """Return the one line to paste that replays a stored trace."""
    relative = os.path.relpath(trace_path)
    return f"kvlockstep replay {shlex.quote(relative if not relative.startswith('..') else str(trace_path))}"


def store_failure(out: Path, shortest: Trace, found: Trace, text: str) -> Path:
    """Write the folder of a failure under ``out``, synced and renamed into place; return it."""
    signature = shortest.header.signature
    assert signature, "a failure has a signature"
    folder = out / signature
    if folder.exists() and len(read_trace(folder / "trace.jsonl").ops) < len(shortest.ops):
        return folder
    out.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{signature}.", dir=out))
    write_trace(fresh / "trace.jsonl", shortest)
    write_trace(fresh / "original.jsonl", found)
    _write_synced(fresh / "verdict.txt", f"{text}\n  replay    {replay_line(folder / 'trace.jsonl')}\n")
    _write_synced(fresh / "environment.json", json.dumps(environment(), indent=1, sort_keys=True) + "\n")
    fresh.chmod(0o755)
    replaced = None
    if folder.exists():
        replaced = Path(tempfile.mkdtemp(prefix=f".{signature}.old.", dir=out))
        os.rename(folder, replaced / "old")
    os.rename(fresh, folder)
    if replaced is not None:
        shutil.rmtree(replaced)
    return folder


def environment() -> dict[str, str]:
    """Versions that a result may depend on."""
    facts = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("kvlockstep", "torch", "triton", "hypothesis", "numpy"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "absent"
    return facts


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
