"""The folder of one failure: named by its cause signature, complete in itself, put in place in one step.

``trace.jsonl`` is the shortest trace known for the signature, ``original.jsonl`` the one that was found,
``verdict.txt`` the message, ``environment.json`` where it was found, ``replay.sh`` a script that runs it again. A
second failure with the same signature, on the same target and with the same planted fault, replaces the folder unless
the trace in it is shorter and still fails: a trace of an earlier run may have been repaired since, and would hide that
the cause is still there. A failure of another target or fault gets a folder with a number.

``page.html``, the picture of ``trace.jsonl``, is put in afterwards, and with it what the failure means into
``verdict.txt``, so that no failure is lost in the drawing of it.

The trace that a worker died on is kept beside the folders.
"""

import fcntl
import json
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path

from kvlockstep.fuzz.files import replace_file
from kvlockstep.fuzz.registry import BUILT_IN
from kvlockstep.fuzz.trace import Header, Trace, TraceError, TraceReader, read_trace, write_trace

TRACE, VERDICT, PAGE = "trace.jsonl", "verdict.txt", "page.html"

MEANING, BEFORE_LINE = "\n  meaning   ", "\n  replay    "
"""What goes before the last lines of a verdict."""


def replay_line(trace_path: Path, target: str) -> str:
    """Return the one line to paste that replays a stored trace; it names a target that a file may not import."""
    return _line("replay", trace_path, target)


def show_line(trace_path: Path, target: str) -> str:
    """Return the one line to paste that draws a stored trace."""
    return _line("show", trace_path, target)


def _line(command: str, trace_path: Path, target: str) -> str:
    relative = os.path.relpath(trace_path)
    named = "" if target in BUILT_IN else f" --target {shlex.quote(target)}"
    return f"kvlockstep {command}{named} {shlex.quote(relative if not relative.startswith('..') else str(trace_path))}"


def store_failure(out: Path, shortest: Trace, found: Trace, text: str, still_fails: Callable[[Trace], bool]) -> Path:
    """Write the folder of a failure under ``out``, synced and renamed into place; return it.

    ``still_fails`` runs a shorter trace that is there already, on the target as it is now.
    """
    out.mkdir(parents=True, exist_ok=True)
    with _alone_in(out):
        folder, stored = _folder_for(out, shortest.header)
        if stored is not None and len(stored.ops) < len(shortest.ops) and still_fails(stored):
            return folder
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=out))
        try:
            _fill(fresh, folder, shortest, found, text)
            if folder.exists():
                os.rename(folder, fresh / "old")
            os.rename(fresh, folder)
        except BaseException:
            if (fresh / "old").exists():
                os.rename(fresh / "old", folder)
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        shutil.rmtree(folder / "old", ignore_errors=True)
    return folder


def add_picture(folder: Path, drawn: Trace, page: str, meaning: str) -> None:
    """Put the picture of a trace into its folder, and what it means into its verdict, unless another trace is there.

    Raises OSError and TraceError.
    """
    with _alone_in(folder.parent):
        if read_trace(folder / TRACE) != drawn:
            return
        verdict = (folder / VERDICT).read_bytes().decode()
        text, before_line, line = verdict.rpartition(BEFORE_LINE)
        replace_file(folder / VERDICT, f"{text}{MEANING}{meaning}{before_line}{line}")
        replace_file(folder / PAGE, page)


def meaning_in(verdict: str) -> str | None:
    """Return what a failure means, of the text of its verdict; None if it was not drawn."""
    _, found, rest = verdict.rpartition(MEANING)
    return rest.partition("\n")[0] if found else None


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Keep the workers of all runs into one folder apart; sync what was renamed in it."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder_for(out: Path, header: Header) -> tuple[Path, Trace | None]:
    """Find the folder that this cause has or gets, and the trace that is in it, if it can be read."""
    assert header.signature, "a failure has a signature"
    for number in count(1):
        folder = out / (header.signature if number == 1 else f"{header.signature}.{number}")
        if not folder.exists():
            return folder, None
        try:
            stored = read_trace(folder / TRACE)
        except TraceError:
            if folder.is_dir():  # nobody can replay what is in it
                return folder, None
            continue
        if (stored.header.target, stored.header.fault) == (header.target, header.fault):
            return folder, stored
    raise AssertionError("there is no last number")


def header_of(folder: Path) -> Header | None:
    """Return what the shortest trace of a failure folder says of it; None if it is none, or cannot be read."""
    try:
        with TraceReader(folder / TRACE) as reader:
            return reader.header
    except TraceError:
        return None


def _fill(fresh: Path, folder: Path, shortest: Trace, found: Trace, text: str) -> None:
    write_trace(fresh / TRACE, shortest)
    write_trace(fresh / "original.jsonl", found)
    line = replay_line(folder / TRACE, shortest.header.target)
    _write_synced(fresh / VERDICT, f"{text}{BEFORE_LINE}{line}\n")
    _write_synced(fresh / "environment.json", json.dumps(environment(), indent=1, sort_keys=True) + "\n")
    script = fresh / "replay.sh"
    _write_synced(script, replay_script(shortest.header))
    for path in (fresh, script):
        path.chmod(0o755)


_SCRIPT = """\
#!/bin/sh
# {law} on {target}
# Runs trace.jsonl from a fresh state: exit code 1 as long as it fails, 0 once it is fixed.
# Run it where the target can be imported; more arguments are those of kvlockstep replay:
#   ./replay.sh --lane interpret     ./replay.sh --fault none
# As a picture, where page.html does not lie here:
#   kvlockstep show --target {quoted} trace.jsonl
here=$(CDPATH= cd "$(dirname "$0")" && pwd) || exit 2
command -v kvlockstep >/dev/null || {{ echo "kvlockstep is not on the path: pip install kvlockstep" >&2; exit 2; }}
exec kvlockstep replay --target {quoted} "$@" "$here/trace.jsonl"
"""


def replay_script(header: Header) -> str:
    """Return the text of the script that lies beside a stored trace."""
    return _SCRIPT.format(**_in_script(header))


def _in_script(header: Header) -> dict[str, str]:
    return {"law": str(header.signature), "target": header.target, "quoted": shlex.quote(header.target)}


RESERVE = 1 << 20
"""Bytes kept under ``out`` for the failure at which the disk turns out to be full."""


def keep_reserve(out: Path) -> None:
    """Take the room that is given up on a full disk. Raises OSError."""
    with _reserve_of(out).open("wb") as file:
        file.write(bytes(RESERVE))
        file.flush()
        os.fsync(file.fileno())


def give_up_reserve(out: Path) -> bool:
    """Make room on a full disk; False if there is none that was kept."""
    try:
        _reserve_of(out).unlink()
    except FileNotFoundError:
        return False
    return True


def _reserve_of(out: Path) -> Path:
    return out / ".reserve"


def traces_in(folder: Path) -> list[Path]:
    """List the stored traces of a folder, by name."""
    return sorted(path for path in folder.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")) and path.is_file())


def current_path(out: Path, worker: str) -> Path:
    """Return the path of the trace that a worker is running."""
    return out / f"{worker}.current.jsonl"


def keep_last_trace(out: Path, worker: str) -> Path | None:
    """Move the trace that a worker ended in out of the way of the next run; None if it ran nothing."""
    current = current_path(out, worker)
    try:
        ran = bool(read_trace(current, allow_cut_tail=True).ops)
    except TraceError:
        ran = False
    if not ran:
        return None
    with _alone_in(out):
        kept = next(path for n in count(1) if not (path := out / f"{worker}.died-{n}.jsonl").exists())
        os.rename(current, kept)
    return kept


def environment() -> dict[str, str]:
    """Versions that a result may depend on."""
    facts = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("kvlockstep", "torch", "triton", "hypothesis", "numpy", "sglang"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "absent"
    return facts


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
