"""The top-level conftest: what is absent is skipped with a reason, unless this run promised it.

The sessions are run inside one folder for all tests, each in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = """
import pytest

@pytest.mark.needs("ray")
def test_marked():
    pass

@pytest.mark.needs("cuda")
def test_skips_itself():
    pytest.skip("driver too old")

@pytest.mark.needs("cuda")
@pytest.mark.xfail(reason="known")
def test_fails_as_expected():
    assert False

def test_free():
    pass
"""
MISSING = "import conftest\nconftest._MISSING['ray'] = lambda: 'ray is not installed'\n"
PRESENT = "conftest._MISSING['cuda'] = lambda: None\n"


@pytest.fixture
def session(tmp_path):
    """Run pytest with this checkout's conftest on a sample file; on that machine ray is absent and cuda present."""

    def run(sample=SAMPLE, **variables):
        (tmp_path / "machine.py").write_text(MISSING + PRESENT)
        (tmp_path / "test_sample.py").write_text(sample)
        command = [sys.executable, "-m", "pytest", "-rs", "--strict-markers", "-p", "conftest", "-p", "machine"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "KVLOCKSTEP_REQUIRE": "", **variables}
        command += ["--rootdir", str(tmp_path), "-c", os.devnull, "-p", "no:cacheprovider", "test_sample.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_absent_need_is_skipped_with_a_printed_reason(session):
    code, text = session(KVLOCKSTEP_LANE="interpret")

    assert code == 0
    assert "1 passed, 2 skipped, 1 xfailed" in text
    assert "needs ray: ray is not installed" in text
    assert "driver too old" in text
    assert "kvlockstep: lane=interpret required=nothing" in text


def test_promised_need_fails_where_it_would_be_skipped(session):
    code, text = session(KVLOCKSTEP_REQUIRE="ray,cuda")

    assert code == 1
    assert "1 failed, 1 passed, 1 xfailed, 1 error" in text
    assert "KVLOCKSTEP_REQUIRE promises ray, but: Skipped: needs ray: ray is not installed" in text
    assert "KVLOCKSTEP_REQUIRE promises cuda, but: Skipped: driver too old" in text


def test_promise_of_another_need_changes_nothing(session):
    code, text = session(KVLOCKSTEP_REQUIRE="browser")

    assert code == 0
    assert "2 skipped" in text


@pytest.mark.parametrize(
    ("sample", "required", "wrong"),
    [
        (SAMPLE, "gpu", "KVLOCKSTEP_REQUIRE: expected some of browser, compiled, cuda, ray, sglang, got 'gpu'"),
        (SAMPLE.replace('"ray"', '"raay"'), "", "test_marked needs 'raay': expected one of"),
    ],
)
def test_misspelt_need_is_an_error(session, sample, required, wrong):
    code, text = session(sample, KVLOCKSTEP_REQUIRE=required)

    assert code == 4
    assert wrong in text


def test_session_that_would_test_another_copy_does_not_start(session, tmp_path):
    package = tmp_path / "kvlockstep"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "fuzz").mkdir()
    for name in ("__init__", "pytest_plugin"):  # as any copy has it
        (package / "fuzz" / f"{name}.py").touch()
    code, text = session(PYTHONPATH=f"{tmp_path}:{ROOT}")

    assert code == 4
    assert "not from this checkout" in text


def test_torch_computes_with_one_thread():
    torch = pytest.importorskip("torch")

    assert torch.get_num_threads() == 1
