"""What a worker died of is found again in a ward, stored as a failure, and made short; or it is said that it is not.

The targets are made from the reference in a file of its own. Most run where a campaign runs them: in a process that
reports on its standard output.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from kvlockstep.fuzz.campaign.postmortem import Postmortem, PostmortemOrder
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.failures import keep_last_trace
from kvlockstep.fuzz.ops import Abort, Alloc, AllocItem, Checkpoint, Commit, Match, Peek, Submit
from kvlockstep.fuzz.trace import Header, Trace, read_trace, write_trace
from kvlockstep.fuzz.ward import Limits, Ward
from kvlockstep.fuzz.worker import Order

MODULE = '''
import os, signal, sys, time
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
        print("about to die")
        os.kill(os.getpid(), signal.SIGSEGV)

class Leaves(Harmless):
    def harm(self):
        os._exit(3)

class Hangs(Harmless):
    def harm(self):
        with open("pids", "a") as file:
            file.write(f"{os.getppid()} {os.getpid()}\\n")
        while True:
            pass

class Devours(Harmless):
    def harm(self):
        eaten = []
        while True:
            eaten.append(b"x" * 10_000_000)

class Dawdles(Hangs):
    def checkpoint(self, request):
        time.sleep(0.5)
        super().checkpoint(request)
'''
CONFIG = CacheConfig(page_size=1, n_pages=16, n_rows=4, max_context_len=12)
MIB = 1 << 20
HEADER = Header(CONFIG)


def started(name, *tokens):
    first = [Submit(name, tokens), Match(name), Alloc((AllocItem(name, len(tokens)),)), Commit(name, len(tokens))]
    return [*first, Checkpoint(name)]


OPS = [Peek("r9"), *started("r0", 1, 2, 3), Peek("r1"), *started("r1", 4, 5, 6, 7)]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    (tmp_path / "harmful.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "w.died-1.jsonl", Trace(HEADER, list(OPS)))
    return tmp_path


def order_for(name, **changes):
    seconds = 1.0 if name in ("Hangs", "Dawdles") else 20.0
    order = PostmortemOrder(f"harmful:{name}", None, "w.died-1.jsonl", "out", "w", hang_seconds=seconds)
    return replace(order, memory_bytes=250 * MIB, **changes)


def command_for(order):
    return [sys.executable, "-P", "-m", "kvlockstep.fuzz.campaign.postmortem", json.dumps(asdict(order))]


def reports_of(order):
    done = subprocess.run(command_for(order), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def started_process(order):
    return subprocess.Popen(command_for(order), stdout=subprocess.PIPE, text=True)


def is_running(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def pids_once_it_hangs(path):
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
    return {int(pid) for pid in path.read_text().split()}


def wait_for(holds, seconds=30.0):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "signature", "what"),
    [
        ("Segfaults", "Died.checkpoint.SIGSEGV", "Died: the process was ended by SIGSEGV in checkpoint"),
        ("Leaves", "Died.checkpoint.exit3", "Died: the process left with status 3 in checkpoint"),
        ("Hangs", "Hung.checkpoint", "Hung: checkpoint did not come to an end within 1 s"),
        ("Devours", "OutOfMemory.checkpoint", "OutOfMemory: checkpoint brought the process to "),
    ],
)
def test_death_is_reported_stored_and_minimized(place, name, signature, what):
    violates, found, failure, end = reports_of(order_for(name, minimize_seconds=40.0))
    folder = place / "out" / signature
    shortest, original = read_trace(folder / "trace.jsonl"), read_trace(folder / "original.jsonl")
    text = (folder / "verdict.txt").read_text()

    assert (violates, end) == ({"event": "violates", "signature": signature}, {"event": "end"})
    assert (found["event"], failure["event"]) == ("found", "failure")
    for report in (found, failure):
        assert (report["signature"], report["folder"], report["operations"]) == (signature, f"out/{signature}", 12)
        assert report["text"].startswith(what)
        assert report["found_len"] == 12
        assert report["seconds"] > 0
    assert failure["law"] == signature.partition(".")[0]
    assert (failure["minimized_len"], failure["ending"]) == (10, "minimized")
    assert original.ops == OPS
    assert len(shortest.ops) == 10
    for header in (shortest.header, original.header):
        assert (header.violates, header.signature) == (failure["law"], signature)
        assert (header.target, header.lane, header.fault) == (f"harmful:{name}", None, None)
        assert what.partition(": ")[2] in header.why
    assert text.startswith(what)
    assert "\n  step      9: checkpoint r1\n  config    page_size=1 " in text
    assert text.endswith(f"  replay    kvlockstep replay --target harmful:{name} out/{signature}/trace.jsonl\n")
    assert os.listdir(place / "out") == [signature]


def test_violation_is_reported_as_a_worker_does(place):
    header = replace(HEADER, config=replace(CONFIG, page_size=2))
    write_trace("w.died-1.jsonl", Trace(header, [*OPS, Abort("r0")]))
    order = replace(order_for("x"), target="kvlockstep.fuzz.targets.wrong:LeaksOnAbort")
    reports = reports_of(order)

    assert [report["event"] for report in reports] == ["violates", "found", "failure", "end"]
    assert reports[2]["law"] == "PageLeaked"
    assert reports[2]["ending"] == "minimized"
    assert read_trace(place / "out" / reports[0]["signature"] / "trace.jsonl").header.why.startswith("page ")


def test_trace_that_runs_through_is_unreproduced(place):
    assert reports_of(order_for("Harmless")) == [{"event": "unreproduced", "trace": "w.died-1.jsonl"}, {"event": "end"}]
    assert not (place / "out").exists()


def test_trace_that_a_worker_leaves_dies_again(place):
    """The file ends with the operation that killed the worker, and a line that is cut off does no harm."""
    (place / "out").mkdir()
    order = Order("harmful:Segfaults", None, 60.0, 0, "out", "w")
    command = [sys.executable, "-P", "-m", "kvlockstep.fuzz.worker", json.dumps(asdict(order))]
    worker = subprocess.run(command, capture_output=True, timeout=120)
    kept = keep_last_trace(Path("out"), "w")

    assert worker.returncode == -signal.SIGSEGV
    assert kept is not None
    with kept.open("a") as file:
        file.write('{"op":"peek","requ')
    n_ops = len(read_trace(kept, allow_cut_tail=True).ops)
    found = reports_of(order_for("Segfaults", trace=str(kept)))[1]
    assert found["signature"] == "Died.checkpoint.SIGSEGV"
    assert found["found_len"] == n_ops


def test_shorter_trace_of_an_earlier_run_stays_while_it_still_dies(place):
    reports_of(order_for("Segfaults"))
    first = read_trace("out/Died.checkpoint.SIGSEGV/trace.jsonl")
    failure = reports_of(order_for("Segfaults", minimize_seconds=0.0))[2]

    assert (failure["folder"], failure["minimized_len"]) == ("out/Died.checkpoint.SIGSEGV", 12)
    assert failure["ending"] == "time ran out"
    assert read_trace("out/Died.checkpoint.SIGSEGV/trace.jsonl") == first
    for stored in ("trace.jsonl", "original.jsonl"):
        write_trace(f"out/Died.checkpoint.SIGSEGV/{stored}", Trace(first.header, [Peek("r0")]))
    reports_of(order_for("Segfaults"))
    assert len(read_trace("out/Died.checkpoint.SIGSEGV/trace.jsonl").ops) == 10


def test_search_stops_when_its_time_is_over(place):
    started_at = time.monotonic()
    failure = reports_of(order_for("Hangs", minimize_seconds=0.5))[2]

    assert failure["ending"] == "time ran out"
    assert failure["minimized_len"] == 12
    assert time.monotonic() - started_at < 30


def test_interrupt_stores_the_best(place):
    process = started_process(order_for("Hangs", minimize_seconds=600.0))
    events = [json.loads(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    events += [json.loads(line) for line in process.stdout]

    assert [event["event"] for event in events] == ["violates", "found", "failure", "end"]
    assert events[2]["ending"] == "interrupted"
    assert len(read_trace("out/Hung.checkpoint/trace.jsonl").ops) == events[2]["minimized_len"]
    assert process.wait(10) == 0
    wait_for(lambda: not any(map(is_running, pids_once_it_hangs(place / "pids"))))


def test_interrupt_before_anything_is_found_ends_it(place):
    process = started_process(
        order_for(
            "Hangs",
        )
    )
    process.kill()
    process.wait()
    process = started_process(replace(order_for("Hangs"), hang_seconds=600.0))
    pids = pids_once_it_hangs(place / "pids")
    process.send_signal(signal.SIGINT)

    assert process.communicate(timeout=10)[0] == '{"event": "end"}\n'
    wait_for(lambda: not any(map(is_running, pids)))


def test_everything_ends_with_the_parent(place):
    order = replace(order_for("Hangs"), hang_seconds=600.0)
    (place / "parent.py").write_text(
        f"import subprocess\nprint(subprocess.Popen({command_for(order)!r}).pid, flush=True)\ninput()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "parent.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    pid = int(parent.stdout.readline())
    pids = {pid, *pids_once_it_hangs(place / "pids")}
    parent.kill()
    parent.wait()

    wait_for(lambda: not any(map(is_running, pids)))


def test_what_was_only_slow_is_no_hang(monkeypatch):
    """A search in a hurry takes an honest checkpoint for a hang; what is kept is the trace that was found."""
    in_a_hurry = Limits(hang_seconds=0.2, memory_bytes=250 * MIB)
    monkeypatch.setattr(Ward, "hurry", lambda self, ended: setattr(self, "limits", in_a_hurry))
    reports = []
    Postmortem(order_for("Dawdles"), lambda event, **facts: reports.append({"event": event, **facts})).run()

    assert [report["event"] for report in reports] == ["violates", "found", "failure"]
    assert (reports[2]["ending"], reports[2]["minimized_len"]) == ("did not fail again", 12)
    assert read_trace("out/Hung.checkpoint/trace.jsonl").ops == OPS


@pytest.mark.parametrize(
    ("changes", "event", "text"),
    [
        ({"target": "harmful:Nothing"}, "unusable", "harmful has no factory 'Nothing'"),
        ({"trace": "nowhere.jsonl"}, "broken", "nowhere.jsonl:1: cannot be read"),
        ({"out": "harmful.py/out"}, "broken", "could not write harmful.py/out: Not a directory"),
    ],
)
def test_trouble_is_reported_in_one_line(changes, event, text):
    *others, trouble, end = reports_of(replace(order_for("Segfaults"), **changes))

    assert [report["event"] for report in others] == (["violates"] if "out" in changes else [])
    assert trouble["event"] == event
    assert text in trouble["text"]
    assert end == {"event": "end"}
