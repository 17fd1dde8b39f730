"""Prove the arithmetic: what CrossHair confirms must stay confirmed, and what it cannot is counted through to a bound.

``python -m kvlockstep.fuzz.prove`` does four things and prints a table of each; with ``--short``, what fits a test run:

1. the contracts of `fuzz/proofs`, each in a process without torch. ``CONTRACTS`` says which have to be *confirmed over
   all paths* and within which bounds. One that is refuted, or falls back to "not confirmed", ends the run with 1; so
   does, in full, one that does not refute the fault planted for it;
2. both sides counted through, against each other and against the definition: *bounded*, with the bound;
3. each Triton kernel, interpreted, against its twin on every shape up to a size: bounded too;
4. three properties on Hypothesis' symbolic and random backends, with a fault planted, and the time that each took.

CrossHair's exit code is no verdict: 0 also stands for "not confirmed" and for "nothing to check". So its report is
read. A counterexample counts once it has been run.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvlockstep.fuzz.exits import BROKEN, USAGE, VIOLATION, Seconds, Stop, make_console, run_and_exit
from kvlockstep.fuzz.proofs.sides import COUNTED

CONFIRMED, NOT_CONFIRMED, REFUTED, BOUNDED = "confirmed", "not confirmed", "refuted", "bounded"

ANY = "any integers"
CONTRACTS = {
    "implementation.page_floor": ANY,
    "implementation.page_ceiling": ANY,
    "implementation.touched_pages": ANY,
    "implementation.new_pages": ANY,
    "implementation.batch_pages": "two requests, any integers",
    "implementation.pages_freed_at_release": ANY,
    "implementation.pages_kept_at_rejection": ANY,
    "implementation.units_to_match": ANY,
    "implementation.units_to_publish": ANY,
    "implementation.published_length": ANY,
    "implementation.shared_pages": "edge and key to 6 pages of any size",
    "model.page_floor": ANY,
    "model.page_ceiling": ANY,
    "model.touched_pages": ANY,
    "model.new_pages": ANY,
    "model.intervals_partition_the_row": ANY,
    "model.units": ANY,
    "model.published_pages": ANY,
    "model.shared_pages": "two strings to 4 tokens, pages to 2, any tokens",
    "agreement.page_floor": ANY,
    "agreement.page_ceiling": ANY,
    "agreement.touched_pages": ANY,
    "agreement.new_pages": ANY,
    "agreement.units_to_match": ANY,
    "agreement.units_to_publish": ANY,
    "agreement.published_length": ANY,
}
"""Contracts that are confirmed over all paths, within these bounds. One that is not any more fails."""

SIZE_OF_TWINS = {True: 3, False: 5}
TWINS = ["apply_plan", "rewrite_row", "scatter_kv", "gather_kv"]
PROPERTIES = ("split point", "child lookup", "interval partition")
SECONDS_OF_PROPERTIES = {True: 20.0, False: 30.0}
FEWEST_MISSED_BY_RANDOM = 2
SEED = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a contract. ``call`` is the counterexample, run and found true."""

    kind: str
    seconds: float
    call: str = ""


def _run(module: str, *args: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a module of `fuzz/proofs` in a process of its own."""
    command = [sys.executable, "-m", f"kvlockstep.fuzz.proofs.{module}", *args]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise Stop(f"{module} {' '.join(args)}: no answer in {timeout:.0f} s", BROKEN) from error


def check_contract(name: str, seconds: float, fault: bool = False) -> Verdict:
    """Give a contract to CrossHair, or with ``fault`` a wrong function under it, and read the report.

    ``seconds`` of CPU time are for each condition. A counterexample that is false leaves the contract not confirmed.
    """
    subject = "fault" if fault else "sound"
    began = time.monotonic()
    done = _run("contract", name, str(seconds), subject, timeout=20 * seconds + 120)
    took = time.monotonic() - began
    kinds = re.findall(r": (?:info|error|warning): (.*)", done.stdout)
    if done.returncode not in (0, 1) or not kinds:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Stop(f"{name}: CrossHair ended with {done.returncode}: {said[-1] if said else 'it said nothing'}", BROKEN)
    for call in re.findall(r"when calling (.*\))", done.stdout):
        if _run("contract", name, str(seconds), subject, call, timeout=120).stdout.strip() == "broken":
            return Verdict(REFUTED, took, call)
    confirmed = all(kind.startswith("Confirmed over all paths") for kind in kinds)
    return Verdict(CONFIRMED if confirmed else NOT_CONFIRMED, took)


def prove_contracts(
    names: Sequence[str], seconds: float, console: Console, *, fault: bool = False, wanted: str = CONFIRMED
) -> Iterator[str]:
    """Check contracts and print them; give a sentence for each that has not the wanted verdict."""
    title = "contracts, each with its function made wrong" if fault else "contracts"
    table = _table(title, "contract", "verdict", "counterexample" if fault else "bounds", "seconds")
    problems = []
    for name in names:
        verdict = check_contract(name, seconds, fault)
        table.add_row(name, verdict.kind, verdict.call or CONTRACTS[name], f"{verdict.seconds:.1f}")
        if verdict.kind != wanted:
            problems.append(f"{name}: {verdict.kind}, expected {wanted}" + f", by {verdict.call}" * bool(verdict.call))
    console.print(table)
    yield from problems


def count_sides(short: bool, console: Console) -> Iterator[str]:
    """Count both sides through; give a sentence for each case in which they differ."""
    table = _table("both sides, counted through", "cases", "verdict", "bound", "number", "seconds")
    for count, (size, full_size) in COUNTED.items():
        size = size if short else full_size
        began = time.monotonic()
        try:
            n_cases, kind = count(size), BOUNDED
        except AssertionError as error:
            n_cases, kind = 0, REFUTED
            yield f"{count.__name__}: {error or 'the sides differ, or one is wrong'}"
        name = count.__name__.replace("_", " ")
        table.add_row(name, kind, f"size {size}", f"{n_cases:,}", f"{time.monotonic() - began:.1f}")
    console.print(table)


def compare_twins(short: bool, console: Console) -> Iterator[str]:
    """Compare the kernels with their twins; give a sentence where one differs."""
    table = _table("kernels and their twins", "kernel", "verdict", "bound", "shapes", "seconds")
    size = SIZE_OF_TWINS[short]
    done = _run("twins", str(size), timeout=1800)
    compared, differ = [], False
    for line in done.stdout.splitlines():
        name, *rest = line.split("\t")
        if name == "differs":
            differ = True
            yield rest[0]
        else:
            n_cases, seconds = rest
            compared.append(name)
            table.add_row(name, BOUNDED, f"size {size}", f"{int(n_cases):,}", seconds)
    if done.returncode != differ or not (differ or compared == TWINS):
        raise Stop(f"twins: {(done.stderr.strip().splitlines() or ['no word'])[-1]}", BROKEN)
    console.print(table)


def run_property(name: str, subject: str, backend: str, seconds: float) -> tuple[bool, int, float]:
    """Run a property with the ``sound`` subject or the ``fault``: did it fail, after how many examples and seconds."""
    done = _run("properties", name, subject, backend, str(seconds), str(SEED), timeout=20 * seconds + 120)
    said = done.stdout.strip().split("\t")
    if done.returncode or len(said) != 3:
        raise Stop(f"{name}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}", BROKEN)
    return said[0] == "found", int(said[1]), float(said[2])


def try_properties(short: bool, console: Console) -> Iterator[str]:
    """Look for the planted faults on both backends; give a sentence where the comparison comes out otherwise."""
    table = _table("planted faults, found by Hypothesis", "property", "symbolic", "random", "sound, symbolic")
    seconds = SECONDS_OF_PROPERTIES[short]
    n_missed = 0
    for name in PROPERTIES[1:2] if short else PROPERTIES:
        symbolic = run_property(name, "fault", "crosshair", seconds)
        sound = run_property(name, "sound", "crosshair", seconds / 4)
        random = None if short else run_property(name, "fault", "hypothesis", seconds)
        n_missed += random is not None and not random[0]
        table.add_row(name, _told(symbolic), "not tried" if random is None else _told(random), _told(sound))
        if not symbolic[0]:
            yield f"{name}: the symbolic backend missed the planted fault in {seconds:.0f} s"
        if sound[0]:
            yield f"{name}: fails without a fault"
    console.print(table)
    if not short and n_missed < FEWEST_MISSED_BY_RANDOM:
        yield f"the random backend missed {n_missed} planted faults, expected {FEWEST_MISSED_BY_RANDOM} or more"


def _told(run: tuple[bool, int, float]) -> str:
    found, n_examples, seconds = run
    return f"{'found' if found else 'nothing'} in {seconds:.1f} s, {n_examples:,} examples"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in ("seconds", "number", "shapes") else "left")
    return table


@click.command()
@click.option("--short", is_flag=True, help="Smaller bounds, and one property on one backend.")
@click.option("--contract", "contracts", multiple=True, type=click.Choice(list(CONTRACTS)), help="Only this one.")
@click.option("--fault", is_flag=True, help="Make the function of each --contract wrong first, to see the run fail.")
@click.option("--seconds", default=60.0, show_default=True, type=Seconds(0.001), help="CPU time for each condition.")
def prove(short: bool, contracts: tuple[str, ...], fault: bool, seconds: float) -> None:
    """Prove the arithmetic. Ends with 1 if a contract is not confirmed any more, or if sides or twins differ."""
    for module, package in (("crosshair", "crosshair-tool"), ("hypothesis_crosshair_provider", "hypothesis-crosshair")):
        if find_spec(module) is None:
            raise Stop(f"{package} is not installed: pip install {package}, or run make prove", USAGE)
    if fault and not contracts:
        raise click.UsageError("--fault: name the functions to make wrong with --contract")
    console = make_console()
    problems: list[str] = []
    if contracts:
        problems += prove_contracts(contracts, seconds, console, fault=fault)
    else:
        problems += prove_contracts(list(CONTRACTS), seconds, console)
        if not short:
            problems += prove_contracts(list(CONTRACTS), seconds, console, fault=True, wanted=REFUTED)
        problems += count_sides(short, console)
        problems += compare_twins(short, console)
        problems += try_properties(short, console)
    for problem in problems:
        console.print(problem)
    if problems:
        raise click.exceptions.Exit(VIOLATION)
    console.print("proved: every verdict is as listed")


if __name__ == "__main__":
    run_and_exit(prove, "python -m kvlockstep.fuzz.prove")
