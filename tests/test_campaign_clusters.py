"""The examples for Slurm and Kubernetes: exit codes, shards, and what is queued again.

The clusters are not here. Of Slurm ``srun`` and ``scontrol`` are scripts that stand for them, and what they set in the
environment is set; of Kubernetes the file is read, and its command line is run as a pod would run it.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from kvlockstep.fuzz import exits
from kvlockstep.fuzz.cli import EXIT_CODES

ROOT = Path(__file__).resolve().parents[1]
SBATCH = ROOT / "examples" / "slurm" / "kvlockstep.sbatch"
JOB = ROOT / "examples" / "kubernetes" / "kvlockstep.yaml"

CODES = {int(code) for code in re.findall(r"(?:: |; )(\d+) ", EXIT_CODES)}
AGAIN = {exits.CRASHED, exits.BROKEN, exits.INTERRUPTED}
TARGET = "from kvlockstep.fuzz.targets.reference import ReferenceTarget as Honest\n"


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path):
    """A folder with what stands for Slurm on the path; the arguments of each call are a line in a file."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "mine.py").write_text(TARGET)
    script(tmp_path / "bin" / "srun", f'echo "$@" >> {tmp_path}/srun.log; shift; exec "$@"')
    script(tmp_path / "bin" / "scontrol", f'echo "$@" >> {tmp_path}/scontrol.log')
    script(tmp_path / "bin" / "kvlockstep", f'exec {shlex.quote(sys.executable)} -P -m kvlockstep "$@"')
    return tmp_path


def environment(cluster, **more):
    slurm = {"SLURM_ARRAY_JOB_ID": "4242", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "1"}
    slurm |= {"SLURM_ARRAY_TASK_COUNT": "8", "SLURM_CPUS_PER_TASK": "1"}
    mine = {"STORE": str(cluster / "store"), "TMPDIR": str(cluster), "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}"}
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | slurm | mine | more


def run_task(cluster, **more):
    return subprocess.run(
        ["bash", str(SBATCH)],
        cwd=cluster,
        env=environment(cluster, **more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


def test_all_exit_codes_are_known_here():
    assert sorted(CODES) == [0, 1, 2, 10, 11, 12, 130]


# Slurm


@pytest.mark.parametrize("code", sorted(CODES))
def test_task_is_queued_again_for_what_may_go_better_elsewhere(cluster, code):
    script(cluster / "bin" / "kvlockstep", f"exit {code}")
    done = run_task(cluster)

    assert done.returncode == code
    assert lines_of(cluster / "scontrol.log") == (["requeue 4242_3"] if code in AGAIN else [])


def test_task_that_was_queued_again_too_often_is_given_up(cluster):
    script(cluster / "bin" / "kvlockstep", "exit 11")
    done = run_task(cluster, SLURM_RESTART_COUNT="20")

    assert done.returncode == 11
    assert lines_of(cluster / "scontrol.log") == []
    assert done.stderr == "shard 3 ended with 11 and is not queued again\n"


def test_task_without_a_store_is_wrong_usage(cluster):
    done = run_task(cluster, STORE="")

    assert done.returncode == exits.USAGE
    assert not (cluster / "srun.log").exists()


def test_task_passes_the_signal_on_and_waits_for_the_shard(cluster):
    """Slurm sends TERM to the script before the time is up; the shard stores what it has, which takes a while."""
    at_term = f"trap 'sleep 1; touch {cluster}/stored; exit 130' TERM"
    script(cluster / "bin" / "kvlockstep", f"{at_term}\ntouch {cluster}/on\nwhile :; do sleep 0.1; done")
    task = subprocess.Popen(["bash", str(SBATCH)], cwd=cluster, env=environment(cluster))
    until = time.monotonic() + 20
    while not (cluster / "on").exists() and time.monotonic() < until:
        time.sleep(0.05)
    task.send_signal(signal.SIGTERM)

    assert task.wait(20) == exits.INTERRUPTED
    assert (cluster / "stored").exists()
    assert lines_of(cluster / "scontrol.log") == ["requeue 4242_3"]


def test_tasks_of_an_array_are_shards_that_meet_in_the_store(cluster):
    """An array that does not begin at 1; one task is run twice, as after a requeue."""
    asked = {"TARGET": "mine:Honest", "DURATION": "2s", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "4"}
    done = [run_task(cluster, SLURM_ARRAY_TASK_ID=index, **asked) for index in ("5", "7", "7")]

    assert {task.returncode for task in done} <= {exits.CLEAN, exits.UNKNOWN}, done[0].stderr
    assert "seed base slurm-4242" in done[0].stdout
    places = [path.relative_to(cluster / "store").parts for path in (cluster / "store").glob("shards/*/*")]
    assert sorted(place[2] for place in places) == ["0001-of-0004", "0003-of-0004"]
    assert len({place[1] for place in places}) == 1
    assert "shard 3/4" in done[2].stdout
    merged = ["kvlockstep", "merge", "store", "--out", "merged"]
    said = subprocess.run(merged, cwd=cluster, env=environment(cluster), capture_output=True, text=True, check=True)
    assert said.stdout.startswith("shards: 2, causes of failure: 0,")


def test_script_asks_slurm_for_what_it_counts_on():
    asked = re.findall(r"^#SBATCH (--[a-z-]+)(?:=(\S+))?$", SBATCH.read_text(), re.MULTILINE)

    assert dict(asked).keys() >= {"--array", "--requeue", "--time", "--signal", "--cpus-per-task"}
    assert dict(asked)["--signal"].startswith("B:TERM@")
    assert re.fullmatch(r"\d+-\d+", dict(asked)["--array"]), "a step other than 1 leaves holes among the shards"


# Kubernetes


@pytest.fixture(scope="module")
def job():
    return yaml.safe_load(JOB.read_text())


def codes_of(job, action):
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if rule["action"] == action]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}
    assert {rule["onExitCodes"]["operator"] for rule in rules} == {"In"}
    return {code for rule in rules for code in rule["onExitCodes"]["values"]}


def test_exit_codes_of_the_job_are_those_of_the_command(job):
    assert codes_of(job, "FailIndex") == CODES - AGAIN - {exits.CLEAN}
    assert codes_of(job, "Count") == AGAIN


def test_pod_that_is_taken_away_does_not_count(job):
    first = job["spec"]["podFailurePolicy"]["rules"][0]

    assert first == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}


def test_job_is_as_kubernetes_wants_it_for_these_rules(job):
    spec = job["spec"]

    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert spec["completionMode"] == "Indexed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["backoffLimitPerIndex"] > 0
    assert spec["maxFailedIndexes"] >= spec["completions"], "one shard that finds something must not end the others"
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 60


def test_every_index_is_a_shard(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (shards,) = [one["value"] for one in container["env"] if one["name"] == "KVLOCKSTEP_SHARDS"]

    assert shards == str(job["spec"]["completions"])
    assert job["spec"]["parallelism"] <= job["spec"]["completions"]


def test_command_of_a_pod_runs_its_shard(job, cluster):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    assert f"--out={mount['mountPath']}" in container["command"]
    given = {one["name"]: one["value"] for one in container["env"]} | {"STORE": str(cluster / "store")}
    command = [re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], word) for word in container["command"]]
    other = {"--for": "2s", "--target": "mine:Honest", "--workers": "1", "--out": str(cluster / "campaign")}
    names = [word.partition("=")[0] for word in command]
    assert set(other) <= set(names)
    command = [f"{n}={other[n]}" if n in other else word for n, word in zip(names, command, strict=True)]
    pod = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    pod |= given | {"JOB_COMPLETION_INDEX": "2", "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=cluster, env=pod, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode in (exits.CLEAN, exits.UNKNOWN), done.stderr
    (place,) = (cluster / "store").glob("shards/*/*")
    assert place.name == "0003-of-0008"
    assert "seed base campaign-1" in done.stdout
