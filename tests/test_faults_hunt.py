"""What a hunt makes of the ways in which its process can end, and that a forked process is as good as a fresh one.

Where the process does not matter it is played by a stub.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvlockstep.fuzz.faults import FAULTS, nursery
from kvlockstep.fuzz.faults import hunt as hunting
from kvlockstep.fuzz.faults.zoo import null_faults

FAULT = FAULTS["abort-keeps-lock"]
NULL = null_faults(["gpu_impl"])[0]
FOUND = (
    '{{"event": "failure", "law": "{law}", "signature": "{law}.abort", "operations": 30, "seconds": 0.5, '
    '"found_len": 12, "minimized_len": 8, "laws": ["{law}", "TreeDiffers"], "did_not_run": ["sizes_add_up: x"]}}\n'
)
END = '{"event": "end"}\n'


@pytest.fixture
def ends_with(monkeypatch):
    """Let every process end with the given output and status."""

    def play(stdout, stderr="", status=0):
        done = subprocess.CompletedProcess([], status, stdout, stderr)
        monkeypatch.setattr(nursery.subprocess, "run", lambda *_, **__: done)

    return play


def test_hunt_counts_as_caught_when_an_allowed_law_names_the_fault(ends_with):
    ends_with("a target may print\n" + FOUND.format(law="LockCountWrong") + END)

    assert hunting.hunt(FAULT, 0, 60.0) == hunting.Hunt(
        FAULT.name,
        0,
        True,
        "LockCountWrong",
        "LockCountWrong.abort",
        30,
        0.5,
        12,
        8,
        laws=("LockCountWrong", "TreeDiffers"),
        did_not_run=("sizes_add_up: x",),
    )


def test_hunt_counts_as_missed_when_another_law_names_the_fault(ends_with):
    ends_with(FOUND.format(law="PageLeaked") + END)

    found = hunting.hunt(FAULT, 0, 60.0)

    assert (found.caught, found.law, found.trouble) == (False, "PageLeaked", None)


def test_hunt_without_a_law_counts_as_caught_whatever_names_the_fault(ends_with):
    ends_with(FOUND.format(law="PageLeaked") + END)

    found = hunting.hunt(FAULT, 0, 60.0, without=5)

    assert (found.caught, found.without) == (True, 5)


def test_null_fault_counts_as_caught_whatever_is_found(ends_with):
    ends_with(FOUND.format(law="PageLeaked") + '{"event": "end", "reached": null}\n')

    found = hunting.hunt(NULL, 0, 60.0)

    assert (found.caught, found.law, found.trouble) == (True, "PageLeaked", None)


def test_order_of_a_null_fault_plants_nothing():
    orders = [hunting.order_for(hunting.Task(fault, 3, 5.0, 2), "out", 1.0) for fault in (FAULT, NULL)]

    assert [order.fault for order in orders] == [FAULT.name, None]
    assert {(order.seed, order.seconds, order.canary, order.without) for order in orders} == {(3, 5.0, False, 2)}


def test_hunt_counts_as_missed_when_the_time_runs_out(ends_with):
    ends_with('{"event": "ready"}\n{"event": "end"}\n')

    assert hunting.hunt(FAULT, 0, 60.0) == hunting.Hunt(FAULT.name, 0, False, seconds=60.0)


@pytest.mark.parametrize(("reached", "trouble"), [(0, "never reached"), (3, None)])
def test_hunt_tells_a_fault_that_was_never_reached_from_one_that_was_missed(ends_with, reached, trouble):
    ends_with(f'{{"event": "ready"}}\n{{"event": "end", "reached": {reached}}}\n')

    found = hunting.hunt(FAULT, 0, 60.0)

    assert (found.caught, found.trouble, found.reached) == (False, trouble, reached)


def test_fault_that_was_never_reached_is_not_caught_whatever_was_found(ends_with):
    ends_with(FOUND.format(law="LockCountWrong") + '{"event": "end", "reached": 0}\n')

    found = hunting.hunt(FAULT, 0, 60.0)

    assert (found.caught, found.law, found.trouble) == (False, "LockCountWrong", "never reached")


def test_hunt_passes_over_a_report_cut_by_the_death_of_its_process(ends_with):
    ends_with('{"event": "ready"}\n{"event": "end", "rea', stderr="Killed", status=-9)

    assert hunting.hunt(FAULT, 0, 60.0).trouble == "the process died: Killed"


@pytest.mark.parametrize("event", ["unusable", "broken"])
def test_hunt_repeats_why_its_process_gave_no_verdict(ends_with, event):
    ends_with(f'{{"event": "{event}", "text": "it does not apply"}}\n')

    assert hunting.hunt(FAULT, 0, 60.0).trouble == "it does not apply"


def test_hunt_says_what_its_process_died_of(ends_with):
    ends_with('{"event": "ready"}\n', stderr="Traceback\nSegmentation fault\n", status=-11)

    assert hunting.hunt(FAULT, 0, 60.0).trouble == "the process died: Segmentation fault"


def test_hunt_in_this_process_finds_what_a_fresh_process_finds():
    fresh, here = (look(FAULT, 0, 60.0, minimize_seconds=0.0) for look in (hunting.hunt, hunting.hunt_here))

    assert here.caught
    assert replace(here, seconds=fresh.seconds) == fresh


@pytest.fixture
def nurseries():
    made = nursery.Nurseries()
    yield made
    made.close()


@pytest.mark.parametrize("name", ["abort-keeps-lock", "kernel-value-of-first-layer"])
def test_forked_process_finds_what_a_fresh_one_finds(tmp_path, nurseries, name):
    """The same reports, and the same minimized trace; a kernel's fault is hunted on the interpreter."""
    traces, reports = [], []
    for start in (nursery.in_fresh_process, nurseries.run):
        out = tmp_path / start.__name__
        out.mkdir()
        order = hunting.order_for(hunting.Task(FAULTS[name], 0, 60.0), str(out), 60.0)
        ended = start(order, 120.0)
        assert ended.status == 0, ended.said
        (trace,) = out.glob("*/trace.jsonl")
        traces.append((trace.parent.name, trace.read_text()))
        (failure,) = [line for line in ended.reports.splitlines() if line.startswith('{"event": "failure"')]
        facts = json.loads(failure)
        reports.append([facts[fact] for fact in ("law", "signature", "operations", "found_len", "laws", "ending")])

    assert traces[0] == traces[1]
    assert reports[0] == reports[1]


def test_forked_processes_share_nothing(nurseries):
    """A fault planted in one is not in the next, which is forked from the same nursery."""
    faulty, clean, again = (
        hunting.hunt(fault, 0, seconds, 0.0, start=nurseries.run)
        for fault, seconds in ((FAULT, 60.0), (NULL, 1.0), (FAULT, 60.0))
    )

    assert faulty.caught
    assert (clean.law, clean.trouble) == (None, None)
    assert replace(again, seconds=faulty.seconds) == faulty


@pytest.mark.parametrize("kind", ["fresh", "forked"])
def test_hunt_ends_a_process_that_hangs(monkeypatch, nurseries, kind):
    monkeypatch.setattr(hunting, "GRACE", -29.9)
    start = nurseries.run if kind == "forked" else nursery.in_fresh_process

    found = hunting.hunt(NULL, 0, 30.0, 0.0, start=start)

    assert found.trouble == "the process hung"


def test_hunt_says_that_a_nursery_died_and_of_what(monkeypatch, nurseries):
    monkeypatch.setattr(nursery, "python_for", lambda target: "/bin/false")

    assert hunting.hunt(NULL, 0, 1.0, start=nurseries.run).trouble == "the process died: exit status 1"


def test_hunt_that_comes_when_the_nurseries_are_closed_begins_nothing(nurseries):
    nurseries.close()

    assert hunting.hunt(NULL, 0, 1.0, start=nurseries.run).trouble == "the process died: the nurseries are closed"


HUNTS_FOREVER = """
from kvlockstep.fuzz.faults.hunt import Task, hunt_all
from kvlockstep.fuzz.faults.zoo import null_faults
list(hunt_all([Task(null_faults(["gpu_impl"])[0], seed, 600.0) for seed in range(2)], 2))
"""


def processes_of(group):
    """List processes by the folder for temporary files that they were given: it tells one test from another."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ, state = (path / "environ").read_bytes(), (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if f"TMPDIR={group}".encode() in environ and state != "Z":
            found.append(int(path.name))
    return found


def waits_until(holds, seconds=60.0):
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.1)
    return holds()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_goes_on_when_the_command_is_gone(tmp_path, number):
    """A nursery and two hunts end with whoever began them, killed or interrupted."""
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", HUNTS_FOREVER], env=environ, stderr=subprocess.DEVNULL) as command:
        began = waits_until(lambda: len(processes_of(tmp_path)) == 4)
        command.send_signal(number)

    assert began, "the command, a nursery, two hunts"
    assert waits_until(lambda: processes_of(tmp_path) == [], 10.0)
