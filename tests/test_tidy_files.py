"""The shape of the checkout: one package through four links, names of files, docstrings, words."""

import ast
import importlib
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from kvlockstep.fuzz.trace import encode_header, encode_op, read_trace

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("reference", "gpu_impl", "invariants", "fuzz")
CODE = (*FOLDERS, "regressions", "tests", "benchmarks", "examples", "src")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".yml", ".yaml", ".html", ".css", ".js", ""}

MACHINE_PATH = re.compile(r"/(?:work|home|root|Users)/|/tmp/\w")
NUMBERED = re.compile(r"\b(?:issue|task|ticket)\s+#?\d", re.IGNORECASE)
WORKPLACE = re.compile(r"\bthe (?:lead|brief)\b", re.IGNORECASE)


def python_files():
    return [file for folder in CODE for file in sorted((ROOT / folder).rglob("*.py"))] + [ROOT / "conftest.py"]


def text_files():
    found = [file for file in ROOT.iterdir() if file.is_file()]
    for folder in (*CODE, "docs", "requirements", ".ci"):
        found += [file for file in (ROOT / folder).rglob("*") if file.is_file()]
    skipped = {"__pycache__", "kvlockstep.egg-info"}
    found = [file for file in found if file.suffix in TEXT_SUFFIXES and not skipped.intersection(file.parts)]
    return sorted(set(found) - {Path(__file__)})  # which holds the samples


def relative(path):
    return str(path.relative_to(ROOT))


def words_out_of_place(text):
    """List numbers of tickets, paths of somebody's machine, and traces of who wrote it."""
    return [match.group() for rule in (MACHINE_PATH, NUMBERED, WORKPLACE) for match in rule.finditer(text)]


def test_package_is_four_relative_links():
    links = {path.name: str(path.readlink()) for path in (ROOT / "src" / "kvlockstep").iterdir() if path.is_symlink()}

    assert links == {name: f"../../{name}" for name in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS)
def test_package_and_folder_are_the_same_files(folder):
    module = importlib.import_module(f"kvlockstep.{folder}")

    assert Path(module.__file__).resolve() == ROOT / folder / "__init__.py"


def test_no_file_is_loaded_under_two_names():
    loaded = defaultdict(set)
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if file and name != "__main__":
            loaded[Path(file).resolve()].add(name)
    ours = {relative(file): names for file, names in loaded.items() if file.is_relative_to(ROOT / "fuzz")}

    assert ours["fuzz/trace.py"] == {"kvlockstep.fuzz.trace"}
    assert {file: names for file, names in ours.items() if len(names) > 1} == {}


@pytest.mark.parametrize("file", python_files(), ids=relative)
def test_module_has_docstring(file):
    assert ast.get_docstring(ast.parse(file.read_text())), f"{file.name} does not say what it is for"


@pytest.mark.parametrize("file", python_files(), ids=relative)
def test_file_name_is_in_lower_case_with_underscores(file):
    assert re.fullmatch(r"[a-z0-9_]+\.py", file.name)


def test_tests_lie_flat_and_are_no_package():
    files = [file for file in (ROOT / "tests").rglob("*.py") if "__pycache__" not in file.parts]

    assert [relative(file) for file in files if file.parent not in (ROOT / "tests", ROOT / "tests" / "sglang")] == []
    assert [file.name for file in files if not file.name.startswith("test_") and file.name != "conftest.py"] == []


@pytest.mark.parametrize("file", text_files(), ids=relative)
def test_file_speaks_of_the_project_only(file):
    assert words_out_of_place(file.read_text()) == []


@pytest.mark.parametrize(
    "text",
    ["see issue 12", "Task #3", "# from /home/me/x", "/work/main/fuzz", "open('/tmp/x')", "The lead said so"],
)
def test_rule_finds_words_out_of_place(text):
    assert len(words_out_of_place(text)) == 1


@pytest.mark.parametrize("text", ["an issue of ownership", "../../fuzz", "work/main", "tmp_path / 'x'", "it leads to"])
def test_rule_lets_plain_words_pass(text):
    assert words_out_of_place(text) == []


def regression_traces():
    return sorted(path for path in (ROOT / "regressions").iterdir() if ".jsonl" in path.suffixes)


def test_regressions_are_named_by_number_and_defect():
    names = [path.name for path in regression_traces()]

    assert [name for name in names if not re.fullmatch(r"\d{4}(?:-[a-z0-9]+)+\.jsonl", name)] == []
    assert len({name[:4] for name in names}) == len(names), "a number stands twice"


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in regression_traces()])
def test_regression_is_canonical_and_says_what_it_violates(path):
    trace = read_trace(path)
    lines = [encode_header(trace.header), *map(encode_op, trace.ops)]

    assert path.read_text() == "".join(f"{line}\n" for line in lines)
    assert trace.header.violates
    assert trace.header.fault
    assert trace.header.why
