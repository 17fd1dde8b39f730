"""``pytest --kvlockstep-target`` in suites that are not ours: each test runs pytest in a folder of its own."""

import base64
import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shlex import split

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Abort, Alloc, AllocItem, Commit, Match, Submit
from kvlockstep.fuzz.pytest_items import Asked, line_that_replays
from kvlockstep.fuzz.trace import Header, Trace, write_trace

ROOT = Path(__file__).resolve().parents[1]
HASH_BLOCKS = "examples.hash_blocks_target:make"
LEAKS = "kvlockstep.fuzz.targets.wrong:LeaksOnAbort"
FEW = ("--kvlockstep-cases=12", "--kvlockstep-shards=3", "--kvlockstep-seed=abc")

KEEP_REPORTS = """
import json

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Keeper())

class Keeper:
    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            done = [text for name, text in report.user_properties if name == "kvlockstep"]
            with open("reports.jsonl", "a") as file:
                file.write(json.dumps([report.nodeid, *map(json.loads, done)]) + "\\n")
"""


class Adopter:
    """A folder with somebody's tests; ``run`` runs pytest in it."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        self.environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        self.environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    def write(self, name, text):
        (self.folder / name).write_text(text)

    def run(self, *options):
        return self.call(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options)

    def call(self, *command):
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)

    def fuzz(self, target, *options):
        return self.run(f"--kvlockstep-target={target}", "--kvlockstep-minimize=1", *options)

    def reports(self):
        lines = (self.folder / "reports.jsonl").read_text().splitlines()
        (self.folder / "reports.jsonl").unlink()
        return {nodeid: done[0] if done else None for nodeid, *done in map(json.loads, lines)}


@pytest.fixture
def adopter(tmp_path):
    return Adopter(tmp_path)


def hashes_of(reports):
    return {nodeid: base64.b64decode(done["hashes"]) for nodeid, done in reports.items() if done and "hashes" in done}


def leaking_trace(config=None):
    """Return a trace whose last operation shows LeaksOnAbort, and no honest cache."""
    running = [
        Submit("r0", (1, 2, 3), (None, None, ())),
        Match("r0"),
        Alloc((AllocItem("r0", 3),)),
        Commit("r0", 3, ()),
    ]
    ops = [*running, Abort("r0")]
    return Trace(Header(config=config or CacheConfig(), why=""), ops)


def test_without_a_target_nothing_else_is_loaded(adopter):
    adopter.write(
        "test_theirs.py",
        "import sys\n"
        "def test_modules(request):\n"
        "    assert request.config.pluginmanager.has_plugin('kvlockstep')\n"
        "    ours = {name for name in sys.modules if name.startswith('kvlockstep')}\n"
        "    assert ours == {'kvlockstep', 'kvlockstep.fuzz', 'kvlockstep.fuzz.pytest_plugin'}\n"
        "    assert not {'torch', 'triton', 'hypothesis', 'numpy', 'rich'} & set(sys.modules)\n",
    )

    done = adopter.run("--kvlockstep-cases=5")

    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert "kvlockstep:" not in done.stdout


def test_clean_target_passes_beside_other_tests_and_the_same_on_two_processes(adopter):
    adopter.write("test_theirs.py", "def test_theirs(): pass\n")
    adopter.write("conftest.py", KEEP_REPORTS)

    alone = adopter.fuzz(HASH_BLOCKS, *FEW, "-n0")
    here = adopter.reports()
    shared = adopter.fuzz(HASH_BLOCKS, *FEW, "-n2")
    there = adopter.reports()
    other = adopter.fuzz(HASH_BLOCKS, *FEW, "--kvlockstep-seed=abd", "kvlockstep::cases[1/3]")

    assert (alone.returncode, shared.returncode, other.returncode) == (0, 0, 0), alone.stdout + shared.stdout
    assert "6 passed" in alone.stdout
    assert "6 passed" in shared.stdout
    assert [name for name in here if "cases" in name] == [f"kvlockstep::cases[{i}/3]" for i in (1, 2, 3)]
    hashes = hashes_of(here)
    assert hashes == hashes_of(there)
    assert len(hashes) == 4
    packed = [text[i : i + 8] for text in hashes.values() for i in range(0, len(text), 8)]
    summary = re.search(r"fresh cases (\d+), distinct traces (\d+), items 4, operations done [\d,]+", alone.stdout)
    assert summary.groups() == ("24", str(len(set(packed)))), "12 cases are those of kvlockstep::shown"
    assert len(set(packed)) > 20, "items run different cases"
    assert summary.group() in shared.stdout
    assert not set(hashes_of(adopter.reports()).values()) & set(hashes.values()), "another seed draws other cases"
    assert "seed base abc" in alone.stdout
    assert "canary found after 13 operations" in alone.stdout
    assert "not observed: law 5, root is not counted (needs root_lock_ref)" in shared.stdout
    assert list((adopter.folder / "out").iterdir()) == []


def test_wrong_target_fails_with_its_law_and_a_line_that_replays_it(adopter):
    done = adopter.fuzz(LEAKS, "kvlockstep::cases[1/8]", "kvlockstep::canary", "--kvlockstep-out=found")

    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert re.search(r"^PageLeaked: page \d+ has 0 owners, expected 1$", done.stdout, re.MULTILINE)
    assert re.search(r"^  step +\d+: abort r\d+$", done.stdout, re.MULTILINE)
    assert "FAILED kvlockstep::cases[1/8] - PageLeaked" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "warning" not in done.stdout
    line = re.search(r"^  replay +(kvlockstep replay .*)$", done.stdout, re.MULTILINE)[1]
    replayed = adopter.call(*split(line))
    assert replayed.returncode == 1, replayed.stderr
    assert "FAILED: PageLeaked.abort" in replayed.stdout
    [folder] = (adopter.folder / "found").iterdir()
    assert (folder / "verdict.txt").read_text().startswith("PageLeaked: ")


def test_blind_canary_fails(adopter):
    adopter.write(
        "conftest.py",
        "from kvlockstep.fuzz.canary import RepeatsWriteSlot\n"
        "RepeatsWriteSlot.alloc = lambda self, batch: self._target.alloc(batch)\n",
    )

    done = adopter.fuzz(HASH_BLOCKS, "kvlockstep::canary")

    assert done.returncode == 1
    assert "that ends in the slot it begins with, was not found: 400 operations, no violation" in done.stdout
    assert "Traceback" not in done.stdout


def test_traces_are_replayed_and_skipped_with_a_reason(adopter):
    traces = adopter.folder / "traces"
    traces.mkdir()
    write_trace(traces / "a.jsonl", leaking_trace())
    (traces / "b.jsonl.gz").write_bytes(gzip.compress((traces / "a.jsonl").read_bytes()))
    write_trace(traces / "c.jsonl", leaking_trace(replace(CacheConfig(), policy="mru")))
    (traces / "README.md").write_text("no trace")
    options = "--kvlockstep-regressions=traces", "-k", "regression", "-rs"

    honest = adopter.fuzz(HASH_BLOCKS, *options)
    wrong = adopter.fuzz(LEAKS, *options)

    assert honest.returncode == 0, honest.stdout
    assert "2 passed, 1 skipped" in honest.stdout
    assert f"needs policy:mru, which {HASH_BLOCKS} does not promise" in honest.stdout
    assert "traces replayed 2, skipped 1" in honest.stdout
    assert wrong.returncode == 1
    assert "3 failed" in wrong.stdout
    assert f"  replay    kvlockstep replay --target {LEAKS} traces/b.jsonl.gz\n" in wrong.stdout


@pytest.mark.parametrize(
    ("asked", "found_with", "options"),
    [
        (("gpu_impl", "torch", None), ("gpu_impl", "torch", None), ""),
        (("gpu_impl", "torch", None), ("gpu_impl", "interpret", "abort-keeps-lock"), "--lane torch --fault none "),
        (("gpu_impl", "torch", "abort-keeps-lock"), ("gpu_impl", "torch", "abort-keeps-lock"), ""),
        (("gpu_impl", "torch", None), ("sglang:radix", "torch", "row-freed-twice"), "--target gpu_impl --lane torch "),
        (("reference", None, None), ("gpu_impl", "torch", "abort-keeps-lock"), "--target reference "),
        ((LEAKS, None, None), ("gpu_impl", "torch", "abort-keeps-lock"), f"--target {LEAKS} "),
    ],
)
def test_replay_line_of_a_trace_names_what_the_trace_does_not(asked, found_with, options):
    target, lane, fault = asked
    asked = Asked(target, lane, fault, "0", 1, 1, (), Path("out"), 0.0, frozenset())
    header = Header(CacheConfig(), "", target=found_with[0], lane=found_with[1], fault=found_with[2])

    assert line_that_replays(Path("a.jsonl"), header, asked, lane) == f"kvlockstep replay {options}a.jsonl"


def test_target_that_does_not_show_the_charter_does_not_pass(adopter):
    options = "--kvlockstep-cases=2", "--kvlockstep-shards=1"
    law_3 = "law 3 was not observed on this target: --kvlockstep-accept-unobserved 3 lets it pass all the same"
    accept = [f"--kvlockstep-accept-unobserved={law}" for law in (1, 2, 3)]

    done = adopter.fuzz("examples.smallest_target:make", *options, *accept[:2])
    deselected = adopter.fuzz("examples.smallest_target:make", *options, "-k", "cases")
    accepted = adopter.fuzz("examples.smallest_target:make", *options, *accept)

    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout
    assert f"\n{law_3}\n  not observed: law 3, write sets are row segments (needs rows, requests)\n" in done.stdout
    assert (deselected.returncode, "1 passed" in deselected.stdout, law_3 in deselected.stdout) == (1, True, True)
    assert accepted.returncode == 0
    assert "law 3 was not observed, accepted" in accepted.stdout


def test_seed_base_is_the_commit(adopter):
    identity = "-c", "user.name=x", "-c", "user.email=x@x"
    before = adopter.fuzz(HASH_BLOCKS, "--co")
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        assert adopter.call("git", *identity, *command).returncode == 0
    commit = adopter.call("git", "rev-parse", "HEAD").stdout.strip()

    after = adopter.fuzz(HASH_BLOCKS, "--co")

    assert "collected 10 items" in after.stdout
    assert "seed base 0\n" in before.stdout
    assert f"seed base {commit}\n" in after.stdout


def test_interrupt_ends_a_run_cleanly(adopter):
    adopter.write(
        "interrupted.py",
        "import os, signal\n"
        "from examples.hash_blocks_target import HashBlockTarget\n"
        "class Interrupted(HashBlockTarget):\n"
        "    def evict(self, n_slots):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        return super().evict(n_slots)\n",
    )

    done = adopter.fuzz("interrupted:Interrupted", "-n0", "-k", "cases")

    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "! KeyboardInterrupt !" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "Error" not in done.stdout + done.stderr


MISTAKES = {
    "unknown target": (["--kvlockstep-target=gpu_imp"], "unknown target 'gpu_imp': expected gpu_impl, reference, "),
    "several targets": (["--kvlockstep-target=all"], "--kvlockstep-target all: expected one target, got 4"),
    "no such factory": ([f"--kvlockstep-target={HASH_BLOCKS[:-1]}"], "has no factory 'mak', did you mean make"),
    "factory raises": (["--kvlockstep-target=mistakes:raises", "-n2"], "its factory raised ValueError: no such pool"),
    "factory leaves": (["--kvlockstep-target=mistakes:leaves"], "target 'mistakes:leaves' left with status 3"),
    "another Python": (["--kvlockstep-target=sglang:radix"], "needs the Python of another environment: run /other/py"),
    "no folder": (["--kvlockstep-regressions=nowhere"], "--kvlockstep-regressions nowhere: no such folder"),
    "no trace": (["--kvlockstep-regressions=empty"], "empty: has no *.jsonl and no *.jsonl.gz"),
    "bad trace": (["--kvlockstep-regressions=bad", "-n2"], "bad/x.jsonl:7: not JSON"),
    "no such lane": (["--kvlockstep-target=gpu_impl", "--kvlockstep-lane=tor"], "has no lane tor, expected one of"),
    "no such item": (["kvlockstep::cases[9/8]", "-n2"], "no item 'cases[9/8]', expected one of canary, shown, cases"),
    "out is a file": (["--kvlockstep-out=mistakes.py"], "mistakes.py: is no folder"),
    "no cases": (["--kvlockstep-cases=0"], "argument --kvlockstep-cases: expected a whole number from 1 to"),
    "no time": (["--kvlockstep-minimize=nan"], "argument --kvlockstep-minimize: expected seconds from 0 to"),
    "no law": (["--kvlockstep-accept-unobserved=4"], "argument --kvlockstep-accept-unobserved: invalid choice: 4"),
}

MAKE_MISTAKES = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from kvlockstep.fuzz import pytest_items

asked = pytest_items.python_for
pytest_items.python_for = lambda target: "/other/python" if target.startswith("sglang:") else asked(target)

def raises(config):
    raise ValueError("no such pool")

def leaves(config):
    raise SystemExit(3)

if __name__ == "__main__":
    results = {}
    for mistake, options in json.loads(sys.argv[1]).items():
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            code = int(pytest.main(["-p", "no:cacheprovider", *options]))
        results[mistake] = code, out.getvalue(), err.getvalue()
    print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def made_mistakes(tmp_path_factory):
    """Make all mistakes in one process; give exit code, standard output and standard error of each."""
    adopter = Adopter(tmp_path_factory.mktemp("mistakes"))
    adopter.write("mistakes.py", MAKE_MISTAKES)
    for name in ("empty", "bad"):
        (adopter.folder / name).mkdir()
    write_trace(adopter.folder / "bad" / "x.jsonl", leaking_trace())
    with (adopter.folder / "bad" / "x.jsonl").open("a") as file:
        file.write("nonsense\n")
    options = {mistake: [f"--kvlockstep-target={HASH_BLOCKS}", *options] for mistake, (options, _) in MISTAKES.items()}
    done = adopter.call(sys.executable, "mistakes.py", json.dumps(options))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_usage_is_one_line_and_exit_code_4(made_mistakes, mistake):
    code, out, err = made_mistakes[mistake]

    assert code == pytest.ExitCode.USAGE_ERROR
    [line] = [line for line in err.splitlines() if MISTAKES[mistake][1] in line]
    assert line.startswith("ERROR: kvlockstep: ") or "error: argument" in line
    assert "Traceback" not in out + err
