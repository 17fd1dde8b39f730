"""The page of one trace in a real browser without a window: clicked through by keyboard and slider, and looked at.

The screenshots of each test lie in its ``tmp_path``.
"""

import os
import re
import shutil
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Alloc, AllocItem, Checkpoint, Commit, Match, Submit
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.show.page import page_of, verdict_of
from kvlockstep.fuzz.story import tell
from kvlockstep.fuzz.trace import read_trace
from kvlockstep.fuzz.why import Chances, Point
from kvlockstep.invariants import FULL
from kvlockstep.invariants.ownership import PageLeaked

pytestmark = pytest.mark.needs("browser")

REGRESSIONS = Path(__file__).resolve().parents[1] / "regressions"
LAPTOP = {"width": 1366, "height": 768}
WRONG = {
    1: ("LockCountWrong", "Request r1 still reads page 1", "page 1 is locked by r1, but its lock count is 0"),
    6: ("PageOwnedTwice", "Page 1 went to the free list", "free+tree"),
    20: ("WriteSlotRepeated", "Requests r1 and r2 are told", "slot 3 is written by r1 and r2"),
}


def regression(number):
    (path,) = REGRESSIONS.glob(f"{number:04}-*.jsonl")
    trace = read_trace(path)
    return tell(trace.header.config, trace.ops, factory_for(trace.header.target, trace.header.fault))


def chances_of(story, turn, low=2, high=18):
    """Make up a picture that jumps at one operation; the middle of three continuations at the start was not tried."""
    n = len(story.steps)
    counts = [(low, 20) if length - 1 < turn else (high, 20) for length in range(n)]
    counts[1] = (0, 0)
    points = [Point(length, *count) for length, count in enumerate([*counts, (20, 20)])]
    law, ops = type(story.violation).__name__, tuple(f"operation {i}" for i in range(n))
    return Chances(law, tuple(points), turn, low / 20, high / 20, 20, True, ops)


def long_story():
    """Tell how forty requests of 96 tokens and a common beginning fill 256 pages, in two hundred operations."""
    ops = []
    for i in range(40):
        name = f"r{i}"
        cached = 32 if i else 0
        ops += [Submit(name, (*range(32), *range(1000 * i + 100, 1000 * i + 164))), Match(name)]
        ops += [Alloc((AllocItem(name, 96 - cached),)), Commit(name, 96 - cached, (7,)), Checkpoint(name)]
    config = CacheConfig(page_size=16, n_pages=256, n_rows=40, max_context_len=1024)
    return tell(config, ops, factory_for("gpu_impl"))


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("of the browsers that are here none is a Chromium")
    with sync_api.sync_playwright() as playwright:
        # the sandbox of Chromium refuses to run as root, as in a container; the pages opened here are our own
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()


class Opened:
    """A page in the browser, and all that it said and asked for."""

    def __init__(self, browser, tmp_path, story, chances, **options):
        self.tmp_path = tmp_path
        file = tmp_path / "page.html"
        file.write_text(page_of(story, chances=chances), encoding="utf-8")
        self.said, self.asked = [], []
        self.page = browser.new_page(viewport=LAPTOP, **options)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())
        self.asked.remove(file.as_uri())

    @property
    def head(self):
        return self.page.inner_text("#now-head")

    @property
    def step(self):
        return int(re.match(r"Operation (\d+)", self.head).group(1))

    def text(self, where="main"):
        return self.page.inner_text(where)

    def press(self, key):
        self.page.keyboard.press(key)
        return self.step

    def picture(self, name):
        self.page.screenshot(path=self.tmp_path / f"{name}.png", full_page=True)
        assert (self.tmp_path / f"{name}.png").stat().st_size > 10_000

    def close(self):
        self.page.close()
        assert self.said == [], "the console is empty"
        assert self.asked == [], "nothing else was asked for"


@pytest.fixture
def opened(browser, tmp_path):
    pages = []

    def open_page(story, chances=None, **options):
        pages.append(Opened(browser, tmp_path, story, chances, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()


@pytest.mark.parametrize("number", WRONG)
def test_page_opens_at_the_wrong_operation_and_says_what_is_wrong(opened, number):
    law, sentence, mark = WRONG[number]
    story = regression(number)
    page = opened(story)
    page.picture(law)

    assert page.step == len(story.steps) - 1
    assert "a law is broken" in page.head
    assert page.text("header h1").startswith(f"{law} in operation {page.step}")
    assert page.text("header .said").startswith(sentence)
    assert mark in page.text("#pages-0")
    assert mark not in page.text("#pages-1")
    assert page.page.locator("#pages-0 .cell.bad").count() >= 1
    assert page.page.locator("#pages-1 .cell.bad").count() == 0


@pytest.mark.parametrize("number", WRONG)
def test_keyboard_goes_through_every_operation(opened, number):
    story = regression(number)
    page = opened(story)
    last = len(story.steps) - 1

    assert page.press("Home") == 0
    assert [page.press("ArrowRight") for _ in range(last + 1)] == [*range(1, last + 1), last]
    assert verdict_of(story).sentence in page.page.text_content("#live")
    assert [page.press("ArrowLeft") for _ in range(last + 1)] == [*range(last - 1, -1, -1), 0]
    assert page.press("w") == last
    assert (page.press("Home"), page.press("End")) == (0, last)


def test_slider_and_buttons_go_through_every_operation(opened):
    story = regression(6)
    page = opened(story)
    slider, last = page.page.locator("#slider"), len(story.steps) - 1
    seen = []
    for step in range(last + 1):
        slider.fill(str(step))
        seen.append((page.step, slider.get_attribute("aria-valuetext"), page.text("#ops [aria-current]").split()[0]))
    slider.focus()
    pressed = [page.press("ArrowLeft"), page.press("ArrowLeft"), page.press("Home"), page.press("ArrowRight")]
    clicked = []
    for button in ("#first", "#next", "#last", "#back", "#wrong", '[data-step="3"]'):
        page.page.click(button)
        clicked.append(page.step)

    assert [step for step, _, _ in seen] == list(range(last + 1))
    assert [said for _, said, _ in seen][-1] == "operation 8: checkpoint r1"
    assert [number for _, _, number in seen] == [str(step) for step in range(last + 1)]
    assert pressed == [last - 1, last - 2, 0, 1]
    assert clicked == [0, 1, last, last - 1, last, 3]


def test_wrong_operation_is_in_view_below_a_long_sentence(opened):
    story = long_story()
    violation = PageLeaked("page 3 is lost")
    page = opened(replace(story, violation=violation, signature="PageLeaked.checkpoint"))
    page.page.evaluate("document.querySelector('header .said').textContent = 'word '.repeat(90)")
    page.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    last, head = (page.page.locator(where).bounding_box() for where in ("#ops .wrong", "header"))

    assert head["height"] > 160
    assert last["y"] + last["height"] <= LAPTOP["height"]


def test_operation_before_the_wrong_one_shows_nothing_wrong(opened):
    page = opened(regression(6))
    page.press("ArrowLeft")

    assert page.page.locator("main .bad:not(.sample), main .wrong:not(button), main .diff:not(.sample)").count() == 0
    assert "page 1: r0, now the tree" in page.text("#lines")
    assert page.text("#differences") == "in nothing"


def test_colours_are_never_the_only_sign(opened):
    page = opened(regression(6))
    cells = page.page.locator("#pages-0 .cell")
    words = [cells.nth(i).locator(".hidden").text_content() for i in range(cells.count())]

    assert words[0].startswith("page 0: padding")
    assert words[1].startswith("page 1: the free list and the tree; 2 filled; generation ")
    assert "changed now" in words[1]
    assert "differs from the other side" in words[1]
    assert words[3].startswith("page 3: nobody")
    assert page.page.locator("#pages-0 .cell .who").all_inner_texts() == [
        "pad",
        "free+tree",
        "r0",
        "lost",
        "r1",
        "free",
        "free",
    ]


@pytest.mark.parametrize("turn", [None, 5])
def test_page_can_be_read_aloud(opened, turn):
    story = regression(6)
    page = opened(story, None if turn is None else chances_of(story, turn))
    levels = page.page.eval_on_selector_all("h1, h2, h3", "all => all.map(one => Number(one.tagName[1]))")
    tables = page.page.eval_on_selector_all(
        "table", "all => all.map(t => Boolean(t.caption && t.caption.textContent && t.querySelector('th[scope]')))"
    )

    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
    assert tables
    assert all(tables)
    assert page.page.locator("[aria-live=polite]").count() == 1
    assert page.page.locator("label[for=slider]").count() == 1


def test_bars_stand_above_the_slider_at_their_operations(opened):
    story = regression(6)
    chances = chances_of(story, turn=5)
    page = opened(story, chances)
    page.picture("chances")
    slider = page.page.locator("#slider").bounding_box()
    columns = page.page.locator("#chances .column")
    places, heights, here = [], [], []
    for step in range(len(story.steps)):
        page.page.locator("#slider").fill(str(step))
        column, bar = columns.nth(step).bounding_box(), columns.nth(step).locator(".share").bounding_box()
        places.append(column["x"] + column["width"] / 2)
        heights.append(bar["height"])
        here.append(page.page.eval_on_selector_all("#chances .here", "all => all.map(one => one.dataset.step)"))
        assert column["y"] + column["height"] <= slider["y"] + 2
    thumb, last = 16, len(story.steps) - 1
    at = [slider["x"] + thumb / 2 + step * (slider["width"] - thumb) / last for step in range(last + 1)]

    assert places == pytest.approx(at, abs=1)
    assert here == [[str(step)] for step in range(last + 1)]
    assert heights[1:] == pytest.approx([(point.share or 0) * heights[-1] for point in chances.points[2:]], abs=1)
    assert page.page.locator("#chances .untried").count() == 1
    assert page.page.locator("#chances .after").count() == last + 1 - 5
    assert page.text("#chances .turning") == "op 5 \u25bc"
    assert page.text("#ops .turned") == "no return"


def test_bars_lead_to_their_operations_and_are_said_in_words(opened):
    story = regression(6)
    page = opened(story, chances_of(story, turn=5))
    steps = [page.press("t")]
    said = [page.text("#chance"), page.page.text_content("#live")]
    for step in (2, 7):
        page.page.locator(f'#chances [data-step="{step}"]').click()
        steps.append(page.step)
    page.page.click("#turn")
    steps.append(page.step)
    page.page.click("text=The bars as a table")
    page.page.click('#shares [data-step="3"]')
    steps.append(page.step)
    rows = page.page.locator("#shares tbody tr").all_inner_texts()
    page.press("Home")
    said.append(page.text("#chance"))

    assert steps == [5, 2, 7, 5, 3]
    assert said[0] == "18 of 20 continuations from after this operation break the same law (90 %)."
    assert said[0] in said[1]
    assert said[2] == "No continuation was tried after this operation."
    assert page.page.get_attribute("#chances", "aria-hidden") == "true"
    assert [row.split("\t")[1:] for row in rows[:3]] == [["2", "20", "10 %"], ["0", "0", "-"], ["2", "20", "10 %"]]
    assert rows[6].startswith("5 ")
    assert "point of no return" in rows[6]
    assert len(rows) == len(story.steps) + 1
    assert page.page.inner_text("p.turn").startswith("Point of no return: op 5 (t)")


def test_jump_at_the_last_operation_is_not_called_a_point_of_no_return(opened):
    story = regression(6)
    page = opened(story, chances_of(story, turn=8))

    assert page.text("#ops .turned") == "jump"
    assert page.page.inner_text("#turn") == "Where the share jumps: op 8 (t)"
    assert "no operation before it made the failure much likelier" in page.text("section[aria-labelledby=why-head]")


def test_page_without_bars_knows_no_turn(opened):
    page = opened(regression(6))
    before = page.step

    assert page.press("t") == before
    assert page.page.locator("#chances, #turn, #shares").count() == 0
    assert "continuation" not in page.text("body")


def test_everything_can_be_reached_and_done_with_the_keyboard_alone(opened):
    story = regression(6)
    page = opened(story, chances_of(story, turn=5))
    page.press("Home")
    reached = []
    for _ in range(60):
        page.page.keyboard.press("Tab")
        words = page.page.evaluate("document.activeElement.id || document.activeElement.innerText")
        if words in reached:
            break
        reached.append(words)
    page.page.focus('#ops [data-step="3"]')
    page.page.keyboard.press("Enter")
    chosen = [page.step]
    page.page.focus("#turn")
    page.page.keyboard.press("Space")
    chosen.append(page.step)
    page.page.focus("text=The bars as a table")
    page.page.keyboard.press("Enter")
    page.page.focus('#shares [data-step="2"]')
    page.page.keyboard.press("Enter")
    chosen.append(page.step)
    outline = page.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")

    assert {"slider", "next", "last", "wrong", "turn", "As a table", "The bars as a table"} <= set(reached)
    assert any(words.startswith("8 checkpoint r1") for words in reached)
    assert chosen == [3, 5, 2]
    assert outline == "solid"


def test_target_that_shows_little_is_drawn(opened):
    def make(config):
        target = factory_for("reference")(config)
        snapshot = target.snapshot

        def hidden():
            now = snapshot()
            now.rows = now.requests = now.nodes = now.free_rows = now.row_generations = now.evictable_nodes = None
            now.pools[FULL].free_pages = now.pools[FULL].page_generations = None
            return now

        target.snapshot = hidden
        return target

    ops = [Submit("r0", (1, 2, 3)), Match("r0"), Alloc((AllocItem("r0", 3),)), Commit("r0", 3), Checkpoint("r0")]
    story = tell(CacheConfig(page_size=2, n_pages=6, n_rows=2, max_context_len=8), ops, make)
    page = opened(story)
    page.press("Home")
    page.press("End")

    assert story.violation is None
    for part, place in (("rows", "#requests-0"), ("requests", "#requests-0"), ("tree", "#nodes-0")):
        assert f"This target does not show its {part}." in page.text(place)
    assert page.page.locator("#pages-0 .cell .who").all_inner_texts() == ["pad"] + 6 * ["?"]
    assert page.text("#differences") == "in nothing"


def test_dark_page_has_dark_ground(opened):
    page = opened(regression(1), color_scheme="dark")
    page.picture("dark")
    ground = page.page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert max(map(int, re.findall(r"\d+", ground))) < 60


def test_two_hundred_operations_on_256_pages_fit_a_laptop(opened, record_property):
    story = long_story()
    page = opened(story)
    page.page.screenshot(path=page.tmp_path / "long.png")
    began = time.perf_counter()
    page.press("Home")
    for _ in range(len(story.steps) - 1):
        page.page.keyboard.press("ArrowRight")
    step_ms = 1000 * (time.perf_counter() - began) / len(story.steps)
    wide = "all => all.map(one => one.scrollWidth - one.clientWidth)"

    assert len(story.steps) == 200
    assert story.violation is None
    assert page.step == 199
    assert page.page.locator("#pages-0 .cell").count() == 257
    assert page.page.evaluate("document.documentElement.scrollWidth") <= LAPTOP["width"]
    assert page.page.eval_on_selector_all("#pages-0, #pages-1, #requests-0, #nodes-0", wide) == [0, 0, 0, 0]
    assert page.page.locator("#pages-0 table").bounding_box()["height"] < LAPTOP["height"]
    listed = page.page.locator("#ops").bounding_box()
    assert listed["y"] + listed["height"] <= LAPTOP["height"]
    assert page.page.locator("#wrong").is_disabled()
    assert page.page.locator("#requests-0 tbody tr").count() == 1
    page.page.click("#requests-0 summary")
    assert page.page.locator("#requests-0 tbody tr").count() == 40
    record_property("show", f"page of 200 operations on 256 pages in a browser: {step_ms:.0f} ms an operation")


def test_bars_of_two_hundred_operations_fit_a_laptop(opened):
    story = replace(long_story(), violation=PageLeaked("page 3 is lost"), signature="PageLeaked.checkpoint")
    page = opened(story, chances_of(story, turn=120))
    page.page.screenshot(path=page.tmp_path / "long.png")
    widths = page.page.eval_on_selector_all(
        "#chances .share", "all => all.map(one => one.getBoundingClientRect().width)"
    )

    assert page.page.locator("#chances .column").count() == 200
    assert min(widths) >= 1
    assert page.page.evaluate("document.documentElement.scrollWidth") <= LAPTOP["width"]
    assert page.page.locator("#now").bounding_box()["height"] < LAPTOP["height"] / 2
    assert page.press("t") == 120
