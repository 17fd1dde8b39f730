"""``kvlockstep record``: run a program, and record what the SGLang caches do that it builds."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from kvlockstep.fuzz.commands.campaign import read_size
from kvlockstep.fuzz.commands.out_file import OUT_FILE
from kvlockstep.fuzz.exits import BROKEN, CLEAN, UNKNOWN, USAGE, Stop, complain, make_console, writing
from kvlockstep.fuzz.recorder import BYTES_AT_MOST, OPS_AT_MOST
from kvlockstep.fuzz.recorder_hook import VARIABLE, paths_from
from kvlockstep.fuzz.trace import MAX_OPS, TraceError, TraceReader

EPILOG = (
    "Exit codes: that of PROGRAM, 128 and the signal if it died of one; 10 if PROGRAM ended well and nothing was "
    "recorded; 2 wrong usage; 12 a file could not be written."
)

PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
"""Signals by which whoever started this asks it to end, and that only the program can answer."""

CUSTOMIZATION = """\
import sys
from kvlockstep.fuzz import recorder_hook
recorder_hook.install()
recorder_hook.run_next_customization({folder!r})
"""


@click.command(epilog=EPILOG)
@click.argument("out", type=OUT_FILE)
@click.option("--max-ops", default=OPS_AT_MOST, show_default=True, type=click.IntRange(1, MAX_OPS), help="Of one file.")
@click.option(
    "--max-bytes",
    default=f"{BYTES_AT_MOST >> 20}M",
    show_default=True,
    callback=read_size,
    metavar="SIZE",
    help="Of one file, at most.",
)
@click.option("--pseudonyms", is_flag=True, help="Replace tokens and names, with a key that is thrown away.")
@click.argument("program", metavar="-- PROGRAM [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def record(out: Path, max_ops: int, max_bytes: int, pseudonyms: bool, program: tuple[str, ...]) -> None:
    """Run a Python PROGRAM, and write to OUT what the SGLang cache does that it builds; a trace like any other.

    Of several caches, in one process or in many, each has a file of its own: out.jsonl, out-1.jsonl, ... in the order
    in which they begin. A recording begins with an empty cache, and ends with the program, at its bounds, or where
    something happens that no trace can say; its header tells which. The program does not notice.
    """
    if out.suffix == ".gz":
        raise Stop(f"{out}: a recording is written plain: name it without .gz, and pack it afterwards", USAGE)
    if out.exists() or paths_from(out, 1).exists():
        raise Stop(f"{out}: is there already, or {paths_from(out, 1).name}: name another file", USAGE)
    asked = {
        "path": str(out.absolute()),
        "max_ops": max_ops,
        "max_bytes": max_bytes,
        "pseudonyms": secrets.token_hex(32) if pseudonyms else None,
    }
    with writing("a temporary folder"), tempfile.TemporaryDirectory(prefix="kvlockstep-record-") as made:
        folder = os.path.realpath(made)
        Path(folder, "sitecustomize.py").write_text(CUSTOMIZATION.format(folder=folder))
        _lay_out(Path(folder, "kvlockstep"))
        code = _run(program, folder, asked)
    sys.exit(_told(out, code))


def _lay_out(inside: Path) -> None:
    """Let the program import this very kvlockstep, and nothing of what else is installed beside it."""
    inside.mkdir()
    spec = find_spec("kvlockstep")
    assert spec is not None, "this module is one of it"
    source = Path(spec.origin or "").parent
    for part in [path for path in source.iterdir() if path.name != "__pycache__"]:
        (inside / part.name).symlink_to(part.resolve())


def _run(program: tuple[str, ...], folder: str, asked: dict[str, Any]) -> int:
    """Run the program to its end, and return its exit code as a shell would."""
    paths = [folder, os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [folder]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), VARIABLE: json.dumps(asked)}
    try:
        running = subprocess.Popen(program, env=environment)
    except OSError as error:
        raise Stop(f"{program[0]}: {error.strerror}: name a program that can be run", USAGE) from error
    passed_on = {number: signal.signal(number, lambda got, _: running.send_signal(got)) for number in PASSED_ON}
    try:
        return _code_of(running)
    finally:
        for number, before in passed_on.items():
            signal.signal(number, before)


def _code_of(running: "subprocess.Popen[bytes]") -> int:
    while True:
        try:
            code = running.wait()
        except KeyboardInterrupt:  # which the program has heard, too, and answers in its own way
            continue
        return code if code >= 0 else 128 - code


def _told(out: Path, code: int) -> int:
    """Say what was written, and return the exit code."""
    console = make_console()
    n, n_recorded, broken = 0, 0, False
    while (path := paths_from(out, n)).exists():
        n += 1
        try:
            with TraceReader(path, allow_cut_tail=True) as reader:
                n_ops = sum(1 for _ in reader)
                why = reader.header.why.rstrip()
        except TraceError as error:
            broken = True
            complain(f"{error}", BROKEN)
            continue
        n_recorded += n_ops > 0
        console.print(f"{path}: {n_ops:,} operations on {reader.header.target}. {why}", soft_wrap=True)
    if code == CLEAN and broken:
        return BROKEN
    if code == CLEAN and not n_recorded:
        text = "nothing was recorded: the program built no cache that can be recorded, or used none from its begin on"
        return complain(text, UNKNOWN)
    return code
