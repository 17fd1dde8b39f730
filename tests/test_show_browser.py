"""The page of one trace in a real browser without a window: clicked through by keyboard and slider, and looked at.

The screenshots of each test lie in its ``tmp_path``.
"""

import os
import re
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Alloc, AllocItem, Checkpoint, Commit, Match, Submit
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.show.page import page_of, verdict_of
from kvlockstep.fuzz.story import tell
from kvlockstep.fuzz.trace import read_trace
from kvlockstep.invariants import FULL

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

    def __init__(self, browser, tmp_path, story, **options):
        self.tmp_path = tmp_path
        file = tmp_path / "page.html"
        file.write_text(page_of(story), encoding="utf-8")
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

    def open_page(story, **options):
        pages.append(Opened(browser, tmp_path, story, **options))
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


def test_page_can_be_read_aloud(opened):
    page = opened(regression(6))
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
    assert page.page.locator("#wrong").is_disabled()
    assert page.page.locator("#requests-0 tbody tr").count() == 1
    page.page.click("#requests-0 summary")
    assert page.page.locator("#requests-0 tbody tr").count() == 40
    record_property("show", f"page of 200 operations on 256 pages in a browser: {step_ms:.0f} ms an operation")
