"""The way into the command line: an interrupt while it is loaded ends as one later on."""

import os
import subprocess
import sys

CODE = """
import sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "kvlockstep.fuzz.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
from kvlockstep.__main__ import main
main()
"""


def test_interrupt_while_the_command_line_is_loaded_is_one_line():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvlockstep: interrupted\n")


WRITES = """
import os, signal, sys
from pathlib import Path
import click
from kvlockstep.fuzz.exits import run_and_exit
from kvlockstep.fuzz.files import replacing

@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def write(file):
    with replacing(file) as draft:
        draft.write(b"half")
        os.kill(os.getpid(), signal.SIGTERM)

run_and_exit(write)
"""


def test_polite_kill_of_any_command_leaves_no_draft(tmp_path):
    command = [sys.executable, "-c", WRITES, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (130, "kvlockstep: interrupted\n")
    assert os.listdir(tmp_path) == []


def test_polite_kill_that_whoever_started_it_has_ignored_is_ignored(tmp_path):
    ignored = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WRITES}"
    done = subprocess.run([sys.executable, "-c", ignored, tmp_path / "out"], capture_output=True, check=False)

    assert (done.returncode, (tmp_path / "out").read_bytes()) == (0, b"half")
