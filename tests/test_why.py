"""``why``: the operation from which on a failure was bound to come, its chart, its budget, and what it refuses."""

import json
import re
from dataclasses import replace
from itertools import count

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lenient import tell_without
from kvlockstep.fuzz.lockstep import COMPARISON
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
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.show.page import MOST_PAGES
from kvlockstep.fuzz.targets.wrong import LeaksOnAbort
from kvlockstep.fuzz.trace import Header, Trace, write_trace
from kvlockstep.fuzz.why import Point, _spread, _turn, chances

CLEAN, USAGE, BROKEN = 0, 2, 12
CONFIG = CacheConfig(page_size=2, n_pages=8, n_rows=3, max_context_len=16)
LEAKY = "kvlockstep.fuzz.targets.wrong:LeaksOnAbort"


def took_off(name, tokens):
    return [Submit(name, tokens), Match(name), Alloc((AllocItem(name, len(tokens)),))]


def published(name, tokens):
    return [*took_off(name, tokens), Commit(name, len(tokens)), Release(name)]


LEAKS = [*took_off("r0", (1, 2, 3)), Commit("r0", 3), Abort("r0")]

# Faults with a trace in which the law notices three operations after the damage or more: what is left out, the trace,
# and the operation that does it.
TURNS = {
    "evicted-pages-freed-again-at-reset": (
        (),
        [*published("r0", (1, 2, 3)), Evict(2), Submit("r1", (5, 6)), Match("r1"), Abort("r1"), Reset()],
        (5, Evict),
    ),
    "recycled-node-keeps-hits": ((), [*published("r0", (1, 2, 3)), Evict(2), *published("r1", (5, 6, 7))], (5, Evict)),
    "peek-leaves-old-rank": (
        (),
        [
            *[*published("r0", (1, 2)), *published("r1", (3, 4)), Submit("r2", (1, 2, 9)), Peek("r2")],
            *[Submit("r3", (7, 8)), Match("r3"), Abort("r3"), Evict(1)],
        ],
        (11, Peek),
    ),
    "retract-keeps-row": (
        (1, 11, COMPARISON),
        [
            *[Submit("r1", (5, 6)), Match("r1"), *took_off("r0", (1,)), Commit("r0", 1), Retract("r0")],
            *[Submit("r2", (3,)), Match("r2"), Abort("r2"), Abort("r1")],
        ],
        (6, Retract),
    ),
    "checkpoint-keeps-row": (
        (2, COMPARISON),
        [
            *[*took_off("r0", (1, 2, 3)), Commit("r0", 3), *took_off("r1", (1, 2, 4)), Commit("r1", 3)],
            *[Checkpoint("r0"), Checkpoint("r1"), *took_off("r2", (7, 8, 9)), Commit("r2", 3)],
        ],
        (9, Checkpoint),
    ),
}


def found_for(fault, **options):
    words, ops, _ = TURNS[fault]
    factory, without = factory_for("gpu_impl", fault), frozenset(words)
    violation = tell_without(CONFIG, ops, factory, without).violation
    return chances(CONFIG, ops, factory, type(violation).__name__, seconds=600, without=without, **options)


@pytest.mark.parametrize("fault", TURNS)
def test_turn_is_the_operation_that_did_the_damage(fault):
    _, ops, (index, kind) = TURNS[fault]
    found = found_for(fault)

    assert (found.turn, type(ops[found.turn])) == (index, kind)
    assert found.stands_out
    assert len(ops) - 1 - found.turn >= 3
    assert found.after - found.before >= 0.2
    assert found.in_time


def test_same_trace_gives_the_same_picture():
    fault = "recycled-node-keeps-hits"

    assert found_for(fault, continuations=4) == found_for(fault, continuations=4)


def test_time_that_runs_out_leaves_fewer_continuations_from_each_point():
    ticks = count()
    found = chances(
        CONFIG, LEAKS, LeaksOnAbort, "PageLeaked", continuations=9, seconds=13.0, clock=lambda: float(next(ticks))
    )

    assert not found.in_time
    assert [point.tried for point in found.points] == [3, 2, 2, 2, 3, 9]
    assert found.sentences()[-1] == "time ran out: 2 of 9 continuations from each point; --seconds gives it more"


def test_points_that_were_not_tried_have_no_share():
    found = chances(CONFIG, LEAKS, LeaksOnAbort, "PageLeaked", seconds=0.0)

    assert [point.share for point in found.points] == [None] * 5 + [1.0]
    assert found.turn == 4
    assert "   -" in found.chart()[0]


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_order_of_points_takes_each_once(size):
    assert sorted(_spread(size)) == list(range(size))


def points_of(*failed):
    return [Point(length, number, 20) for length, number in enumerate(failed)]


@pytest.mark.parametrize(
    ("failed", "turn"),
    [
        ((0, 1, 0, 18, 20, 19, 20), 2),
        ((1, 0, 0, 1, 0, 2, 20), 5),  # nothing stands out before the last
        ((0, 0, 1, 0, 3, 2, 20), 5),  # nor is a small rise named
        ((9, 11, 8, 10, 9, 11, 20), 5),
        ((20, 20), 0),
    ],
)
def test_turn_is_where_the_share_jumps_most(failed, turn):
    assert _turn(points_of(*failed))[0] == turn


@pytest.fixture
def stored(tmp_path):
    def write(ops=LEAKS, **header):
        path = tmp_path / "t.jsonl"
        write_trace(path, Trace(Header(**({"config": CONFIG, "target": LEAKY} | header)), list(ops)))
        return path

    return write


def test_why_draws_a_bar_for_each_operation_and_names_one(stored, command):
    fault = "recycled-node-keeps-hits"
    path = stored(TURNS[fault][1], target="gpu_impl", fault=fault)
    code, out, err = command("why", path, "--continuations", 12)
    lines = out.splitlines()

    assert (code, err) == (CLEAN, "")
    assert lines[0] == ("TreeDiffers.release.hits: of 12 continuations from each point, so many end in TreeDiffers")
    assert lines[1].startswith("before ")
    assert [line.split()[:2] for line in lines[2:13]] == [["op", str(index)] for index in range(11)]
    assert len({line.index(" %") for line in lines[1:13]}) == 1
    assert [line for line in lines if line.endswith("<-")] == [lines[7]]
    assert lines[12].endswith("100 %  " + "#" * 40)
    assert lines[13].startswith("from op 5 (evict 2) on ")
    assert " % of continuations fail; before it " in lines[13]
    assert command("why", path, "--continuations", 12) == (code, out, err)


def test_why_writes_what_it_found_as_json(tmp_path, stored, command):
    out = tmp_path / "why.json"
    code, _, _ = command("why", "--target", LEAKY, stored(), "--continuations", 2, "--json", out)
    data = json.loads(out.read_text())

    assert code == CLEAN
    assert data["law"] == "PageLeaked"
    assert [point["op"] for point in data["points"]] == [-1, 0, 1, 2, 3, 4]
    assert data["points"][-1] == {"op": 4, "failed": 2, "tried": 2, "share": 1.0}
    assert data["ops"][4] == "abort r0"
    assert data["sentence"].startswith(f"from op {data['named']['op']} ")


def test_why_says_so_when_it_cannot_write(stored, command):
    code, _, err = command("why", "--target", LEAKY, stored(), "--continuations", 1, "--json", "/dev/full")

    assert code == BROKEN
    assert err == "kvlockstep: --json /dev/full: No space left on device\n"


def test_why_puts_its_picture_on_the_page_of_the_trace(tmp_path, stored, command):
    fault = "recycled-node-keeps-hits"
    path, html = stored(TURNS[fault][1], target="gpu_impl", fault=fault, lane="torch"), tmp_path / "why.html"
    asked = ("why", path, "--continuations", 6, "--html", html)
    code, out, err = command(*asked)
    page = html.read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page).group(1))

    assert (code, err) == (CLEAN, "")
    assert out.splitlines()[-1][1:] in page
    assert data["chances"]["turn"] == 5
    assert [tried for _, tried in data["chances"]["points"]] == [6] * 12
    assert len(data["steps"]) == 11
    assert f"<dd>{fault}</dd>" in page
    assert "<dd>torch</dd>" in page
    assert command(*asked)[0] == CLEAN
    assert html.read_text() == page


def test_picture_on_the_page_is_of_the_laws_that_were_not_left_out(tmp_path, stored, command):
    words, ops, _ = TURNS["retract-keeps-row"]
    path, html = stored(ops, target="gpu_impl", fault="retract-keeps-row"), tmp_path / "why.html"
    without = [word for law in words for word in ("--without", law or "comparison")]
    code, _, err = command("why", path, "--continuations", 2, *without, "--html", html)

    assert (code, err) == (CLEAN, "")
    assert f"in operation {len(ops) - 1}, the last" in html.read_text()


def test_why_refuses_a_page_that_is_too_large_before_it_runs_anything(tmp_path, stored, command):
    html = tmp_path / "why.html"
    path = stored(config=replace(CONFIG, n_pages=MOST_PAGES + 1), target="gpu_impl")
    code, out, err = command("why", path, "--html", html)

    assert (code, out) == (USAGE, "")
    assert err.endswith(f"at most {MOST_PAGES} can be shown: kvlockstep minimize makes it smaller\n")
    assert not html.exists()


def test_why_says_so_when_it_cannot_write_the_page(stored, command):
    code, _, err = command("why", "--target", LEAKY, stored(), "--continuations", 1, "--html", "/dev/full")

    assert code == BROKEN
    assert err == "kvlockstep: --html /dev/full: No space left on device\n"


def test_why_refuses_a_trace_that_does_not_fail(stored, command):
    code, out, err = command("why", stored(target="reference"))

    assert (code, out) == (USAGE, "")
    assert err.endswith("t.jsonl: does not fail on reference, so there is nothing to explain\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--continuations", "0"], "'--continuations'"),
        (["--seconds", "nan"], "nan is not a time"),
        (["--without", "x"], "'x': expected a law, 1 to 12, or comparison"),
        ([], f"to import that, say --target {LEAKY}"),
    ],
)
def test_why_refuses_wrong_usage_in_one_line(stored, command, arguments, text):
    code, out, err = command("why", stored(), *arguments)

    assert (code, out) == (USAGE, "")
    assert text in err
    assert err.count("\n") == 1
