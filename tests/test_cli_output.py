"""What the command prints where nobody can read it, on small and colourless terminals, and about this machine."""

import json
import os
import subprocess
import sys

import pytest

from kvlockstep.fuzz import doctor
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.doctor import targets_here
from kvlockstep.fuzz.faults import FAULTS as CATALOGUE
from kvlockstep.fuzz.faults.hunt import Hunt
from kvlockstep.fuzz.ops import Match, Submit
from kvlockstep.fuzz.trace import Header, Trace, write_trace

CLEAN, VIOLATION, USAGE, UNKNOWN, BROKEN, INTERRUPTED = 0, 1, 2, 10, 12, 130
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


def hunts(*results, interrupted=False):
    def hunt_all(faults, seeds, seconds, jobs):
        yield from results
        if interrupted:
            raise KeyboardInterrupt

    return hunt_all


CAUGHT = Hunt("abort-keeps-lock", 0, True, "LockCountWrong", "LockCountWrong.abort", 300, 1.5, 40, 6)
MISSED = Hunt("abort-keeps-lock", 1, False, seconds=60.0)
FAULTS = ["faults", "--only", "abort-keeps-lock", "--only", "lock-only-last-node"]


@pytest.mark.parametrize(
    ("hunt_all", "code", "said"),
    [
        (hunts(CAUGHT), CLEAN, "1/2  abort-keeps-lock seed 0: LockCountWrong\n"),
        (hunts(CAUGHT, MISSED), VIOLATION, "2/2  abort-keeps-lock seed 1: not found\n"),
        (hunts(CAUGHT, interrupted=True), INTERRUPTED, "interrupted after 1 of 2\n"),
    ],
)
def test_faults_end_with_a_table_of_what_was_found_so_far(monkeypatch, capsys, tmp_path, hunt_all, code, said):
    from kvlockstep.fuzz import cli

    monkeypatch.setattr("kvlockstep.fuzz.faults.hunt.hunt_all", hunt_all)
    monkeypatch.setattr(sys, "argv", ["kvlockstep", *FAULTS, "--seeds", "1", "--json", str(tmp_path / "f.json")])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out = capsys.readouterr().out

    assert stopped.value.code == code
    assert said in out
    assert "faults, slowest of their seeds" in out
    assert json.loads((tmp_path / "f.json").read_text())[0]["law"] == "LockCountWrong"


LONGEST = max(CATALOGUE, key=len)
PRINT_TABLE = f"""
from kvlockstep.fuzz import cli
from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults.hunt import Hunt
chosen = [FAULTS[name] for name in ({LONGEST!r}, "abort-keeps-lock")]
results = [Hunt(fault.name, 0, True, law, law, 123456, 59.9, 400, 38)
    for fault in chosen for law in ("RowOffCanonicalPath", "EvictableClaimWrong")]
cli.print_hunts(cli.console, chosen, results)
"""


@pytest.mark.parametrize("columns", [None, "80", "100", "40"])
def test_faults_in_a_pipe_keep_names_whole_and_say_which_law_named_them(columns):
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environ |= {"COLUMNS": columns} if columns else {}
    out = subprocess.run(
        [sys.executable, "-c", PRINT_TABLE], env=environ, capture_output=True, text=True, check=True
    ).stdout

    assert out.count("EvictableClaimWrong, ") == out.count("RowOffCanonicalPath") == 2
    for name in (LONGEST, "abort-keeps-lock"):
        (line, *_) = [line for line in out.splitlines() if name in line]
        if columns != "40":
            assert line.split()[:5] == [name, "2/2", "123,456", "59.9", "38"]
    if columns != "40":
        assert " fault caught ops s min " in " ".join(out.split())


@pytest.mark.parametrize("path", ["/dev/full", "absent/f.json"])
def test_faults_name_the_file_that_could_not_be_written(monkeypatch, capsys, tmp_path, path):
    from kvlockstep.fuzz import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvlockstep.fuzz.faults.hunt.hunt_all", hunts(CAUGHT))
    monkeypatch.setattr(sys, "argv", ["kvlockstep", *FAULTS, "--seeds", "1", "--json", path])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, err = capsys.readouterr()

    assert stopped.value.code == BROKEN
    assert err.startswith(f"kvlockstep: --json {path}: No s")
    assert err.count("\n") == 1
    assert ("LockCountWrong" in out) == (path == "/dev/full"), "a folder that is absent is found out before the hunt"


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
