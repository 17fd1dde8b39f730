"""What can run here: targets, lanes, tools; and for what cannot, the reason and the remedy."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass

from kvlockstep.fuzz.failures import environment
from kvlockstep.fuzz.registry import BUILT_IN, LANED, LANES

_PROBE = """
import os, sys
os.environ["KVLOCKSTEP_LANE"] = sys.argv[2]
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.registry import TargetUnusable, factory_for
try:
    target = factory_for(sys.argv[1])(CacheConfig())
except TargetUnusable as error:
    sys.exit(str(error))
print(getattr(target, "lane", None) or "-")
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor: what was looked for, whether it works, and in which way or why not."""

    subject: str
    works: bool
    text: str


def targets_here() -> list[Finding]:
    """Try every built-in target on every lane, each in a process of its own."""
    findings = []
    for name in BUILT_IN:
        for lane in LANES if name in LANED else ("torch",):
            environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
            command = [sys.executable, "-c", _PROBE, name, lane]
            done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
            works = done.returncode == 0
            last = (done.stdout if works else done.stderr).strip().splitlines()[-1:]
            text = f"lane {last[0]}" if works and name in LANED else last[0] if last and not works else "works"
            findings.append(Finding(f"{name} ({lane})" if name in LANED else name, works, text))
    return findings


def examine() -> list[Finding]:
    """Look at the interpreter, the packages, the machine, and then at the targets."""
    facts = environment()
    python_ok = sys.version_info >= (3, 11)
    findings = [Finding("python", python_ok, facts["python"] + ("" if python_ok else ": 3.11 or newer is needed"))]
    for package in ("torch", "triton", "hypothesis", "numpy"):
        present = facts[package] != "absent"
        findings.append(Finding(package, present, facts[package] if present else f"absent: pip install {package}"))
    crosshair = importlib.util.find_spec("crosshair") is not None
    findings.append(Finding("crosshair", crosshair, "present" if crosshair else "absent: pip install crosshair-tool"))
    cores = len(os.sched_getaffinity(0))
    findings.append(Finding("cores", cores >= 2, f"{cores}" + ("" if cores >= 2 else ": two workers will share it")))
    return findings + targets_here()
