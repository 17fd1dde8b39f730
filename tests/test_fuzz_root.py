"""The root of a failure: forms of one mistake come down to few, and no step leaves the law."""

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Alloc, AllocItem, Checkpoint, Commit, Match, Peek, Release, Submit
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.replay import failing_signature
from kvlockstep.fuzz.root import RootSearch

CONFIG = CacheConfig(page_size=1, n_pages=8, n_rows=3, max_context_len=8, layers=1)


def published(name, *tokens, end=Release):
    n = len(tokens)
    return [
        Submit(name, tokens, (None, None, ()), 0, False),
        Match(name),
        Alloc((AllocItem(name, n, ()),)),
        Commit(name, n, ()),
        end(name),
    ]


def root_of(fault, ops, seconds=60.0):
    factory = factory_for("gpu_impl", fault)
    signature, steps = failing_signature(CONFIG, ops, factory)
    assert signature is not None, "this trace was made to fail"
    search = RootSearch(CONFIG, tuple(ops[:steps]), factory, signature, seconds=seconds)
    assert search.run() is (seconds > 0)
    return signature, search


def split_by(last):
    """Two requests share the first token of an edge that is locked; the second one splits it by its last operation."""
    return [*published("r0", 1, 2, end=Checkpoint), Submit("r1", (1, 3, 4), (None, None, ()), 0, False), last]


def test_two_forms_of_one_mistake_have_the_same_root():
    by_peek, peeked = root_of("split-offers-locked-leaf", split_by(Peek("r1")))
    by_match, matched = root_of("split-offers-locked-leaf", split_by(Match("r1")))

    assert (by_peek, by_match) == ("EvictableSetWrong.peek.locked", "EvictableSetWrong.match.locked")
    assert peeked.signature == matched.signature == by_peek
    assert (peeked.config, peeked.ops) == (matched.config, matched.ops)


def test_root_fails_as_it_is_called():
    _, search = root_of("split-offers-locked-leaf", [*published("r9", 7), *split_by(Match("r1"))])
    signature, steps = failing_signature(search.config, search.ops, factory_for("gpu_impl", "split-offers-locked-leaf"))

    assert (signature, steps) == (search.signature, len(search.ops))
    assert len(search.ops) <= 7


@pytest.mark.parametrize("signature", [None, "PageLeaked.peek.locked", "EvictableSet.peek.locked"])
def test_what_breaks_another_law_is_not_the_same(signature):
    factory = factory_for("gpu_impl", "split-offers-locked-leaf")
    search = RootSearch(CONFIG, (Peek("r0"),), factory, "EvictableSetWrong.match.locked", seconds=1.0)

    assert not search.is_same(signature)
    assert search.is_same("EvictableSetWrong.peek.other")
    assert search.signature == "EvictableSetWrong.peek.other"


def test_search_without_time_leaves_the_failure_as_it_is():
    signature, search = root_of("split-offers-locked-leaf", split_by(Match("r1")), seconds=0.0)

    assert search.signature == signature
