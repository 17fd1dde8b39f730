"""The tests that touch the device, again on the lane that this session does not run: the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = ["test_gpu_impl_kernels.py", "test_gpu_impl_cache.py", "test_gpu_impl_target.py"]


@pytest.mark.skipif(os.environ.get("KVLOCKSTEP_LANE") == "interpret", reason="the session runs on this lane already")
def test_kernels_and_cache_hold_on_the_interpret_lane():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / name) for name in FILES)],
        env=os.environ | {"KVLOCKSTEP_LANE": "interpret"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
