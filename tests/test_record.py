"""Recordings: what a target is asked is in the file, as a trace, and whatever goes wrong there stays there."""

import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import (
    Abort,
    Alloc,
    AllocItem,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Peek,
    Release,
    Reset,
    Retract,
    Submit,
)
from kvlockstep.fuzz.recorder import WHY_WIDTH, Pseudonyms, Recording, recording, tokens_text
from kvlockstep.fuzz.recorder_hook import claim
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.replay import failing_signature, run_ops
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.targets.wrong import LeaksOnAbort
from kvlockstep.fuzz.trace import Header, encode_op, read_trace
from kvlockstep.fuzz.trace_bounds import MAX_TOKEN
from kvlockstep.invariants import Violation

CONFIG = CacheConfig(page_size=2, n_pages=12, n_rows=3, max_context_len=16)
SALTED = ("lora-a", "salt", ())
STORY = [
    Submit("r0", (1, 2, 3, 4), SALTED, 2),
    Match("r0"),
    Alloc((AllocItem("r0", 4),)),
    Commit("r0", 4, (9,)),
    Checkpoint("r0"),
    Alloc((AllocItem("r0", 2, (7,)),)),
    Commit("r0", 2, (8,)),
    Retract("r0", publish=True),
    Submit("r1", (1, 2, 3, 4, 5)),
    Peek("r1"),
    Match("r1"),
    Match("r0"),
    Alloc((AllocItem("r1", 5), AllocItem("r0", 1))),
    Commit("r1", 5),
    Commit("r0", 1, (6,)),
    Release("r1"),
    Abort("r0"),
    Evict(2),
    Reset(),
]


def run_recorded(path, ops=STORY, target=None, config=CONFIG, **options):
    """Run operations on a recorded target in lockstep; return it, and the violation if there was one."""
    recorded = recording(target or ReferenceTarget(config), config, path, **options)
    lockstep = Lockstep(config, recorded)
    try:
        for op in ops:
            lockstep.run(op)
    except Violation as violation:
        return recorded, violation
    return recorded, None


def why_of(path):
    return read_trace(path).header.why.rstrip()


@pytest.mark.parametrize("name", ["reference", "gpu_impl"])
def test_recorded_trace_is_what_was_run_and_replays_clean(name, tmp_path):
    path = tmp_path / "t.jsonl"
    recorded, violation = run_recorded(path, target=factory_for(name)(CONFIG))
    recorded.stop()
    trace = read_trace(path)

    assert violation is None
    assert trace.ops == STORY
    assert (trace.header.config, trace.header.target) == (CONFIG, name)
    assert trace.header.lane == getattr(recorded, "lane", None)
    run = run_ops(CONFIG, trace.ops, factory_for(name))
    assert (run.violation, run.statistics.done) == (None, len(STORY))


def test_recorded_target_has_whatever_the_target_has():
    target = LeaksOnAbort(CONFIG)
    recorded = recording(target, CONFIG, os.devnull)

    for name in ("name", "conformance", "capabilities", "kv", "read_slots"):
        assert getattr(recorded, name) == getattr(target, name)
    assert not hasattr(recorded, "no_such_thing")


def test_line_is_in_the_file_before_its_operation_runs(tmp_path):
    path = tmp_path / "t.jsonl"

    class Dies(ReferenceTarget):
        def checkpoint(self, request):
            raise RuntimeError(path.read_text().splitlines()[-1])

    recorded, violation = run_recorded(path, target=Dies(CONFIG))

    assert '{"op":"checkpoint","request":"r0"}' in str(violation)
    assert why_of(path).endswith("goes on, or its process died")
    recorded.stop()
    assert why_of(path).endswith(": 5 operations, stopped by its owner")
    assert read_trace(path).ops == STORY[:5]


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (  # a waiting request that comes back otherwise is a new one; a peek tells no priority
            [Submit("r0", (1, 2), priority=3), Peek("r0"), Match("r0")],
            [Submit("r0", (1, 2)), Peek("r0"), Abort("r0"), Submit("r0", (1, 2), priority=3), Match("r0")],
        ),
        (  # one that ends unmatched is heard of, if it was seen
            [Submit("r0", (1, 2)), Peek("r0"), Abort("r0"), Submit("r0", (5,)), Match("r0")],
            [Submit("r0", (1, 2)), Peek("r0"), Abort("r0"), Submit("r0", (5,)), Match("r0")],
        ),
        ([Submit("r0", (1, 2)), Abort("r0"), Peek("r0")], []),
        (  # an abort that waits for its pass
            [
                *STORY[:3],
                Abort("r0"),
                Commit("r0", 4),
                Submit("r0", (3,)),
                Match("r0"),
            ],
            [*STORY[:3], Abort("r0"), Commit("r0", 4), Submit("r0", (3,)), Match("r0")],
        ),
    ],
)
def test_requests_that_wait_are_told_as_they_were_left(ops, expected, tmp_path):
    run_recorded(tmp_path / "t.jsonl", ops)

    assert read_trace(tmp_path / "t.jsonl").ops == expected


def test_refused_operations_are_recorded_and_refused_again(tmp_path):
    path = tmp_path / "t.jsonl"
    ops = [Release("r9"), *STORY[:3], Alloc((AllocItem("r0", 1),)), Evict(0), Commit("r0", 4), Alloc(())]
    run_recorded(path, ops)

    run = run_ops(CONFIG, read_trace(path).ops, ReferenceTarget)
    assert read_trace(path).ops == ops
    assert (run.violation, run.statistics.done) == (None, 4)


def test_recording_of_a_fault_replays_to_the_violation_and_minimizes(tmp_path, command):
    path = tmp_path / "t.jsonl"
    name = "kvlockstep.fuzz.targets.wrong:LeaksOnAbort"
    ops = [
        *STORY[:-3],
        Submit("r5", (8, 8, 8)),
        Match("r5"),
        Alloc((AllocItem("r5", 3),)),
        Commit("r5", 3),
        Abort("r5"),
    ]
    recorded, violation = run_recorded(
        path, [op for op in ops if op != Abort("r0")], LeaksOnAbort(CONFIG), target_name=name
    )
    recorded.stop()

    assert type(violation).__name__ == "PageLeaked"
    code, out, _ = command("replay", "--target", name, path)
    assert code == 1
    assert "FAILED: PageLeaked" in out
    code, out, _ = command("minimize", "--target", name, path)
    assert code == 0, out
    shortest = read_trace(tmp_path / "t.min.jsonl")
    assert shortest.header.violates == "PageLeaked"
    assert len(shortest.ops) < len(read_trace(path).ops)
    assert failing_signature(shortest.header.config, shortest.ops, LeaksOnAbort)[0] == shortest.header.signature


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ({"max_ops": 7}, "7 operations, stopped at the bound of 7 operations"),
        ({"max_bytes": 1000}, "operations, stopped at the bound of 1,000 bytes"),
    ],
)
def test_bound_ends_the_recording_and_not_the_target(bound, reason, tmp_path):
    path = tmp_path / "t.jsonl"
    recorded, violation = run_recorded(path, **bound)
    trace = read_trace(path)

    assert violation is None
    assert recorded.recording.stopped is not None
    assert trace.header.why.rstrip().endswith(reason)
    assert trace.ops == STORY[: len(trace.ops)]
    assert 0 < len(trace.ops) < len(STORY)
    assert path.stat().st_size <= bound.get("max_bytes", 1 << 20)


def test_full_disk_is_one_logged_line_and_the_target_goes_on(caplog):
    with caplog.at_level(logging.INFO, "kvlockstep.record"):
        recorded, violation = run_recorded("/dev/full")
        recorded.stop()

    assert violation is None
    assert [record.message for record in caplog.records] == [
        "recording /dev/full: 0 operations, ended early: No space left on device"
    ]


def test_disk_that_fills_up_leaves_a_trace_that_says_so(tmp_path, monkeypatch):
    path, write, room = tmp_path / "t.jsonl", os.pwrite, [1000]

    def fills_up(file, data, at):
        if at + len(data) > room[0]:
            if at < room[0]:
                return write(file, bytes(data)[: room[0] - at], at)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", fills_up)
    _, violation = run_recorded(path)
    trace = read_trace(path)

    assert violation is None
    assert why_of(path).endswith(f": {len(trace.ops)} operations, ended early: No space left on device")
    assert trace.ops == STORY[: len(trace.ops)]
    assert len(trace.ops) > 3


def test_disk_that_is_full_while_lines_are_replaced_leaves_what_stood_before_them(tmp_path, monkeypatch):
    path, write = tmp_path / "t.jsonl", os.pwrite
    file = Recording(path, Header(CONFIG), source="a test")
    file.put(Submit("r0", (1, 2)))
    mark = file.mark()
    file.put(Peek("r0"))
    file.put(Peek("r0"))
    room = file.n_bytes

    def fills_up(file, data, at):
        if at >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, bytes(data)[: room - at], at)

    monkeypatch.setattr(os, "pwrite", fills_up)
    with file.guarded():
        file.put_text("".join(f"{encode_op(op)}\n" for op in [Match("r0"), Peek("r0"), Peek("r0")]), 3, at=mark)

    assert read_trace(path).ops == [Submit("r0", (1, 2))]
    assert "1 operations, ended early: No space left on device" in why_of(path)


def test_what_no_trace_can_hold_ends_the_recording_only(tmp_path):
    path = tmp_path / "t.jsonl"
    target = recording(ReferenceTarget(CONFIG), CONFIG, path)
    target.match("r0", [1, 2], (None, None, ()), 0, private=False)
    target.match("r 1", [1, 2], (None, None, ()), 0, private=False)
    target.match("r2", [1, 2], (None, None, ()), 0, private=False)

    assert read_trace(path).ops == [Submit("r0", (1, 2)), Match("r0")]
    assert "2 operations, ended early: BadLine: " in why_of(path)
    assert [view.request for view in target.snapshot().requests] == ["r0", "r 1", "r2"]


def test_file_that_cannot_be_made_is_an_error_of_the_caller(tmp_path):
    with pytest.raises(FileNotFoundError):
        recording(ReferenceTarget(CONFIG), CONFIG, tmp_path / "no" / "t.jsonl")
    with pytest.raises(ValueError, match=r"t\.jsonl\.gz: a recording is written plain: name it without \.gz"):
        recording(ReferenceTarget(CONFIG), CONFIG, tmp_path / "t.jsonl.gz")


def test_header_has_one_width_whatever_it_says(tmp_path):
    file = Recording(tmp_path / "t.jsonl", Header(CONFIG), source='a "quoted\\ source" \x1b\N{SNOWMAN}')
    first = (tmp_path / "t.jsonl").stat().st_size
    file.stop("x" * 500)

    assert (tmp_path / "t.jsonl").stat().st_size == first
    assert len(read_trace(tmp_path / "t.jsonl").header.why) == WHY_WIDTH


def test_text_of_tokens_is_canonical():
    for tokens in ((), (0,), (1, 22, MAX_TOKEN)):
        assert f'"tokens":{tokens_text(tokens, None)},' in encode_op(Submit("r0", tokens))
    for tokens in ((-1,), (MAX_TOKEN + 1,)):
        with pytest.raises(ValueError, match="a trace has"):
            tokens_text(tokens, None)


# Pseudonyms


def test_pseudonyms_of_tokens_are_one_to_one_and_depend_on_the_key_alone():
    one, same, other = Pseudonyms("key"), Pseudonyms(b"key"), Pseudonyms("another")
    tokens = [*range(20_000), *random.Random(0).sample(range(MAX_TOKEN), 20_000), MAX_TOKEN]
    shown = one.tokens(tokens)

    assert len(set(shown)) == len(set(tokens))
    assert min(shown) >= 0
    assert max(shown) <= MAX_TOKEN
    assert same.tokens(reversed(tokens)) == shown[::-1]
    assert sum(a == b for a, b in zip(other.tokens(tokens), shown, strict=True)) < 5
    with pytest.raises(ValueError, match="token -1"):
        one.tokens([-1])


def test_recording_with_pseudonyms_keeps_what_is_equal_and_nothing_else(tmp_path):
    path, plain = tmp_path / "t.jsonl", tmp_path / "plain.jsonl"
    ops = [replace(op, request="alice") if getattr(op, "request", "") == "r1" else op for op in STORY[:12]]
    run_recorded(plain, ops)
    run_recorded(path, ops, pseudonyms="a key")
    shown, told = read_trace(path).ops, read_trace(plain).ops

    assert "alice" not in path.read_text()
    assert "lora-a" not in path.read_text()
    assert "a key" not in path.read_text()
    assert [type(op) for op in shown] == [type(op) for op in told]
    assert len(shown[0].tokens) == 4
    assert set(shown[0].tokens).isdisjoint(told[0].tokens)
    assert shown[0].namespace != SALTED
    assert shown[8].tokens[:4] == shown[0].tokens  # r1 begins as r0 does
    assert shown[8].namespace == (None, None, ())
    assert len({op.request for op in shown if hasattr(op, "request")}) == 2
    assert shown == [Pseudonyms("a key").op(op) for op in told]
    run = run_ops(CONFIG, shown, ReferenceTarget)
    assert (run.violation, run.statistics.done) == (None, len(ops))


# The command


def test_program_that_builds_no_cache_is_not_called_recorded(command, tmp_path):
    code, out, err = command("record", tmp_path / "t.jsonl", "--", sys.executable, "-c", "pass")

    assert (code, out) == (10, "")
    assert err.startswith("kvlockstep: nothing was recorded: the program built no cache that can be recorded")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "expected"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)]
)
def test_exit_code_is_that_of_the_program(program, expected, command, tmp_path):
    code, _, err = command("record", tmp_path / "t.jsonl", "--", sys.executable, "-c", program)

    assert (code, err) == (expected, "")


def test_program_has_its_own_customization_and_arguments(command, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.CUSTOMIZED = True")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = tmp_path / "told.txt"
    program = f"import sys, kvlockstep; open({str(told)!r}, 'w').write(str([CUSTOMIZED, *sys.argv[1:]]))"
    command("record", tmp_path / "t.jsonl", "--max-ops", 5, "--", sys.executable, "-c", program, "--max-ops", "-h")

    assert told.read_text() == "[True, '--max-ops', '-h']"


def test_wrong_usage_of_record_names_the_remedy(command, tmp_path):
    (tmp_path / "there.jsonl").touch()
    for words, remedy in (
        ((tmp_path / "there.jsonl", "true"), "name another file"),
        ((tmp_path / "t.jsonl.gz", "true"), "name it without .gz"),
        ((tmp_path / "no" / "t.jsonl", "true"), "make it first"),
        ((tmp_path / "t.jsonl", tmp_path / "no-program"), "name a program that can be run"),
        ((tmp_path / "t.jsonl",), "Missing argument"),
        ((tmp_path / "t.jsonl", "--max-op", "5", "--", "true"), "No such option"),
    ):
        code, _, err = command("record", *words)

        assert (code, remedy in err, err.count("\n")) == (2, True, 1), err


def test_files_are_claimed_in_order(tmp_path):
    names = [claim(tmp_path / "t.jsonl").name for _ in range(3)]

    assert names == ["t.jsonl", "t-1.jsonl", "t-2.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_command_tells_of_each_file_and_of_one_that_is_none(command, tmp_path):
    out = tmp_path / "t.jsonl"
    run_recorded(tmp_path / "made.jsonl")
    program = f"""
import os, shutil
from kvlockstep.fuzz.recorder_hook import VARIABLE, claim
import json, pathlib
path = pathlib.Path(json.loads(os.environ[VARIABLE])["path"])
shutil.copy({str(tmp_path / "made.jsonl")!r}, claim(path))
claim(path)
"""
    code, said, err = command("record", out, "--", sys.executable, "-c", program)

    assert code == 12
    assert f"{out}: {len(STORY)} operations on reference. Recorded from the target reference: goes on" in said
    assert f"{tmp_path / 't-1.jsonl'}:1: an empty file" in err
    assert json.loads(out.read_text().splitlines()[0])["kvlockstep"] == 1
    assert Path(out).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_to_end_is_passed_on_to_the_program(tmp_path, number):
    program = "import signal, sys\nprint('up', flush=True)\nsignal.pause()"
    command = [
        sys.executable,
        "-m",
        "kvlockstep",
        "record",
        str(tmp_path / "t.jsonl"),
        "--",
        sys.executable,
        "-c",
        program,
    ]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    heard = {"preexec_fn": lambda: signal.signal(number, signal.SIG_DFL)}  # nohup has it ignored
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **heard)
    assert running.stdout.readline() == "up\n"
    running.send_signal(number)

    assert running.wait(timeout=60) == 128 + number
    assert os.listdir(tmp_path) == []
