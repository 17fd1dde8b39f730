"""``fuzz`` on targets that misbehave, on disks that are full, and under signals: exit codes, and nothing found is lost.

The targets are an adopter's own module in the working folder, each a subclass of the honest one. Every run is a
process of its own in a folder of its own.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlockstep.fuzz.commands import fuzz as fuzz_command
from kvlockstep.fuzz.crew import run_workers
from kvlockstep.fuzz.labels import LABELS, name_of
from kvlockstep.fuzz.ops import Release
from kvlockstep.fuzz.places import names_of
from kvlockstep.fuzz.trace import read_trace
from kvlockstep.fuzz.verdict import Verdict
from kvlockstep.fuzz.worker import Order

CLEAN, VIOLATION, USAGE, UNKNOWN, CRASHED, BROKEN, INTERRUPTED = 0, 1, 2, 10, 11, 12, 130
TARGETS = '''
import os, signal, sys, time
from kvlockstep.fuzz.targets.reference import ReferenceTarget

class Odd(Exception):
    """Its text is what a terminal, a file name and a header cannot take as it is."""

class Raises(ReferenceTarget):
    def release(self, request):
        raise Odd("first line\\nsecond [red]line[/] :bug: \\ud800")

class RaisesOnce(ReferenceTarget):
    n = 0
    def release(self, request):
        RaisesOnce.n += 1
        if RaisesOnce.n == 20:
            raise RuntimeError("once")
        super().release(request)

class Slow(ReferenceTarget):
    """Violates at once, and then takes long to be minimized."""
    pause = 0.0
    def match(self, *arguments):
        time.sleep(Slow.pause)
        return super().match(*arguments)
    def release(self, request):
        Slow.pause = 0.2
        raise KeyError(request)

class IsKilled(ReferenceTarget):
    def release(self, request):
        os.kill(os.getpid(), signal.SIGKILL)

class Leaves(ReferenceTarget):
    """It leaves a child behind that holds its files open."""
    def release(self, request):
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)

class Hangs(ReferenceTarget):
    def release(self, request):
        time.sleep(600)

class Prints(ReferenceTarget):
    def release(self, request):
        print('{"event": "ready"}')
        sys.stdout.write("without an end")
        os.write(1, b'{"event": "end"}\\n')
        super().release(request)

class Blind(ReferenceTarget):
    def snapshot(self):
        snapshot = super().snapshot()
        for request in snapshot.requests:
            request.anchor = None
        return snapshot

class Bare(ReferenceTarget):
    def __init__(self, config):
        super().__init__(config)
        self.capabilities = frozenset({"sharing", "policy:lru"})

class Fragile(ReferenceTarget):
    """A release fails once so many operations came before it as the file says, by which one repairs it in part."""
    n = 0
    def match(self, *arguments):
        self.n += 1
        return super().match(*arguments)
    def release(self, request):
        if self.n >= int(open("needs").read()):
            raise KeyError(request)
        super().release(request)

def ignores_its_config(config):
    return ReferenceTarget(type(config)())

def small_only(config):
    if config.page_size != 4:
        raise ValueError(f"no pages of {config.page_size}")
    return ReferenceTarget(config)

def takes_long(config):
    time.sleep(600)

honest = ReferenceTarget
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(TARGETS)
    return tmp_path


def start(folder, target, *options, **popen):
    command = [sys.executable, "-m", "kvlockstep", "fuzz", "--target", f"mine:{target}", "--out", "out", *options]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


def fuzz(folder, target, *options, **popen):
    """Run to the end; return exit code and what was printed."""
    process = start(folder, target, "--seconds", "1", *options, **popen)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert workers_of(folder) == []
    return process.returncode, out, err


def workers_of(folder):
    """List the processes that work in this folder, a moment after the one that started them is gone."""
    time.sleep(0.1)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            same = (process / "cwd").readlink() == folder
            if same and b"kvlockstep.fuzz.worker" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def until(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def failure_folders(folder):
    return sorted(path for path in (folder / "out").iterdir() if path.is_dir())


# Violations


def test_target_that_raises_is_a_violation_with_a_line_that_replays_it(folder):
    code, out, err = fuzz(folder, "Raises")
    (failure,) = failure_folders(folder)
    (line,) = [text.strip() for text in out.splitlines() if text.startswith("  replay ")]
    trace = read_trace(failure / "trace.jsonl")

    assert (code, err) == (VIOLATION, "")
    assert failure.name == "TargetRaised.release.Odd"
    assert {path.name for path in failure.iterdir()} == {
        "page.html",
        "trace.jsonl",
        "original.jsonl",
        "verdict.txt",
        "environment.json",
        "replay.sh",
    }
    assert trace.ops == [Release("r0")] or isinstance(trace.ops[-1], Release)
    assert "second [red]line[/] :bug: \\ud800" in out
    assert trace.header.why.endswith("first line second [red]line[/] :bug: ?")
    assert "1 of 1 workers found a violation" in out
    assert json.loads((failure / "environment.json").read_text())["python"]

    command = shlex.split(line.removeprefix("replay").strip())
    assert command[:4] == ["kvlockstep", "replay", "--target", "mine:Raises"]
    again = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert again.returncode == VIOLATION
    assert f"FAILED: {failure.name} " in again.stdout


def test_violation_that_does_not_come_again_is_unknown_and_kept(folder):
    code, out, err = fuzz(folder, "RaisesOnce")

    assert code == UNKNOWN
    assert err == "kvlockstep: a violation was found that did not replay in a fresh process\n"
    assert "(it did not fail when run again)" in out
    assert "did not replay in a fresh process: counted apart" in out
    assert [path.name for path in failure_folders(folder)] == ["TargetRaised.release.RuntimeError"]


def test_failure_that_was_repaired_for_the_stored_trace_only_is_found_again(folder):
    (folder / "needs").write_text("1")
    fuzz(folder, "Fragile")
    (stored,) = failure_folders(folder)
    before = read_trace(stored / "trace.jsonl").ops
    (folder / "needs").write_text("3")
    code, out, err = fuzz(folder, "Fragile", "--seconds", "5")

    assert (code, err) == (VIOLATION, "")
    assert "did not replay" not in out
    assert failure_folders(folder) == [stored]
    assert len(before) < len(read_trace(stored / "trace.jsonl").ops)


# Too little shown


def test_run_that_reached_too_little_is_unknown_and_says_what(folder):
    code, out, err = fuzz(folder, "honest", "--seconds", "0.1", "--seed", str((1 << 63) - 1))

    assert code == UNKNOWN
    assert "unknown: too little was shown to call this clean" in out
    assert "kvlockstep: never reached: " in err
    assert all(line.startswith("kvlockstep: ") for line in err.splitlines())


@pytest.mark.parametrize(
    ("seconds", "advice"),
    [(0.1, "--seconds 60"), (20.0, "--seconds 80"), (100.0, "--seconds 300"), (300.0, None), (3600.0, None)],
)
def test_run_that_missed_labels_only_is_told_how_long_is_longer(monkeypatch, capsys, tmp_path, seconds, advice):
    lines = [f"never reached: {name_of(label)}" for label in [*LABELS][:2]]
    verdicts = [Verdict(UNKNOWN, lines), Verdict(UNKNOWN, [*lines, "law 2 was not observed"]), Verdict(CLEAN, [])]
    said = []
    monkeypatch.setattr(fuzz_command, "too_seldom", lambda states: lines)
    monkeypatch.setattr(fuzz_command, "run_workers", lambda orders, progress: ([], False))
    for verdict in verdicts:
        monkeypatch.setattr(fuzz_command, "verdict_of", lambda *arguments, verdict=verdict: verdict)
        fuzz_command._fuzz([], seconds, [], tmp_path)
        said.append([line for line in capsys.readouterr().out.splitlines() if "a longer run" in line])

    assert said == [[f"a longer run reaches more: {advice}"] if advice else [], [], []]


def test_law_that_cannot_be_observed_is_named_and_never_clean(folder):
    code, out, err = fuzz(folder, "Blind")
    accepted_code, _, accepted_err = fuzz(folder, "Blind", "--accept-unobserved", "2")

    assert code == UNKNOWN
    assert accepted_code in (CLEAN, UNKNOWN)  # a second may or may not be enough to reach every label
    assert "law 2 was not observed on this target: --accept-unobserved 2 calls it clean all the same" in err
    assert "law 1 was not observed" not in err
    assert "law 2 was not observed" not in accepted_err
    assert "not observed: law 2, every anchor hangs on the root (needs requests, anchors, nodes)" in out
    assert "not observed: law 1," not in out


def test_target_without_a_capability_need_not_reach_what_takes_it(folder):
    _, out, err = fuzz(folder, "Bare")

    assert "not observed: law 8, reads return what was computed (needs reads)" in out
    assert "draft rejected" not in err
    assert "two namespaces" not in err


# Workers that give no verdict


def test_worker_that_is_killed_is_named_and_its_trace_kept(folder):
    for number in (1, 2):
        code, _, err = fuzz(folder, "IsKilled")
        kept = f"out/mine.died-{number}.jsonl"

        assert code == CRASHED
        assert err == (
            "kvlockstep: worker mine died: killed by SIGKILL, by hand or for want of memory; "
            f"what it ran: kvlockstep replay --target mine:IsKilled {kept}\n"
        )
        assert isinstance(read_trace(folder / kept, allow_cut_tail=True).ops[-1], Release)


def test_worker_that_leaves_with_status_0_is_not_clean_and_not_waited_for(folder):
    started = time.monotonic()
    code, _, err = fuzz(folder, "Leaves")  # whose child would hold the pipes for a minute

    assert code == CRASHED
    assert "worker mine died: it left with status 0 in the middle of its work" in err
    assert time.monotonic() - started < 15


def test_worker_that_hangs_is_stopped_and_its_trace_kept(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "out").mkdir()
    order = Order("mine:Hangs", None, 30.0, 0, "out", "mine")
    (state,), interrupted = run_workers([order], lambda states: None, grace=2.0)

    assert not interrupted
    assert state.trouble == "said nothing for 2 s while running, and was stopped"
    assert state.last_trace == Path("out/mine.died-1.jsonl")
    assert isinstance(read_trace(state.last_trace).ops[-1], Release)
    assert workers_of(folder) == []


def test_words_of_a_target_are_no_reports(folder):
    code, out, err = fuzz(folder, "Prints")

    assert code in (CLEAN, UNKNOWN)  # a second may or may not be enough to reach every label
    assert "event" not in out
    for said in ('{"event": "ready"}\n', "without an end", '{"event": "end"}\n'):  # in which order, buffers decide
        assert said in err


def test_factory_that_refuses_some_config_is_wrong_usage_and_names_it(folder):
    code, _, err = fuzz(folder, "small_only")

    assert code == USAGE
    assert err.startswith("kvlockstep: target 'mine:small_only': its factory raised ValueError: no pages of ")
    assert "(page_size=" in err
    assert err.count("\n") == 1


def test_factory_that_ignores_its_config_is_refused_for_the_first_config_that_shows_it(folder):
    code, _, err = fuzz(folder, "ignores_its_config")

    assert code == USAGE
    assert re.fullmatch(
        r"kvlockstep: target 'mine:ignores_its_config': "
        r"snapshot\(\)\.(page_size|n_rows|pools\['full'\]\.n_pages) is \d+, the config says \d+\n",
        err,
    )


@pytest.mark.parametrize(
    ("target", "lanes", "names"),
    [
        ("reference", [None], ["reference"]),
        ("mine:make", [None], ["mine"]),
        ("caches.paged-v2:make:it", [None], ["paged-v2"]),
        ("odd.:make", [None], ["target"]),
        ("gpu_impl", ["torch", "interpret", "torch"], ["torch-1", "interpret", "torch-2"]),
    ],
)
def test_worker_is_named_after_its_lane_or_else_its_target(target, lanes, names):
    assert names_of([(target, lane) for lane in lanes]) == names


# Disks


def test_full_disk_ends_the_run_and_keeps_what_was_found(folder):
    """A file-size limit stands for the disk."""
    fuzz(folder, "Raises")
    before = {path: path.read_bytes() for path in failure_folders(folder)[0].iterdir()}
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700)); "
    script = f"{limit}from kvlockstep.fuzz import cli; cli.main()"
    command = [sys.executable, "-c", script, "fuzz", "--target", "mine:honest", "--out", "out", "--seconds", "5"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == BROKEN
    assert done.stderr.startswith("kvlockstep: could not write out: File too large; what it ran: kvlockstep replay ")
    assert done.stderr.count("\n") == 1
    assert "state labels" in done.stdout
    assert {path: path.read_bytes() for path in failure_folders(folder)[0].iterdir()} == before
    assert read_trace(folder / "out" / "mine.died-1.jsonl").ops


def test_violation_that_no_longer_fits_on_the_disk_is_named_with_its_trace(folder):
    script = f"mkdir out && mount -t tmpfs -o size=16k none out && {shlex.quote(sys.executable)} -m kvlockstep fuzz "
    script += "--target mine:Raises --out out --seconds 5; code=$?; cp out/*.jsonl .; exit $code"
    allowed = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    if allowed.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {allowed.stderr.decode().strip()}")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == BROKEN
    assert (
        "No space left on device; it had found TargetRaised.release.Odd; what it ran: kvlockstep replay" in done.stderr
    )
    assert done.stderr.count("\n") == 1
    assert isinstance(read_trace(folder / "mine.died-1.jsonl").ops[-1], Release)


def test_folder_that_cannot_be_written_is_named(folder):
    (folder / "out").write_text("in the way")
    is_file = fuzz(folder, "honest")
    below_file = fuzz(folder, "honest", "--out", "out/below")
    (folder / "other" / "mine.current.jsonl").mkdir(parents=True)
    taken = fuzz(folder, "honest", "--out", "other")

    assert is_file[0] == USAGE
    assert "Invalid value for '--out': Directory 'out' is a file" in is_file[2]
    assert (below_file[0], below_file[2]) == (BROKEN, "kvlockstep: --out out/below: Not a directory\n")
    assert (taken[0], taken[2]) == (BROKEN, "kvlockstep: could not write other/mine.current.jsonl: Is a directory\n")


def test_pipe_that_closes_in_the_middle_ends_the_run_and_keeps_what_was_found(folder):
    process = start(folder, "Raises", "--seconds", "60")
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()

    assert process.wait(timeout=30) == BROKEN
    assert err == "kvlockstep: output (what was found is under out): Broken pipe\n"
    assert [path.name for path in failure_folders(folder)] == ["TargetRaised.release.Odd"]
    assert workers_of(folder) == []


# Signals


def test_interrupt_before_the_first_operation_leaves_at_once(folder):
    process = start(folder, "takes_long", "--seconds", "60")
    until(lambda: workers_of(folder), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=5)

    assert (process.returncode, err) == (INTERRUPTED, "")
    assert "interrupted; what was found is under out" in out
    assert workers_of(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_in_the_middle_prints_what_was_done(folder, number):
    process = start(folder, "honest", "--seconds", "60")
    current = folder / "out" / "mine.current.jsonl"
    until(lambda: current.exists() and current.stat().st_size > 2000, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=10)

    assert (process.returncode, err) == (INTERRUPTED, "")
    assert "operations by outcome" in out
    assert "state labels" in out
    assert workers_of(folder) == []
    read_trace(current, allow_cut_tail=True)


def test_interrupt_while_minimizing_keeps_the_failure(folder):
    process = start(folder, "Slow", "--seconds", "60", start_new_session=True)
    stored = folder / "out" / "TargetRaised.release.KeyError" / "trace.jsonl"
    until(stored.exists, process)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=10)

    assert (process.returncode, err) == (INTERRUPTED, "")
    assert "state labels" in out
    assert "TargetRaised: reference raised KeyError" in out
    assert "(interrupted; kvlockstep minimize goes on)" in out
    assert f"  replay    kvlockstep replay --target mine:Slow {stored.relative_to(folder)}\n" in out
    assert workers_of(folder) == []
    assert isinstance(read_trace(stored).ops[-1], Release)
    assert {path.name for path in stored.parent.iterdir()} == {
        "trace.jsonl",
        "original.jsonl",
        "verdict.txt",
        "environment.json",
        "replay.sh",
    }


def test_workers_end_when_the_command_is_killed(folder):
    process = start(folder, "honest", "--seconds", "60")
    current = folder / "out" / "mine.current.jsonl"
    until(lambda: current.exists() and current.stat().st_size > 2000, process)
    (worker,) = workers_of(folder)
    process.kill()
    process.communicate(timeout=10)

    deadline = time.monotonic() + 10
    while worker in workers_of(folder):
        assert time.monotonic() < deadline
