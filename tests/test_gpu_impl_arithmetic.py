"""Page and interval arithmetic against definitions that count one position at a time."""

from itertools import pairwise

import pytest

from kvlockstep.gpu_impl.arithmetic import (
    matchable_units,
    pages_spanned,
    pages_to_take,
    publishable_units,
    published_len,
    whole_pages,
)

PAGE_SIZES = (1, 2, 3, 16)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_spanned_counts_pages_that_positions_touch(page_size):
    for length in range(40):
        assert pages_spanned(length, page_size) == len({pos // page_size for pos in range(length)})


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_whole_pages_counts_pages_that_positions_fill(page_size):
    for length in range(40):
        assert whole_pages(length, page_size) == sum((page + 1) * page_size <= length for page in range(length))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_to_take_counts_pages_not_held_yet(page_size):
    for allocated_len in range(20):
        held = {pos // page_size for pos in range(allocated_len)}
        for committed_len in range(allocated_len + 1):
            for n in range(1, 20):
                wanted = {pos // page_size for pos in range(committed_len, committed_len + n)}

                assert pages_to_take(committed_len, n, allocated_len, page_size) == len(wanted - held)


def test_units_of_pairs_are_one_fewer_than_tokens():
    for n_tokens in range(1, 10):
        tokens = list(range(n_tokens))
        pairs = list(pairwise(tokens[:-1]))

        assert matchable_units(n_tokens, bigram=False) == len(tokens[:-1])
        assert matchable_units(n_tokens, bigram=True) == len(pairs)
        assert publishable_units(n_tokens, bigram=True) == len(list(pairwise(tokens)))
    assert publishable_units(0, bigram=True) == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("bigram", [False, True])
def test_published_len_is_aligned_and_never_shrinks(page_size, bigram):
    for committed_len in range(40):
        for protected_len in range(0, committed_len + 1, page_size):
            length = published_len(committed_len, protected_len, page_size, bigram)

            assert length % page_size == 0
            assert protected_len <= length <= committed_len
            assert publishable_units(committed_len, bigram) - length < page_size
