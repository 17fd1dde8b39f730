"""Files that stand as a whole or not at all, and what is no file and must not become one."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.files import replace_file, replacing
from kvlockstep.fuzz.ops import Submit
from kvlockstep.fuzz.trace import Header, Trace, write_trace

LOG = '{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n'


@pytest.mark.parametrize("synced", [False, True])
def test_file_is_the_old_one_until_all_is_written(tmp_path, synced):
    file = tmp_path / "a"
    file.write_text("old")
    with replacing(file, synced=synced) as draft:
        draft.write(b"new")
        draft.flush()
        assert file.read_text() == "old"

    assert file.read_text() == "new"
    assert os.listdir(tmp_path) == ["a"]


def test_failure_in_between_leaves_what_was_there_and_no_draft(tmp_path):
    file = tmp_path / "a"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(file) as draft:
        draft.writelines(text.encode("ascii") for text in ("new", "\xe4"))

    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    replace_file(pipe, "all of it", synced=False)
    reader.join(timeout=30)

    assert got == [b"all of it"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_trace_goes_to_a_pipe_as_to_a_file(tmp_path):
    pipe, file = tmp_path / "pipe", tmp_path / "trace.jsonl"
    trace = Trace(Header(CacheConfig()), [Submit("r0", (1, 2))])
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_trace(pipe, trace)
    reader.join(timeout=30)
    write_trace(file, trace)

    assert got == [file.read_bytes()]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_trace_can_be_piped_out_of_the_command(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(LOG)
    command = [sys.executable, "-m", "kvlockstep", "trace", "from-workload", str(log), "--out", "/dev/stderr"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])

    assert done.stderr.startswith('{"kvlockstep":1,')


@pytest.mark.parametrize("place", ["missing/a.json", "."])
@pytest.mark.parametrize(
    "words",
    [["trace", "from-workload", "FILE", "--out"], ["replay", "FILE", "--json"], ["replay", "FILE", "--write"]]
    + [["minimize", "FILE", "--out"]]
    + [["why", "FILE", option] for option in ("--html", "--json")]
    + [["show", "FILE", "--out"], ["report", ".", "--out"]],
    ids=" ".join,
)
def test_place_that_no_file_can_take_is_refused_before_any_work(tmp_path, monkeypatch, command, words, place):
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("no trace at all")
    code, _, err = command(*words, place)

    assert code == 2
    assert err.startswith(f"kvlockstep: Invalid value for '{words[-1]}': ")
    assert err.count("\n") == 1
    assert os.listdir() == ["FILE"]


def test_link_goes_on_to_lead_to_what_is_replaced(tmp_path):
    file, link = tmp_path / "a", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    replace_file(link, "new")

    assert link.is_symlink()
    assert file.read_text() == "new"


@pytest.mark.parametrize(
    ("words", "option", "reason"),
    [
        (["replay", "t.jsonl", "--json", "t.jsonl"], "--json t.jsonl", "is what is read"),
        (["replay", "t.jsonl", "--json", "hard.jsonl"], "--json hard.jsonl", "is what is read"),
        (["replay", "t.jsonl", "--write", "soft.jsonl"], "--write soft.jsonl", "is what is read"),
        (["replay", "t.jsonl", "--write", "new", "--json", "new"], "--json new", "is what --write writes"),
        (["minimize", "t.jsonl", "--out", "./t.jsonl"], "--out t.jsonl", "is what is read"),
        (["show", "t.jsonl", "--out", "t.jsonl"], "--out t.jsonl", "is what is read"),
        (["why", "t.jsonl", "--html", "t.jsonl"], "--html t.jsonl", "is what is read"),
        (["why", "t.jsonl", "--json", "t.jsonl"], "--json t.jsonl", "is what is read"),
        (["why", "t.jsonl", "--html", "new", "--json", "new"], "--json new", "is what --html writes"),
        (["trace", "from-workload", "t.jsonl", "--out", "t.jsonl"], "--out t.jsonl", "is what is read"),
    ],
)
def test_output_that_is_the_input_or_another_output_is_refused(tmp_path, monkeypatch, command, words, option, reason):
    monkeypatch.chdir(tmp_path)
    write_trace("t.jsonl", Trace(Header(CacheConfig()), [Submit("r0", (1, 2))]))
    os.link("t.jsonl", "hard.jsonl")
    os.symlink("t.jsonl", "soft.jsonl")
    before = Path("t.jsonl").read_bytes()
    code, _, err = command(*words)

    assert (code, err) == (2, f"kvlockstep: {option}: {reason}, name another file\n")
    assert Path("t.jsonl").read_bytes() == before
    assert sorted(os.listdir()) == ["hard.jsonl", "soft.jsonl", "t.jsonl"]


@pytest.mark.parametrize("words", [["trace", "from-workload", "FILE", "--out", ""], ["record", "", "--", "true"]])
def test_empty_name_is_wrong_usage(tmp_path, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text(LOG)
    code, _, err = command(*words)

    assert code == 2
    assert ": an empty name; " in err
