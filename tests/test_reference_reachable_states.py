"""All reachable states of tiny caches: every operation tried in each, every law checked on each transition."""

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.labels import reached
from kvlockstep.fuzz.ops import Submit
from kvlockstep.fuzz.reachable import World, explore
from kvlockstep.invariants.checks import run_checks
from kvlockstep.reference import Cache

NS = (None, None, ())
LORA = ("lora", None, ())


def prompts(*token_lists, namespaces=(NS,)):
    return tuple(Submit("any", tokens, namespace) for tokens in token_lists for namespace in namespaces)


THREE_PAGES = World(CacheConfig(page_size=1, n_pages=3, n_rows=2, max_context_len=2), prompts((0, 0), (0, 1)))
"""Two prompts that share their first token, so that one splits the edge of the other."""

ONE_ROW = World(
    CacheConfig(page_size=1, n_pages=3, n_rows=1, max_context_len=2), prompts((0, 0), namespaces=(NS, LORA))
)
DRAFTS = World(CacheConfig(page_size=1, n_pages=3, n_rows=1, max_context_len=3), prompts((0, 0)), drafts=((0,),))
BIGRAM = World(CacheConfig(page_size=1, n_pages=3, n_rows=1, max_context_len=3, key_units="bigram"), prompts((0, 0, 0)))
NO_SHARING = World(
    CacheConfig(page_size=1, n_pages=3, n_rows=1, max_context_len=2, prefix_sharing=False), prompts((0, 0))
)
FOUR_PAGES_OF_TWO = World(CacheConfig(page_size=2, n_pages=4, n_rows=2, max_context_len=4), prompts((0, 0, 0, 0)))

REACHED = {
    "edge split",
    "locked edge split",
    "duplicate pages freed at checkpoint",
    "row rewritten to canonical slots",
    "allocation evicted",
    "eviction made parent evictable",
    "row reused",
    "pool exactly full",
    "pending abort landed",
    "retract then rematch",
    "out of pages",
}


@pytest.fixture
def search(record_property):
    """Explore a world, and have what was found printed at the end of the test run."""

    def explore_and_show(name, world):
        report = explore(world, run_checks, reached)
        record_property("show", f"reachable states, {name}: {report}")
        return report

    return explore_and_show


def test_all_states_of_three_pages_hold_the_laws(search):
    report = search("P=1, three pages, two rows", THREE_PAGES)

    assert report.closed
    assert set(report.labels) >= REACHED | {"page reused while old row names it", "eviction skipped locked leaf"}
    assert set(report.refused) == {
        "EmptyBatch",
        "DuplicateInBatch",
        "UnknownRequest",
        "InFlight",
        "WrongState",
        "BadArgument",
        "ContextTooLong",
        "OutOfPages",
    }


@pytest.mark.parametrize(
    ("name", "world", "labels"),
    [
        ("one row, two namespaces", ONE_ROW, {*REACHED, "out of rows", "same tokens in two namespaces"}),
        ("drafts", DRAFTS, {*REACHED, "out of rows", "draft rejected across page boundary"}),
        ("bigram", BIGRAM, {*REACHED, "out of rows"}),
        ("no sharing", NO_SHARING, {"out of rows", "pending abort landed", "row reused"}),
    ],
)
def test_all_states_hold_the_laws_with_other_switches(search, name, world, labels):
    report = search(f"P=1, three pages, {name}", world)

    assert report.closed
    assert set(report.labels) >= labels


def test_all_states_of_four_pages_of_two_hold_the_laws(search):
    report = search("P=2, four pages, two rows", FOUR_PAGES_OF_TWO)

    assert report.closed
    assert set(report.labels) >= {
        "split at page boundary inside edge",
        "duplicate pages freed at checkpoint",
        "partial last page at checkpoint",
        "partial last page at release",
        "partial last page at abort",
        "tail reused without new page",
    }


def test_search_finds_a_model_that_breaks_a_law(monkeypatch):
    def forget_the_tail(self, r):
        if r.row is not None:
            self.rows.give_back(r.row)

    monkeypatch.setattr(Cache, "_give_everything_back", forget_the_tail)

    with pytest.raises(AssertionError, match="PageLeaked"):
        explore(THREE_PAGES, run_checks, max_states=500)


def test_search_finds_a_refusal_that_changes_something(monkeypatch):
    question = Cache.refusal

    def count_refusals(self, kind, *arguments):
        refused = question(self, kind, *arguments)
        if refused is not None and kind == "evict":
            self.rows.generations[1] += 1
        return refused

    monkeypatch.setattr(Cache, "refusal", count_refusals)

    with pytest.raises(AssertionError, match="a refused operation changed"):
        explore(THREE_PAGES, max_states=10)


def test_search_is_the_same_every_time():
    assert str(explore(THREE_PAGES, None, reached, max_states=300)) == str(
        explore(THREE_PAGES, None, reached, max_states=300)
    )
