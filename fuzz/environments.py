"""Which Python runs a target.

The environment of SGLang is its own, for its pins are not those of the rest. So a command that is asked for an
SGLang target in another environment starts the processes that run it with the Python of that one: the one that
``KVLOCKSTEP_SGLANG_PYTHON`` names, else ``.venv-sglang`` of the checkout that this package lies in, which
``make sglang`` builds. Both must run the same kvlockstep, or a trace would be judged by another law than this one's.
Every other target runs where the command does.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from kvlockstep.fuzz.registry import SGLANG_TARGETS, TargetUnusable

VARIABLE = "KVLOCKSTEP_SGLANG_PYTHON"

SGLANG_VERSION = "0.5.23"
"""What requirements/sglang.txt pins."""

PACKAGE = Path(__file__).resolve().parents[1]
"""Where the folders of this package really lie: those of the checkout, if it is installed from one."""

PROBE_S = 60.0

_PROBE = """
import importlib.util, json, os, sys
from importlib.metadata import PackageNotFoundError, version
def origin(name):
    spec = importlib.util.find_spec(name)
    return spec and spec.origin and os.path.realpath(spec.origin)
ours, theirs = origin("kvlockstep"), origin("sglang")
fuzz = ours and os.path.realpath(os.path.join(os.path.dirname(ours), "fuzz"))
try:
    pin = version("sglang")
except PackageNotFoundError:
    pin = None
print(json.dumps([fuzz and os.path.dirname(fuzz), bool(theirs), pin]))
"""


def python_for(target: str) -> str:
    """Return the Python that runs a target: this one, or that of SGLang's environment.

    Raises TargetUnusable, with the remedy, where there is none.
    """
    if target not in SGLANG_TARGETS or sglang_is_here():
        return sys.executable
    named = os.environ.get(VARIABLE)
    python = _named_python(target, named) if named else _python_of_checkout()
    needs = f"target {target!r} needs SGLang {SGLANG_VERSION}"
    if python is None:
        raise TargetUnusable(f"{needs}, which is not installed here: make sglang")
    remedy = f"let {VARIABLE} name another" if named else "make sglang"
    package, has_sglang, _ = _look_at(python)
    if not has_sglang:
        raise TargetUnusable(f"{needs}, which {python} does not have: {remedy}")
    if package is None:
        raise TargetUnusable(f"target {target!r}: {python} does not have kvlockstep: {remedy}")
    if package != str(PACKAGE):
        raise TargetUnusable(f"target {target!r}: {python} has the kvlockstep of {package}, not of {PACKAGE}: {remedy}")
    return python


def sglang_found() -> tuple[str, str]:
    """Return the version of SGLang that its targets run with, and the Python that has it. Raises TargetUnusable."""
    python = python_for(SGLANG_TARGETS[0])
    return _look_at(python)[2] or "of no known version", python


def go_where_it_runs(target: str) -> None:
    """Start this command line over with the Python that the target needs; do nothing where it runs here.

    Raises TargetUnusable.
    """
    python = python_for(target)
    if python != sys.executable:
        sys.stdout.flush()
        os.execv(python, [python, "-P", "-m", "kvlockstep", *sys.argv[1:]])


def sglang_is_here() -> bool:
    """Tell whether this Python has SGLang: a package, no mere folder of that name such as a clone of it."""
    spec = importlib.util.find_spec("sglang")
    return spec is not None and spec.origin is not None


def _named_python(target: str, named: str) -> str:
    found = shutil.which(named)
    if found is None:
        raise TargetUnusable(f"target {target!r}: {VARIABLE} is {named!r}, which is no program")
    return os.path.abspath(found)  # not resolved: a link into an environment is what makes a Python the one of it


def _python_of_checkout() -> str | None:
    """Return the Python of the environment that ``make sglang`` builds, if it is there."""
    python = PACKAGE / ".venv-sglang" / "bin" / "python"
    return str(python) if python.exists() else None


@cache
def _look_at(python: str) -> tuple[str | None, bool, str | None]:
    """Ask a Python where its kvlockstep lies, whether it has SGLang, and of which version. Raises TargetUnusable."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S
        )
        package, has_sglang, version = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise TargetUnusable(f"{python} does not run as a Python that could have SGLang: make sglang") from error
    return package, has_sglang, version


def why_not_compiled() -> str | None:
    """Say why the host side of `gpu_impl` is interpreted here; None where it is compiled."""
    from kvlockstep.gpu_impl.native import WHY_NOT

    return WHY_NOT
