"""``--sanitize`` on the command line, from a planted fault to its replay; and what needs the lane interpret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlockstep.fuzz.campaign.folder import progress_of, settings_of
from kvlockstep.fuzz.campaign.seeds import Shard, seed_of
from kvlockstep.fuzz.campaign.supervisor import Bounds
from kvlockstep.fuzz.commands.campaign import Asked
from kvlockstep.fuzz.commands.chosen import seed_for
from kvlockstep.fuzz.commands.on_ray import _arguments
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.registry import TargetUnusable, factory_for
from kvlockstep.fuzz.trace import read_trace
from kvlockstep.fuzz.trace_bounds import MAX_NUMBER

HERE = Path(__file__).parent
REGRESSION = HERE.parent / "regressions" / "0001-match-locks-only-last-node.jsonl"
FAULT = "kernel-value-of-first-layer"
SIGNATURE = "KernelWritesCollide.commit.scatter_kv_kernel+pool_ptr"


def run(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvlockstep", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "120"},
        check=False,
    )


def complaint_of(done):
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_kernels_are_watched_on_the_interpret_lane():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_sanitizer_kernels.py")],
        env=os.environ | {"KVLOCKSTEP_LANE": "interpret"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Fuzz under the sanitizer with a fault in a kernel that the laws would name otherwise."""
    folder = tmp_path_factory.mktemp("sanitized")
    done = run("fuzz", "--sanitize", "--fault", FAULT, "--seed", 3, "--seconds", 60, "--out", "out", cwd=folder)
    return folder, done


def test_finding_of_a_run_is_stored_with_its_seed(found):
    folder, done = found

    assert done.returncode == 1, done.stdout + done.stderr
    assert "workers: interpret, seed 3, under the sanitizer" in done.stdout
    assert SIGNATURE in done.stdout
    header = json.loads((folder / "out" / SIGNATURE / "trace.jsonl").read_text().partition("\n")[0])
    assert list(header.items())[-4:] == [
        ("target", "gpu_impl"),
        ("lane", "interpret"),
        ("fault", FAULT),
        ("sanitize", 3),
    ]
    verdict = (folder / "out" / SIGNATURE / "verdict.txt").read_text()
    assert "kernel    scatter_kv_kernel, program 1 of 2, program 0 of 2" in verdict
    assert "lanes     [0, 1) of 1 of program 1" in verdict


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([], 1, f"FAILED: {SIGNATURE} at step 3, the last of 4 operations, as stored"),
        (["--sanitize"], 1, "  sanitized from seed 3"),
        (["--no-sanitize"], 1, "DIFFERENT: SlotChangedOutsideWriteSet"),
        (["--fault", "none"], 0, "  sanitized from seed 3"),
        (["--lane", "torch"], 0, "FIXED: 4 operations"),
    ],
    ids=str,
)
def test_finding_replays_under_the_sanitizer_unless_told_otherwise(found, options, code, said):
    done = run("replay", *options, found[0] / "out" / SIGNATURE / "trace.jsonl")

    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
    assert ("sanitized from seed" in done.stdout) == (not {"--no-sanitize", "torch"}.intersection(options))


def test_finding_is_minimized_under_the_sanitizer(found, tmp_path):
    out = tmp_path / "short.jsonl"

    done = run("minimize", "--seconds", 20, "--out", out, found[0] / "out" / SIGNATURE / "original.jsonl")

    assert done.returncode == 0, done.stdout + done.stderr
    shortest = read_trace(out)
    assert (shortest.header.signature, shortest.header.sanitize) == (SIGNATURE, 3)
    assert len(shortest.ops) == 4


def test_trace_that_was_found_without_runs_under_the_sanitizer_if_asked():
    done = run("replay", "--sanitize", "--lane", "interpret", "--fault", "none", REGRESSION)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "sanitized from seed 0" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        (["fuzz", "--sanitize", "--lanes", "torch"], "gpu_impl on lane torch"),
        (["fuzz", "--sanitize", "--lanes", "interpret,torch"], "gpu_impl on lane torch"),
        (["fuzz", "--sanitize", "--target", "reference"], "reference on lane interpret"),
        (["fuzz", "--sanitize", "--lanes", "torch", "--for", "5s"], "gpu_impl on lane torch"),
        (["replay", "--sanitize", REGRESSION], "gpu_impl on lane torch"),
        (["replay", "--sanitize", "--target", "reference", REGRESSION], "reference"),
        (["minimize", "--sanitize", REGRESSION], "gpu_impl on lane torch"),
    ],
    ids=lambda value: " ".join(map(str, value[:-1])) if isinstance(value, list) else value,
)
def test_sanitizer_that_cannot_run_is_wrong_usage(arguments, got, tmp_path):
    said = complaint_of(run(*arguments, cwd=tmp_path))

    assert said == f"kvlockstep: --sanitize: expected target gpu_impl on lane interpret, got {got}\n"


def test_campaign_under_the_sanitizer_stores_what_it_finds_with_its_seed(tmp_path):
    asked = ("fuzz", "--sanitize", "--fault", FAULT, "--for", "90s", "--workers", 1, "--units", 1, "--base", "b")
    done = run(*asked, "--out", "c", cwd=tmp_path)
    found = read_trace(tmp_path / "c" / "failures" / SIGNATURE / "trace.jsonl").header
    progress = progress_of(tmp_path / "c", 1)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "seed base b, under the sanitizer\n" in done.stdout
    assert settings_of(tmp_path / "c", 1).sanitize
    assert (found.signature, found.fault, found.lane) == (SIGNATURE, FAULT, "interpret")
    assert found.sanitize == seed_of("b sanitizer", 1, 0, 0) & MAX_NUMBER
    assert [cause.replays for cause in progress.causes.values()] == [True] * len(progress.causes)


@pytest.mark.parametrize("sanitize", [True, False])
def test_shard_on_ray_is_under_the_sanitizer_too(sanitize):
    where = {"workers": None, "out": Path("c"), "resume": False, "shard": Shard(), "base": None, "store": "s"}
    rest = {"faults": (), "units": None, "bounds": Bounds(), "accepted": (1,), "sanitize": sanitize}
    words = _arguments(Asked("gpu_impl", ["interpret"], 60.0, **where, **rest), "B", Shard(2, 3), 1)

    assert ("--sanitize" in words) is sanitize
    assert {"--lanes=interpret", "--shard=2/3", "--accept-unobserved=1"} <= set(words)


def test_several_targets_have_no_sanitizer(tmp_path):
    on_two = run("replay", "--sanitize", "--target", "gpu_impl,reference", REGRESSION)
    assert "--sanitize: expected one target with it, got 2" in complaint_of(on_two)


def test_lane_that_is_not_interpreted_makes_no_sanitized_target(monkeypatch):
    monkeypatch.setenv("KVLOCKSTEP_LANE", "torch")
    with pytest.raises(TargetUnusable, match="expected target gpu_impl on lane interpret, got gpu_impl on lane torch"):
        factory_for("gpu_impl", sanitize=0)(CacheConfig())


@pytest.mark.parametrize(
    ("asked", "found", "lane", "seed"),
    [
        (None, 7, "interpret", 7),
        (None, 7, "torch", None),
        (None, None, "interpret", None),
        (True, 7, "interpret", 7),
        (True, None, "interpret", 0),
        (False, 7, "interpret", None),
    ],
)
def test_seed_is_that_of_the_trace_where_the_sanitizer_can_run(asked, found, lane, seed):
    assert seed_for(asked, found, "gpu_impl", lane) == seed
