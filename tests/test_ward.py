"""The ward: targets that kill their process, hang or eat memory, and what is left of them, which is a signature.

The targets are made from the reference in a file of its own, and never imported into this process.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.minimize import Minimizer
from kvlockstep.fuzz.ops import Abort, Alloc, AllocItem, Checkpoint, Commit, Match, Peek, Submit
from kvlockstep.fuzz.registry import TargetUnusable
from kvlockstep.fuzz.replay import failing_signature, run_ops
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.targets.wrong import LeaksOnAbort
from kvlockstep.fuzz.trace import Header, Trace, read_trace, write_trace
from kvlockstep.fuzz.trace_bounds import NAME, SIGNATURE
from kvlockstep.fuzz.ward import Limits, Ward, WardClosed, WardFailed, is_of_ward

CLEAN, VIOLATION, USAGE, BROKEN = 0, 1, 2, 12
MODULE = '''
import os, signal, subprocess, sys, time
from kvlockstep.fuzz.targets.reference import ReferenceTarget

class Harmless(ReferenceTarget):
    """Does harm at a checkpoint after which two nodes are published."""

    def harm(self):
        pass

    def checkpoint(self, request):
        super().checkpoint(request)
        if len(list(self.cache.tree.nodes())) > 1:
            self.harm()

class Segfaults(Harmless):
    def harm(self):
        os.kill(os.getpid(), signal.SIGSEGV)

class LeavesAtOnce(Harmless):
    def harm(self):
        os._exit(3)

class Leaves(Harmless):
    def harm(self):
        sys.exit(4)

class Aborts(Harmless):
    def harm(self):
        os.abort()

class Hangs(Harmless):
    def harm(self):
        while True:
            pass

class HangsWithChild(Harmless):
    def harm(self):
        child = subprocess.Popen(["sleep", "600"])
        open("pids", "w").write(f"{os.getppid()} {os.getpid()} {child.pid}\\n")
        time.sleep(600)

class Devours(Harmless):
    def harm(self):
        eaten = []
        while True:
            eaten.append(b"x" * 10_000_000)

class Gains(ReferenceTarget):
    """Each pass leaves 100 MB behind."""

    def __init__(self, config):
        super().__init__(config)
        self.gained = []

    def alloc(self, batch):
        self.gained.append(b"x" * 100_000_000)
        return super().alloc(batch)

class DiesAtOnce(ReferenceTarget):
    def __init__(self, config):
        os._exit(5)

def raises(config):
    raise RuntimeError("no room")
'''
CONFIG = CacheConfig(page_size=1, n_pages=16, n_rows=4, max_context_len=12)
MIB = 1 << 20


def started(name, *tokens):
    first = [Submit(name, tokens), Match(name), Alloc((AllocItem(name, len(tokens)),)), Commit(name, len(tokens))]
    return [*first, Checkpoint(name)]


OPS = [Peek("r9"), *started("r0", 1, 2, 3), Peek("r1"), *started("r1", 4, 5, 6, 7), *started("r2", 8), Abort("r0")]
HARM = OPS.index(Checkpoint("r1"))
LIMITS = Limits(hang_seconds=20.0, memory_bytes=250 * MIB)
IN_A_HURRY = replace(LIMITS, hang_seconds=1.0)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    (tmp_path / "harmful.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ward():
    """Open a ward for one of the targets in MODULE; it is closed in the end."""
    opened = []

    def make(name, lane=None, limits=LIMITS):
        opened.append(Ward(name if ":" in name else f"harmful:{name}", lane, limits=limits))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def store(path, name, signature, ops=OPS):
    header = Header(CONFIG, target=f"harmful:{name}", signature=signature, violates=signature.partition(".")[0])
    write_trace(path, Trace(header, list(ops)))
    return path


def is_running(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def assert_end(pids, seconds=20.0):
    until = time.monotonic() + seconds
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < until, f"still running: {running}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("Segfaults", "Died.checkpoint.SIGSEGV"),
        ("LeavesAtOnce", "Died.checkpoint.exit3"),
        ("Leaves", "Died.checkpoint.exit4"),
        ("Aborts", "Died.checkpoint.SIGABRT"),
        ("Hangs", "Hung.checkpoint"),
        ("Devours", "OutOfMemory.checkpoint"),
    ],
)
def test_ward_names_the_end_and_its_operation(ward, name, signature):
    ended = ward(name, limits=IN_A_HURRY if name == "Hangs" else LIMITS).run(CONFIG, OPS)

    assert (ended.signature, ended.steps) == (signature, HARM + 1)
    law, step, config = ended.text.split("\n")
    assert law.startswith(f"{signature.partition('.')[0]}: ")
    assert step == f"  step      {HARM}: checkpoint r1"
    assert config.endswith(f" target=harmful:{name}")
    assert re.fullmatch(SIGNATURE, ended.signature)
    assert re.fullmatch(NAME, law.partition(":")[0])
    assert is_of_ward(ended.signature)
    assert "harmful" not in sys.modules


def test_memory_left_behind_is_found_after_the_same_operation_each_time(ward):
    kept = ward("Gains")
    third = OPS.index(Alloc((AllocItem("r2", 1),)))

    assert [kept.judge(CONFIG, OPS) for _ in range(5)] == [("OutOfMemory.alloc", third + 1)] * 5
    assert "expected 250" in kept.last.text
    assert ward("Gains", limits=Limits(memory_bytes=400 * MIB)).judge(CONFIG, OPS) == (None, len(OPS))


def test_hang_is_found_in_its_time_and_ends(ward):
    kept = ward("HangsWithChild", limits=Limits(hang_seconds=0.5))
    begun = time.monotonic()
    signature, _ = kept.judge(CONFIG, OPS)
    took = time.monotonic() - begun

    assert signature == "Hung.checkpoint"
    assert 0.5 < took < 5.0
    assert_end(map(int, Path("pids").read_text().split()[1:]))


def test_judge_says_what_is_said_in_this_process(ward):
    kept = ward("kvlockstep.fuzz.targets.wrong:LeaksOnAbort")
    config = replace(CONFIG, page_size=2)  # the last page of r0 is not whole, so it is no node's

    assert kept.judge(config, OPS) == failing_signature(config, OPS, LeaksOnAbort)
    assert kept.last.text.startswith("PageLeaked: ")
    assert kept.judge(config, OPS[:-1]) == (None, len(OPS) - 1)
    assert not is_of_ward("PageLeaked.abort")


def test_run_says_what_is_said_in_this_process(ward):
    ended, expected = ward("Harmless").run(CONFIG, OPS), run_ops(CONFIG, OPS, ReferenceTarget, digest=True)

    assert (ended.digest, ended.statistics) == (expected.digest, expected.statistics)
    assert (ended.signature, ended.steps, ended.text) == (None, len(OPS), "")


def test_child_begins_from_nothing_where_a_context_would_not_survive(ward):
    kept = ward("Segfaults", "cuda")

    assert kept.judge(CONFIG, OPS) == ("Died.checkpoint.SIGSEGV", HARM + 1)
    assert kept.judge(CONFIG, OPS[:HARM]) == (None, HARM)
    assert "lane=cuda" in Ward.run(kept, CONFIG, OPS).text


def test_runs_share_no_state(place, ward):
    text = "\n".join(["N = []", "class Once(Harmless):", "    def harm(self):", "        N.append(1)"])
    (place / "harmful.py").write_text(f"{MODULE}\n{text}\n        if len(N) > 1: os._exit(9)\n")
    kept = ward("Once")

    assert [kept.judge(CONFIG, OPS[: HARM + 1])[0] for _ in range(3)] == [None] * 3


def test_many_runs_are_cheap(ward, record_property):
    kept = ward("Segfaults")
    kept.judge(CONFIG, OPS)
    begun = time.monotonic()
    for _ in range(20):
        kept.judge(CONFIG, OPS)
    each = (time.monotonic() - begun) / 20
    record_property("show", f"a run in the ward: {1000 * each:.0f} ms")

    assert each < 0.5


def test_target_that_cannot_be_made_has_a_signature_or_a_reason(ward):
    kept = ward("DiesAtOnce")
    ended = kept.run(CONFIG, OPS)

    assert (ended.signature, ended.steps) == ("Died.start.exit5", 0)
    assert ended.text.startswith("Died: the process left with status 5 in making the target\n  step      none\n")
    with pytest.raises(TargetUnusable, match="left with status 5"):
        kept.make(CONFIG)
    with pytest.raises(TargetUnusable, match="its factory raised RuntimeError: no room"):
        ward("raises").judge(CONFIG, OPS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("import nonsense", "No module named 'nonsense'"), ("import os; os._exit(7)", "left with status 7")],
)
def test_target_that_cannot_be_imported_is_unusable(place, text, reason):
    (place / "harmful.py").write_text(text)

    with pytest.raises(TargetUnusable, match=reason):
        Ward("harmful:Segfaults", None)


def test_promises_are_those_of_the_target(ward):
    promises = ward("Segfaults").make(CONFIG)

    assert promises.capabilities == ReferenceTarget(CONFIG).capabilities


def test_interrupt_ends_the_run_at_hand(ward):
    kept = ward("HangsWithChild", limits=Limits())
    threading.Timer(0.5, kept.interrupt).start()

    with pytest.raises(WardClosed):
        kept.judge(CONFIG, OPS)
    with pytest.raises(WardClosed):
        kept.judge(CONFIG, OPS)
    kept.close()
    assert_end(map(int, Path("pids").read_text().split()))


def test_nothing_is_left_when_its_owner_is_killed(place):
    (place / "owner.py").write_text(
        "from kvlockstep.fuzz.trace import read_trace\n"
        "from kvlockstep.fuzz.ward import Ward\n"
        "trace = read_trace('t.jsonl')\n"
        "Ward('harmful:HangsWithChild', None).judge(trace.header.config, trace.ops)\n"
    )
    store(place / "t.jsonl", "HangsWithChild", "Hung.checkpoint")
    (place / "tmp").mkdir()
    owner = subprocess.Popen([sys.executable, "-P", "owner.py"], env=os.environ | {"TMPDIR": str(place / "tmp")})
    until = time.monotonic() + 30
    while not (place / "pids").exists() or not (place / "pids").read_text().endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.05)
    owner.send_signal(signal.SIGKILL)
    owner.wait()

    assert_end(map(int, (place / "pids").read_text().split()))
    assert os.listdir(place / "tmp") == []


@pytest.mark.parametrize("lane", [None, "cuda"])
def test_child_ends_with_its_keeper(place, ward, lane):
    kept = ward("HangsWithChild", lane, Limits())

    def kill():
        while not (place / "pids").exists() or not (place / "pids").read_text().endswith("\n"):
            time.sleep(0.05)
        kept._process.kill()

    threading.Thread(target=kill).start()
    with pytest.raises(WardFailed, match="the process that keeps the ward was ended by signal 9"):
        kept.judge(CONFIG, OPS)
    assert_end([int(pid) for pid in (place / "pids").read_text().split()[:2]])
    os.kill(int((place / "pids").read_text().split()[2]), signal.SIGKILL)


@pytest.mark.parametrize("name", ["Segfaults", "LeavesAtOnce"])
def test_minimizer_reaches_the_shortest_trace_in_a_ward(ward, name):
    kept = ward(name)
    signature, _ = kept.judge(CONFIG, OPS)
    search = Minimizer(CONFIG, tuple(OPS), kept.make, signature, seconds=60.0, judge=kept.judge)

    assert search.run()
    assert len(search.ops) == 10  # two requests: submit, match, alloc, commit, checkpoint
    assert kept.judge(search.config, search.ops) == (signature, 10)
    assert "harmful" not in sys.modules


def test_minimizer_asks_its_judge_alone():
    asked = []

    def judge(config, ops):
        asked.append(ops)
        return ("Died.peek.exit1", len(ops)) if Peek("r1") in ops else (None, len(ops))

    search = Minimizer(CONFIG, tuple(OPS), ReferenceTarget, "Died.peek.exit1", seconds=60.0, judge=judge)

    assert search.run()
    assert search.tried == len(asked)
    assert [type(op) for op in search.ops] == [Peek]


@pytest.mark.parametrize(
    ("name", "signature", "verdict", "code"),
    [
        ("Segfaults", "Died.checkpoint.SIGSEGV", f"FAILED: Died.checkpoint.SIGSEGV at step {HARM} of 18", VIOLATION),
        ("Hangs", "Hung.checkpoint", f"FAILED: Hung.checkpoint at step {HARM} of 18", VIOLATION),
        ("Hangs", "Died.checkpoint.exit3", "DIFFERENT: Hung.checkpoint", VIOLATION),
        ("Gains", "OutOfMemory.alloc", "FAILED: OutOfMemory.alloc", VIOLATION),
        ("DiesAtOnce", "Died.start.exit5", "FAILED: Died.start.exit5 before the first of 18 operations", VIOLATION),
        ("Harmless", "Hung.checkpoint", "FIXED: 18 operations without a violation, stored was Hung.checkpoint", CLEAN),
    ],
)
def test_replay_runs_a_stored_death_in_a_ward(place, command, name, signature, verdict, code):
    path = store(place / "t.jsonl", name, signature)
    seconds = 1 if name == "Hangs" else 20
    got, out, err = command(
        "replay",
        "--hang-seconds",
        seconds,
        "--memory",
        "250M",
        "--target",
        f"harmful:{name}",
        "--write",
        "w.jsonl",
        path,
    )

    assert (got, err) == (code, "")
    assert f"\n{verdict}" in f"\n{out}"
    assert "harmful" not in sys.modules
    if code == CLEAN:
        assert "  digest    " in out
        assert read_trace("w.jsonl").ops == OPS
    elif name == "Segfaults":
        assert out.startswith("Died: the process was ended by SIGSEGV in checkpoint\n")
        assert "  replay    kvlockstep replay --target harmful:Segfaults t.jsonl\n" in out
        assert read_trace("w.jsonl").ops == OPS[: HARM + 1]


def test_replay_says_what_the_target_of_a_stored_death_lacks(place, command):
    ops = [Submit("r0", (1,), private=True), *OPS]
    text = "class Plain(Harmless):\n    def __init__(self, config):\n        super().__init__(config)\n"
    text += "        self.capabilities -= {'private'}\n"
    (place / "harmful.py").write_text(f"{MODULE}\n{text}")
    path = store(place / "t.jsonl", "Plain", "Hung.checkpoint", ops)
    code, out, _ = command("replay", "--target", "harmful:Plain", path)

    assert code == USAGE
    assert out == "CANNOT TAKE IT: needs private, which harmful:Plain does not promise\n"


def test_replay_writes_the_outcomes_of_a_stored_death(place, command):
    path = store(place / "t.jsonl", "Segfaults", "Died.checkpoint.SIGSEGV")
    options = ("replay", "--target", "harmful:Segfaults", path, "--outcomes")

    assert command(*options, "o.jsonl")[0] == VIOLATION
    assert len((place / "o.jsonl").read_text().splitlines()) == 1 + HARM
    code, _, err = command(*options, "nowhere/o.jsonl")
    assert code == BROKEN
    assert err == f"kvlockstep: --outcomes nowhere/o.jsonl: {place}/nowhere/o.jsonl: No such file or directory\n"


def test_replay_of_several_deaths_gives_a_verdict_each(place, command):
    one = store(place / "1.jsonl", "Segfaults", "Died.checkpoint.SIGSEGV")
    two = store(place / "2.jsonl", "Segfaults", "Hung.checkpoint")
    code, out, _ = command("replay", "--target", "harmful:Segfaults", one, two)

    assert code == VIOLATION
    assert f"{one}: FAILED: Died.checkpoint.SIGSEGV" in out
    assert f"{two}: DIFFERENT: Died.checkpoint.SIGSEGV" in out


def test_minimize_shortens_a_stored_death(place, command):
    path = store(place / "t.jsonl", "Segfaults", "Died.checkpoint.SIGSEGV")
    code, out, _ = command("minimize", "--target", "harmful:Segfaults", path)
    shortest = read_trace(place / "t.min.jsonl")

    assert code == CLEAN
    assert "Died.checkpoint.SIGSEGV: 18 operations to 10" in out
    assert shortest.header.signature == "Died.checkpoint.SIGSEGV"
    assert shortest.header.violates == "Died"
    code, out, _ = command("replay", "--target", "harmful:Segfaults", place / "t.min.jsonl")
    assert code == VIOLATION
    assert "FAILED: Died.checkpoint.SIGSEGV at step 9, the last of 10 operations, as stored" in out


def test_minimize_says_that_a_stored_death_does_not_come(place, command):
    path = store(place / "t.jsonl", "Harmless", "Died.checkpoint.SIGSEGV")
    code, _, err = command("minimize", "--target", "harmful:Harmless", path)

    assert code == USAGE
    assert "does not fail, so there is nothing to minimize" in err


def test_ward_closes_and_takes_its_files_with_it(ward):
    kept = ward("Harmless")
    folder, keeper = kept._folder.name, kept._process.pid
    assert os.path.isdir(folder)
    kept.close()

    assert not os.path.exists(folder)
    assert not is_running(keeper)


@pytest.mark.parametrize("lane", ["torch", "interpret"])
def test_shipped_implementation_runs_in_a_ward(lane):
    with Ward("gpu_impl", lane) as kept:
        ended = kept.run(CONFIG, OPS)

        assert (ended.signature, ended.steps) == (None, len(OPS))
        assert ended.statistics.done > 10
        assert kept.judge(replace(CONFIG, page_size=2), OPS) == (None, len(OPS))


@pytest.mark.needs("sglang")
def test_sglang_runs_in_a_ward_with_its_own_python():
    with Ward("sglang:radix", "torch") as kept:
        assert kept.judge(CONFIG, OPS) == (None, len(OPS))
