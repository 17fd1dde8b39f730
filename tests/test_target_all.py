"""Several targets in one run: fuzzed side by side, replayed side by side, and the trees of SGLang held against another.

Models of the reference stand for the three trees, and a program that lets them be found stands for the Python that has
SGLang; so the commands find another environment, and start what they need in it, as they do with the real one.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvlockstep.fuzz import cli, environments
from kvlockstep.fuzz.commands import fuzz as fuzz_command
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.crew import WorkerState, follow, run_workers
from kvlockstep.fuzz.environments import SGLANG_VERSION, VARIABLE
from kvlockstep.fuzz.labels import LABELS, name_of
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import Abort, Alloc, AllocItem, Commit, Evict, Match, Peek, Release, Submit
from kvlockstep.fuzz.outcomes import Ran, compare_outcomes, outcome_of
from kvlockstep.fuzz.places import names_of
from kvlockstep.fuzz.registry import SGLANG_TARGETS
from kvlockstep.fuzz.report import print_run
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.trace import Header, Trace, read_trace, write_trace
from kvlockstep.fuzz.verdict import FLOOR_PER_MINUTE, SGLANG_FLOOR_PER_MINUTE, verdict_of
from kvlockstep.fuzz.worker import Order

ROOT = Path(__file__).resolve().parents[1]
CLEAN, VIOLATION, USAGE, UNKNOWN, CRASHED = 0, 1, 2, 10, 11
RADIX, PYTHON, RUST = SGLANG_TARGETS

FINDS_THE_STAND_INS = """
import sys, types
module = types.ModuleType("kvlockstep.fuzz.targets.sglang")
def __getattr__(name):
    import stand_ins
    return getattr(stand_ins, name)
module.__getattr__ = __getattr__
sys.modules[module.__name__] = module
"""

STAND_INS = '''
import os
from kvlockstep.fuzz.targets.reference import ReferenceTarget, new_cache
from kvlockstep.fuzz.targets.wrong import LeaksOnAbort

IS = os.environ.get("UNIFIED_RUST_IS", "honest")

class Tree(ReferenceTarget):
    name = "stand-in"
    def __init__(self, config):
        super().__init__(config)
        self.lane = os.environ.get("KVLOCKSTEP_LANE", "torch")
        self.capabilities -= {"discards"}

class DatesSplitsNew(Tree):
    allowances = frozenset({"split_dates_upper_new"})
    def __init__(self, config):
        super().__init__(config)
        self.cache = new_cache(config, self.allowances)

class TakesNewestFirst(Tree):
    """A legal target: nothing says which leaf it must evict."""
    conformance = "legal"
    def __init__(self, config):
        super().__init__(config)
        self.cache.policy = "mru"

class Leaks(Tree, LeaksOnAbort):
    pass

class Dies(Tree):
    def evict(self, n):
        os._exit(3)

def radix(config):
    return DatesSplitsNew(config)

def unified_python(config):
    return Tree(config)

def unified_rust(config):
    if IS == "absent":
        raise ImportError("no core")
    return {"honest": Tree, "newest first": TakesNewestFirst, "leaky": Leaks, "dying": Dies}[IS](config)
'''


@pytest.fixture
def environ(tmp_path):
    """The variables of a machine where a stand-in for SGLang's Python is named."""
    (tmp_path / "other" / "sglang").mkdir(parents=True)
    (tmp_path / "other" / "sglang" / "__init__.py").touch()
    (tmp_path / "other" / "sitecustomize.py").write_text(FINDS_THE_STAND_INS)
    (tmp_path / "other" / "stand_ins.py").write_text(STAND_INS)
    python = tmp_path / "other" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/other exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    return {**os.environ, VARIABLE: str(python), "COLUMNS": "120"}


@pytest.fixture
def command(tmp_path, environ):
    """Run a command in a process and a folder of its own; return exit code, output and complaints."""
    (tmp_path / "here").mkdir()

    def run(*arguments, rust="honest"):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvlockstep", *map(str, arguments)],
            cwd=tmp_path / "here",
            env={**environ, "UNIFIED_RUST_IS": rust},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def in_process(monkeypatch, capfd, tmp_path):
    """Run a command in this process, on a machine where SGLang is nowhere."""
    monkeypatch.setattr(environments, "sglang_is_here", lambda: False)
    monkeypatch.setattr(environments, "PACKAGE", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlockstep", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, *capfd.readouterr()

    return run


def life(name, tokens):
    return [
        Submit(name, tokens),
        Match(name),
        Alloc((AllocItem(name, len(tokens)),)),
        Commit(name, len(tokens)),
        Release(name),
    ]


TWO = [*life("a", (1, 2, 3, 4)), *life("b", (8, 9))]
SPLIT = [*TWO, Submit("c", (1, 2, 7)), Peek("c"), Evict(1), Evict(1), Evict(1)]
"""The upper half of the first edge is as old as that, or as new as the peek; the second edge is between the two."""


@pytest.fixture
def stored(tmp_path):
    def write(ops=SPLIT, name="t.jsonl", policy="lru", **header):
        path = tmp_path / "here" / name
        config = CacheConfig(page_size=1, policy=policy)
        write_trace(path, Trace(Header(config, **{"target": "reference", **header}), list(ops)))
        return name

    return write


def state_of(target, lane, name, done=20_000, missed=(), ended=True):
    """Make the state of a worker that ran for a minute and reached all labels but those missed."""
    state = WorkerState(Order(target, lane, 60.0, 0, "out", name))
    statistics = Statistics(cases=10, cases_under_pressure=5, distinct_cases=9)
    statistics.outcomes.update({("alloc", "done"): done})
    statistics.labels.update({name_of(label): done for label in LABELS if name_of(label) not in missed})
    capabilities = ["drafts", "namespaces", "sharing"]
    follow(state, {"event": "ready", "lane": lane, "capabilities": capabilities})
    follow(state, {"event": "canary", "law": "WriteSlotRepeated", "operations": 13, "seconds": 0.1})
    facts = {"seconds": 60.0, "statistics": statistics.to_json(), "unobserved": [], "hidden": []}
    follow(state, {"event": "end" if ended else "progress", **facts})
    return state


def test_commands_start_without_torch_and_so_before_a_lane_is_chosen():
    loaded = "import sys, kvlockstep.fuzz.cli; print([name for name in ('torch', 'triton') if name in sys.modules])"

    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "[]\n"


# The verdict of a run on several targets


def test_each_target_must_have_reached_what_is_required():
    states = [
        state_of("gpu_impl", "torch", "gpu_impl-torch", missed=["out of rows"]),
        state_of(RADIX, "torch", "radix-torch", missed=["row reused"]),
        state_of(RADIX, "interpret", "radix-interpret", missed=["row reused", "out of rows"]),
    ]
    verdict = verdict_of(states, 60.0)

    assert verdict.code == UNKNOWN
    assert verdict.lines == ["gpu_impl: never reached: out of rows", f"{RADIX}: never reached: row reused"]


def test_run_that_is_clean_says_on_how_many_targets():
    states = [state_of("gpu_impl", "torch", "gpu_impl-torch"), state_of(RADIX, "torch", "radix-torch")]
    verdict = verdict_of(states, 60.0)

    assert verdict.code == CLEAN
    assert verdict.lines == ["clean: no law was broken, and every required state was reached, on each of 2 targets"]


def test_trees_of_sglang_have_floors_of_their_own():
    least = SGLANG_FLOOR_PER_MINUTE
    enough = [state_of(RADIX, lane, f"radix-{lane}", done=least[lane]) for lane in ("torch", "interpret")]
    too_few = [state_of(RADIX, "interpret", "radix-interpret", done=least["interpret"] - 1)]

    assert least["interpret"] < least["torch"] < FLOOR_PER_MINUTE["torch"]
    assert verdict_of(enough, 60.0).code == CLEAN
    assert verdict_of(too_few, 60.0).lines == [
        f"worker radix-interpret: {least['interpret'] - 1} operations done, expected {least['interpret']} in 60 s"
    ]
    assert verdict_of([state_of("gpu_impl", "torch", "torch", done=least["torch"])], 60.0).code == UNKNOWN


def test_target_that_was_not_run_leaves_the_run_unknown_and_hides_no_violation():
    good, bad = state_of("gpu_impl", "torch", "gpu_impl-torch"), state_of(PYTHON, "torch", "unified-python-torch")
    bad.failure, bad.replays = {"signature": "PageLeaked.abort"}, True

    assert verdict_of([good], 60.0, not_run=[RADIX, RUST]).lines == [f"not run: {RADIX}, {RUST}"]
    assert verdict_of([good], 60.0, not_run=[RADIX]).code == UNKNOWN
    found = verdict_of([good, bad], 60.0, not_run=[RADIX])
    assert (found.code, found.lines) == (VIOLATION, ["1 of 2 workers found a violation", f"not run: {RADIX}"])


def test_target_that_turned_out_unusable_leaves_the_others_their_verdict():
    good, stopped = (
        state_of("gpu_impl", "torch", "gpu_impl-torch"),
        state_of(RADIX, "torch", "radix-torch", ended=False),
    )
    unusable = WorkerState(Order(RADIX, "interpret", 60.0, 0, "out", "radix-interpret"), unusable="no kernels")

    assert verdict_of([good, stopped, unusable], 60.0).lines == ["no kernels", f"not run: {RADIX}"]
    assert verdict_of([good, stopped, unusable], 60.0).code == UNKNOWN
    assert verdict_of([stopped, unusable], 60.0).code == USAGE


def test_tables_show_as_many_workers_as_have_room_and_cut_no_name(capsys):
    states = [
        state_of(target, lane, f"{target.rpartition(':')[2]}-{lane}", done=1234 + i)
        for target in ("gpu_impl", *SGLANG_TARGETS)
        for i, lane in enumerate(("torch", "interpret"))
    ]
    for width in (120, 80):
        fuzz_command.console.width, before = width, fuzz_command.console.width
        print_run(fuzz_command.console, states)
        fuzz_command.console.width = before
        lines = capsys.readouterr().out.splitlines()
        headings = [line for line in lines if any(name in line for name in ("gpu_impl", "radix", "unified-"))]

        assert max(map(len, lines)) <= width
        assert len(headings) == {120: 2 * 2, 80: 2 * 4}[width]
        assert " ".join(headings).split().count("unified-python") == 4
        assert [line.split()[-2:] for line in lines if "operations done  " in line][-1] == ["1,234", "1,235"]


@pytest.mark.parametrize(
    ("workers", "names"),
    [
        ([("gpu_impl", "torch"), ("gpu_impl", "interpret")], ["torch", "interpret"]),
        ([(RADIX, "torch"), (RADIX, "interpret")], ["radix-torch", "radix-interpret"]),
        (
            [("gpu_impl", "torch"), (RADIX, "torch"), ("reference", None), ("mine:a", None), ("mine:b", None)],
            ["gpu_impl-torch", "radix-torch", "reference", "mine-1", "mine-2"],
        ),
    ],
)
def test_workers_of_several_targets_are_told_apart_by_name(workers, names):
    assert names_of(workers) == names


# Fuzzing


def test_fuzz_runs_each_target_in_its_environment_and_goes_on_without_one_that_is_not_there(command, tmp_path):
    options = ("--lanes", "torch", "--seconds", "1")
    code, out, err = command("fuzz", "--target", f"reference,{RADIX},{RUST}", *options, rust="absent")

    assert code == UNKNOWN
    assert "workers: reference, radix-torch, unified-rust-torch, seed 0" in out
    assert f"kvlockstep: target {RUST!r}: its factory raised ImportError: no core " in err
    assert f"kvlockstep: not run: {RUST}\n" in err
    (lanes,) = [line.split() for line in out.splitlines() if line.strip().startswith("lane ")]
    assert lanes == ["lane", "-", "torch"]
    assert f"{RADIX}: drawn: " in out
    assert sorted(path.name for path in (tmp_path / "here" / "out").iterdir()) == [
        "radix-torch.current.jsonl",
        "reference.current.jsonl",
    ]


def test_failure_of_another_environment_replays_and_is_minimized_there(command, tmp_path):
    code, out, err = command("fuzz", "--target", RUST, "--lanes", "torch", "--seconds", "5", rust="leaky")
    (line,) = [text.strip() for text in out.splitlines() if text.startswith("  replay ")]
    name, *replay = shlex.split(line.removeprefix("replay").strip())
    again = command(*replay, rust="leaky")
    repaired = command(*replay)
    minimized = command("minimize", "--seconds", "5", replay[-1], rust="leaky")
    short = read_trace(tmp_path / "here" / replay[-1].replace("trace.", "trace.min."))

    assert (code, err) == (VIOLATION, "")
    assert (name, replay[0]) == ("kvlockstep", "replay")
    assert "1 of 1 workers found a violation" in out
    assert (again[0], again[2]) == (VIOLATION, "")
    assert "FAILED: PageLeaked.abort" in again[1]
    assert repaired[0] == CLEAN
    assert (minimized[0], minimized[2]) == (CLEAN, "")
    assert (short.header.target, short.header.lane) == (RUST, "torch")


def test_single_target_without_its_environment_is_wrong_usage(in_process, tmp_path):
    needs = f"kvlockstep: target {RADIX!r} needs SGLang {SGLANG_VERSION}, which is not installed here: make sglang\n"
    write_trace(tmp_path / "t.jsonl", Trace(Header(CacheConfig(), target=RADIX, lane="torch"), list(TWO)))

    for arguments in (
        ("fuzz", "--target", RADIX, "--out", tmp_path / "out"),
        ("replay", tmp_path / "t.jsonl"),
        ("replay", "--target", RADIX, tmp_path / "t.jsonl"),
        ("minimize", tmp_path / "t.jsonl"),
    ):
        assert in_process(*arguments) == (USAGE, "", needs)
    both = in_process("fuzz", "--target", f"{RADIX},{RUST}", "--out", tmp_path / "out")
    assert both == (USAGE, "", needs + needs.replace(RADIX, RUST))
    assert not (tmp_path / "out").exists()


def test_all_goes_on_without_sglang_and_says_so_first_and_last(in_process, monkeypatch, tmp_path):
    monkeypatch.setattr(
        fuzz_command, "run_workers", lambda orders, progress: ([done_by(order) for order in orders], False)
    )
    done_by = lambda order: state_of(order.target, order.lane, order.name)  # noqa: E731
    code, out, err = in_process("fuzz", "--target", "all", "--out", tmp_path)
    first, *others = err.splitlines()

    assert code == UNKNOWN
    assert first == (
        f"kvlockstep: not run: target {RADIX!r} needs SGLang {SGLANG_VERSION}, which is not installed here: make sglang"
    )
    assert others[-1] == f"kvlockstep: not run: {RADIX}, {PYTHON}, {RUST}"
    assert "fuzzing gpu_impl for 60 s, workers: torch, interpret, seed 0" in out
    assert "a longer run" not in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--target", RADIX, "--lanes", "cuda"],
            f"target {RADIX!r} has no lane cuda, expected one of interpret, torch",
        ),
        (
            ["--target", "all", "--fault", "abort-keeps-lock"],
            "--fault abort-keeps-lock: expected one target with it, got 4",
        ),
        (["--target", "gpu_impl,vllm"], "unknown target 'vllm': expected gpu_impl, reference, "),
    ],
)
def test_fuzz_refuses_what_makes_no_sense(in_process, tmp_path, arguments, complaint):
    code, out, err = in_process("fuzz", *arguments, "--out", tmp_path / "out")

    assert (code, out) == (USAGE, "")
    assert err.startswith(f"kvlockstep: {complaint}")


def test_lane_that_one_of_several_targets_does_not_have_is_left_out_and_said(command):
    options = ("--lanes", "torch,cuda", "--seconds", "0.5")
    code, out, err = command("fuzz", "--target", f"reference,{RADIX},{RUST}", *options)

    assert code == UNKNOWN
    assert out.startswith(f"{RADIX} is not run on cuda, which it does not have\n{RUST} is not run on cuda, ")
    assert "workers: reference, radix-torch, unified-rust-torch, seed 0" in out
    assert "not run:" not in err


def test_more_workers_than_cores_is_said(in_process, monkeypatch, tmp_path):
    monkeypatch.setattr(fuzz_command, "run_workers", lambda orders, progress: ([], False))
    said = []
    for cores in (1, 2):
        monkeypatch.setattr(fuzz_command, "n_cores", lambda cores=cores: cores)
        said.append("workers share" in in_process("fuzz", "--seconds", "1", "--out", tmp_path)[1])

    assert said == [True, False]


def test_seeds_of_one_target_are_what_they_are_alone_and_differ_between_workers(in_process, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(fuzz_command, "run_workers", lambda orders, progress: (seen.append(orders), ([], False))[1])
    in_process("fuzz", "--seed", "3", "--out", tmp_path)
    in_process("fuzz", "--seed", "3", "--target", "gpu_impl,reference", "--out", tmp_path)

    assert [[order.seed for order in orders] for orders in seen] == [[6, 7], [9, 10, 11]]


def test_unusable_target_ends_its_own_workers_only(monkeypatch, tmp_path):
    (tmp_path / "two_targets.py").write_text(
        "import time\nfrom kvlockstep.fuzz.targets.reference import ReferenceTarget\n"
        "def absent(config):\n    raise OSError('not here')\n"
        "def slow(config):\n    time.sleep(1.0)\n    return ReferenceTarget(config)\n"
    )
    monkeypatch.chdir(tmp_path)
    orders = [
        Order(f"two_targets:{factory}", None, 0.2, 0, str(tmp_path), name)
        for factory, name in (("absent", "a"), ("slow", "b"))
    ]
    (absent, slow), interrupted = run_workers(orders, lambda states: None)

    assert "OSError: not here" in absent.unusable
    assert (slow.ended, slow.trouble, interrupted) == (True, None, False)
    assert slow.statistics.done > 0


# Replaying


def test_replay_on_several_targets_prints_a_row_each_and_compares_the_trees(command, stored):
    assert command("replay", stored(), "--target", f"reference,{RADIX},{PYTHON},{RUST}") == (
        CLEAN,
        "reference              CLEAN  15 operations without a violation\n"
        "sglang:radix           CLEAN  15 operations without a violation\n"
        "sglang:unified-python  CLEAN  15 operations without a violation\n"
        "sglang:unified-rust    CLEAN  15 operations without a violation\n"
        "the SGLang trees agree on hits, evicted prefixes and sizes: 15 operations\n",
        "",
    )


def test_difference_that_an_allowance_explains_is_named_and_no_violation(command, stored):
    code, out, err = command("replay", stored(policy="fifo"), "--target", ",".join(SGLANG_TARGETS))
    allowed = "evict different prefixes at step 13 (evict), as split_dates_upper_new allows; "
    allowed += "they agree on the 13 operations before, and are not compared from there on"

    assert (code, err) == (CLEAN, "")
    assert out.splitlines()[3:] == [
        f"{RADIX} and {PYTHON} {allowed}",
        f"{RADIX} and {RUST} {allowed}",
        f"{PYTHON} and {RUST} agree on hits, evicted prefixes and sizes: 15 operations",
    ]


def test_trees_that_differ_without_an_allowance_are_a_violation_with_both_values(command, stored):
    code, out, err = command("replay", stored(), "--target", f"{PYTHON},{RUST}", rust="newest first")

    assert (code, err) == (VIOLATION, "")
    assert out.splitlines() == [
        f"{PYTHON}  CLEAN  15 operations without a violation",
        f"{RUST}    CLEAN  15 operations without a violation",
        f"{PYTHON} and {RUST} differ at step 12 (evict) in evicted prefixes",
        f"  {PYTHON}  evicted [[[null, null, []], [1, 2, 3, 4]]]",
        f"  {RUST}    evicted [[[null, null, []], [8, 9]]]",
    ]


def test_replay_on_several_targets_ends_with_the_worst_verdict_of_those_that_took_the_trace(command, stored):
    discards = stored([*TWO[:3], Commit("a", 0), Release("a")], "discards.jsonl")
    dies = stored(name="dies.jsonl")
    cannot = "CANNOT TAKE IT  needs discards, which"

    assert command("replay", discards, "--target", f"reference,{RADIX}")[:2] == (
        CLEAN,
        f"reference     CLEAN           5 operations without a violation\n{RADIX}  {cannot} {RADIX} does not promise\n",
    )
    assert command("replay", discards, "--target", f"{RADIX},{PYTHON}")[0] == USAGE
    assert command("replay", discards, "--target", RADIX)[:2] == (
        USAGE,
        f"CANNOT TAKE IT: needs discards, which {RADIX} does not promise\n",
    )
    code, out, err = command("replay", dies, "--target", f"{RADIX},{RUST}", rust="dying")
    assert code == CRASHED
    assert f"{RUST}  NO VERDICT  exit code 11\n" in out
    assert "compared as far as both ran: sglang:radix ran 15, sglang:unified-rust ran 12" in out
    assert "left with status 3, without a verdict" in err


def test_replay_goes_on_without_targets_that_cannot_be_had_and_is_not_clean(command, stored, in_process, tmp_path):
    _, out, err = command("replay", stored(), "--target", f"{RADIX},{RUST}", rust="absent")
    assert f"{RUST}  NOT RUN  target {RUST!r}: its factory raised ImportError: no core (" in out
    assert err == ""

    needs = f"target {RADIX!r} needs SGLang {SGLANG_VERSION}, which is not installed here: make sglang"
    path = tmp_path / "here" / stored()
    code, out, _ = in_process("replay", path, "--target", f"reference,{RADIX}")
    assert (code, out.splitlines()[1]) == (UNKNOWN, f"{RADIX}  NOT RUN  {needs}")
    assert in_process("replay", path, "--target", f"{RADIX},{RUST}")[0] == USAGE


def test_replay_of_several_traces_on_several_targets_heads_each_with_its_name(command, stored):
    stored(name="one")
    stored(name="two", violates="PageLeaked", signature="PageLeaked.abort")
    code, out, _ = command("replay", "one", "two", "--target", "reference,gpu_impl")

    assert code == CLEAN
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["one:"],
        ["reference", "CLEAN"],
        ["gpu_impl", "CLEAN"],
        ["two:"],
        ["reference", "FIXED"],
        ["gpu_impl", "FIXED"],
    ]


def test_file_that_cannot_be_read_hides_no_violation_in_another(command, stored):
    code, out, err = command(
        "replay",
        "absent",
        stored([*life("a", (1, 2))[:4], Abort("a")]),
        "--target",
        f"reference,{RUST}",
        rust="leaky",
    )

    assert code == VIOLATION
    assert "FAILED" in out
    assert err == "kvlockstep: absent:1: cannot be read (No such file or directory): name a readable, undamaged trace\n"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--write", "again"], "--write again: expected one target with it, got 2"),
        (["--outcomes", "again"], "--outcomes again: expected one target with it, got 2"),
        (["--fault", "abort-keeps-lock"], "--fault abort-keeps-lock: expected one target with it, got 2"),
        (["--lane", "cuda"], f"target {RADIX!r} has no lane cuda, expected one of interpret, torch"),
    ],
)
def test_replay_on_several_targets_refuses_what_is_for_one(in_process, options, complaint):
    code, out, err = in_process("replay", "t.jsonl", "--target", f"gpu_impl,{RADIX}", *options)

    assert (code, out, err) == (USAGE, "", f"kvlockstep: {complaint}\n")


def test_planted_fault_is_kept_to_its_target_and_none_plants_nothing(command):
    trace = ROOT / "regressions" / "0002-abort-leaves-prefix-locked.jsonl"
    planted = command("replay", trace, "--target", "gpu_impl,reference")
    none = command("replay", trace, "--target", "gpu_impl,reference", "--fault", "none")

    assert (planted[0], none[0]) == (VIOLATION, CLEAN)
    assert [line.split()[:2] for line in planted[1].splitlines()] == [["gpu_impl", "FAILED"], ["reference", "FIXED"]]
    assert [line.split()[:2] for line in none[1].splitlines()] == [["gpu_impl", "FIXED"], ["reference", "FIXED"]]


# Outcomes


def outcomes_of(config, ops):
    seen = []
    lockstep = Lockstep(config, ReferenceTarget(config), watch=lambda op, what: seen.append(outcome_of(what)))
    for op in ops:
        lockstep.run(op)
    return seen


def test_outcome_names_prefixes_with_their_namespace_and_no_slots():
    config = CacheConfig(page_size=2, n_pages=4, n_rows=1)
    told = Submit("a", (1, 2, 3, 4), ("x", None, ("h",)))
    outcomes = outcomes_of(config, [told, *life("a", (1, 2, 3, 4))[1:], *life("b", (1, 2, 5, 6)), Evict(3), Match("c")])

    assert outcomes[-2] == {
        "step": 10,
        "op": "evict",
        "refused": None,
        "matched": None,
        "evicted": [[["x", None, ["h"]], [1, 2, 3, 4]]],
        "sizes": [4, 4, 0],
        "allowed": {},
    }
    assert (outcomes[-1]["refused"], outcomes[1]["matched"]) == ("UnknownRequest", 0)


def test_outcome_spells_the_whole_path_of_a_node_that_was_evicted():
    bigram = outcomes_of(CacheConfig(page_size=1, key_units="bigram"), [*life("a", (1, 2, 3)), Evict(2)])
    split = outcomes_of(CacheConfig(page_size=1), [*SPLIT[:-3], Evict(16)])

    assert bigram[-1]["evicted"] == [[[None, None, []], [[1, 2], [2, 3]]]]
    assert [units for _, units in split[-1]["evicted"]] == [[1, 2, 3, 4], [1, 2], [8, 9]]


def outcome(step, **changes):
    plain = {"step": step, "op": "evict", "refused": None, "matched": None, "evicted": [], "sizes": [4, 0, 0]}
    return {**plain, "allowed": {}, **changes}


ONE, TWO_PREFIXES = [[[None, None, []], [1]]], [[[None, None, []], [2]]]


def compared(first, second, policy="fifo", allowances=(("split_dates_upper_new",), ())):
    return compare_outcomes([Ran("one", allowances[0], first), Ran("two", allowances[1], second)], policy, "trees")


def test_allowance_explains_victims_only_after_it_made_a_difference():
    used, other = outcome(0, allowed={"split_dates_upper_new": 1}), outcome(0)
    first, second = outcome(1, evicted=ONE), outcome(1, evicted=TWO_PREFIXES)

    assert compared([used, first], [other, second]).agree
    assert not compared([other, first], [other, second]).agree
    assert not compared([used, first], [other, second], "lru").agree
    assert not compared([used, first], [used, second], allowances=(("split_dates_upper_new",),) * 2).agree


@pytest.mark.parametrize("changed", [{"matched": 4}, {"refused": "OutOfPages"}, {"sizes": [3, 1, 0]}])
def test_allowance_explains_nothing_but_victims_and_what_comes_of_them(changed):
    used = outcome(0, allowed={"split_dates_upper_new": 1})
    first, second = outcome(1, evicted=ONE), outcome(1, evicted=TWO_PREFIXES, **changed)

    assert not compared([used, outcome(1)], [outcome(0), outcome(1, **changed)]).agree
    assert compared([used, first], [outcome(0), second]).agree == ("sizes" in changed)


def test_victims_that_one_cache_does_not_show_are_not_compared():
    assert compared([outcome(0, evicted=None)], [outcome(0, evicted=ONE)]).agree
    assert not compared([outcome(0, evicted=None)], [outcome(0, evicted=ONE, sizes=[9, 9, 9])]).agree


def test_outcomes_are_written_for_each_operation_that_the_laws_accepted(command, stored, tmp_path):
    code, _, _ = command("replay", stored(), "--target", RADIX, "--outcomes", "o.jsonl", "--quiet")
    header, *lines = map(json.loads, (tmp_path / "here" / "o.jsonl").read_text().splitlines())

    assert code == CLEAN
    assert header == {"target": RADIX, "allowances": ["split_dates_upper_new"]}
    assert [line["step"] for line in lines] == list(range(len(SPLIT)))
    assert lines[11]["allowed"] == {"split_dates_upper_new": 1}
