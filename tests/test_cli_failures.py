"""Folders of failures: complete or not there, the shorter trace stays, and nothing of another cause is replaced."""

import os
import threading

import pytest

from kvlockstep.fuzz import failures
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.failures import keep_last_trace, replay_line, store_failure
from kvlockstep.fuzz.ops import Match, Reset
from kvlockstep.fuzz.trace import Header, Trace, TraceWriter, read_trace

HEADER = Header(CacheConfig(), violates="PageLeaked", signature="PageLeaked.abort", target="gpu_impl", lane="torch")


def failure(length, **changes):
    header = Header(**{**{name: getattr(HEADER, name) for name in HEADER.__slots__}, **changes})
    return Trace(header, [Match(f"r{n}") for n in range(length)])


def store(out, length, text="PageLeaked: page 1 is lost", still_fails=lambda stored: True, **changes):
    trace = failure(length, **changes)
    return store_failure(out, trace, trace, text, still_fails)


def n_ops(folder):
    return len(read_trace(folder / "trace.jsonl").ops)


@pytest.mark.parametrize("lengths", [(5, 3), (3, 5), (3, 3)])
def test_shorter_trace_of_one_cause_stays(tmp_path, lengths):
    first, second = [store(tmp_path, length, f"found with {length}") for length in lengths]

    assert first == second == tmp_path / "PageLeaked.abort"
    assert n_ops(first) == min(lengths)
    assert (first / "verdict.txt").read_text().startswith(f"found with {min(lengths)}\n")
    assert os.listdir(tmp_path) == ["PageLeaked.abort"]
    assert sorted(os.listdir(first)) == [
        "environment.json",
        "original.jsonl",
        "replay.sh",
        "trace.jsonl",
        "verdict.txt",
    ]


@pytest.mark.parametrize(("still_fails", "kept"), [(True, 1), (False, 6)])
def test_shorter_trace_stays_only_while_it_still_fails(tmp_path, still_fails, kept):
    asked = []
    store(tmp_path, 1, "as it was")
    folder = store(tmp_path, 6, "as it is", lambda stored: asked.append(stored) or still_fails)

    assert asked == [failure(1)]
    assert n_ops(folder) == kept
    assert (folder / "verdict.txt").read_text().startswith("as it was\n" if still_fails else "as it is\n")
    assert os.listdir(tmp_path) == ["PageLeaked.abort"]


def test_longer_trace_is_replaced_without_being_run(tmp_path):
    store(tmp_path, 6)

    assert n_ops(store(tmp_path, 5, still_fails=None)) == 5


def test_failure_on_another_lane_is_the_same_cause(tmp_path):
    assert store(tmp_path, 3) == store(tmp_path, 4, lane="interpret")


def test_failure_of_another_fault_or_target_gets_a_folder_of_its_own(tmp_path):
    folders = [
        store(tmp_path, 3, fault="abort-keeps-lock"),
        store(tmp_path, 9),
        store(tmp_path, 5, target="mine:make"),
        store(tmp_path, 2, target="mine:make"),
    ]

    names = ["PageLeaked.abort", "PageLeaked.abort.2", "PageLeaked.abort.3", "PageLeaked.abort.3"]
    assert [folder.name for folder in folders] == names
    assert [n_ops(tmp_path / name) for name in names] == [3, 9, 2, 2]


def test_folder_with_a_trace_that_cannot_be_read_is_replaced(tmp_path):
    (tmp_path / "PageLeaked.abort").mkdir()
    (tmp_path / "PageLeaked.abort" / "trace.jsonl").write_text('{"kvlockstep":1,"con')

    assert n_ops(store(tmp_path, 3)) == 3
    assert os.listdir(tmp_path) == ["PageLeaked.abort"]


def test_file_in_the_place_of_a_folder_is_left_alone(tmp_path):
    (tmp_path / "PageLeaked.abort").write_text("in the way")

    assert store(tmp_path, 3).name == "PageLeaked.abort.2"
    assert (tmp_path / "PageLeaked.abort").read_text() == "in the way"


def test_folder_stays_as_it_was_when_the_disk_is_full(tmp_path, monkeypatch):
    folder = store(tmp_path, 5)
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failures.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store(tmp_path, 3)

    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before
    assert os.listdir(tmp_path) == ["PageLeaked.abort"]


def test_workers_that_find_one_cause_at_the_same_time_keep_the_shortest(tmp_path):
    threads = [threading.Thread(target=store, args=(tmp_path, length)) for length in (7, 4, 9, 3, 8, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert os.listdir(tmp_path) == ["PageLeaked.abort"]
    assert n_ops(tmp_path / "PageLeaked.abort") == 3


def test_text_that_no_file_can_hold_is_written_all_the_same(tmp_path):
    folder = store(tmp_path, 3, "TargetRaised: \ud800")

    assert (folder / "verdict.txt").read_text().startswith("TargetRaised: \\ud800\n")


def test_last_trace_is_moved_out_of_the_way_of_the_next_run(tmp_path):
    for number in (1, 2):
        with TraceWriter(tmp_path / "torch.current.jsonl", HEADER) as writer:
            writer.write(Reset())

        assert keep_last_trace(tmp_path, "torch") == tmp_path / f"torch.died-{number}.jsonl"
    with (tmp_path / "torch.died-2.jsonl").open("a") as file:
        file.write('{"op":"mat')

    assert sorted(os.listdir(tmp_path)) == ["torch.died-1.jsonl", "torch.died-2.jsonl"]


def test_nothing_is_kept_of_a_worker_that_ran_nothing(tmp_path):
    assert keep_last_trace(tmp_path, "torch") is None
    TraceWriter(tmp_path / "torch.current.jsonl", HEADER).close()

    assert keep_last_trace(tmp_path, "torch") is None


@pytest.mark.parametrize(
    ("target", "path", "line"),
    [
        ("gpu_impl", "out/x/trace.jsonl", "kvlockstep replay out/x/trace.jsonl"),
        ("mine:make", "out/x/trace.jsonl", "kvlockstep replay --target mine:make out/x/trace.jsonl"),
        ("gpu_impl", "out/it's (1)/t.jsonl", "kvlockstep replay 'out/it'\"'\"'s (1)/t.jsonl'"),
    ],
)
def test_line_to_paste_is_quoted_and_names_a_target_that_is_not_built_in(tmp_path, monkeypatch, target, path, line):
    monkeypatch.chdir(tmp_path)

    assert replay_line(tmp_path / path, target) == line
