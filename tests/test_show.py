"""The page of one trace, without a browser: what it says, what it holds, how the command ends."""

import base64
import copy
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Abort, Alloc, AllocItem, Checkpoint, Commit, Match, Release, Submit
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.show.page import MOST_PAGES, MOST_STEPS, page_of, verdict_of
from kvlockstep.fuzz.show.sentences import SENTENCES, Case, sentence_of
from kvlockstep.fuzz.show.view import differences, lines_of, runs_in_words, view_of
from kvlockstep.fuzz.story import tell
from kvlockstep.fuzz.trace import Header, Trace, read_trace, write_trace
from kvlockstep.invariants import FULL, Hold, Snapshot, Violation
from kvlockstep.invariants.checks import CHECKS

REGRESSIONS = Path(__file__).resolve().parents[1] / "regressions"
SMALL = CacheConfig(page_size=2, n_pages=6, n_rows=2, max_context_len=8)


def regression(number):
    (path,) = REGRESSIONS.glob(f"{number:04}-*.jsonl")
    return path


def on_torch():
    """List the regressions that can be told in this process, whose lane is torch."""
    paths = sorted(REGRESSIONS.glob("*.jsonl"))
    return [path for path in paths if (header := read_trace(path).header).lane == "torch" and header.fault]


def story_of(path):
    trace = read_trace(path)
    header = trace.header
    return tell(header.config, trace.ops, factory_for(header.target, header.fault))


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page).group(1))


def our_violations():
    found, todo = set(), [Violation]
    while todo:
        for kind in todo.pop().__subclasses__():
            if kind.__module__.startswith("kvlockstep."):
                found.add(kind)
                todo.append(kind)
    return {kind for kind in found if not kind.__subclasses__()}  # the others are never raised themselves


def served(requests=1, tokens=(1, 2, 3)):
    """Serve requests with the same prompt one after the other."""
    ops = []
    for name in (f"r{i}" for i in range(requests)):
        ops += [Submit(name, tokens), Match(name)]
        n = 1 if name != "r0" else len(tokens)
        ops += [Alloc((AllocItem(name, n),)), Commit(name, n), Checkpoint(name), Release(name)]
    return ops


def long_trace(n_ops=200):
    """Serve many requests of a few shared prompts, in chunks, interleaved, some of it refused."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(50_000) for _ in range(draw.choice([32, 64, 128]))) for _ in range(6)]
    ops, running = [], []
    for number in range(n_ops):
        if len(running) < 12 and draw.random() < 0.5:
            name = f"r{number}"
            tokens = draw.choice(prompts) + tuple(draw.randrange(50_000) for _ in range(draw.randrange(20, 200)))
            ops += [Submit(name, tokens), Match(name), Alloc((AllocItem(name, 16),)), Commit(name, 16)]
            running.append(name)
        elif running:
            name = draw.choice(running)
            ops += draw.choice([[Alloc((AllocItem(name, 16),)), Commit(name, 16)], [Checkpoint(name)], [Release(name)]])
            running = [other for other in running if ops[-1] != Release(other)]
    config = CacheConfig(page_size=16, n_pages=256, n_rows=16, max_context_len=1024)
    return Trace(Header(config=config), ops[:n_ops])


# What it says


def test_every_class_of_violation_has_a_sentence():
    import kvlockstep.fuzz.ward  # noqa: F401 - has some of them

    assert set(SENTENCES) == our_violations()
    assert {kind for check in CHECKS for kind in check.violations} <= set(SENTENCES)


@pytest.mark.parametrize("kind", SENTENCES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["checkpoint", "alloc", "match"])
def test_sentence_is_said_where_the_cache_shows_nothing_wrong(kind, name, hand_built):
    observation = hand_built[name]
    case = Case(kind("headline"), "checkpoint r1", observation.before, observation.now, observation)

    for one in (case, replace(case, seen=None)):
        said = sentence_of(one)
        assert said.endswith(".")
        assert said[0].isupper()
        assert len(said) < 400
        assert "  " not in said
        assert "None" not in said


@pytest.mark.parametrize("kind", SENTENCES, ids=lambda kind: kind.__name__)
def test_sentence_is_said_where_little_can_be_seen(kind, hand_built):
    now = hand_built["checkpoint"].now
    hidden = replace(now, rows=None, requests=None, nodes=None, free_rows=None, evictable_nodes=None)
    hidden.pools = {FULL: replace(now.pools[FULL], free_pages=None, page_generations=None)}

    assert sentence_of(Case(kind("headline"), "checkpoint r1", hidden, hidden, None)).endswith(".")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "Request r1 still reads page 1 of the radix tree, but the node looks free to evict"),
        (6, "Page 1 went to the free list, but the radix tree still offers it as a cached prefix, and r0 and r1 still"),
        (8, "Page 2 was given back twice"),
        (11, "Page 3 belongs to nobody after alloc r0"),
        (19, "Row 1 of request r0 was given back while its forward pass is still running"),
        (20, "Requests r1 and r2 are told to write to the same slot 3 (page 3, r1's) in one batch"),
        (
            23,
            "The tree holds positions 0-1 of request r2 in slots 2-3, but r2's row says slots 4-5 (page 2, the tree's)",
        ),
        (24, "Request r1 was given slots 2-3 (page 1) as the beginning of its prompt, but what stands there was"),
    ],
)
def test_sentence_names_requests_and_pages(number, words):
    assert verdict_of(story_of(regression(number))).sentence.startswith(words)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (
            6,
            "and r0, r1 and whoever matches that prefix will see that request's text. Page 3 (r1's until then) now",
        ),
        (
            20,
            "so r1 may see r2's text. r2's row names slot 4 in its place, which r2 does not write: it reads",
        ),
        (23, "r2 reads that other prefix in place of its own prefix."),
        (24, "the tree keeps it under key 'a', salt 'bc': it goes on from a prefix that is not its own."),
    ],
)
def test_sentence_says_who_is_hurt_and_by_what(number, words):
    assert words in verdict_of(story_of(regression(number))).sentence


def test_request_that_arrives_is_shown_with_its_namespace():
    data = data_of(page_of(story_of(regression(24))))

    assert data["steps"][0]["op"] == "submit r0 with 2 tokens, key 'a', salt 'bc'"


def test_sentence_names_the_other_pages_of_which_the_same_is_true(hand_built):
    before, now = hand_built["alloc"].before, copy.deepcopy(hand_built["alloc"].now)
    tree = sorted({slot // 2 for node in now.nodes for slot in node.slots[FULL]})
    now.pools[FULL].free_pages += tree[:3]
    said = sentence_of(Case(violation_named("PageOwnedTwice"), "release r1", before, now, None))

    assert said.startswith(f"Page {tree[0]} went to the free list")
    assert f" It is the same with pages {runs_in_words(tree[1:3])}." in said


def test_page_of_two_requests_says_whose_text_is_seen(hand_built):
    before, now = hand_built["alloc"].before, copy.deepcopy(hand_built["alloc"].now)
    row = next(row for row in now.rows if row.request == "r2")
    row.slots[4:6] = [12, 13]  # page 6, which is r1's

    said = sentence_of(Case(violation_named("PageOwnedTwice"), "alloc r2 r3", before, now, None))

    assert said.startswith("Request r1 still reads page 6, but page 6 was given to r2: r1 will see r2's text")


def violation_named(name):
    return next(kind for kind in SENTENCES if kind.__name__ == name)("headline")


@pytest.mark.parametrize("path", on_torch(), ids=lambda path: path.stem)
def test_every_regression_has_its_page(path):
    story = story_of(path)
    page = page_of(story)
    data = data_of(page)

    assert f"<h1>{read_trace(path).header.violates} in operation " in page
    assert [step["wrong"] for step in data["steps"]] == [False] * (len(story.steps) - 1) + [True]


# What it holds


def drawn(data, side, number):
    """Put the pages of one side together, as the script does."""
    pages = {}
    for step in data["steps"][: number + 1]:
        changes = step["sides"][side]["pages"]
        pages.update(zip(changes[::2], changes[1::2], strict=True))
    return {page: data["parts"][part]["words"] for page, part in pages.items()}


def test_pages_come_back_from_their_changes():
    story = story_of(regression(6))
    data = data_of(page_of(story))

    for step in story.steps:
        for side, snapshot in enumerate((step.after, step.model)):
            cells = view_of(snapshot, {}, {}).pages
            assert drawn(data, side, step.index) == {page: cell.words(page) for page, cell in cells.items()}


def test_wrong_operation_shows_what_changed_and_what_differs():
    data = data_of(page_of(story_of(regression(6))))
    last = data["steps"][-1]

    assert "page 1: the tree, now the free list and the tree" in data["parts"][last["lines"]]
    assert "page 3: model the free list, implementation nobody" in data["parts"][last["differences"]]
    assert last["differs"]["page"] == [1, 3]
    assert all(step["differs"] == {} for step in data["steps"][:-1])


def test_model_that_did_not_run_is_said_to_stand_before():
    last = data_of(page_of(story_of(regression(20))))["steps"][-1]

    assert last["behind"]
    assert last["differs"] == {}
    assert last["note"].startswith("The model is shown before")
    assert last["writing"] == ["r0 slot 1", "r1 slots 2-3", "r2 slot 3"]


def test_slots_have_a_letter_each():
    ops = [Submit("r0", (1, 2, 3)), Match("r0"), Alloc((AllocItem("r0", 3),)), Commit("r0", 3), Checkpoint("r0")]
    ops += [Submit("r1", (9,)), Match("r1"), Alloc((AllocItem("r1", 1),))]
    story = tell(SMALL, ops, factory_for("reference"))
    step = story.steps[-1]
    cells = view_of(step.after, {"r0": [1, 2, 3], "r1": [9]}, step.seen.holds).pages
    letters = {cell.words(page): cell.slots for page, cell in cells.items()}

    assert letters == {"padding": "..", "the tree": "ff", "r0": "f-", "r1": "w-", "the free list": ".."}
    assert sorted(cell.tokens for cell in cells.values() if "f" in cell.slots) == [(1, 2), (3, None)]


def test_two_owners_nobody_and_strange_pages_are_drawn(hand_built):
    now = copy.deepcopy(hand_built["alloc"].now)
    now.pools[FULL].free_pages[0] = 1  # which is the tree's, in place of page 12
    now.pools[FULL].free_pages.append(99)
    cells = view_of(now, {}, {}).pages

    assert cells[1].words(1) == "the free list and the tree"
    assert cells[12].words(12) == "nobody"
    assert cells[99].words(99) == "the free list"


def test_row_that_is_free_twice_or_lost_is_said(hand_built):
    now = copy.deepcopy(hand_built["alloc"].now)
    now.free_rows += [4, 1]
    now.rows = [row for row in now.rows if row.row != 2]
    rows = view_of(now, {}, {}).rows

    assert [(cell.words, cell.wrong) for cell in rows] == [
        ("free list and r1", True),
        ("nobody", True),
        ("r3", False),
        ("free list twice", True),
    ]


def test_illegal_write_and_wrong_lock_are_said(hand_built):
    now = copy.deepcopy(hand_built["alloc"].now)
    now.nodes[0].lock_ref = 0
    holds = {"r2": Hold(2, 1, {}, [16, 17, 18]), "r3": Hold(3, 1, {}, [16, 2])}
    cells = view_of(now, {}, holds).pages

    assert cells[8].complaint == "slot 16 is written by r2 and r3"
    assert cells[1].complaint == "slot 2 is written by r3, and its page belongs to the tree"
    assert cells[2].complaint == "page 2 is locked by r1 r2 r3, but its lock count is 0"
    assert "x" in cells[8].slots


def test_spoiled_slot_is_wrong_in_page_and_row(hand_built):
    view = view_of(hand_built["commit"].now, {}, {}, {20})

    assert view.pages[10].complaint == "slot 20 holds other keys and values than belong there"
    assert view.requests["r3"].wrong == (4,)


def test_what_a_target_does_not_show_is_not_drawn_as_wrong(hand_built):
    now = hand_built["checkpoint"].now
    hidden = replace(now, rows=None, requests=None, nodes=None)
    view = view_of(hidden, {}, {})
    free = set(now.pools[FULL].free_pages)

    assert {cell.words(page) for page, cell in view.pages.items() if page and page not in free} == {"not shown"}
    assert view.requests is None
    assert view.nodes is None
    assert differences(view_of(now, {}, {}), view, of_sides=True) == []


def test_anchors_that_are_not_shown_accuse_nobody(hand_built):
    now = copy.deepcopy(hand_built["commit"].now)
    for request in now.requests:
        request.anchor = None
    view = view_of(now, {}, {})

    assert {line.complaint for line in view.requests.values()} == {""}
    assert {cell.complaint for cell in view.pages.values()} == {""}
    assert {node.locked_by for node in view.nodes} == {None}


def test_nodes_that_go_round_are_drawn_off_the_tree(hand_built):
    now = copy.deepcopy(hand_built["checkpoint"].now)
    by_id = {node.node: node for node in now.nodes}
    by_id[1].parent = 5
    view = view_of(now, {}, {})

    assert len(view.nodes) == len(now.nodes)
    assert {node.off for node in view.nodes} == {True, False}


def test_differences_name_only_what_is_not_the_same(hand_built):
    now, other = hand_built["commit"].now, copy.deepcopy(hand_built["commit"].now)
    other.requests[0].committed_len = 8
    other.pools[FULL].page_generations[3] += 1
    found = differences(view_of(now, {}, {}), view_of(other, {}, {}), of_sides=True)

    assert lines_of(found, left="model ", right="implementation ") == [
        "generation of page 3: model 3, implementation 4",
        "r1: model committed 9, implementation committed 8",
    ]


# The file


def test_page_loads_nothing_and_runs_one_script():
    page = page_of(story_of(regression(1)))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page).group(1)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}'" in policy
    assert re.findall(r"(?:src|href)=|https?:|@import|url\(", page) == []
    assert page.count("<script") == 2


def test_texts_of_strangers_are_escaped():
    evil = "</script><script>alert(1)</script><!--\u202e"
    ops = [Submit("r0", (1, 2, 3), (evil, None, ("<img src=x>",))), *served()[1:-1]]
    story = tell(SMALL, ops, factory_for("reference"))
    broken = type(violation_named("PageLeaked"))(evil, [(evil, evil)])
    story = replace(story, target=evil, violation=broken, signature=evil)
    page = page_of(story, fault=evil, why=evil, lane=evil)

    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    assert "<!--" not in page
    assert "\u202e" not in page
    nodes = data_of(page)["parts"][data_of(page)["steps"][-1]["sides"][0]["nodes"]]
    assert "</script>" in data_of(page)["parts"][nodes[0]]["namespace"]


def test_trace_without_operations_has_a_page():
    page = page_of(tell(SMALL, [], factory_for("reference")))

    assert "<h1>No violation in 0 operations</h1>" in page
    assert data_of(page)["steps"] == []


def test_long_trace_of_a_large_pool_is_a_small_page(record_property):
    trace = long_trace()
    story = tell(trace.header.config, trace.ops, factory_for("gpu_impl"))
    began = time.perf_counter()
    page = page_of(story)
    seconds = time.perf_counter() - began

    assert (len(story.steps), story.violation) == (200, None)
    assert len(page.encode()) < 2_000_000
    record_property("show", f"page of 200 operations on 256 pages: {len(page.encode()) >> 10} KiB in {seconds:.2f} s")


# The command


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "kvlockstep", "show", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_same_trace_gives_the_same_bytes(tmp_path):
    pages = []
    for seed in ("1", "2"):
        done = run(regression(6), "--out", tmp_path / f"{seed}.html", PYTHONHASHSEED=seed)
        assert (done.returncode, done.stderr) == (0, "")
        pages.append((tmp_path / f"{seed}.html").read_bytes())
        assert "PageOwnedTwice: Page 1 went to the free list" in done.stdout

    assert pages[0] == pages[1]


def test_page_lies_beside_the_trace_and_the_fault_can_be_left_out(tmp_path):
    trace = tmp_path / "x.jsonl"
    trace.write_bytes(regression(6).read_bytes())
    done = run(trace, "--fault", "none")

    assert (done.returncode, done.stderr) == (0, "")
    assert "no violation" in done.stdout
    assert "<h1>No violation in 9 operations</h1>" in (tmp_path / "x.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.html", "x.jsonl"]


def test_trace_that_ended_its_process_is_drawn_up_to_there(tmp_path):
    trace = tmp_path / "died.jsonl"
    ops = [*served()[:4], Abort("r0")]
    header = Header(SMALL, why="SIGSEGV", violates="Died", signature="Died.abort.SIGSEGV", target="reference")
    write_trace(trace, Trace(header, ops))
    done = run(trace)

    assert done.returncode == 0
    assert "The process died in abort r0" in done.stdout
    last = data_of((tmp_path / "died.html").read_text())["steps"][-1]
    assert (last["op"], last["wrong"]) == ("abort r0", True)
    assert last["note"].startswith("Nothing could be seen")


@pytest.mark.parametrize(
    ("header", "n_ops", "options", "words"),
    [
        (Header(SMALL), 1, ["--target", "nonsense"], "unknown target 'nonsense'"),
        (Header(SMALL), 1, ["--fault", "nonsense"], "unknown fault 'nonsense'"),
        (Header(SMALL, target="mine:make"), 1, [], "say --target mine:make"),
        (Header(SMALL), MOST_STEPS + 1, [], f"{MOST_STEPS + 1} operations, at most {MOST_STEPS} can be shown"),
        (Header(replace(SMALL, n_pages=MOST_PAGES + 1)), 1, [], f"at most {MOST_PAGES} can be shown"),
        (Header(replace(SMALL, page_size=64, n_pages=2000)), 70, [], "8964480 operations times slots, at most 8000000"),
        (None, 0, [], "cannot be read"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path, header, n_ops, options, words):
    trace = tmp_path / "x.jsonl"
    if header is not None:
        write_trace(trace, Trace(header, [Submit("r0", (1, 2))] * n_ops))
    done = run(trace, *options)

    assert done.returncode == 2
    assert done.stderr.startswith("kvlockstep: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert not (tmp_path / "x.html").exists()


def test_page_that_cannot_be_written_is_one_line():
    done = run(regression(6), "--out", "/dev/full")

    assert done.returncode == 12
    assert done.stderr.startswith("kvlockstep: --out ")
    assert done.stderr.count("\n") == 1


def test_malformed_snapshot_is_drawn_as_it_was_before():
    config = SMALL

    def make(config):
        target = factory_for("reference")(config)
        snapshot, calls = target.snapshot, []

        def broken() -> Snapshot:
            calls.append(1)
            now = snapshot()
            if len(calls) > 4:
                now.pools[FULL].free_pages = tuple(now.pools[FULL].free_pages)
                now.nodes = [None]
            return now

        target.snapshot = broken
        return target

    story = tell(config, served(), make)
    page = page_of(story)

    assert story.violation is not None
    assert "malformed" in data_of(page)["steps"][-1]["note"]
