"""Folders of failures: complete or not there, the shorter trace stays, and nothing of another cause is replaced."""

import os
import threading

import pytest

from kvlockstep.fuzz import failures, worker
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.failures import (
    add_picture,
    keep_last_trace,
    meaning_in,
    replay_line,
    replay_script,
    show_line,
    store_failure,
)
from kvlockstep.fuzz.ops import Match, Reset
from kvlockstep.fuzz.show import page as pages
from kvlockstep.fuzz.story import tell
from kvlockstep.fuzz.targets.wrong import LeaksOnAbort
from kvlockstep.fuzz.trace import Header, Trace, TraceWriter, read_trace
from kvlockstep.fuzz.worker import Order, Worker

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


def test_picture_and_meaning_are_put_beside_the_trace_that_they_show(tmp_path):
    folder = store(tmp_path, 3, "PageLeaked: page 1 is lost\r\n  step      2: match r2")
    line = (folder / "verdict.txt").read_bytes().splitlines(keepends=True)[-1]
    assert meaning_in((folder / "verdict.txt").read_text()) is None

    add_picture(folder, failure(3), "<p>", "Page 1 belongs to nobody.")

    verdict = (folder / "verdict.txt").read_bytes()
    text = b"PageLeaked: page 1 is lost\r\n  step      2: match r2\n  meaning   Page 1 belongs to nobody.\n"
    assert (folder / "page.html").read_text() == "<p>"
    assert verdict == text + line
    assert meaning_in(verdict.decode()) == "Page 1 belongs to nobody."
    assert sorted(os.listdir(folder)) == [
        "environment.json",
        "original.jsonl",
        "page.html",
        "replay.sh",
        "trace.jsonl",
        "verdict.txt",
    ]


def test_picture_of_another_trace_is_not_put_in(tmp_path):
    folder = store(tmp_path, 3)
    before = (folder / "verdict.txt").read_bytes()
    add_picture(folder, failure(4), "<p>", "Page 1 belongs to nobody.")

    assert (folder / "verdict.txt").read_bytes() == before
    assert not (folder / "page.html").exists()


def test_picture_goes_with_the_trace_that_it_shows(tmp_path):
    folder = store(tmp_path, 4)
    add_picture(folder, failure(4), "<p>", "Page 1 belongs to nobody.")
    store(tmp_path, 6)
    assert (folder / "page.html").exists()
    store(tmp_path, 3)

    assert not (folder / "page.html").exists()
    assert meaning_in((folder / "verdict.txt").read_text()) is None


def found_by_worker(out):
    """Let a worker find a leak; return the folder of it and what the worker reported."""
    events = []
    order = Order("kvlockstep.fuzz.targets.wrong:LeaksOnAbort", None, 60.0, 0, str(out), "w", canary=False)
    Worker(order, LeaksOnAbort, lambda event, **facts: events.append(event)).fuzz()
    (folder,) = [path for path in out.iterdir() if path.is_dir()]
    return folder, events


def test_worker_puts_the_picture_of_the_minimized_trace_into_the_folder(tmp_path, capsys):
    folder, _ = found_by_worker(tmp_path)
    trace = read_trace(folder / "trace.jsonl")
    header = trace.header
    story = tell(header.config, trace.ops, LeaksOnAbort)
    picture = pages.page_of(story, lane=header.lane, fault=header.fault, why=header.why)

    assert (folder / "page.html").read_text(encoding="utf-8") == picture
    assert meaning_in((folder / "verdict.txt").read_text()) == pages.verdict_of(story).sentence
    assert capsys.readouterr() == ("", "")


def test_failure_is_not_lost_in_the_drawing_of_it(tmp_path, monkeypatch, capsys):
    def broken(story, **facts):
        raise RuntimeError("no paint")

    monkeypatch.setattr(pages, "page_of", broken)
    folder, events = found_by_worker(tmp_path)

    assert events[-2:] == ["failure", "end"]
    assert read_trace(folder / "trace.jsonl").header.violates == "PageLeaked"
    assert not (folder / "page.html").exists()
    assert capsys.readouterr().err == f"{folder}: has no page.html: RuntimeError: no paint\n"


def test_trace_that_takes_long_to_draw_is_not_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "MOST_DRAWN", 1)
    folder, events = found_by_worker(tmp_path)

    assert "failure" in events
    assert not (folder / "page.html").exists()


def test_line_and_script_say_how_a_trace_is_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert show_line(tmp_path / "a b" / "t.jsonl", "gpu_impl") == "kvlockstep show 'a b/t.jsonl'"
    assert show_line(tmp_path / "t.jsonl", "my:T") == "kvlockstep show --target my:T t.jsonl"
    assert "#   kvlockstep show --target gpu_impl trace.jsonl\n" in replay_script(HEADER)


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
