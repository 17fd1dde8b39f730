"""What the command prints where nobody can read it, on small and colourless terminals, and about this machine."""

import os
import subprocess
import sys

import pytest

from kvlockstep.fuzz import doctor
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.doctor import targets_here
from kvlockstep.fuzz.ops import Match, Submit
from kvlockstep.fuzz.trace import Header, Trace, write_trace

CLEAN, USAGE, UNKNOWN, BROKEN = 0, 2, 10, 12
COMMAND = [sys.executable, "-m", "kvlockstep"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    write_trace(path, Trace(Header(CacheConfig(), target="reference"), [Submit("r0", (1, 2)), Match("r0")]))
    return path


def run(*arguments, **options):
    options = {"capture_output": True, "text": True, "timeout": 60, "check": False, **options}
    return subprocess.run([*COMMAND, *map(str, arguments)], **options)


def test_module_is_the_same_as_the_command(tmp_path):
    script = os.path.join(os.path.dirname(sys.executable), "kvlockstep")
    by_name = subprocess.run([script, "replay", "absent"], cwd=tmp_path, capture_output=True, text=True, check=False)
    by_module = run("replay", "absent", cwd=tmp_path)

    assert by_name.returncode == by_module.returncode == USAGE
    assert by_name.stderr == by_module.stderr
    assert by_name.stderr.startswith("kvlockstep: absent:1: ")


@pytest.mark.parametrize("command", ["", "fuzz", "replay", "minimize", "faults", "targets", "doctor"])
def test_help_of_every_command_is_there(monkeypatch, capsys, command):
    from kvlockstep.fuzz import cli

    monkeypatch.setattr(sys, "argv", ["kvlockstep", *command.split(), "--help"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, err = capsys.readouterr()

    assert (stopped.value.code, err) == (CLEAN, "")
    assert f"Usage: kvlockstep {command}".rstrip() in out
    if command in ("", "targets", "doctor"):
        assert "Exit codes: 0 " in out


def test_full_standard_output_is_exit_code_12(trace):
    with open("/dev/full", "w") as full:
        done = run("replay", trace, capture_output=False, stdout=full, stderr=subprocess.PIPE)

    assert (done.returncode, done.stderr) == (BROKEN, "kvlockstep: output: No space left on device\n")


@pytest.mark.parametrize("arguments", [["replay"], ["--help"], ["fuzz", "--target", "reference", "--seconds", "60"]])
def test_closed_pipe_is_exit_code_12_and_no_violation(tmp_path, trace, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [*arguments, trace] if arguments == ["replay"] else arguments
    done = run(*arguments, cwd=tmp_path, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)

    assert done.returncode == BROKEN
    assert done.stderr.startswith("kvlockstep: output")
    assert done.stderr.endswith(": Broken pipe\n")
    assert done.stderr.count("\n") == 1


def test_closed_standard_output_leaves_the_verdict(trace):
    done = subprocess.run(
        f"{sys.executable} -m kvlockstep replay {trace} >&-", shell=True, capture_output=True, check=False
    )

    assert (done.returncode, done.stderr) == (CLEAN, b"")


def test_output_fits_a_terminal_that_knows_only_ascii_and_no_colours(trace):
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40", "FORCE_COLOR": "1", "NO_COLOR": "1"}
    done = run("replay", trace, "--fault", "none", env=environ)

    assert (done.returncode, done.stderr) == (CLEAN, "")
    assert "CLEAN: 2 operations without a violation\n" in done.stdout
    assert "\x1b[3" not in done.stdout


def test_doctor_says_what_runs_here_and_what_to_do_about_the_rest(tmp_path):
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "KVLOCKSTEP_SGLANG_PYTHON": "absent"}
    done = run("doctor", cwd=tmp_path, env=environ, timeout=120)
    found = {line.split("  ")[0]: line.split()[-1] and line for line in done.stdout.splitlines()}

    assert (done.returncode, done.stderr) == (CLEAN, "")
    for subject in ("python", "torch", "triton", "cores", "gpu_impl on torch", "gpu_impl on interpret", "reference"):
        assert subject in found
    assert "  yes  kvlockstep fuzz --lanes interpret" in found["gpu_impl on interpret"]
    assert "  yes  kvlockstep fuzz --target reference" in found["reference"]
    assert "  no   lane 'cuda': torch finds no GPU: install the CUDA build of torch" in found["gpu_impl on cuda"]
    for subject in ("sglang", "sglang:radix on torch", "sglang:unified-rust on interpret"):
        assert "KVLOCKSTEP_SGLANG_PYTHON is 'absent', which is no program" in found[subject]
    assert "package.module:factory" in found["your own"]
    assert os.listdir(tmp_path) == []


def failing_probe(command, **options):
    if command[-1] == "interpret":
        raise subprocess.TimeoutExpired(command, options["timeout"])
    return subprocess.CompletedProcess(
        command, 1, "", "Traceback\nImportError: no libtorch" if command[-1] == "torch" else ""
    )


def test_machine_where_nothing_runs_is_unknown_and_says_why(monkeypatch, capsys):
    from kvlockstep.fuzz import cli

    monkeypatch.setattr(doctor.subprocess, "run", failing_probe)
    monkeypatch.setattr(sys, "argv", ["kvlockstep", "targets"])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out = capsys.readouterr().out

    assert stopped.value.code == UNKNOWN
    assert "ImportError: no libtorch" in out
    assert "did not start within 120 s" in out
    assert "ended with status 1" in out
    assert [finding.works for finding in targets_here() if finding.is_target] == [False] * 10
