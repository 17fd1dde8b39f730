"""Choosing the lane: a promise is kept or fails loudly. Each case in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch


def run(code, **environment):
    """Run Python in a fresh process without the session's lane; return (exit code, last line printed)."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("KVLOCKSTEP_LANE", "TRITON_INTERPRET")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=False
    )
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


CHOOSE = "from kvlockstep.gpu_impl import choose_lane; print(choose_lane({}))"


def test_auto_lane_is_cuda_with_gpu_and_torch_without():
    assert run(CHOOSE.format("")) == (0, "cuda" if torch.cuda.is_available() else "torch")


def test_lane_comes_from_environment_and_argument_wins():
    code = "from kvlockstep.gpu_impl import choose_lane; print(choose_lane(), choose_lane('torch'))"

    assert run(code, KVLOCKSTEP_LANE="interpret") == (0, "interpret torch")


def test_unknown_lane_is_an_error_that_lists_lanes():
    code, line = run(CHOOSE.format("'fast'"))

    assert code == 1
    assert line.endswith("LaneUnavailable: lane 'fast': expected one of cuda, interpret, torch, auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is at hand, so the lane can be kept")
def test_cuda_lane_is_an_error_without_gpu():
    code, line = run(CHOOSE.format(""), KVLOCKSTEP_LANE="cuda")

    assert code == 1
    assert line.endswith("LaneUnavailable: lane 'cuda': torch finds no GPU")


def test_interpret_lane_is_an_error_when_triton_was_imported_compiled():
    code, line = run("import triton; " + CHOOSE.format("'interpret'"))

    assert code == 1
    assert line.endswith("lane 'interpret': Triton was imported earlier in this process, in compiled mode")


def test_interpret_lane_makes_device_assert_count():
    code = (
        "from kvlockstep.gpu_impl import choose_lane; choose_lane('interpret')\n"
        "from triton.runtime import interpreter\n"
        "print(interpreter.interpreter_builder.options.debug)"
    )

    assert run(code) == (0, "True")
