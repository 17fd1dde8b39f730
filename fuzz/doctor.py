"""What can run here: targets, lanes, tools; and for what cannot, the reason and the remedy."""

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvlockstep.fuzz.environments import python_for, sglang_found, why_not_compiled
from kvlockstep.fuzz.failures import environment
from kvlockstep.fuzz.registry import ALL, BUILT_IN, LANED, SGLANG_TARGETS, TargetUnusable
from kvlockstep.fuzz.trace_bounds import LANES

DEFAULT = "gpu_impl"
"""What is fuzzed if no target is named."""

PROBE_S = 120.0
"""The first import of torch on a cold disk takes a while."""

_PROBE = """
import os, sys
*names, os.environ["KVLOCKSTEP_LANE"] = sys.argv[1:]
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.registry import TargetUnusable, factory_for
for name in names:
    try:
        factory_for(name)(CacheConfig())
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
    """Try every built-in target on each of its lanes, in processes of their own, as many at a time as there are cores.

    More would wait for each other's imports, and then each seem to take too long. The trees of SGLang, which takes
    seconds to import, share one process a lane; if that finds anything wrong, each is tried alone.
    """
    groups: list[tuple[tuple[str, ...], str | None]] = []
    for names in (*((name,) for name in BUILT_IN if name not in SGLANG_TARGETS), SGLANG_TARGETS):
        groups += [(names, lane) for lane in LANES if lane in LANED[names[0]]] if names[0] in LANED else [(names, None)]
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        findings = [finding for of_group in pool.map(_try, *zip(*groups, strict=True)) for finding in of_group]
    return [
        *findings,
        Finding("all", True, f"--target all is {', '.join(ALL)}; a part of it: names with commas between them"),
        Finding("your own", True, "--target package.module:factory, also from the current folder"),
    ]


def _try(names: tuple[str, ...], lane: str | None) -> list[Finding]:
    """Try several targets in one process; say of each whether it runs there, or what keeps it from that."""
    reason = _reason_against(names, lane)
    if reason is not None and len(names) > 1:
        return [finding for name in names for finding in _try((name,), lane)]
    findings = []
    for name in names:
        subject = f"{name} on {lane}" if lane else name
        options = ([] if name == DEFAULT else [f"--target {name}"]) + ([f"--lanes {lane}"] if lane else [])
        findings.append(Finding(subject, reason is None, reason or f"kvlockstep fuzz {' '.join(options)}", True))
    return findings


def _reason_against(names: tuple[str, ...], lane: str | None) -> str | None:
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    try:
        command = [python_for(names[0]), "-P", "-c", _PROBE, *names, lane or "auto"]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environ, timeout=PROBE_S
        )
    except TargetUnusable as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"did not start within {PROBE_S:.0f} s"
    if done.returncode == 0:
        return None
    reason = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
    remedy = next((remedy for cause, remedy in _REMEDIES.items() if cause in reason), None)
    return f"{reason}: {remedy}" if remedy else reason


def _sglang() -> Finding:
    """Say which SGLang its targets run with, and where that is."""
    try:
        version, python = sglang_found()
    except TargetUnusable as error:
        return Finding("sglang", False, str(error))
    return Finding("sglang", True, version if python == sys.executable else f"{version}, with {python}")


def examine() -> list[Finding]:
    """Look at the interpreter, the packages, the machine, and then at the targets."""
    facts = environment()
    python_ok = sys.version_info >= (3, 11)
    findings = [Finding("python", python_ok, facts["python"] + ("" if python_ok else ": 3.11 or newer is needed"))]
    for package in ("kvlockstep", "torch", "triton", "hypothesis", "numpy"):
        present = facts[package] != "absent"
        findings.append(Finding(package, present, facts[package] if present else f"absent: pip install {package}"))
    findings.append(_sglang())
    interpreted = why_not_compiled()
    findings.append(Finding("gpu_impl's host side", interpreted is None, interpreted or "compiled"))
    crosshair = importlib.util.find_spec("crosshair") is not None
    findings.append(Finding("crosshair", crosshair, "present" if crosshair else "absent: pip install crosshair-tool"))
    cores = len(os.sched_getaffinity(0))
    findings.append(Finding("cores", cores >= 2, f"{cores}" + ("" if cores >= 2 else ": two workers will share it")))
    return findings + targets_here()
