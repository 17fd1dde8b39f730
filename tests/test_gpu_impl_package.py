"""`gpu_impl` as a library: its example runs, it needs nothing of the harness, and parts import without torch."""

import ast
import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvlockstep import gpu_impl

FOLDER = Path(gpu_impl.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("kernels")])
def test_examples_in_docstrings_hold(name):
    module = gpu_impl if name == "__init__" else import_module(f"kvlockstep.gpu_impl.{name}")

    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


def test_package_example_is_not_empty():
    assert ">>> cache.release" in gpu_impl.__doc__


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'KvCash'"):
        gpu_impl.KvCash  # noqa: B018


@pytest.mark.parametrize(
    "name", ["arithmetic", "config", "free_stack", "lane", "native", "plan", "refusals", "runs", "tree", "victims"]
)
def test_host_part_imports_without_torch(name):
    code = f"import sys; import kvlockstep.gpu_impl.{name}; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", MODULES)
def test_module_names_its_own_package_only_relatively(name):
    """So that a copy of the folder under another name is a package of its own."""
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("kvlockstep") for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            assert not (node.module or "").startswith("kvlockstep")
