"""What can run here: targets, lanes, tools; and for what cannot, the reason and the remedy."""

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvlockstep.fuzz.failures import environment
from kvlockstep.fuzz.registry import BUILT_IN, LANED
from kvlockstep.fuzz.trace_bounds import LANES

PROBE_S = 120.0
"""The first import of torch on a cold disk takes a while."""

_PROBE = """
import os, sys
os.environ["KVLOCKSTEP_LANE"] = sys.argv[2]
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.registry import TargetUnusable, factory_for
try:
    target = factory_for(sys.argv[1])(CacheConfig())
except TargetUnusable as error:
    sys.exit(str(error.__cause__ or error))
"""

_REMEDIES = {
    "torch finds no GPU": "install the CUDA build of torch on a machine with one, or leave this lane out",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor: what was looked for, whether it works, and in which way or why not."""

    subject: str
    works: bool
    text: str
    is_target: bool = False


def targets_here() -> list[Finding]:
    """Try every built-in target on every lane, each in a process of its own, all at the same time."""
    subjects = [(name, lane) for name in BUILT_IN for lane in (LANES if name in LANED else (None,))]
    with ThreadPoolExecutor(len(subjects)) as pool:
        findings = list(pool.map(_try, *zip(*subjects, strict=True)))
    return findings + [Finding("your own", True, "--target package.module:factory, also from the current folder")]


def _try(name: str, lane: str | None) -> Finding:
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", _PROBE, name, lane or "auto"]
    subject = f"{name} on {lane}" if lane else name
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environ, timeout=PROBE_S
        )
    except subprocess.TimeoutExpired:
        return Finding(subject, False, f"did not start within {PROBE_S:.0f} s", True)
    if done.returncode == 0:
        lanes = f"--lanes {lane}" if lane else f"--target {name}"
        return Finding(subject, True, f"kvlockstep fuzz {lanes}", True)
    reason = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
    remedy = next((remedy for cause, remedy in _REMEDIES.items() if cause in reason), None)
    return Finding(subject, False, f"{reason}: {remedy}" if remedy else reason, True)


def examine() -> list[Finding]:
    """Look at the interpreter, the packages, the machine, and then at the targets."""
    facts = environment()
    python_ok = sys.version_info >= (3, 11)
    findings = [Finding("python", python_ok, facts["python"] + ("" if python_ok else ": 3.11 or newer is needed"))]
    for package in ("kvlockstep", "torch", "triton", "hypothesis", "numpy"):
        present = facts[package] != "absent"
        findings.append(Finding(package, present, facts[package] if present else f"absent: pip install {package}"))
    crosshair = importlib.util.find_spec("crosshair") is not None
    findings.append(Finding("crosshair", crosshair, "present" if crosshair else "absent: pip install crosshair-tool"))
    cores = len(os.sched_getaffinity(0))
    findings.append(Finding("cores", cores >= 2, f"{cores}" + ("" if cores >= 2 else ": two workers will share it")))
    return findings + targets_here()
