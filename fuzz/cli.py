"""The command line. Each command parses its arguments, calls one part, and turns the result into text and an exit code.

How a command ends, also in trouble, is in ``exits.py``.
"""

import sys

import click
from rich.table import Table
from rich.text import Text

from kvlockstep.fuzz.commands.bisect import bisect_command
from kvlockstep.fuzz.commands.blame import blame
from kvlockstep.fuzz.commands.check import check
from kvlockstep.fuzz.commands.faults import faults
from kvlockstep.fuzz.commands.fuzz import fuzz
from kvlockstep.fuzz.commands.gate import gate
from kvlockstep.fuzz.commands.merge import merge
from kvlockstep.fuzz.commands.minimize import minimize
from kvlockstep.fuzz.commands.record import record
from kvlockstep.fuzz.commands.replay import replay
from kvlockstep.fuzz.commands.report import report
from kvlockstep.fuzz.commands.show import show
from kvlockstep.fuzz.commands.why import why
from kvlockstep.fuzz.commands.workload import trace as trace_commands
from kvlockstep.fuzz.doctor import Finding, examine, targets_here
from kvlockstep.fuzz.exits import CLEAN, UNKNOWN, make_console, run_and_exit

console = make_console()

RUNS_HERE = "Exit codes: 0 if some target can run here, 10 if none can."
EXIT_CODES = (
    "Exit codes: 0 clean; 1 a violation; 2 wrong usage or unreadable input; 10 unknown, too little was shown; "
    "11 a worker crashed or hung; 12 the harness failed or could not write; 130 interrupted."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(package_name="kvlockstep")
def commands() -> None:
    """Model-based fuzzing of LLM KV caches."""


commands.add_command(bisect_command)
commands.add_command(blame)
commands.add_command(check)
commands.add_command(faults)
commands.add_command(fuzz)
commands.add_command(gate)
commands.add_command(merge)
commands.add_command(minimize)
commands.add_command(record)
commands.add_command(replay)
commands.add_command(report)
commands.add_command(show)
commands.add_command(trace_commands)
commands.add_command(why)


@commands.command(epilog=RUNS_HERE)
def targets() -> None:
    """List the targets and lanes that can run here, and why the others cannot."""
    sys.exit(_print_findings(targets_here()))


@commands.command(epilog=RUNS_HERE)
def doctor() -> None:
    """Examine this machine: Python, packages, cores, memory, targets, lanes."""
    sys.exit(_print_findings(examine()))


def _print_findings(findings: list[Finding]) -> int:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, "yes" if finding.works else Text("no", style="red"), finding.text)
    console.print(table)
    return CLEAN if any(finding.works and finding.is_target for finding in findings) else UNKNOWN


def main() -> None:
    """Run the command line; every expected trouble ends in one line and its exit code."""
    run_and_exit(commands)
