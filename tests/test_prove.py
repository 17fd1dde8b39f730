"""The proofs in short, and that they can fail: a fallback, a wrong function, a side or a kernel that differs."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
from rich.console import Console

from kvlockstep.fuzz import prove
from kvlockstep.fuzz.proofs import contract, faults, sides
from kvlockstep.gpu_impl.tree import PrefixTree
from kvlockstep.reference.intervals import ownership_intervals

SECONDS = 30.0
RUN = [sys.executable, "-m", "kvlockstep.fuzz.prove"]
WITH_ANOTHER_TWIN = """
import sys
from kvlockstep.fuzz.proofs import twins

def gather_other_row(pool, row_table, row, length):
    return twins.kernels.gather_kv_torch(pool, row_table, 0, length)

twins.kernels.TORCH = twins.kernels.TORCH._replace(gather_kv=gather_other_row)
sys.exit(twins.main(2))
"""

COUNTING_PROGRAMS = """
from collections import Counter
from kvlockstep.fuzz.proofs import twins

seen = {}

def counting(name, launch):
    seen[name] = Counter()
    def counted(*args):
        seen[name][twins.kernels.FEWEST_PROGRAMS] += 1
        return launch(*args)
    return counted

real = twins.kernels.TRITON
twins.kernels.TRITON = type(real)(*(counting(name, launch) for name, launch in zip(real._fields, real)))
twins.main(2)
for name, counter in seen.items():
    print(f"seen {name}\t{counter[1]} {counter[2]}")
"""


def run(*args):
    return subprocess.run([*RUN, *args], capture_output=True, text=True, check=False)


def contracts_in(home):
    module = import_module(f"kvlockstep.fuzz.proofs.{home}")
    functions = inspect.getmembers(module, inspect.isfunction)
    return {f"{home}.{name}" for name, function in functions if function.__module__ == module.__name__}


def test_every_contract_is_listed_and_has_a_fault():
    written = set().union(*map(contracts_in, ("implementation", "model", "agreement")))

    assert written - {"implementation.shared_by"} == set(prove.CONTRACTS) == set(faults.FAULTS)


@pytest.mark.parametrize("name", prove.CONTRACTS)
def test_contract_is_confirmed_over_all_paths(name):
    assert prove.check_contract(name, SECONDS).kind == prove.CONFIRMED


@pytest.mark.parametrize("name", prove.CONTRACTS)
def test_contract_is_refuted_by_its_fault(name):
    verdict = prove.check_contract(name, SECONDS, fault=True)

    assert verdict.kind == prove.REFUTED
    assert verdict.call.startswith(name.split(".")[1] + "(")


def test_run_fails_when_a_function_is_wrong():
    done = run("--contract", "implementation.page_ceiling", "--fault")

    assert done.returncode == 1, done.stdout + done.stderr
    assert "implementation.page_ceiling: refuted, expected confirmed, by page_ceiling(" in done.stdout


def test_run_fails_when_a_contract_falls_back_to_not_confirmed():
    done = run("--contract", "model.shared_pages", "--seconds", "0.05")

    assert done.returncode == 1, done.stdout + done.stderr
    assert "model.shared_pages: not confirmed, expected confirmed" in done.stdout


def test_run_refuses_a_fault_without_a_contract():
    done = run("--fault")

    assert done.returncode == 2
    assert done.stderr.startswith("kvlockstep: --fault: ")


def test_counterexample_counts_only_within_the_precondition():
    assert contract.replayed("implementation.page_floor", "page_floor(3, 2)") == "kept"
    assert contract.replayed("implementation.page_floor", "page_floor(-1, 2)") == "outside"
    assert contract.replayed("implementation.shared_pages", "shared_pages(1, 1, 2, 4, 0, bigram=True)") == "outside"


def test_false_counterexample_leaves_a_contract_not_confirmed(monkeypatch):
    reported = "m.py:1: error: AssertionError: when calling page_floor(3, 2)\n"

    def answer(module, name, seconds, subject, *call, timeout):
        return subprocess.CompletedProcess([], 0 if call else 1, "kept\n" if call else reported, "")

    monkeypatch.setattr(prove, "_run", answer)

    assert prove.check_contract("implementation.page_floor", 1.0).kind == prove.NOT_CONFIRMED


def test_report_without_a_verdict_is_no_proof(monkeypatch):
    monkeypatch.setattr(
        prove, "_run", lambda *_, timeout: subprocess.CompletedProcess([], 0, "", "contain no checkable functions")
    )

    with pytest.raises(prove.Stop, match="no checkable functions"):
        prove.check_contract("implementation.page_floor", 1.0)


@pytest.mark.parametrize(
    ("code", "out"),
    [(1, ""), (0, ""), (-11, ""), (1, "apply_plan\t7\t0.1\n"), (0, "apply_plan\t7\t0.1\nrewrite_row\t7\t0.1\n")],
    ids=["raises", "says nothing", "dies", "raises later", "leaves kernels out"],
)
def test_twins_that_were_not_all_compared_are_no_proof(monkeypatch, code, out):
    done = subprocess.CompletedProcess([], code, out, "LaneUnavailable: no interpreter")
    monkeypatch.setattr(prove, "_run", lambda *_, timeout: done)

    with pytest.raises(prove.Stop, match="LaneUnavailable: no interpreter"):
        list(prove.compare_twins(True, Console()))


@pytest.mark.parametrize("count", sides.COUNTED, ids=lambda count: count.__name__)
def test_sides_agree_on_all_small_cases(count):
    assert count(sides.COUNTED[count][0]) > 1000


def open_interval_forgotten(protected_len, committed_len, allocated_len):
    return ownership_intervals(protected_len, committed_len, committed_len)


class TreeThatComparesOneByteMore(PrefixTree):
    _shared_pages = faults.search_one_byte_more


@pytest.mark.parametrize(
    ("count", "name", "wrong"),
    [
        (sides.lengths_and_pages, "implementation.pages_touched", faults.one_more_at_boundary),
        (sides.units_and_publications, "implementation.published_len", faults.published_backwards),
        (sides.pages_of_a_batch, "implementation.pages_to_take", faults.slack_forgotten),
        (sides.intervals_and_what_is_freed, "ownership_intervals", open_interval_forgotten),
        (sides.longest_common_prefixes, "PrefixTree", TreeThatComparesOneByteMore),
    ],
)
def test_counting_through_sees_a_wrong_function(count, name, wrong, monkeypatch):
    monkeypatch.setattr(f"kvlockstep.fuzz.proofs.sides.{name}", wrong)

    with pytest.raises(AssertionError):
        count(sides.COUNTED[count][0])


def test_kernels_agree_with_their_twins_on_all_small_shapes():
    done = subprocess.run(
        [sys.executable, "-m", "kvlockstep.fuzz.proofs.twins", str(prove.SIZE_OF_TWINS[True])],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split("\t") for line in done.stdout.splitlines()]

    assert done.returncode == 0, done.stdout + done.stderr
    assert [name for name, _, _ in lines] == ["apply_plan", "rewrite_row", "scatter_kv", "gather_kv"]
    assert all(int(n_cases) > 100 for _, n_cases, _ in lines)


def test_each_kernel_runs_as_one_program_and_as_several():
    done = subprocess.run([sys.executable, "-c", COUNTING_PROGRAMS], capture_output=True, text=True, check=True)
    seen = dict(line.split("\t") for line in done.stdout.splitlines() if line.startswith("seen "))

    assert len(seen) == len(prove.TWINS)
    for counted in seen.values():
        once, twice = counted.split()
        assert once == twice != "0"


def test_twin_that_differs_is_seen():
    done = subprocess.run([sys.executable, "-c", WITH_ANOTHER_TWIN], capture_output=True, text=True, check=False)

    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("differs\tgather_kv ")


def test_symbolic_backend_finds_colliding_keys_and_passes_sound_lookup():
    found, _, _ = prove.run_property("child lookup", "fault", "crosshair", 20.0)
    failed, n_examples, _ = prove.run_property("child lookup", "sound", "crosshair", 3.0)

    assert found
    assert not failed
    assert n_examples > 10
