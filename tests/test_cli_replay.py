"""``replay`` and ``minimize``: verdicts with their exit codes, what they print and write, and what an interrupt leaves.

Targets are the reference and wrong ones made from it, so that commands can run in this process.
"""

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from kvlockstep.fuzz import cli
from kvlockstep.fuzz.commands import minimize as minimize_command
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Abort, Alloc, AllocItem, Commit, Evict, Match, Peek, Release, Submit
from kvlockstep.fuzz.replay import failing_signature
from kvlockstep.fuzz.replay_files import worst
from kvlockstep.fuzz.targets.wrong import LeaksOnAbort
from kvlockstep.fuzz.trace import Header, Trace, read_trace, write_trace

CLEAN, VIOLATION, USAGE, UNKNOWN, CRASHED, BROKEN, INTERRUPTED = 0, 1, 2, 10, 11, 12, 130
LEAKY = "kvlockstep.fuzz.targets.wrong:LeaksOnAbort"
HEADER = Header(CacheConfig(), target=LEAKY)
OPS = [
    Submit("r0", (1, 2, 3)),
    Match("r0"),
    Alloc((AllocItem("r0", 3),)),
    Commit("r0", 3, (4,)),
    Submit("r1", tuple(range(1, 10))),
    Match("r1"),
    Peek("r9"),
    Evict(1),
    Abort("r0"),
    Abort("r1"),
]
LEAK = failing_signature(HEADER.config, OPS, LeaksOnAbort)[0] or ""


@pytest.fixture
def stored(tmp_path):
    def write(header=HEADER, ops=OPS, name="t.jsonl"):
        path = tmp_path / name
        write_trace(path, Trace(header, list(ops)))
        return path

    return write


def test_replay_says_failed_when_the_violation_is_there(stored, command):
    for header in (HEADER, replace(HEADER, violates="PageLeaked", signature=LEAK)):
        code, out, err = command("replay", "--target", LEAKY, stored(header))

        assert (code, err) == (VIOLATION, "")
        assert f"FAILED: {LEAK} at step 8 of 10 operations" in out
        assert "PageLeaked: " in out
        assert f"kvlockstep replay --target {LEAKY} " in out


def test_replay_says_fixed_when_a_stored_violation_does_not_come(stored, command):
    path = stored(replace(HEADER, violates="PageLeaked", signature=LEAK))
    code, out, err = command("replay", "--target", "reference", path)

    assert (code, err) == (CLEAN, "")
    assert f"FIXED: 10 operations without a violation, stored was {LEAK}" in out
    assert "9 done, 1 refused (1 UnknownRequest)" in out


def test_replay_says_different_when_another_violation_comes(stored, command):
    header = replace(HEADER, violates="PageOwnedTwice", signature="PageOwnedTwice.[red].release")
    code, out, _ = command("replay", "--quiet", "--target", LEAKY, stored(header))

    assert code == VIOLATION
    assert out == f"DIFFERENT: {LEAK} at step 8 of 10 operations, stored was PageOwnedTwice.[red].release\n"


def test_replay_says_refused_all_when_nothing_was_shown(stored, command):
    ops = [Match("r0"), Abort("r1"), Evict(0)]
    code, out, _ = command("replay", "--quiet", stored(replace(HEADER, target="reference"), ops))

    assert code == UNKNOWN
    assert out == "REFUSED-ALL: none of 3 operations was done, so nothing was shown\n"


def test_replay_says_clean_when_nothing_was_stored_and_nothing_came(stored, command):
    code, out, _ = command("replay", "--quiet", stored(replace(HEADER, target="reference")))

    assert code == CLEAN
    assert out == "CLEAN: 10 operations without a violation\n"


@pytest.mark.parametrize(("n_ops", "where"), [(10, "8 of 10 operations"), (9, "8, the last of 9 operations")])
def test_replay_says_at_which_step_and_whether_it_is_the_last(stored, command, n_ops, where):
    _, out, _ = command("replay", "--quiet", "--target", LEAKY, stored(ops=OPS[:n_ops]))

    assert out == f"FAILED: {LEAK} at step {where}\n"


def test_replay_of_several_traces_prints_a_verdict_for_each(tmp_path, monkeypatch, stored, command):
    monkeypatch.chdir(tmp_path)
    honest = replace(HEADER, target="reference")
    stored(honest, name="clean.jsonl")
    stored(honest, [Match("r0")], name="refused.jsonl")
    stored(replace(honest, violates="PageLeaked", signature=LEAK), name="-fixed [red].jsonl")

    assert command("replay", "clean.jsonl", "refused.jsonl", "--", "-fixed [red].jsonl") == (
        UNKNOWN,
        "clean.jsonl: CLEAN: 10 operations without a violation\n"
        "refused.jsonl: REFUSED-ALL: none of 1 operations was done, so nothing was shown\n"
        f"-fixed [red].jsonl: FIXED: 10 operations without a violation, stored was {LEAK}\n",
        "",
    )
    assert command("replay", "--target", LEAKY, "refused.jsonl", "clean.jsonl", "absent") == (
        VIOLATION,
        "refused.jsonl: REFUSED-ALL: none of 1 operations was done, so nothing was shown\n"
        f"clean.jsonl: FAILED: {LEAK} at step 8 of 10 operations\n",
        "kvlockstep: absent:1: cannot be read (No such file or directory): name a readable, undamaged trace\n",
    )


def test_replay_of_several_traces_runs_each_on_its_own_lane(tmp_path, monkeypatch, stored, command):
    monkeypatch.chdir(tmp_path)
    for lane in ("torch", "interpret"):
        stored(replace(HEADER, target="gpu_impl", lane=lane), name=lane)

    code, out, err = command("replay", "torch", "interpret")

    assert (code, err) == (CLEAN, "")
    assert [line.split(": ")[:2] for line in out.splitlines()] == [["torch", "CLEAN"], ["interpret", "CLEAN"]]


def test_replay_of_several_traces_names_those_whose_target_left_without_a_verdict(
    tmp_path, monkeypatch, stored, command
):
    (tmp_path / "dying_target.py").write_text("""
import os
from kvlockstep.fuzz.targets.reference import ReferenceTarget
class Dies(ReferenceTarget):
    def abort(self, request):
        os._exit(0)
    def evict(self, n):
        os.abort()
""")
    monkeypatch.chdir(tmp_path)
    stored(ops=[Abort("r0"), *OPS[:4], Abort("r0")], name="leaves")
    stored(ops=OPS, name="aborts")
    stored(ops=OPS[:4], name="clean")

    code, out, err = command("replay", "--target", "dying_target:Dies", "leaves", "aborts", "clean")

    assert code == CRASHED
    assert out == "clean: CLEAN: 4 operations without a violation\n"
    assert "kvlockstep: leaves: the process that ran it left with status 0, without a verdict\n" in err
    assert "kvlockstep: aborts: the process that ran it was killed by SIGABRT, without a verdict\n" in err


@pytest.mark.parametrize(("codes", "code"), [([0, 0], 0), ([0, 10], 10), ([10, 11, 2], 2), ([2, 12, 1, 0, 10], 1)])
def test_worst_of_several_exit_codes_is_the_violation_first(codes, code):
    assert worst(codes) == code


@pytest.mark.parametrize("name", ["again.jsonl", "again.jsonl.gz"])
def test_replay_writes_the_same_bytes_again(tmp_path, stored, command, name):
    path, again = stored(ops=OPS[:9], name=f"of-{name}"), tmp_path / name
    code, _, _ = command("replay", "--target", LEAKY, "--write", again, path)

    assert code == VIOLATION
    assert read_trace(again) == read_trace(path)
    if name.endswith("l"):
        assert again.read_bytes() == path.read_bytes()


def test_replay_does_not_write_over_the_trace_it_runs(stored, command):
    path = stored()
    before = path.read_bytes()
    code, _, err = command("replay", "--target", LEAKY, "--write", path, path)

    assert code == USAGE
    assert err == f"kvlockstep: --write {path}: is what is read, name another file\n"
    assert path.read_bytes() == before


def test_replay_of_a_target_that_cannot_be_had_does_not_cost_the_file_to_write(tmp_path, stored, command):
    path = stored()
    (tmp_path / "kept.jsonl").write_text("something else")
    code, _, _ = command("replay", "--target", "absent_module:make", "--write", tmp_path / "kept.jsonl", path)

    assert code == USAGE
    assert (tmp_path / "kept.jsonl").read_text() == "something else"


def test_replay_names_what_it_could_not_write(stored, command):
    full = command("replay", "--target", LEAKY, "--write", "/dev/full", stored())

    assert full == (BROKEN, "", "kvlockstep: --write /dev/full: No space left on device\n")


def test_minimize_names_what_it_could_not_write(monkeypatch, tmp_path, stored, command):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(minimize_command, "write_trace", full)
    out = tmp_path / "out.jsonl"
    code, _, err = command("minimize", "--target", LEAKY, "--out", out, stored())

    assert (code, err.splitlines()[-1]) == (BROKEN, f"kvlockstep: --out {out}: No space left on device")


def test_replay_says_so_when_the_target_leaves_the_process(tmp_path, monkeypatch, stored, command):
    (tmp_path / "leaving_target.py").write_text("""
from kvlockstep.fuzz.targets.reference import ReferenceTarget
class Leaves(ReferenceTarget):
    def abort(self, request):
        raise SystemExit(0)
""")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = stored()

    code, out, err = command("replay", "--target", "leaving_target:Leaves", path)

    assert (code, out) == (CRASHED, "")
    assert err == f"kvlockstep: {path}: target 'leaving_target:Leaves' left the process with status 0\n"


def test_bug_of_the_harness_is_exit_code_12_and_not_a_violation(stored, monkeypatch, capfd):
    def bug(*arguments):
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr("kvlockstep.fuzz.replay.verdict_of", bug)
    monkeypatch.setattr(sys, "argv", ["kvlockstep", "replay", "--target", "reference", str(stored())])
    with pytest.raises(SystemExit) as stopped:
        cli.main()

    assert stopped.value.code == BROKEN
    assert capfd.readouterr().err.endswith("its own bug: ZeroDivisionError: by accident\n")


def test_minimize_shortens_under_the_same_signature(tmp_path, stored, command):
    code, out, err = command("minimize", "--target", LEAKY, stored())
    short = read_trace(tmp_path / "t.min.jsonl")

    assert (code, err) == (CLEAN, "")
    assert f"{LEAK}: 10 operations to {len(short.ops)} in " in out
    assert f"kvlockstep replay --target {LEAKY} " in out
    assert short.header.signature == LEAK
    assert [type(op) for op in short.ops] == [Submit, Match, Alloc, Commit, Abort]


def test_minimize_goes_on_only_from_a_trace_of_the_same_cause(tmp_path, stored, command):
    other = tmp_path / "other.jsonl"
    write_trace(other, Trace(replace(HEADER, signature="PageLeaked.abort.x", fault="abort-keeps-lock"), OPS))
    before = other.read_bytes()
    code, _, err = command("minimize", "--target", LEAKY, "--out", other, stored())

    assert code == USAGE
    assert err == f"kvlockstep: --out {other}: is another trace, of PageLeaked.abort.x: name another file\n"
    assert other.read_bytes() == before


def test_minimize_says_where_a_trace_fails_otherwise_than_it_is_stored(stored, command):
    code, out, _ = command("minimize", "--target", LEAKY, stored(replace(HEADER, signature="PageOwnedTwice.alloc.x")))

    assert code == CLEAN
    assert "is stored as PageOwnedTwice.alloc.x, and fails as PageLeaked." in out


def test_minimize_refuses_a_trace_that_does_not_fail(tmp_path, stored, command):
    path = stored(replace(HEADER, target="reference"))
    code, out, err = command("minimize", path)

    assert (code, out) == (USAGE, "")
    assert err == f"kvlockstep: {path}: does not fail, so there is nothing to minimize; kvlockstep replay says more\n"
    assert os.listdir(tmp_path) == ["t.jsonl"]


def long_ops():
    """A leak behind twenty requests that have nothing to do with it."""
    ops = []
    for name in [f"n{number}" for number in range(20)]:
        ops += [Submit(name, (1, 2, 3)), Match(name), Alloc((AllocItem(name, 3),)), Commit(name, 3), Release(name)]
    return [*ops, *OPS[:4], Abort("r0")]


def test_minimize_goes_on_after_an_interrupt_and_reaches_the_same_minimum(tmp_path, stored):
    (tmp_path / "slow_target.py").write_text("""
import os, time
from kvlockstep.fuzz.targets.wrong import LeaksOnAbort
class Slow(LeaksOnAbort):
    def match(self, *arguments):
        time.sleep(float(os.environ["PAUSE"]))
        return super().match(*arguments)
""")
    path = stored(replace(HEADER, target="slow_target:Slow"), long_ops())
    out = tmp_path / "out.jsonl"

    def start(to, pause):
        command = [sys.executable, "-m", "kvlockstep", "minimize", "--target", "slow_target:Slow", "--out", to, path]
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, "PAUSE": str(pause)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    cut, straight = start(out, 0.02), start(tmp_path / "straight.jsonl", 0)
    while not (out.exists() and len(read_trace(out).ops) < len(long_ops())):
        assert cut.poll() is None
        time.sleep(0.02)
    cut.send_signal(signal.SIGINT)
    said, err = cut.communicate(timeout=30)
    straight.communicate(timeout=60)
    halfway = read_trace(out)

    assert (cut.returncode, err) == (INTERRUPTED, "")
    assert f"interrupted; the best so far is {out}; the same command goes on" in said
    assert 5 <= len(halfway.ops) < len(long_ops())

    resumed = start(out, 0)
    said, _ = resumed.communicate(timeout=60)

    assert resumed.returncode == CLEAN
    assert f"going on from {out}: {len(halfway.ops)} operations" in said
    assert out.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()
    assert len(read_trace(out).ops) == 5
