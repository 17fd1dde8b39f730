"""``blame``: lives of things in hand-made traces, and the cause of violations whose damage was done earlier."""

import pytest

from kvlockstep.fuzz.blame import _sets_to_leave_out, hidden_cause, seen_cause, thing_named, things_of
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lenient import tell_without
from kvlockstep.fuzz.lives import Lives, Thing
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
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.targets.wrong import FreesPartialPageTwice
from kvlockstep.fuzz.trace import Header, Trace, write_trace
from kvlockstep.invariants import FULL

CLEAN, USAGE = 0, 2
CONFIG = CacheConfig(page_size=2, n_pages=8, n_rows=3, max_context_len=16)


def took_off(name, tokens):
    return [Submit(name, tokens), Match(name), Alloc((AllocItem(name, len(tokens)),))]


def published(name, tokens):
    return [*took_off(name, tokens), Commit(name, len(tokens)), Release(name)]


OPS = [
    *took_off("r0", (1, 2, 3, 4, 5)),
    Commit("r0", 5, (6,)),
    Checkpoint("r0"),
    Submit("r1", (1, 2, 9)),
    Match("r1"),
    Alloc((AllocItem("r1", 1),)),
    Release("r0"),
    Commit("r1", 1),
    Release("r1"),
    Evict(16),
    *took_off("r2", (7, 8, 7)),
]


def lives_of(ops, factory=ReferenceTarget, config=CONFIG, without=frozenset()):
    return Lives(tell_without(config, ops, factory, without))


def told(lives, thing):
    return [f"{line.index} {line.text}" + (f" <- {line.mark}" if line.mark else "") for line in lives.life(thing)]


def test_life_of_a_page_goes_from_owner_to_owner():
    assert told(lives_of(OPS), Thing("page", 1)) == [
        "-1 in the free list, generation 0",
        "2 taken from the free list by r0, positions [0, 2); a pass of r0 that writes slots 2 3 is in flight",
        "3 the pass of r0 landed",
        "4 published by r0: node 0 (tokens 1 2 3 4), row 1 names it",
        "6 node 0 (tokens 1 2 3 4) was split or changed: now of node 0 (tokens 1 2); lock count of its node 1 -> 2",
        "7 r1 (row 2, positions [0, 2)) reads it too; a pass of r1 that reads it is in flight",
        "8 r0 reads it no more; lock count of its node 2 -> 1",
        "9 the pass of r1 landed",
        "10 r1 reads it no more; lock count of its node 1 -> 0",
        "11 freed with node 0 (tokens 1 2); generation 0 -> 1",
        "14 taken from the free list by r2, positions [0, 2); a pass of r2 that writes slots 2 3 is in flight",
    ]


def test_life_of_a_slot_names_its_position_in_rows():
    lines = told(lives_of(OPS), Thing("slot", 3))

    assert "position 1 of row 1 (r0) names it" in lines[1]
    assert any(line.startswith("7 ") and "position 1 of row 2 (r1) names it" in line for line in lines)
    assert any(line.startswith("8 ") and "position 1 of row 1 (r0) names it no more" in line for line in lines)


def test_life_of_a_row_tells_its_slots_and_generation():
    assert told(lives_of(OPS), Thing("row", 1)) == [
        "-1 in the free list, generation 0",
        "2 taken by r0; names slots 2 3 4 5 6 at [0, 5); protected 0, committed 0, allocated 5",
        "3 protected 0, committed 5, allocated 5",
        "4 protected 4, committed 5, allocated 5",
        "8 given back by r0; generation 0 -> 1",
        "14 taken by r2; names slots 2 3 4 at [0, 3); protected 0, committed 0, allocated 3",
    ]


def test_life_of_a_request_tells_states_lengths_and_lock():
    assert told(lives_of(OPS), Thing("request", "r1")) == [
        "-1 not there yet",
        "5 submitted",
        "6 MATCHED; protected 2, committed 2, allocated 2; locks the path to node 0 (tokens 1 2)",
        "7 IN_FLIGHT; takes row 2; protected 2, committed 2, allocated 3; names slots 2 3 8 at [0, 3)",
        "9 RUNNING; protected 2, committed 3, allocated 3",
        "10 gone or waiting again, its row 2 given back",
    ]


def test_life_of_a_node_goes_on_through_a_split():
    lives = lives_of(OPS)
    lower = next(key for look in lives.looks for key in look.nodes if key.units == (1, 2, 3, 4))
    upper = lower._replace(units=(1, 2))

    assert told(lives, Thing("node", lower)) == [
        "-1 not there yet",
        "4 made: node 0 (tokens 1 2 3 4) below the root, slots 2 3 4 5, lock count 1, 1 hit",
        "6 node 1 (tokens 3 4) is split or merged: its edge is [2, 4) now, was [0, 4)",
        "8 lock count 1 -> 0; used",
        "11 node 1 (tokens 3 4) is removed, slots 4 5",
    ]
    assert told(lives, Thing("node", upper))[1].startswith("6 split off node 0 (tokens 1 2 3 4), above it: node 0")


def test_refusals_stand_in_the_life_of_a_request():
    lines = told(lives_of([Submit("r0", (1, 2)), Match("r0"), Checkpoint("r0")]), Thing("request", "r0"))

    assert lines[-1] == "2 refused: WrongState"


def test_second_owner_is_marked_where_it_comes():
    lives = lives_of(published("r0", (1, 2, 3)), FreesPartialPageTwice)
    lines = told(lives, things_of(lives)[0])

    assert things_of(lives)[0] == Thing("page", 2)
    assert lines[-1].startswith("4 ")
    assert lines[-1].endswith("generation 0 -> 1 <- PageOwnedTwice, two owners")


class HidesRows(ReferenceTarget):
    """A target that shows neither rows nor its free list."""

    def snapshot(self):
        snapshot = super().snapshot()
        snapshot.rows = snapshot.free_rows = snapshot.row_generations = None
        snapshot.pools[FULL].free_pages = None
        return snapshot


class HidesRequests(ReferenceTarget):
    """A target that shows neither requests nor generations."""

    def snapshot(self):
        snapshot = super().snapshot()
        snapshot.requests = snapshot.row_generations = snapshot.pools[FULL].page_generations = None
        return snapshot


class HidesNodes(ReferenceTarget):
    """A target that does not show its tree."""

    def snapshot(self):
        snapshot = super().snapshot()
        snapshot.nodes = snapshot.evictable_nodes = None
        return snapshot


@pytest.mark.parametrize("target", [ReferenceTarget, HidesRows, HidesRequests, HidesNodes])
def test_nothing_is_marked_in_lives_that_are_as_in_the_model(target):
    lives = lives_of(OPS, target)
    things = [Thing(kind, number) for kind in ("page", "slot", "row") for number in range(1, 4)]
    things += [Thing("request", name) for name in ("r0", "r1", "r2")]
    things += [Thing("node", key) for look in lives.looks for key in look.nodes]

    assert [line for thing in things for line in lives.life(thing) if line.mark] == []


def test_node_of_a_target_that_hides_its_tree_is_said_to_be_hidden():
    lives = lives_of(OPS, HidesNodes)

    assert told(lives, thing_named(lives, "node", 0)) == ["-1 not shown by this target"]


@pytest.mark.parametrize("thing", [Thing("page", 1), Thing("slot", 3), Thing("row", 1)])
def test_what_a_target_hides_is_said_to_be_hidden(thing):
    assert told(lives_of(OPS[:5], HidesRows), thing)[0] == "-1 not shown by this target"


# Faults whose damage shows three operations after the cause or more: what the faulty code does wrong, it does there.
HIDDEN = {
    # the evicted node keeps its list of pages; the reset frees them again
    "evicted-pages-freed-again-at-reset": (
        CONFIG,
        [*published("r0", (1, 2, 3)), Evict(2), Submit("r1", (5, 6)), Match("r1"), Abort("r1"), Reset()],
        (5, Evict),
    ),
    # the hits of the evicted node stay under its number, which the next node gets
    "recycled-node-keeps-hits": (
        CONFIG,
        [*published("r0", (1, 2, 3)), Evict(2), *published("r1", (5, 6, 7))],
        (5, Evict),
    ),
    # the last page of r0 is remembered at its end; the end of r2 frees it, which is r1's by then
    "late-free-takes-page-from-third": (
        CONFIG,
        [
            *took_off("r0", (1,)),
            Commit("r0", 0),
            Release("r0"),
            *took_off("r1", (5, 6, 5)),
            *[Submit("r2", (8, 9)), Match("r2"), Retract("r2")],
        ],
        (4, Release),
    ),
    # the peek remembers the node by its number; r0's node gets that number
    "path-remembered-by-node-number": (
        CacheConfig(page_size=3, n_pages=2, n_rows=1, max_context_len=5),
        [
            *[Submit("r0", (1,) * 5), *took_off("r1", (2, 3, 1, 3)), Commit("r1", 4), Match("r0")],
            *[Retract("r1", publish=True), Peek("r1"), Alloc((AllocItem("r0", 4),)), Commit("r0", 4)],
            *[Checkpoint("r0"), Peek("r1")],
        ],
        (7, Peek),
    ),
    # the peek stamps the node and leaves its place among the victims
    "peek-leaves-old-rank": (
        CONFIG,
        [
            *[*published("r0", (1, 2)), *published("r1", (3, 4)), Submit("r2", (1, 2, 9)), Peek("r2")],
            *[Submit("r3", (7, 8)), Match("r3"), Abort("r3"), Evict(1)],
        ],
        (11, Peek),
    ),
    # the peek makes the older node the younger one, but for a cache that looks at creation
    "age-counted-from-creation": (
        CONFIG,
        [
            *[*published("r0", (1, 2)), *published("r1", (3, 4)), Submit("r2", (1, 2, 9)), Peek("r2")],
            *[Submit("r3", (7, 8)), Match("r3"), Abort("r3"), Evict(1)],
        ],
        (11, Peek),
    ),
}


@pytest.mark.parametrize("fault", HIDDEN)
def test_hidden_damage_is_traced_to_the_operation_that_did_it(fault):
    config, ops, (index, kind) = HIDDEN[fault]
    factory = factory_for("gpu_impl", fault)
    lives = lives_of(ops, factory, config)
    cause = hidden_cause(lives, factory)

    assert lives.story.violation is not None
    assert len(lives.story.steps) == len(ops)
    assert seen_cause(lives) is None
    assert cause is not None
    assert (cause.index, type(ops[cause.index])) == (index, kind)
    assert len(ops) - 1 - cause.index >= 3


# Faults that laws see at once; with those and the comparison left out another law notices later.
SEEN = {
    "retract-keeps-row": (
        {1, 11, COMPARISON},
        "IdleCountsWrong",
        [
            *[Submit("r1", (5, 6)), Match("r1"), *took_off("r0", (1,)), Commit("r0", 1), Retract("r0")],
            *[Submit("r2", (3,)), Match("r2"), Abort("r2"), Abort("r1")],
        ],
        (6, Retract),
    ),
    "checkpoint-keeps-row": (
        {2, COMPARISON},
        "ContentWrong",
        [
            *[*took_off("r0", (1, 2, 3)), Commit("r0", 3), *took_off("r1", (1, 2, 4)), Commit("r1", 3)],
            *[Checkpoint("r0"), Checkpoint("r1"), *took_off("r2", (7, 8, 9)), Commit("r2", 3)],
        ],
        (9, Checkpoint),
    ),
}


@pytest.mark.parametrize("fault", SEEN)
def test_damage_in_the_blind_spot_of_a_law_is_traced_to_its_operation(fault):
    without, law, ops, (index, kind) = SEEN[fault]
    lives = lives_of(ops, factory_for("gpu_impl", fault), CONFIG, frozenset(without))
    cause = seen_cause(lives)

    assert type(lives.story.violation).__name__ == law
    assert cause is not None
    assert (cause.index, type(ops[cause.index])) == (index, kind)
    assert len(lives.story.steps) - 1 - cause.index >= 3


def test_sets_to_leave_out_stay_few_in_a_long_trace():
    ops = [op for number in range(300) for op in published(f"r{number}", (1, 2, 3))]
    sets = _sets_to_leave_out(ops)

    assert len(sets) * len(ops) <= 200_000
    assert sets[0] == (len(ops) - 1,)


def test_a_trace_that_holds_has_no_cause():
    lives = lives_of(OPS)

    assert lives.story.violation is None
    assert seen_cause(lives) is None
    assert hidden_cause(lives, ReferenceTarget) is None


def test_immediate_damage_is_not_blamed_on_what_went_before():
    lives = lives_of(published("r0", (1, 2, 3)), FreesPartialPageTwice)

    assert seen_cause(lives) is None
    assert hidden_cause(lives, FreesPartialPageTwice) is None


@pytest.fixture
def stored(tmp_path):
    def write(ops, **header):
        path = tmp_path / "t.jsonl"
        write_trace(path, Trace(Header(**({"config": CONFIG, "target": "reference"} | header)), list(ops)))
        return path

    return write


def test_blame_prints_lives_then_violation_then_cause(stored, command):
    fault = "path-remembered-by-node-number"
    config, ops, _ = HIDDEN[fault]
    path = stored(ops, config=config, target="gpu_impl", fault=fault)
    code, out, err = command("blame", path)

    assert (code, err) == (CLEAN, "")
    assert out.startswith("request r1\n  before ")
    assert "\nviolation  op 11 (peek r1): MatchedUncommitted: " in out
    assert "\ncause      op 7 (peek r1), 4 operations before it was noticed\n" in out
    assert out.endswith("but without op 7 the model comes to the same state, and op 11 breaks no law\n")
    assert command("blame", path) == (code, out, err)


def test_blame_without_laws_says_what_first_differed(stored, command):
    _, _, ops, _ = SEEN["checkpoint-keeps-row"]
    path = stored(ops, target="gpu_impl", fault="checkpoint-keeps-row")
    code, out, _ = command("blame", path, "--without", "2", "--without", "comparison", "--row", 2)

    assert code == CLEAN
    assert "op 9   checkpoint r1 " in out
    assert "<- the model has slots 2 3 8" in out
    assert "\ncause      op 9 (checkpoint r1), 4 operations before it was noticed\n" in out
    assert "first difference from the model: row 2 differs from position 0 on" in out


@pytest.mark.parametrize(
    ("option", "value", "heading"),
    [("--page", 1, "page 1"), ("--slot", 3, "slot 3"), ("--row", 1, "row 1"), ("--request", "r1", "request r1")]
    + [("--node", 0, "node of tokens 1 2")],
)
def test_blame_tells_the_life_that_is_asked_for(stored, command, option, value, heading):
    code, out, err = command("blame", stored(OPS), option, value)

    assert (code, err) == (CLEAN, "")
    assert out.startswith(f"{heading}\n  before ")
    assert out.endswith("\nno violation\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--page", 9], "page 9: this cache has pages 0..8"),
        (["--slot", 18], "slot 18: this cache has slots 0..17"),
        (["--row", -1], "row -1: this cache has rows 0..3"),
        (["--request", "r9"], "request r9: never seen, the trace names r0, r1, r2"),
        (["--node", 7], "node 7: never seen, there were 0..1"),
        (["--page", 1, "--row", 1], "--page and --row: expected one of them"),
        (["--without", "13"], "'13': expected a law, 1 to 12, or comparison"),
        (["--target", "nowhere"], "unknown target 'nowhere'"),
        (["--target", "all"], "--target all: expected one target, got 4"),
        (["--fault", "nothing"], "unknown fault 'nothing'"),
    ],
)
def test_blame_refuses_what_is_not_there_in_one_line(stored, command, arguments, text):
    code, out, err = command("blame", stored(OPS), *arguments)

    assert (code, out) == (USAGE, "")
    assert err.startswith("kvlockstep: ")
    assert text in err
    assert err.count("\n") == 1


def test_blame_refuses_a_trace_that_ends_its_process(stored, command):
    code, _, err = command("blame", stored(OPS, violates="Died", signature="Died.alloc"))

    assert code == USAGE
    assert "only kvlockstep replay takes care of" in err


def test_blame_refuses_a_file_that_is_not_there(tmp_path, command):
    code, _, err = command("blame", tmp_path / "none.jsonl")

    assert code == USAGE
    assert "none.jsonl" in err
