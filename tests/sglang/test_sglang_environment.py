"""The environment that the SGLang targets run in: the pins, what must be absent, and where its targets run."""

import sys
from importlib.metadata import distributions, version
from pathlib import Path

from kvlockstep.fuzz.environments import SGLANG_VERSION, python_for, sglang_found
from kvlockstep.fuzz.registry import SGLANG_TARGETS

ROOT = Path(__file__).resolve().parents[2]


def pins():
    lines = (ROOT / "requirements" / "sglang.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_every_pin_is_what_is_installed():
    installed = {name: version(name) for name in pins()}

    assert installed == pins()
    assert installed["sglang"] == SGLANG_VERSION


def test_no_cuda_build_and_no_torchvision_came_along():
    names = {distribution.metadata["Name"].lower() for distribution in distributions()}

    assert "+cu" not in version("torch")
    assert "torchvision" not in names


def test_targets_run_in_this_very_python():
    assert [python_for(target) for target in SGLANG_TARGETS] == [sys.executable] * 3
    assert sglang_found() == (SGLANG_VERSION, sys.executable)
