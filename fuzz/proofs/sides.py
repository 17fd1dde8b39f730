"""Both sides counted through: every small case, against each other and against counting one position at a time.

This is what a function is bounded to that CrossHair cannot confirm, and a second opinion on those that it can. Each
function here goes through all cases up to ``size``, returns how many that were, and raises AssertionError at the first
in which the two sides, or one of them and the definition, differ.
"""

from array import array
from collections.abc import Iterator
from itertools import pairwise, product
from types import SimpleNamespace
from typing import cast

from kvlockstep.gpu_impl import arithmetic as implementation
from kvlockstep.gpu_impl.native import PrefixTree, int32_bytes
from kvlockstep.reference import arithmetic as model
from kvlockstep.reference.intervals import ownership_intervals
from kvlockstep.reference.keys import page_keys, units_of
from kvlockstep.reference.requests import Request
from kvlockstep.reference.state import CacheState
from kvlockstep.reference.tree import Tree

NAMESPACE = (None, None, ())
TOKENS = (1, 256)
"""As int32, one is the other moved by a byte: a comparison that begins inside a token takes them for equal."""


def lengths_and_pages(size: int) -> int:
    """Floor, ceiling and the pages of an interval."""
    n_cases = 0
    for page_size, end in product(range(1, size + 1), range(3 * size + 1)):
        n_cases += 1
        filled = sum((page + 1) * page_size <= end for page in range(end))
        touched = {pos // page_size for pos in range(end)}
        assert implementation.whole_pages(end, page_size) == model.pages_filled(end, page_size) == filled
        assert implementation.pages_spanned(end, page_size) == model.pages_covering(end, page_size) == len(touched)
        for start in range(end):
            n_cases += 1
            pages = {pos // page_size for pos in range(start, end)}
            both = implementation.pages_touched(start, end, page_size), model.pages_between(start, end, page_size)
            assert both[0] == both[1], f"pages of [{start}, {end}) of size {page_size}: {both}"
            assert set(range(*both[0])) == pages
    return n_cases


def units_and_publications(size: int) -> int:
    """Key units of tokens, in pairs too, and where a publication ends."""
    n_cases = 0
    for n, bigram in product(range(3 * size + 1), (False, True)):
        n_cases += 1
        key_units = "bigram" if bigram else "token"
        tokens = range(n)
        spelled = len(list(pairwise(tokens))) if bigram else n
        assert implementation.publishable_units(n, bigram) == units_of(n, key_units) == spelled
        if n:
            left = len(list(pairwise(tokens[:-1]))) if bigram else n - 1
            assert implementation.matchable_units(n, bigram) == units_of(n - 1, key_units) == left
        for page_size in range(1, size + 1):
            for protected in range(0, n + 1, page_size):
                n_cases += 1
                length = implementation.published_len(n, protected, page_size, bigram)
                assert length == model.publishable_pages(n, protected, page_size, key_units) * page_size
                assert length == max(protected, max(end for end in range(0, spelled + 1, page_size)))
    return n_cases


def _requests(size: int) -> Iterator[tuple[int, int, int]]:
    for allocated in range(size + 1):
        for committed in range(allocated + 1):
            for n in range(1, size + 1):
                yield committed, n, allocated


def pages_of_a_batch(size: int) -> int:
    """New pages of one request, and the model's sum over every batch of two."""
    n_cases = 0
    for page_size in range(1, size + 1):
        taken = {}
        for request in _requests(size):
            committed, n, allocated = request
            held = {pos // page_size for pos in range(allocated)}
            wanted = {pos // page_size for pos in range(committed, committed + n)}
            taken[request] = implementation.pages_to_take(committed, n, allocated, page_size)
            assert taken[request] == model.new_pages_needed(committed, n, allocated, page_size) == len(wanted - held)
        state = CacheState(page_size=page_size, n_pages=1, n_rows=1, max_context_len=1)
        for batch in product(taken, repeat=2):
            n_cases += 1
            state.requests = cast(
                dict[str, Request],
                {
                    name: SimpleNamespace(committed_len=c, allocated_len=a)
                    for name, (c, _, a) in zip("ab", batch, strict=True)
                },
            )
            need = state.pages_needed([(name, n, ()) for name, (_, n, _) in zip("ab", batch, strict=True)])
            assert need == taken[batch[0]] + taken[batch[1]]
    return n_cases


def intervals_and_what_is_freed(size: int) -> int:
    """The split of a row by its three lengths; the pages that go at release, and none that go at a rejection."""
    n_cases = 0
    for page_size, allocated in product(range(1, size + 1), range(3 * size + 1)):
        state = CacheState(page_size=page_size, n_pages=1, n_rows=1, max_context_len=1)
        pages = list(range(100, 100 + model.pages_covering(allocated, page_size)))
        state.rows.pages_of[1] = pages
        for protected in range(0, allocated + 1, page_size):
            request = SimpleNamespace(row=1, protected_len=protected)
            freed = state.tail_pages(cast(Request, request))
            assert freed == pages[implementation.whole_pages(protected, page_size) :]
            assert freed == sorted({100 + pos // page_size for pos in range(protected, allocated)})
            for committed in range(protected, allocated + 1):
                n_cases += 1
                owners = ["tree" if pos < protected else "request" for pos in range(allocated)]
                cuts = ownership_intervals(protected, committed, allocated)
                assert [cut.owner for cut in cuts for _ in range(cut.start, cut.end)] == owners
                assert [cut.end for cut in cuts] == sorted({protected, committed, allocated} - {0})
                for n in range(1, allocated - committed + 1):  # what was rejected is allocated already
                    assert implementation.pages_to_take(committed, n, allocated, page_size) == 0
    return n_cases


def longest_common_prefixes(size: int) -> int:
    """The longest common prefix in whole pages: one is published on an empty tree, the other is looked for."""
    n_cases = 0
    for page_size, bigram in product(range(1, 4), (False, True)):
        for published in product(TOKENS, repeat=size):
            for n_asked in range(size + 1):
                for asked in product(TOKENS, repeat=n_asked):
                    n_cases += 1
                    units = [list(pairwise(tokens)) if bigram else list(tokens) for tokens in (published, asked)]
                    same = [a == b for a, b in zip(*units, strict=False)]
                    shared = (same + [False]).index(False) // page_size
                    found = [
                        _found_by_implementation(published, asked, page_size, bigram),
                        _found_by_model(published, asked, page_size, "bigram" if bigram else "token"),
                    ]
                    assert found == [shared, shared], f"{published} {asked} {page_size=} {bigram=}: {found}, {shared}"
    return n_cases


def _found_by_implementation(published: tuple[int, ...], asked: tuple[int, ...], page_size: int, bigram: bool) -> int:
    tree = PrefixTree(page_size, bigram, "lru")
    keys = []
    for tokens in (published, asked):
        n_pages = implementation.whole_pages(implementation.publishable_units(len(tokens), bigram), page_size)
        n_tokens = n_pages * page_size + (1 if bigram and n_pages else 0)
        keys.append((int32_bytes(array("q", tokens), 0, n_tokens), n_pages))
    (key, n_pages), (key_asked, n_asked) = keys
    tree.publish(0, NAMESPACE, key, array("i", range(1, n_pages + 1)), 0, 0)
    _, pages = tree.match(NAMESPACE, key_asked, n_asked, lock=False)
    assert list(pages) == list(range(1, len(pages) + 1))
    return len(pages)


def _found_by_model(published: tuple[int, ...], asked: tuple[int, ...], page_size: int, key_units: str) -> int:
    tree = Tree()
    keys, keys_asked = (
        page_keys(tokens, key_units, page_size, 0, model.pages_filled(units_of(len(tokens), key_units), page_size))
        for tokens in (published, asked)
    )
    tree.publish(tree.root, NAMESPACE, keys, range(1, len(keys) + 1), 0, 0)
    return tree.match(NAMESPACE, keys_asked).depth


COUNTED = {
    lengths_and_pages: (12, 48),
    units_and_publications: (12, 48),
    pages_of_a_batch: (4, 8),
    intervals_and_what_is_freed: (6, 18),
    longest_common_prefixes: (5, 7),
}
"""To which size, in short and in full."""
