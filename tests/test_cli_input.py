"""Bad input on the command line: one clear line on standard error, exit code 2, and nothing else happens.

Commands run in this process where they stop before a target is built, in a process of their own elsewhere.
"""

import gzip
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from kvlockstep.fuzz import cli
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Match, Submit
from kvlockstep.fuzz.trace import Header, Trace, encode_header, encode_op, write_trace


def zipped(data, level=9):
    """Compress without the clock: a time in the bytes would give a parameter another name in every process."""
    return gzip.compress(data, level, mtime=0)


USAGE = 2
EXPECTED = "expected gpu_impl, reference, sglang:radix, sglang:unified-python, sglang:unified-rust, all, or package.mod"
HEADER = Header(CacheConfig(), target="reference")
LINES = [encode_header(HEADER), encode_op(Submit("r0", (1, 2, 3))), encode_op(Match("r0"))]
TEXT = "".join(f"{line}\n" for line in LINES).encode()
TARGETS = """
from kvlockstep.fuzz.targets.reference import ReferenceTarget

gives_none = lambda config: None
gives_object = lambda config: object()
takes_nothing = lambda: None
not_callable = 7

def raises(config):
    raise RuntimeError("no such device\\nsee the log")

class WithoutEvict(ReferenceTarget):
    evict = property()

class ShortMatch(ReferenceTarget):
    def match(self, request, tokens):
        return 0

class Conforms(ReferenceTarget):
    conformance = "mostly"

class Capable(ReferenceTarget):
    def __init__(self, config):
        super().__init__(config)
        self.capabilities = "kv"

class Lane(ReferenceTarget):
    lane = "gpu"

class NoKv(ReferenceTarget):
    write_kv = property()

class Tensors(ReferenceTarget):
    def read_slots(self, slots):
        return tuple(slots)

class SnapshotRaises(ReferenceTarget):
    def snapshot(self):
        raise KeyError("r0")

class SnapshotNone(ReferenceTarget):
    def snapshot(self):
        return None

class OtherPages(ReferenceTarget):
    def snapshot(self):
        snapshot = super().snapshot()
        snapshot.page_size = 16
        return snapshot

class TupleOfRows(ReferenceTarget):
    def snapshot(self):
        snapshot = super().snapshot()
        snapshot.rows = ()
        return snapshot

class FloatSize(ReferenceTarget):
    def snapshot(self):
        snapshot = super().snapshot()
        snapshot.pools["full"].available = 1.0
        return snapshot
"""


@pytest.fixture
def complaint(monkeypatch, capfd):
    """Run a command in this process that must fail with exit code 2; return its one line, without ``kvlockstep: ``."""

    def run(*arguments, code=USAGE):
        monkeypatch.setattr(sys, "argv", ["kvlockstep", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capfd.readouterr()
        assert stopped.value.code == code, err
        assert out == ""
        return line_of(err)

    return run


def line_of(err):
    assert "Traceback" not in err
    assert err.count("\n") == 1, err
    assert err.startswith("kvlockstep: ")
    return err.removeprefix("kvlockstep: ").rstrip("\n")


BAD_TRACES = [
    (TEXT[:-20], "3: the last line is cut off: delete it, or fetch the file again"),
    (
        TEXT.replace(b'"kvlockstep":1', b'"kvlockstep":9'),
        "1: trace version 9, this kvlockstep reads 1: upgrade kvlockst",
    ),
    (b"", "1: an empty file: a trace starts with a header"),
    (bytes(range(11, 256)) + b"\n", "1: byte 0x80 at column 118 is not UTF-8: save as UTF-8"),
    (b"\x7fELF\x02\x01\x01\x00\n", "1: not JSON (Expecting value, column 1): write one JSON object a line"),
    (TEXT + b'{"op":"drop","request":"r0"}\n', '4: unknown operation "drop": one of submit, peek, match, alloc,'),
    (TEXT + b'{"op":"match","request":"r0","at":1}\n', '4: match: unknown field "at": compare with'),
    (TEXT + b'{"op":"match","request":"../r0"}\n', "4: match.request: expected 1..64 letters, digits and _.:-, got"),
    (
        TEXT + b'{"op":"evict","n":' + b" " * (16 << 20) + b"1}\n",
        "4: a line of more than 16777216 bytes: is this a trace?",
    ),
    (zipped(TEXT)[:-9], "4: the gzip data is cut off: fetch the file again"),
    (b"\x1f\x8b\x00 is no method of compression", "1: cannot be read ("),
    (TEXT.replace(b'"page_size":4', b'"page_size":0'), "1: config.page_size: expected 1..1024, got 0"),
]


@pytest.mark.parametrize(("data", "wrong"), BAD_TRACES, ids=[wrong[3:30] for _, wrong in BAD_TRACES])
def test_bad_trace_is_refused_with_file_line_and_remedy(tmp_path, complaint, data, wrong):
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    for command in ("replay", "minimize"):
        assert complaint(command, path).startswith(f"{path}:{wrong}")

    assert os.listdir(tmp_path) == ["t.jsonl"]


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ({"n_pages": 1 << 20}, "4194308 slots, at most 4194304"),
        ({"n_pages": 1 << 16, "layers": 256, "head_dim": 64}, "17180131328 bytes of KV, at most 8589934592"),
        ({"n_rows": 1 << 14, "max_context_len": 1 << 20}, "17180917760 entries of the row table, at most 268435456"),
    ],
)
def test_trace_of_a_cache_that_would_fill_the_memory_is_refused_at_once(tmp_path, complaint, sizes, wrong):
    path = tmp_path / "t.jsonl"
    write_trace(path, Trace(Header(CacheConfig(**sizes), target="reference"), [Match("r0")]))

    for command in ("replay", "minimize"):
        assert complaint(command, path).startswith(f"target 'reference': too large a cache, {wrong} (page_size=4 ")


def test_absent_file_and_folder_are_refused_by_name(tmp_path, complaint):
    assert complaint("replay", tmp_path / "absent").startswith(f"{tmp_path}/absent:1: cannot be read (No such file")
    assert complaint("minimize", tmp_path).startswith(f"{tmp_path}:1: cannot be read (Is a directory)")


MEASURED = """
import resource, subprocess, sys
status = subprocess.run([sys.executable, "-m", "kvlockstep", "replay", sys.argv[1]]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(status, used.ru_maxrss, used.ru_utime)
"""


def test_gzip_bomb_is_refused_early_in_little_memory(tmp_path):
    """10 MB that expand to 10 GB: an honest header and two operations, then resets without end."""
    unit = b'{"op":"reset"}\n'
    packed = zipped(unit * ((64 << 20) // len(unit)), 9)
    path = tmp_path / "bomb.jsonl.gz"
    with path.open("wb") as file:
        file.write(zipped(TEXT))
        for _ in range(160):
            file.write(packed)
    assert path.stat().st_size < 30 << 20

    # a process begins with the peak of the one that forked it, so a small one stands between
    done = subprocess.run([sys.executable, "-c", MEASURED, path], capture_output=True, text=True, timeout=60)
    status, kibibytes, seconds = done.stdout.split()

    assert int(status) == USAGE
    assert "gzip data that expands over 200-fold: is this a trace?" in line_of(done.stderr)
    assert int(kibibytes) < 256 << 10  # the interpreter and its packages included
    assert float(seconds) < 10


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["frobnicate"], "No such command 'frobnicate'; kvlockstep --help says more"),
        (["fuzz", "--sede", "1"], "No such option '--sede'"),
        (["fuzz", "more"], "Got unexpected extra argument"),
        (["replay"], "Missing argument 'FILE...'; kvlockstep replay --help says more"),
        *[
            (["fuzz", "--seconds", value], "Invalid value for '--seconds': ")
            for value in ("0", "-1", "nan", "inf", "1h")
        ],
        (["minimize", "x", "--seconds", "nan"], "Invalid value for '--seconds': nan is not a time"),
        (["faults", "--seconds", "inf"], "Invalid value for '--seconds': inf is not in the range"),
        (["fuzz", "--seed", "-1"], "Invalid value for '--seed': "),
        (["fuzz", "--seed", str(1 << 63)], "Invalid value for '--seed': "),
        (["fuzz", "--seed", "9" * 5000], "Invalid value for '--seed': "),
        (["fuzz", "--lanes", "torch,warp"], "--lanes 'torch,warp': expected one or more of cuda, interpret, torch"),
        (["replay", "--write", "x", "y", "z"], "--write x: expected one FILE with it, got 2"),
        (["fuzz", "--lanes", ","], "--lanes ',': expected one or more of cuda, interpret, torch"),
        (
            ["fuzz", "--accept-unobserved", "4"],
            "Invalid value for '--accept-unobserved': '4' is not one of '1', '2', '3'",
        ),
        (
            ["fuzz", "--target", "vllm"],
            f"unknown target 'vllm': {EXPECTED}",
        ),
        (
            ["fuzz", "--target", "mine:"],
            f"unknown target 'mine:': {EXPECTED}",
        ),
        (
            ["fuzz", "--target", "my cache:make"],
            "target 'my cache:make': expected at most 200 letters, digits and _.:-",
        ),
        (["fuzz", "--fault", "abort-keeps-lok"], "unknown fault 'abort-keeps-lok': did you mean abort-keeps-lock"),
        (["faults", "--only", "xyz"], "unknown fault 'xyz': expected null or one of the "),
        (["trace", "frm-workload"], "No such command 'frm-workload'"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_wrong_usage_is_refused_before_anything_is_made(tmp_path, monkeypatch, complaint, arguments, wrong):
    monkeypatch.chdir(tmp_path)

    assert complaint(*arguments).startswith(wrong)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    write_trace(path, Trace(HEADER, [Submit("r0", (1, 2, 3)), Match("r0")]))
    return path


@pytest.mark.parametrize(
    ("factory", "wrong"),
    [
        ("gives_none", "its factory returned None without name, conformance, capabilities, peek, match, alloc,"),
        ("gives_object", "its factory returned an object without name, conformance, capabilities, peek,"),
        (
            "takes_nothing",
            "its factory raised TypeError: <lambda>() takes 0 positional arguments but 1 was given (page_si",
        ),
        ("raises", "its factory raised RuntimeError: no such device see the log (page_size=4 n_pages=16 n_rows=4"),
        ("not_callable", " has no factory 'not_callable'"),
        ("ShortMtch", " has no factory 'ShortMtch', did you mean ShortMatch"),
        ("WithoutEvict", "its factory returned a WithoutEvict without evict"),
        ("ShortMatch", "match takes (request, tokens), expected (request, tokens, namespace, priority, private)"),
        ("Conforms", "conformance is 'mostly', expected 'exact' or 'legal'"),
        ("Capable", "capabilities is a str, expected a frozenset of str"),
        ("Lane", "lane is 'gpu', expected None or one of cuda, interpret, torch"),
        ("NoKv", "it promises the capability 'kv' without write_kv"),
        ("Tensors", "read_slots of all 68 slots returned a tuple of 68, expected as many plain ints"),
        ("SnapshotRaises", "a fresh one raised KeyError: 'r0' at "),
        ("SnapshotNone", "snapshot() returned None, expected a kvlockstep.invariants.Snapshot"),
        ("OtherPages", "snapshot().page_size is 16, the config says 4"),
        ("TupleOfRows", "rows of snapshot() is a tuple of 0, expected a list, or None where it cannot be observed"),
        ("FloatSize", "available of snapshot() is a float, expected an int, or None where it cannot be observed"),
    ],
)
def test_target_that_cannot_be_one_is_refused_with_what_is_expected(
    tmp_path, monkeypatch, complaint, trace, factory, wrong
):
    module = f"adopted_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    line = complaint("replay", "--target", f"{module}:{factory}", trace)

    assert line.startswith(f"target '{module}:{factory}': ")
    assert wrong in line


def test_module_that_cannot_be_imported_is_refused_with_its_error(tmp_path, monkeypatch, complaint, trace):
    (tmp_path / "broken_on_import.py").write_text("import nothing_of_that_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    absent = complaint("replay", "--target", "absent_module:make", trace)
    broken = complaint("replay", "--target", "broken_on_import:make", trace)

    assert absent.endswith("importing absent_module failed: ModuleNotFoundError: No module named 'absent_module'")
    assert broken.endswith(
        "importing broken_on_import failed: ModuleNotFoundError: No module named 'nothing_of_that_name'"
    )


def test_trace_does_not_import_the_target_that_it_names(tmp_path, monkeypatch, complaint):
    (tmp_path / "payload.py").write_text("raise SystemExit('imported')")
    path = tmp_path / "t.jsonl"
    write_trace(path, Trace(Header(CacheConfig(), target="payload:make"), [Match("r0")]))
    monkeypatch.chdir(tmp_path)

    for command in ("replay", "minimize"):
        assert (
            complaint(command, path)
            == f"{path}: found on target 'payload:make'; to import that, say --target payload:make"
        )


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--fault", "no-such-fault"], "unknown fault 'no-such-fault': expected one of the "),
        (["--fault", "abort-keeps-lock"], "fault 'abort-keeps-lock' is one of target 'gpu_impl', not of 'reference'"),
        (["--target", "vllm"], f"unknown target 'vllm': {EXPECTED}"),
        (["--lane", "warp"], "Invalid value for '--lane': 'warp' is not one of 'cuda', 'interpret', 'torch'"),
    ],
)
def test_replay_refuses_what_it_cannot_run_the_trace_on(complaint, trace, options, wrong):
    assert complaint("replay", trace, *options).startswith(wrong)


@pytest.mark.parametrize("command", ["replay", "minimize", "blame"])
def test_fault_that_only_a_newer_trace_knows_is_refused_with_the_name_of_the_file(tmp_path, complaint, command):
    path = tmp_path / "t.jsonl"
    write_trace(path, Trace(replace(HEADER, fault="planted-next-year"), [Match("r0")]))

    line = complaint(command, path)

    assert line.startswith(f"{path}: unknown fault 'planted-next-year': expected one of the ")
    assert line.endswith("; --fault none plants nothing")


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (lambda here: here / ("a" * 250), "File name too long: name another file"),
        (lambda here: here / ("a" * 300) / "t.jsonl", "File name too long: name another file"),
        (lambda here: here / "no" / "t.jsonl", "there is no folder {here}/no: make it first"),
        (lambda here: link(here / "a", here / "no" / "b"), "there is no folder {here}/no: make it first"),
        (lambda here: link(here / "a", here / "a"), "Symlink loop from '{here}/a': name another file"),
    ],
    ids=["name", "folder", "none", "link", "circle"],
)
@pytest.mark.parametrize("command", ["minimize", "record"])
def test_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, complaint, trace, command, place, wrong):
    path = place(tmp_path)
    words = [trace, "--out", path] if command == "minimize" else [path, "--", "true"]

    assert complaint(command, *words).endswith(
        f"{path}: {wrong.format(here=tmp_path)}; kvlockstep {command} --help says more"
    )


def link(path, to):
    path.symlink_to(to)
    return path


def test_group_without_a_command_prints_its_commands(command):
    code, out, err = command("trace")

    assert (code, err) == (USAGE, "")
    assert "from-workload" in out


def test_lane_that_is_not_here_ends_the_run_at_once_and_not_silently(tmp_path):
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "kvlockstep", "fuzz", "--lanes", "cuda,torch", "--seconds", "300"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)

    assert done.returncode == USAGE
    assert "lane 'cuda': torch finds no GPU" in line_of(done.stderr)
