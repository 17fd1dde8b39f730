"""The command that hunts faults: what it prints, keeps and returns, and what it goes on from. Stubs play the hunts.

`test_faults_hunt.py` has the hunts themselves.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvlockstep.fuzz import cli
from kvlockstep.fuzz.commands import faults as faults_command
from kvlockstep.fuzz.faults import FAULTS as CATALOGUE
from kvlockstep.fuzz.faults import zoo
from kvlockstep.fuzz.faults.fault import PatchFault, SourceFault
from kvlockstep.fuzz.faults.hunt import Hunt, NullFault, Task
from kvlockstep.fuzz.faults.journal import Journal, JournalUnusable
from kvlockstep.fuzz.faults.summary import results_of, summaries_of
from kvlockstep.fuzz.faults.table import following, print_results
from kvlockstep.fuzz.registry import TargetUnusable

CLEAN, VIOLATION, USAGE, UNKNOWN, BROKEN, INTERRUPTED = 0, 1, 2, 10, 12, 130
ABORT, LOCK = CATALOGUE["abort-keeps-lock"], CATALOGUE["lock-only-last-node"]
TWO = ("--only", ABORT.name, "--only", LOCK.name, "--seeds", "2")
NULL = zoo.null_faults(["gpu_impl"])[0]


def caught(task):
    law = task.fault.laws[0] if task.fault.laws else "PageLeaked"
    cost = 100 * (task.seed + 1), 0.5 * (task.seed + 1)
    return Hunt(task.fault.name, task.seed, True, law, f"{law}.x", *cost, 40, 6 + task.seed, laws=(law,))


def missed(task):
    return Hunt(task.fault.name, task.seed, False, seconds=task.seconds)


def in_trouble(task):
    return Hunt(task.fault.name, task.seed, False, trouble="never reached", reached=0)


def honest(task):
    return missed(task) if isinstance(task.fault, NullFault) else caught(task)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run the command with hunts that end as they are told; return exit code, both outputs, and what was hunted.

    After ``stop`` of them comes Ctrl-C.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # as wide as a file, whatever the terminal of those who test

    def run(*arguments, hunts=honest, stop=None):
        hunted = []

        def hunt_all(tasks, jobs):
            for task in tasks:
                if len(hunted) == stop:
                    raise KeyboardInterrupt
                hunted.append(task)
                yield task, hunts(task)

        monkeypatch.setattr("kvlockstep.fuzz.faults.hunt.hunt_all", hunt_all)
        monkeypatch.setattr(sys, "argv", ["kvlockstep", "faults", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, *capsys.readouterr(), hunted

    return run


def kept():
    with open("out/faults/faults.json") as file:
        return json.load(file)


def row_of(out, name):
    (line,) = [line for line in out.splitlines() if line.strip().startswith(f"{name}  ")]
    return line.removeprefix(f"  {name}").split()


def test_faults_that_are_all_caught_end_with_0_and_medians_over_seeds(command):
    code, out, err, _ = command(*TWO)

    assert (code, err) == (CLEAN, "")
    assert row_of(out, ABORT.name) == ["2/2", "150", "0.8", "1.0", "6", ABORT.laws[0]]
    assert "2 faults, 4 hunts of 60 s at most: 2 caught with every seed, 0 missed, 0 with errors\n" in out
    assert "median over faults: 0.8 s, 150 operations, 6 when minimized\n" in out
    (of_abort, _) = kept()["faults"]
    assert (of_abort["fault"], of_abort["verdict"], of_abort["caught"]) == (ABORT.name, "caught", 2)
    assert (of_abort["seconds"], of_abort["slowest_seconds"], of_abort["minimized_len"]) == (0.75, 1.0, 6.5)


def test_fault_that_one_seed_misses_ends_with_1_and_says_which(command):
    code, out, _, _ = command(*TWO, hunts=lambda task: (missed if task.seed and task.fault is LOCK else caught)(task))

    assert code == VIOLATION
    assert row_of(out, LOCK.name)[0] == "1/2"
    assert f"missed: {LOCK.name} with 1 of 2 seeds (1): not found within 60 s\n" in out
    assert [of["verdict"] for of in kept()["faults"]] == ["caught", "missed"]


def test_fault_named_by_a_law_that_may_not_is_missed(command):
    def named_by_another(task):
        return replace(caught(task), caught=False, law="PageLeaked")

    code, out, _, _ = command(*TWO, hunts=named_by_another)

    assert code == VIOLATION
    assert "named by PageLeaked, which may not name it\n" in out


def test_fault_that_was_never_reached_is_an_error_and_neither_caught_nor_missed(command):
    code, out, err, _ = command(*TWO, hunts=lambda task: (in_trouble if task.fault is LOCK else caught)(task))

    assert code == BROKEN
    assert err == "kvlockstep: no verdict: 2 hunts ended in an error\n"
    assert f"error: {LOCK.name}: never reached\n" in out
    assert "1 caught with every seed, 0 missed, 1 with errors\n" in out


def test_missed_fault_outweighs_an_error(command):
    code, out, _, _ = command(*TWO, hunts=lambda task: (in_trouble if task.fault is LOCK else missed)(task))

    assert code == VIOLATION
    assert "1 missed, 1 with errors\n" in out


def test_null_fault_is_there_for_each_lane_and_must_not_be_caught(command):
    code, out, _, hunted = command("--only", "null", "--target", "gpu_impl", "--seeds", "2", "--null-seconds", "7")

    assert code == CLEAN
    assert {task.fault.lane for task in hunted} == {"torch", "interpret"}
    assert {task.seconds for task in hunted} == {7.0}
    assert row_of(out, "null (no patch), torch")[0] == "0/2"
    assert "nothing in 14 s" in out
    assert "null fault: 4 hunts, 28 s in all, no false alarm\n" in out


def test_null_fault_that_is_caught_is_a_false_alarm_and_ends_with_1(command):
    code, out, _, _ = command("--only", "null", "--target", "gpu_impl", "--seeds", "1", hunts=caught)

    assert code == VIOLATION
    assert "FALSE ALARM: PageLeaked" in out
    assert "false alarm: null, gpu_impl torch, seed 0: PageLeaked.x after 100 operations\n" in out
    assert {of["verdict"] for of in kept()["faults"]} == {"false alarm"}


def test_faults_of_a_target_that_cannot_be_had_are_said_and_end_with_10(command, monkeypatch):
    def python_for(target):
        if target != "gpu_impl":
            raise TargetUnusable(f"target {target!r} needs SGLang")
        return sys.executable

    monkeypatch.setattr(faults_command, "python_for", python_for)

    code, _, err, hunted = command("--seeds", "1")
    alone, _, _, none_hunted = command("--target", "sglang:radix")
    insisted, _, complaint, _ = command("--only", "radix-unlock-stops-one-node-early")

    assert (code, alone, insisted) == (UNKNOWN, UNKNOWN, USAGE)
    assert {task.fault.target for task in hunted} == {"gpu_impl"}
    assert none_hunted == []
    assert "kvlockstep: not looked for: target 'sglang:radix' needs SGLang\n" in err
    assert complaint == "kvlockstep: target 'sglang:radix' needs SGLang\n"


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--only", "abort-keeps-lok"], "unknown fault 'abort-keeps-lok': did you mean abort-keeps-lock"),
        (["--only", "nul"], "unknown fault 'nul': did you mean null"),
        (["--target", "vllm"], "unknown target 'vllm': expected "),
        (["--target", "reference"], "--target reference: no fault is planted there, expected gpu_impl, sglang:radix"),
        (
            ["--target", "sglang:radix", "--only", ABORT.name],
            f"fault {ABORT.name!r} is one of target 'gpu_impl', not of sglang:radix",
        ),
        (["--seeds", "0"], "Invalid value for '--seeds': "),
        (["--sample", "0"], "Invalid value for '--sample': "),
        (["--null-seconds", "nan"], "Invalid value for '--null-seconds': nan is not a time"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_of_faults_is_one_line_and_makes_nothing(command, arguments, wrong):
    code, out, err, hunted = command(*arguments)

    assert (code, out, hunted) == (USAGE, "", [])
    assert err.startswith(f"kvlockstep: {wrong}")
    assert err.count("\n") == 1
    assert os.listdir() == []


def test_same_command_goes_on_where_it_was_interrupted(command):
    first, out, _, _ = command(*TWO, stop=3)
    again, rest, _, hunted = command(*TWO)
    whole = kept()
    fresh, _, _, all_hunted = command(*TWO, "--fresh")

    assert (first, again, fresh) == (INTERRUPTED, CLEAN, CLEAN)
    assert "interrupted with 3 of 4 hunts done; the same command goes on\n" in out
    assert row_of(out, ABORT.name)[0] == "1/1"
    assert rest.startswith("3 of 4 hunts were done earlier: out/faults/hunts.jsonl\n")
    assert ([task.seed for task in hunted], len(all_hunted)) == ([1], 4)
    assert kept() == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_hunts_are_ended_and_those_before_are_kept(tmp_path, number):
    """The real ones: the null faults would go on for ten minutes."""
    asked = ["--target", "gpu_impl", "--only", "null", "--only", ABORT.name, "--seeds", "1", "--null-seconds", "600"]
    journal = tmp_path / "hunts.jsonl"
    with subprocess.Popen(
        [sys.executable, "-m", "kvlockstep", "faults", *asked, "--jobs", "3", "--out", tmp_path],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        until = time.monotonic() + 90.0
        while not (journal.exists() and journal.read_text().endswith("\n")) and time.monotonic() < until:
            time.sleep(0.2)
        process.send_signal(number)
        out, _ = process.communicate(timeout=30.0)

    assert process.returncode == INTERRUPTED
    assert out.endswith("interrupted with 1 of 3 hunts done; the same command goes on\n")
    assert json.loads(journal.read_text())["fault"] == ABORT.name


def test_fault_that_was_changed_is_looked_for_again(command, monkeypatch):
    command(*TWO)
    monkeypatch.setitem(CATALOGUE, LOCK.name, replace(LOCK, story="Another one."))
    _, _, _, hunted = command(*TWO)

    assert [(task.fault.name, task.seed) for task in hunted] == [(LOCK.name, 0), (LOCK.name, 1)]


@pytest.mark.parametrize(
    ("hunts", "arguments"), [(in_trouble, ()), (caught, ("--seconds", "30"))], ids=["no verdict", "other seconds"]
)
def test_hunt_that_answers_another_question_is_done_again(command, hunts, arguments):
    command(*TWO, hunts=hunts)
    _, _, _, hunted = command(*TWO, *arguments)

    assert len(hunted) == 4


def test_journal_passes_over_a_line_that_was_cut_and_goes_on_behind_it(tmp_path):
    path = tmp_path / "hunts.jsonl"
    tasks = [Task(ABORT, seed, 60.0) for seed in range(3)]
    with Journal(path, fresh=False) as journal:
        for task in tasks[:2]:
            journal.add(task, caught(task))
    path.write_text(path.read_text()[:-20])

    with Journal(path, fresh=False) as journal:
        assert [journal.done(task) for task in tasks] == [caught(tasks[0]), None, None]
        journal.add(tasks[2], caught(tasks[2]))

    with Journal(path, fresh=False) as journal:
        assert journal.done(tasks[2]) == caught(tasks[2])


def test_journal_tells_hunts_without_a_law_from_the_others(tmp_path):
    task, without = Task(ABORT, 0, 60.0), Task(ABORT, 0, 60.0, 5)
    with Journal(tmp_path / "hunts.jsonl", fresh=False) as journal:
        journal.add(without, replace(caught(without), without=5))
    with Journal(tmp_path / "hunts.jsonl", fresh=False) as journal:
        assert journal.done(task) is None
        assert journal.done(without).without == 5


@pytest.mark.parametrize("line", ["what?", "{}", '{"fingerprint": "x", "allowed_seconds": 1, "laws": [], "more": 1}'])
def test_file_that_is_no_journal_is_wrong_usage_and_stays(command, line):
    os.makedirs("out/faults")
    with open("out/faults/hunts.jsonl", "w") as file:
        file.write(f"{line}\n")

    code, _, err, hunted = command(*TWO)

    assert (code, hunted) == (USAGE, [])
    assert err == "kvlockstep: out/faults/hunts.jsonl:1: no hunt of this version; --fresh begins anew\n"
    assert Path("out/faults/hunts.jsonl").read_text() == f"{line}\n"


def test_journal_that_another_command_writes_is_refused_and_not_emptied(tmp_path):
    path = tmp_path / "hunts.jsonl"
    with Journal(path, fresh=False) as journal:
        journal.add(Task(ABORT, 0, 60.0), caught(Task(ABORT, 0, 60.0)))
        with pytest.raises(JournalUnusable, match="another command writes it"):
            Journal(path, fresh=True)

    assert path.read_text().count("\n") == 1


def test_folder_that_cannot_be_made_is_exit_code_12_before_any_hunt(command):
    open("file", "w").close()
    code, _, err, hunted = command(*TWO, "--out", "file/faults")

    assert (code, hunted) == (BROKEN, [])
    assert err == "kvlockstep: --out file/faults: Not a directory\n"


def test_results_do_not_depend_on_the_order_in_which_hunts_end():
    tasks = zoo.tasks_for([ABORT, LOCK], 3, 60.0, 60.0)
    hunts = [caught(task) for task in tasks]
    one, other = (
        json.dumps(results_of(summaries_of([ABORT, LOCK], some), 3, 60.0, 60.0)) for some in (hunts, hunts[::-1])
    )

    assert one == other
    assert len(json.loads(one)["hunts"]) == 6


def test_sample_has_every_kind_of_every_target_and_is_always_the_same():
    def strata(faults):
        return {(fault.target, fault.kind) for fault in faults if not isinstance(fault, NullFault)}

    sample, whole = zoo.choose(None, (), 1), zoo.choose(None, ())

    assert strata(sample) == strata(whole)
    assert len([fault for fault in sample if not isinstance(fault, NullFault)]) == len(strata(whole))
    assert sample == zoo.choose(None, (), 1)
    assert {fault.name for fault in sample} < {fault.name for fault in zoo.choose(None, (), 2)}
    assert zoo.choose("gpu_impl", (), 1) == [fault for fault in sample if fault.target == "gpu_impl"]


def test_each_target_and_lane_with_faults_has_a_null_fault():
    nulls = [(fault.target, fault.lane) for fault in zoo.choose(None, [zoo.NULL])]

    assert sorted(nulls) == sorted({(fault.target, fault.lane) for fault in CATALOGUE.values()})


PRINT_FINGERPRINTS = """
from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults.zoo import fingerprint
for fault in FAULTS.values():
    print(fault.name, fingerprint(fault))
"""


def test_fingerprints_are_the_same_in_every_process_and_of_each_fault_another():
    said = {
        subprocess.run(
            [sys.executable, "-c", PRINT_FINGERPRINTS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert said == {"".join(f"{name} {zoo.fingerprint(fault)}\n" for name, fault in CATALOGUE.items())}
    assert len({zoo.fingerprint(fault) for fault in CATALOGUE.values()}) == len(CATALOGUE)


def planting(wrapper):
    def plant(patch):
        patch.around("somewhere", wrapper)

    return plant


def patch_fault(wrapper):
    fields = {"name": "x", "story": "x", "kind": "x", "laws": ("PageLeaked",), "target": "sglang:radix"}
    return PatchFault(plant=planting(wrapper), **fields)


def test_fingerprint_follows_the_code_of_a_patch():
    one, same, other = (
        zoo.fingerprint(patch_fault(wrapper))
        for wrapper in (lambda f, x: f(x + 1), lambda f, x: f(x + 1), lambda f, x: f(x + 2))
    )

    assert one == same
    assert one != other


def test_fingerprint_follows_every_field_and_the_version(monkeypatch):
    source = next(fault for fault in CATALOGUE.values() if isinstance(fault, SourceFault))
    known = zoo.fingerprint(source)

    assert zoo.fingerprint(replace(source, new=source.new + " ")) != known
    assert zoo.fingerprint(replace(source, laws=())) != known
    monkeypatch.setattr(zoo, "version", lambda name: "0")
    assert zoo.fingerprint(source) != known


LONGEST = max(CATALOGUE.values(), key=lambda fault: len(fault.name))


@pytest.mark.parametrize("columns", [40, 80, 100, 120])
def test_table_keeps_names_whole_and_says_which_law_named_them(columns):
    faults = [LONGEST, LOCK]
    hunts = [
        Hunt(fault.name, seed, True, law, law, 123456, 59.9, 400, 38)
        for fault in faults
        for seed, law in enumerate(("RowOffCanonicalPath", "EvictableSetWrong"))
    ]
    text = StringIO()

    print_results(Console(file=text, width=columns), summaries_of(faults, hunts), 60.0)
    out = text.getvalue()

    assert out.count("EvictableSetWrong, ") == out.count("RowOffCanonicalPath") == 2
    for fault in faults:
        line = next(line for line in out.splitlines() if fault.name in line)
        if columns != 40:
            assert line.split()[:6] == [fault.name, "2/2", "123,456", "59.9", "59.9", "38"]


def test_progress_in_a_pipe_is_plain_lines_and_names_at_once_what_is_wrong():
    text = StringIO()
    tasks = [Task(fault, 0, 60.0) for fault in (ABORT, LOCK, NULL)]
    with following(Console(file=text, width=120), 3, every=0.0) as follow:
        for task, hunt in zip(tasks, (caught(tasks[0]), missed(tasks[1]), caught(tasks[2])), strict=True):
            follow(task, hunt)

    assert text.getvalue().splitlines() == [
        "1/3 hunts, about 0 s left",
        f"missed: {LOCK.name}, seed 0: not found within 60 s",
        "2/3 hunts, about 0 s left",
        "false alarm: null, gpu_impl torch, seed 0: PageLeaked.x after 100 operations",
        "3/3 hunts, in 0 s",
    ]


def test_progress_on_a_terminal_is_a_bar_that_goes_away():
    text = StringIO()
    task = Task(LOCK, 0, 60.0)
    with following(Console(file=text, width=120, force_terminal=True), 2) as follow:
        follow(task, in_trouble(task))

    assert "1/2" in text.getvalue()
    assert f"error: {LOCK.name}, seed 0: never reached" in text.getvalue()
    assert text.getvalue().endswith("\x1b[2K")


def test_ablation_hunts_again_without_the_only_law_and_says_what_is_missed(command):
    def hunts(task):
        if task.without is not None:
            return replace((missed if task.seed else caught)(task), without=task.without)
        laws = ("LockCountWrong",) if task.fault is ABORT else ("LockCountWrong", "PageLeaked")
        return replace(caught(task), law="LockCountWrong", laws=laws)

    code, out, _, hunted = command(*TWO, "--ablation", hunts=hunts)
    again, _, _, none_hunted = command(*TWO, "--ablation", hunts=hunts)

    assert (code, again, none_hunted) == (CLEAN, CLEAN, [])
    assert [(task.fault.name, task.seed, task.without) for task in hunted[4:]] == [
        (ABORT.name, 0, 5),
        (ABORT.name, 1, 5),
    ]
    assert row_of(out, "law 5") == ["2", "1", "1", "1", ABORT.name]
    assert row_of(out, "law 9") == ["0", "0", "0", "0", "no", "fault", "breaks", "it"]
    of_law = {worth["group"]: worth for worth in kept()["ablation"]["laws"]}
    assert of_law["law 5"]["missed"] == [ABORT.name]
    assert (of_law["law 1"]["breaks"], of_law["law 1"]["only_one"]) == ([LOCK.name], [])
    assert len(kept()["ablation"]["hunts"]) == 2
