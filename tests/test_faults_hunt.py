"""What a hunt makes of the ways in which its process can end; the process itself is played by a stub."""

import subprocess
from dataclasses import replace

import pytest

from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults import hunt as hunting

FAULT = FAULTS["abort-keeps-lock"]
FOUND = (
    '{{"event": "failure", "law": "{law}", "signature": "{law}.abort", "operations": 30, "seconds": 0.5, '
    '"found_len": 12, "minimized_len": 8}}\n{{"event": "end"}}\n'
)


@pytest.fixture
def ends_with(monkeypatch):
    """Let every process end with the given output and status."""

    def play(stdout, stderr="", status=0):
        done = subprocess.CompletedProcess([], status, stdout, stderr)
        monkeypatch.setattr(hunting.subprocess, "run", lambda *_, **__: done)

    return play


def test_hunt_counts_as_caught_when_an_allowed_law_names_the_fault(ends_with):
    ends_with("a target may print\n" + FOUND.format(law="LockCountWrong"))

    assert hunting.hunt(FAULT, 0, 60.0) == hunting.Hunt(
        FAULT.name, 0, True, "LockCountWrong", "LockCountWrong.abort", 30, 0.5, 12, 8
    )


def test_hunt_counts_as_missed_when_another_law_names_the_fault(ends_with):
    ends_with(FOUND.format(law="TreeDiffers"))

    found = hunting.hunt(FAULT, 0, 60.0)

    assert (found.caught, found.law, found.trouble) == (False, "TreeDiffers", None)


def test_hunt_counts_as_missed_when_the_time_runs_out(ends_with):
    ends_with('{"event": "ready"}\n{"event": "end"}\n')

    assert hunting.hunt(FAULT, 0, 60.0) == hunting.Hunt(FAULT.name, 0, False, seconds=60.0)


@pytest.mark.parametrize(("reached", "trouble"), [(0, "never reached"), (3, None)])
def test_hunt_tells_a_fault_that_was_never_reached_from_one_that_was_missed(ends_with, reached, trouble):
    ends_with(f'{{"event": "ready"}}\n{{"event": "end", "reached": {reached}}}\n')

    found = hunting.hunt(FAULT, 0, 60.0)

    assert (found.caught, found.trouble) == (False, trouble)


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


def test_hunt_ends_a_process_that_hangs(monkeypatch):
    monkeypatch.setattr(hunting, "GRACE", 0.1)

    found = hunting.hunt(FAULT, 0, seconds=0.1, minimize_seconds=0.0)

    assert found.trouble == "the process hung"
