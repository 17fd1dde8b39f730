"""The lanes `torch` and `interpret` agree bit for bit: the same traces, the same digests of rows, pool and write sets.

The traces are drawn here from fixed seeds on the reference, so they are the same on every machine; the stored
regressions come on top. A lane is fixed once a process, so each lane runs all traces in a process of its own,
both at the same time.

Not verified here: that either lane is right (the lockstep says so on each by itself), and the lane `cuda`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget
from kvlockstep.fuzz.trace import Header, Trace, write_trace

N_TRACES = 200
STEPS = 24
REGRESSIONS = Path(__file__).resolve().parents[1] / "regressions"
FAULT = "kernel-value-of-first-layer"
N_WITH_FAULT = 6
LANES = ("torch", "interpret")
RUN = """
import json, sys
from pathlib import Path
from kvlockstep.fuzz.registry import choose_lane, factory_for
from kvlockstep.fuzz.replay import run_ops
from kvlockstep.fuzz.trace import read_trace
lane, fault, n_with_fault, *paths = sys.argv[1:]
choose_lane(lane)
for name, chosen in ((None, paths), (fault, paths[: int(n_with_fault)])):
    factory = factory_for("gpu_impl", name)
    for path in chosen:
        trace = read_trace(path)
        run = run_ops(trace.header.config, trace.ops, factory, digest=True)
        print(json.dumps([name, Path(path).name, [run.signature, run.statistics.done, run.digest]]))
print(json.dumps(["ran on", factory(trace.header.config).lane]))
"""


class Collector:
    """A case that keeps what it ran."""

    config = None

    def __init__(self):
        self.factory = factory_for("reference")
        self.capabilities = GpuImplTarget.capabilities
        self.traces = []

    def start(self, config):
        self.traces.append(Trace(Header(config, target="gpu_impl"), []))
        return Lockstep(config, self.factory(config))

    def run(self, lockstep, op):
        self.traces[-1].ops.append(op)
        lockstep.run(op)


def random_traces():
    """Draw until there are enough that differ; the first cases of a seed are alike."""
    collector = Collector()
    for seed in range(20):
        run_cases(collector, seed, n_cases=60, steps=STEPS + 1)  # the first step of a case draws its config
        distinct = {(t.header.config, tuple(t.ops)): t for t in collector.traces if len(t.ops) == STEPS}
        if len(distinct) >= N_TRACES:
            return list(distinct.values())[:N_TRACES]
    raise AssertionError(f"twenty seeds gave only {len(distinct)} traces")


@pytest.fixture
def results(tmp_path):
    """What each lane said of each trace: lane -> (fault, file) -> signature, operations done, digest."""
    paths = []
    for number, trace in enumerate(random_traces()):
        paths.append(tmp_path / f"random-{number:03}.jsonl")
        write_trace(paths[-1], trace)
    paths += sorted(REGRESSIONS.glob("*.jsonl"))
    processes = {
        lane: subprocess.Popen(
            [sys.executable, "-c", RUN, lane, FAULT, str(N_WITH_FAULT), *map(str, paths)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for lane in LANES
    }
    results = {}
    for lane, process in processes.items():
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        *lines, last = map(json.loads, out.splitlines())
        assert last == ["ran on", lane]
        results[lane] = {(fault, name): said for fault, name, said in lines}
    return results


def test_lanes_give_equal_digests_and_a_kernel_that_differs_is_seen(results):
    """One test for all, so that the traces run once a lane however the suite is spread over processes."""
    plain = {lane: {name: said for (fault, name), said in results[lane].items() if fault is None} for lane in LANES}
    faulty = {lane: {name: said for (fault, name), said in results[lane].items() if fault} for lane in LANES}

    assert len(plain["torch"]) == N_TRACES + len(list(REGRESSIONS.glob("*.jsonl")))
    assert sum(done for _, done, _ in plain["torch"].values()) > 0.8 * N_TRACES * STEPS
    assert len({digest for _, _, digest in plain["torch"].values()}) > 0.95 * N_TRACES

    assert [name for name, (signature, _, _) in plain["torch"].items() if signature is not None] == []
    assert [name for name, said in plain["torch"].items() if said != plain["interpret"][name]] == []

    # the fault is in kernel source: the twins that `torch` runs do not have it
    assert len(faulty["torch"]) == N_WITH_FAULT
    assert [name for name, said in faulty["torch"].items() if said != plain["torch"][name]] == []
    assert [name for name, said in faulty["interpret"].items() if said != plain["torch"][name]]
