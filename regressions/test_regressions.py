"""Every stored trace fails with its planted fault and holds without it, on every lane this machine has.

The lane of the session runs in this process; each other lane runs all files in one process of its own,
which also shows that a trace replays the same elsewhere. Names and canonical text of the files are
checked with the rest of the checkout's shape in ``tests/test_tidy_files.py``.
"""

import fcntl
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults.hunt import may_name
from kvlockstep.fuzz.registry import LANES
from kvlockstep.fuzz.regressions import Replayed, replay_stored
from kvlockstep.fuzz.trace import read_trace

FOLDER = Path(__file__).resolve().parent
HERE = os.environ["KVLOCKSTEP_LANE"]
PATHS = [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.jsonl"))]
ELSEWHERE = [
    pytest.param(lane, marks=pytest.mark.needs("cuda") if lane == "cuda" else ()) for lane in LANES if lane != HERE
]


@cache
def header_of(path):
    return read_trace(path).header


@cache
def replayed_here(path):
    return replay_stored(path)


@pytest.fixture(scope="session")
def replayed_elsewhere(tmp_path_factory):
    """Give what a lane's own process made of all files, and where it wrote them; one process for all test workers."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    @cache
    def replay(lane):
        written, results = shared / f"regressions-{lane}", shared / f"regressions-{lane}.jsonl"
        with open(shared / f"regressions-{lane}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not results.exists():
                written.mkdir(exist_ok=True)
                command = [sys.executable, "-m", "kvlockstep.fuzz.regressions", lane, str(FOLDER), str(written)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=240)
                assert done.returncode == 0, done.stderr
                results.write_text(done.stdout)
        found = [Replayed(**json.loads(line)) for line in results.read_text().splitlines()]
        return {one.file: one for one in found}, written

    return replay


def assert_fault_shows(path, lane, replayed):
    header = header_of(path)
    shows = FAULTS[header.fault].lane == "torch" or lane != "torch"
    n_ops = len(read_trace(path).ops)

    assert replayed.with_fault == (header.signature if shows else None)
    assert replayed.fault_steps == n_ops, "it ends with the operation that fails"


def assert_holds(replayed):
    assert (replayed.without_fault, replayed.on_model) == (None, None)


@pytest.mark.parametrize("path", PATHS)
def test_regression_fails_with_its_fault(path):
    assert_fault_shows(path, HERE, replayed_here(path))


@pytest.mark.parametrize("path", PATHS)
def test_regression_holds_without_its_fault_and_on_the_model(path):
    assert_holds(replayed_here(path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lane", ELSEWHERE)
def test_regression_fails_with_its_fault_on_another_lane(lane, path, replayed_elsewhere):
    assert_fault_shows(path, lane, replayed_elsewhere(lane)[0][path.name])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lane", ELSEWHERE)
def test_regression_shows_the_same_on_another_lane(lane, path, replayed_elsewhere):
    there = replayed_elsewhere(lane)[0][path.name]

    assert_holds(there)
    assert there.digest == replayed_here(path).digest


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lane", ELSEWHERE)
def test_replay_in_another_process_writes_the_same_bytes(lane, path, replayed_elsewhere):
    assert (replayed_elsewhere(lane)[1] / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("path", PATHS)
def test_header_agrees_with_the_fault_that_it_names(path):
    header = header_of(path)
    fault = FAULTS[header.fault]

    assert (header.target, header.lane) == (fault.target, fault.lane)
    assert may_name(fault, header.violates)
    assert header.signature.split(".")[0] == header.violates


@pytest.mark.parametrize("path", PATHS)
def test_header_says_why_in_one_sentence(path):
    why = header_of(path).why

    assert why.endswith(".")
    assert why[0].isupper()
    assert ". " not in why


def test_regressions_cover_most_kinds_of_bugs():
    kinds = {FAULTS[header_of(path).fault].kind for path in FOLDER.glob("*.jsonl")}

    assert len(kinds) >= 12
