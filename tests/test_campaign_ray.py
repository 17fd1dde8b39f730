"""Shards on Ray: what they find is what the same shards find without, also when a Ray worker is killed at its work."""

import json
import subprocess
import sys
import time

import psutil
import pytest

from kvlockstep.fuzz.campaign.record import read_record

CLEAN, VIOLATION, USAGE, CRASHED = 0, 1, 2, 11
UNITS = 10


@pytest.fixture
def folder(tmp_path, slips):
    (tmp_path / "mine.py").write_text(slips)
    return tmp_path


def command(*options):
    asked = ["fuzz", "--for=120s", "--target=mine:Slips", "--base=B", f"--units={UNITS}", *options]
    return [sys.executable, "-P", "-m", "kvlockstep", *asked]


def begin(folder, *options):
    return subprocess.Popen(command(*options), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder, *arguments):
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=150, check=False)


def units_of(store, index):
    for path in store.glob(f"shards/*/{index:04}-of-*/progress.json"):
        return max(json.loads(path.read_text())["units"].values(), default=0)
    return 0


def shard_process(driver, shard):
    """Find the process that runs a shard on this machine: the child of a Ray worker, which is one of the driver's."""
    for process in psutil.Process(driver.pid).children(recursive=True):
        try:
            if f"--shard={shard}" in process.cmdline() and "kvlockstep" in process.cmdline():
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def wait_for(condition, process, seconds=90.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come so far"
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    return found


def found_in(campaign):
    return {(f.cause.signature, f.cause.target, f.cause.fault) for f in read_record(campaign).findings}


@pytest.mark.needs("ray")
def test_shards_on_ray_find_what_they_find_here_though_a_worker_is_killed(folder):
    here = [begin(folder, f"--shard={i}/2", "--workers=1", "--store=here", f"--out=here-{i}") for i in (1, 2)]
    on_ray = begin(folder, "--ray=local", "--workers=2", "--store=store", "--out=merged")
    try:
        wait_for(lambda: units_of(folder / "store", 1) > 0, on_ray)
        shard = shard_process(on_ray, "1/2")
        ray_worker = shard.parent()
        assert "ray::" in " ".join(ray_worker.cmdline())
        was_at = units_of(folder / "store", 1)
        ray_worker.kill()
        psutil.wait_procs([shard], timeout=12.0)
        assert not shard.is_running(), "the shard outlived its Ray worker"
        output, _ = on_ray.communicate(timeout=150)
        for process in here:
            process.communicate(timeout=150)
    finally:
        for process in (on_ray, *here):
            process.kill()
    merged_here = run(folder, sys.executable, "-P", "-m", "kvlockstep", "merge", "here", "--out", "merged-here")

    assert on_ray.returncode == VIOLATION, output
    assert [process.returncode for process in here] == [VIOLATION, VIOLATION]
    assert merged_here.returncode == CLEAN, merged_here.stderr
    assert found_in(folder / "merged") == found_in(folder / "merged-here")
    assert len(found_in(folder / "merged")) == 2
    first, second = read_record(folder / "merged").parties
    assert first.progress.units == second.progress.units == {"mine": UNITS}
    starts = [event["unit"] for event in first.named("start")]
    assert len(starts) == 2
    assert UNITS > starts[1] >= was_at > 0
    assert "2 causes of failure" in output
    assert "kvlockstep replay" in output


@pytest.mark.needs("ray")
@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1", "127.0.0.1:99999"])
def test_ray_that_is_not_there_is_wrong_usage(folder, address):
    done = run(folder, *command(f"--ray={address}", "--store=store"))

    assert done.returncode == USAGE
    assert done.stderr.splitlines()[-1].startswith(f"kvlockstep: --ray {address}: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ray=local"], "--ray local: say --store URL with it, a store that all nodes reach"),
        (["--ray=local", "--store=s", "--shard=1/2"], "--shard 1/2: not with --ray, which runs all shards"),
        (["--ray=local", "--store=s", "--resume"], "--resume: not with --ray; the same --base and --store go on"),
    ],
)
def test_options_that_do_not_go_with_ray(folder, options, said):
    done = run(folder, *command(*options))

    assert (done.returncode, done.stderr) == (USAGE, f"kvlockstep: {said}\n")


def test_ray_that_is_not_installed_is_wrong_usage(folder):
    (folder / "ray.py").write_text("raise ImportError('none')\n")
    script = "import sys; sys.path.insert(0, '.'); from kvlockstep.fuzz.cli import main; main()"
    done = run(folder, sys.executable, "-c", script, *command("--ray=local", "--store=s")[4:])

    assert done.returncode == USAGE
    assert done.stderr == "kvlockstep: --ray: Ray is not installed: pip install 'kvlockstep[ray]'\n"
