"""Which Python runs a target, what is said where there is none, and how ``make`` builds SGLang's environment.

No SGLang is needed: small programs stand for the Python that would have it, and for pip.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvlockstep.fuzz import doctor, environments
from kvlockstep.fuzz.environments import PACKAGE, SGLANG_VERSION, VARIABLE, python_for, sglang_found
from kvlockstep.fuzz.registry import ALL, BUILT_IN, LANED, SGLANG_TARGETS, TargetUnusable, check_lane, targets_named

ROOT = Path(__file__).resolve().parents[1]
RADIX = "sglang:radix"


def program(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def python_that_says(path, package=f'"{PACKAGE}"', has_sglang="true", version='"9.9"'):
    """Make a program that answers as a Python would that is asked what it has."""
    return program(path, f"echo {shlex.quote(f'[{package}, {has_sglang}, {version}]')}")


@pytest.fixture
def no_sglang(monkeypatch, tmp_path):
    """Let this Python have no SGLang, no variable name another, and the checkout lie in an empty folder."""
    monkeypatch.setattr(environments, "sglang_is_here", lambda: False)
    monkeypatch.setattr(environments, "PACKAGE", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)


def reason_against(target):
    with pytest.raises(TargetUnusable) as raised:
        python_for(target)
    return str(raised.value)


@pytest.mark.parametrize("target", ["gpu_impl", "reference", "mine:make"])
def test_target_that_needs_no_sglang_runs_in_this_python(no_sglang, target):
    assert python_for(target) == sys.executable


def test_sglang_target_runs_in_this_python_if_that_has_sglang(no_sglang, monkeypatch):
    monkeypatch.setattr(environments, "sglang_is_here", lambda: True)
    monkeypatch.setenv(VARIABLE, "absent")

    assert [python_for(target) for target in SGLANG_TARGETS] == [sys.executable] * 3


def test_folder_that_is_called_sglang_is_not_sglang(monkeypatch, tmp_path):
    (tmp_path / "sglang").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    spec = environments.importlib.util.find_spec("sglang")

    assert spec is not None
    assert environments.sglang_is_here() == (spec.origin is not None)


@pytest.mark.parametrize("target", SGLANG_TARGETS)
def test_sglang_that_is_nowhere_is_one_line_with_the_remedy(no_sglang, target):
    needs = f"target {target!r} needs SGLang {SGLANG_VERSION}"

    assert reason_against(target) == f"{needs}, which is not installed here: make sglang"


def test_sglang_target_runs_in_the_environment_of_the_checkout(no_sglang, tmp_path):
    python = python_that_says(tmp_path / ".venv-sglang" / "bin" / "python", package=f'"{tmp_path}"')

    assert python_for(RADIX) == str(python)
    assert sglang_found() == ("9.9", str(python))


def test_variable_names_a_python_that_comes_before_that_of_the_checkout(no_sglang, monkeypatch, tmp_path):
    python_that_says(tmp_path / ".venv-sglang" / "bin" / "python", package=f'"{tmp_path}"')
    named = python_that_says(tmp_path / "mine" / "python", package=f'"{tmp_path}"', version="null")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "mine/python")

    assert python_for(RADIX) == str(named)
    assert sglang_found()[0] == "of no known version"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"has_sglang": "false"}, f" needs SGLang {SGLANG_VERSION}, which PYTHON does not have: REMEDY"),
        ({"package": "null"}, ": PYTHON does not have kvlockstep: REMEDY"),
        ({"package": '"/other/copy"'}, ": PYTHON has the kvlockstep of /other/copy, not of FOLDER: REMEDY"),
    ],
)
def test_python_that_cannot_run_the_target_is_named_with_the_remedy(no_sglang, monkeypatch, tmp_path, answer, reason):
    answer = {"package": f'"{tmp_path}"', **answer}
    of_checkout = python_that_says(tmp_path / ".venv-sglang" / "bin" / "python", **answer)
    named = python_that_says(tmp_path / "named", **answer)
    reason = f"target {RADIX!r}{reason}".replace("FOLDER", str(tmp_path))

    assert reason_against(RADIX) == reason.replace("PYTHON", str(of_checkout)).replace("REMEDY", "make sglang")
    monkeypatch.setenv(VARIABLE, str(named))
    remedy = f"let {VARIABLE} name another"
    assert reason_against(RADIX) == reason.replace("PYTHON", str(named)).replace("REMEDY", remedy)


def test_program_that_is_absent_or_no_python_is_named(no_sglang, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "absent-program")
    assert reason_against(RADIX) == f"target {RADIX!r}: {VARIABLE} is 'absent-program', which is no program"

    no_python = program(tmp_path / "no-python", "exit 1")
    monkeypatch.setenv(VARIABLE, str(no_python))
    assert reason_against(RADIX).startswith(f"{no_python} does not run as a Python")


def test_this_very_python_is_asked_what_it_has(no_sglang, monkeypatch):
    monkeypatch.setattr(environments, "PACKAGE", PACKAGE)
    monkeypatch.setenv(VARIABLE, sys.executable)
    package, has_sglang, _ = environments._look_at(sys.executable)

    assert package == str(ROOT)
    if not has_sglang:
        assert f"which {sys.executable} does not have: " in reason_against(RADIX)


@pytest.mark.needs("sglang")
def test_environment_of_sglang_has_the_pinned_version():
    version, python = sglang_found()

    assert version == SGLANG_VERSION
    assert {python_for(target) for target in SGLANG_TARGETS} == {python}


# Names and lanes


def test_all_stands_for_what_is_worth_fuzzing_and_a_list_for_what_it_names():
    assert targets_named("all") == list(ALL) == ["gpu_impl", *SGLANG_TARGETS]
    assert targets_named("sglang:unified-rust, mine:make,sglang:unified-rust") == ["sglang:unified-rust", "mine:make"]
    assert targets_named("reference,all") == ["reference", *ALL]
    assert set(ALL) < set(BUILT_IN)


@pytest.mark.parametrize("text", ["", ",", "sglang", "gpu_impl,vllm", "sglang:rust", "all:"])
def test_name_that_cannot_be_a_target_is_refused_in_a_list_too(text):
    with pytest.raises(TargetUnusable, match=r"^unknown target "):
        targets_named(text)


def test_misspelt_tree_of_sglang_is_told_which_there_are():
    with pytest.raises(TargetUnusable) as raised:
        targets_named("sglang:rust")

    assert str(raised.value) == f"unknown target 'sglang:rust': expected one of {', '.join(SGLANG_TARGETS)}"


def test_target_has_its_lanes_and_no_others():
    assert set(LANED[RADIX]) == {"torch", "interpret"}
    check_lane(RADIX, "interpret")
    check_lane("mine:make", "cuda")
    with pytest.raises(TargetUnusable) as raised:
        check_lane(RADIX, "cuda")

    assert str(raised.value) == f"target {RADIX!r} has no lane cuda, expected one of interpret, torch"


# The doctor


def test_doctor_says_of_every_tree_why_it_cannot_run(no_sglang, monkeypatch):
    monkeypatch.setattr(doctor, "BUILT_IN", dict.fromkeys(SGLANG_TARGETS))
    *findings, everything, own = doctor.targets_here()
    remedy = "which is not installed here: make sglang"

    assert {finding.subject for finding in findings} == {
        f"{name} on {lane}" for name in SGLANG_TARGETS for lane in ("torch", "interpret")
    }
    assert all(not finding.works and finding.text.endswith(remedy) for finding in findings)
    assert all(name in everything.text for name in ALL)
    assert not own.is_target
    assert doctor._sglang().text.endswith(remedy)


def test_doctor_tries_each_tree_alone_once_something_is_wrong(no_sglang, monkeypatch, tmp_path):
    """The program that stands for the Python says no if a tree of the Rust core is among what it is asked for."""
    script = f"""case "$*" in
        *find_spec*) echo '["{tmp_path}", true, "9.9"]';;
        *unified-rust*) echo "ImportError: no core" >&2; exit 1;;
    esac"""
    program(tmp_path / ".venv-sglang" / "bin" / "python", script)
    monkeypatch.setattr(doctor, "BUILT_IN", dict.fromkeys(SGLANG_TARGETS))
    found = {finding.subject: finding for finding in doctor.targets_here()}

    for lane in ("torch", "interpret"):
        assert found[f"sglang:unified-rust on {lane}"].text == "ImportError: no core"
        for name in ("sglang:radix", "sglang:unified-python"):
            assert found[f"{name} on {lane}"].text == f"kvlockstep fuzz --target {name} --lanes {lane}"
    assert doctor._sglang().text == f"9.9, with {tmp_path}/.venv-sglang/bin/python"


# Pins


def pins(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert len({package.lower() for package, _ in found}) == len(found), "a package stands twice"
    return dict(found)


def test_pins_of_sglang_are_the_version_that_messages_name():
    assert pins("sglang.txt")["sglang"] == SGLANG_VERSION


def test_both_environments_pin_the_same_but_for_triton():
    ours, theirs = pins("ci.txt"), pins("sglang.txt")

    assert [name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]] == ["triton"]


# make


@pytest.fixture
def make(tmp_path):
    """Run make on a copy of what builds the environments; a program stands for Python, and for pip in it."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "requirements").mkdir()
    for path in (ROOT / "requirements").iterdir():
        (tmp_path / "requirements" / path.name).write_text(path.read_text())
    python = program(
        tmp_path / "python",
        """case "$*" in
            "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
            "-m pip "*"$PIP_FAILS_AT"*) [ -z "$PIP_FAILS_AT" ] || { echo "$PIP_SAYS" >&2; exit 1; };;
            "-m kvlockstep "*|"-m pytest "*) echo "ran: $0 $*";;
        esac""",
    )

    def run(*arguments, **variables):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "FUZZ_"))}
        environ |= {"PIP_FAILS_AT": "", "PIP_SAYS": "", "KVLOCKSTEP_REQUIRE": "", **variables}
        return subprocess.run(
            ["make", f"PYTHON={python}", *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True
        )

    return run


def test_make_sglang_builds_the_environment_once_and_fuzzes_the_three_trees(make, tmp_path):
    first, second = make("sglang", "FUZZ_SECONDS=7"), make("sglang")
    fuzz = f"ran: .venv-sglang/bin/python -m kvlockstep fuzz --target {','.join(SGLANG_TARGETS)} --seconds"

    assert (first.returncode, first.stderr) == (0, "")
    assert [line[:20] for line in first.stdout.splitlines()[:4]] == [f"== .venv-sglang {n}/4:" for n in (1, 2, 3, 4)]
    assert first.stdout.endswith(f"{fuzz} 7\n")
    assert second.stdout == f"{fuzz} 60\n"
    assert (tmp_path / ".venv-sglang" / ".ready").exists()
    assert not (tmp_path / ".venv").exists()


SILENT = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)': /simple/sglang/"
ABSENT = "ERROR: No matching distribution found for sglang==0.5.23"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (f"{SILENT}\n{ABSENT}", ".venv-sglang: the package registry did not answer; what is installed stays, "),
        (ABSENT, f".venv-sglang: pip install --no-deps -r requirements/sglang.txt failed: {ABSENT}\n"),
        ("Killed", ".venv-sglang: pip install --no-deps -r requirements/sglang.txt failed: Killed\n"),
    ],
)
def test_make_sglang_says_what_pip_failed_at_and_does_not_fuzz(make, tmp_path, said, why):
    done = make("sglang", PIP_FAILS_AT="sglang.txt", PIP_SAYS=said)

    assert done.returncode != 0
    assert why in done.stderr
    assert said in done.stderr
    assert "== .venv-sglang 3/4" in done.stdout
    assert "ran:" not in done.stdout
    assert not (tmp_path / ".venv-sglang" / ".ready").exists()


def test_real_pip_without_a_registry_is_understood(make):
    unreachable = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "1",
        "PIP_TIMEOUT": "1",
        "PIP_NO_CACHE_DIR": "1",
    }
    done = make(f"PYTHON={sys.executable}", ".venv-sglang/.ready", **unreachable)

    assert done.returncode != 0
    assert ".venv-sglang: the package registry did not answer" in done.stderr


@pytest.fixture
def tools(tmp_path):
    """Stand for the main environment, built."""
    for name in ("ruff", "mypy", "python"):
        program(tmp_path / ".venv" / "bin" / name, 'echo "ran: $0 $*"')
    (tmp_path / ".venv" / ".ready").touch()


def test_make_test_says_that_it_left_sglang_out_unless_that_is_promised(make, tools):
    left_out, promised = make("test"), make("test", KVLOCKSTEP_REQUIRE="cuda,sglang")
    skipped = "== pytest (SGLang)\nskipped: needs sglang: .venv-sglang is not built, make sglang\n"

    assert (left_out.returncode, left_out.stderr) == (0, "")
    assert left_out.stdout.endswith(skipped)
    assert promised.returncode != 0
    assert promised.stdout.endswith(skipped)
    assert "KVLOCKSTEP_REQUIRE promises sglang" in promised.stderr


def test_make_test_runs_the_tests_of_sglang_where_it_is_built(make, tools):
    make(".venv-sglang/.ready")
    done = make("test", KVLOCKSTEP_REQUIRE="sglang")

    assert (done.returncode, done.stderr) == (0, "")
    assert "skipped" not in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("ran: .venv-sglang/bin/python -m pytest ")
    assert last.endswith(" tests/sglang")


@pytest.mark.parametrize(
    ("install", "promised", "said"),
    [
        ("ln -s {bin}/true {bin}/chromium; touch {bin}/Python.h", "sglang,ray,browser,compiled", []),
        (
            "echo no network >&2; exit 100",
            "sglang,ray",
            [
                "chromium cannot be installed: tests of pages are skipped",
                "Python's headers are not there: tests of compiled code are skipped",
            ],
        ),
    ],
)
def test_ci_builds_sglang_and_ray_first_and_promises_what_else_it_can(tmp_path, install, promised, said):
    bin_folder = tmp_path / "bin"
    program(bin_folder / "make", 'echo "make $* with ${KVLOCKSTEP_REQUIRE:-nothing} promised"')
    program(bin_folder / "apt-get", install.format(bin=bin_folder))
    program(bin_folder / "python3", f"echo {bin_folder}")
    for name in ("bash", "dirname", "env", "ln", "sh", "touch", "true"):
        (bin_folder / name).symlink_to(shutil.which(name))
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    environ = {**os.environ, "PATH": str(bin_folder), "KVLOCKSTEP_REQUIRE": "cuda"}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=environ, capture_output=True, text=True)

    assert done.stdout.splitlines() == [
        "== chromium",
        *said,
        "make .venv-sglang/.ready .venv/.ray with cuda promised",
        f"make test with cuda,{promised} promised",
    ]


# The suite


def test_tests_of_sglang_are_skipped_with_the_reason_where_nothing_can_import_it():
    if environments.sglang_is_here():
        pytest.skip("SGLang can be imported here")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/sglang"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert (
        "tests/sglang needs sglang: not installed beside this Python; make test runs it in .venv-sglang" in done.stdout
    )
    assert "error" not in done.stdout.lower()
    assert " passed" not in done.stdout
