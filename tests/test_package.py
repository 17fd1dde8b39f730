"""What `pip install .` brings: one top-level name, with all four folders and the schema in it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("reference", "gpu_impl", "invariants", "fuzz")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, so that nothing is left in the checkout and nothing stale gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", *FOLDERS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source]
    subprocess.run(command, check=True, timeout=120)
    (built,) = out.iterdir()
    return built


def test_wheel_brings_one_name_with_four_folders(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}

    assert top == {"kvlockstep"}
    assert {name.split("/")[1] for name in names if name.count("/") > 1 and name.startswith("kvlockstep/")} == {
        *FOLDERS
    }
    assert "kvlockstep/py.typed" in names
    assert "kvlockstep/fuzz/trace.schema.json" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_holds_every_module_of_the_checkout(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        f"kvlockstep/{file.relative_to(ROOT)}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in file.parts
    }

    assert modules - names == set()


def test_wheel_gives_the_command(wheel):
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]

    assert "kvlockstep = kvlockstep.__main__:main" in archive.read(entry_points).decode()
