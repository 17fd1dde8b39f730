"""The script for a GPU machine runs through without a GPU, says so, and fails where it was promised one.

Not verified here: what it says on a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "on_gpu.sh"


def run(*arguments):
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_rehearsal_prints_one_table_with_its_lane():
    done = run("--lane", "torch", "--seconds", "1", "--only", "machine,checks,bandwidth,latency,read_backs,lockstep")

    assert done.returncode == 0, done.stdout + done.stderr
    table = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert table["machine"].strip().startswith("lane torch, no GPU, a rehearsal")
    assert table["checks, P=16, spoiled"].strip().startswith("law 2: 1 cells")
    assert {"checks, P=1", "bandwidth of scatter_kv", "latency, replayed", "read_backs", "lockstep"} < set(table)
    assert "no law broken" in table["lockstep"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_promised_gpu_that_is_missing_is_an_error():
    done = run("--only", "machine")

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "on_gpu: lane 'cuda': torch finds no GPU; --lane interpret is a rehearsal without a GPU\n"


def test_unknown_part_is_wrong_usage():
    done = run("--only", "speed")

    assert done.returncode == 2
    assert "--only speed: expected some of machine, checks" in done.stderr
