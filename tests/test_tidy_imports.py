"""Who may import whom, read off the syntax trees; and tests of that rule on bad samples.

Not verified: names put together at run time, and what third-party packages import.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = {"reference", "gpu_impl", "invariants", "fuzz"}
EVERYTHING = OURS | {"regressions"}
MAY_IMPORT = {
    "reference": {"reference"},
    "gpu_impl": {"gpu_impl"},
    "invariants": {"invariants"},
    "fuzz": OURS,
    "regressions": {"fuzz", "regressions"},
    "conftest.py": {"fuzz"},
    "src": {"fuzz"},
    "benchmarks": OURS,
    "tests": EVERYTHING,
}
STANDARD_LIBRARY_ONLY = {"reference", "invariants"}
TOP_LEVEL = EVERYTHING | {"tests", "benchmarks", "conftest", "src"}


def imported_modules(tree):
    """List (line, dotted name) of every import; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (f"{node.module}." if node.module else "")
            yield from ((node.lineno, origin + alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and is_import_call(node):
            yield node.lineno, str(node.args[0].value)


def is_import_call(node):
    named = ast.unparse(node.func).endswith(("import_module", "__import__"))
    return named and node.args and isinstance(node.args[0], ast.Constant)


def forbidden_imports(source, place):
    """List what a file in this place imports and must not, one line each."""
    found = []
    for line, name in imported_modules(ast.parse(source)):
        if name.startswith(".") and not name.startswith(".."):
            continue  # a sibling, in the same folder
        first, *rest = name.split(".")
        if not first:
            found.append(f"{line}: {name}: write kvlockstep in full")
        elif first in TOP_LEVEL:
            found.append(f"{line}: {name}: the package is kvlockstep.{name}")
        elif first == "kvlockstep":
            if not rest and place != "conftest.py" and place != "tests":
                found.append(f"{line}: {name}: name the folder")
            elif rest and rest[0] in EVERYTHING and rest[0] not in MAY_IMPORT[place]:
                found.append(f"{line}: {name}: {place} may not know {rest[0]}")
        elif place in STANDARD_LIBRARY_ONLY and first not in sys.stdlib_module_names:
            found.append(f"{line}: {name}: {place} uses the standard library only")
    return found


def python_files():
    for place in MAY_IMPORT:
        path = ROOT / place
        yield from ((place, file) for file in ([path] if path.is_file() else sorted(path.rglob("*.py"))))


@pytest.mark.parametrize(
    ("place", "file"), [pytest.param(place, file, id=str(file.relative_to(ROOT))) for place, file in python_files()]
)
def test_imports_keep_their_direction(place, file):
    assert forbidden_imports(file.read_text(), place) == []


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("reference", "from kvlockstep.gpu_impl.tree import Tree"),
        ("reference", "from kvlockstep.invariants import Snapshot"),
        ("reference", "from kvlockstep import fuzz"),
        ("reference", "import kvlockstep"),
        ("reference", "import torch"),
        ("reference", "import numpy as np"),
        ("invariants", "def f():\n    import torch"),
        ("invariants", "from kvlockstep.fuzz.config import CacheConfig"),
        ("gpu_impl", "import kvlockstep.reference.cache"),
        ("gpu_impl", "from kvlockstep.fuzz.ops import Op"),
        ("gpu_impl", "if True:\n    from kvlockstep.invariants import Snapshot"),
        ("gpu_impl", "from ..reference import cache"),
        ("gpu_impl", "from .. import reference"),
        ("gpu_impl", "import importlib\nimportlib.import_module('kvlockstep.reference')"),
        ("gpu_impl", "__import__('kvlockstep.fuzz')"),
        ("regressions", "from kvlockstep.reference import cache"),
        ("conftest.py", "from kvlockstep.gpu_impl import lane"),
        ("fuzz", "import invariants"),
        ("fuzz", "from reference.cache import Cache"),
        ("fuzz", "from tests import helpers"),
        ("tests", "from fuzz.trace import Header"),
    ],
)
def test_rule_finds_forbidden_import(place, source):
    assert len(forbidden_imports(source, place)) == 1


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("reference", "import heapq\nfrom kvlockstep.reference.pages import Pages"),
        ("gpu_impl", "import torch\nfrom kvlockstep.gpu_impl import arithmetic"),
        ("gpu_impl", "from .tree import Tree\nfrom . import kernels"),
        ("invariants", "from dataclasses import dataclass"),
        ("fuzz", "from kvlockstep import gpu_impl, invariants, reference"),
        ("regressions", "from kvlockstep.fuzz.trace import read_trace"),
        ("tests", "import kvlockstep"),
    ],
)
def test_rule_lets_allowed_import_pass(place, source):
    assert forbidden_imports(source, place) == []
