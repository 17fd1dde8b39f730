"""The way into the command line: an interrupt while it is loaded ends as one later on."""

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
