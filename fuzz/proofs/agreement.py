"""Contracts that hold a function of the model against the same one of the implementation, whatever the integers.

The first assertion of each is the precondition of both, the other one says that they give the same.
"""

from kvlockstep.gpu_impl import arithmetic as implementation
from kvlockstep.reference import arithmetic as model
from kvlockstep.reference.keys import units_of


def page_floor(length: int, page_size: int) -> None:
    """`whole_pages` is `pages_filled`."""
    assert length >= 0 and page_size >= 1
    assert implementation.whole_pages(length, page_size) == model.pages_filled(length, page_size)


def page_ceiling(length: int, page_size: int) -> None:
    """`pages_spanned` is `pages_covering`."""
    assert length >= 0 and page_size >= 1
    assert implementation.pages_spanned(length, page_size) == model.pages_covering(length, page_size)


def touched_pages(start: int, end: int, page_size: int) -> None:
    """`pages_touched` is `pages_between`."""
    assert 0 <= start < end and page_size >= 1
    first, behind = implementation.pages_touched(start, end, page_size)
    first_of_model, behind_of_model = model.pages_between(start, end, page_size)
    assert first == first_of_model and behind == behind_of_model


def new_pages(committed_len: int, n: int, allocated_len: int, page_size: int) -> None:
    """`pages_to_take` is `new_pages_needed`."""
    assert 0 <= committed_len <= allocated_len and n >= 1 and page_size >= 1
    taken = implementation.pages_to_take(committed_len, n, allocated_len, page_size)
    assert taken == model.new_pages_needed(committed_len, n, allocated_len, page_size)


def units_to_match(n_tokens: int, bigram: bool) -> None:
    """`matchable_units` is `units_of` all tokens but the last."""
    assert n_tokens >= 1
    matched = implementation.matchable_units(n_tokens, bigram)
    assert matched == units_of(n_tokens - 1, "bigram" if bigram else "token")


def units_to_publish(committed_len: int, bigram: bool) -> None:
    """`publishable_units` is `units_of` the committed tokens."""
    assert committed_len >= 0
    published = implementation.publishable_units(committed_len, bigram)
    assert published == units_of(committed_len, "bigram" if bigram else "token")


def published_length(protected_pages: int, more: int, page_size: int, bigram: bool) -> None:
    """`published_len` is `publishable_pages`, in positions."""
    assert protected_pages >= 0 and more >= 0 and page_size >= 1
    protected_len = protected_pages * page_size
    length = implementation.published_len(protected_len + more, protected_len, page_size, bigram)
    pages = model.publishable_pages(protected_len + more, protected_len, page_size, "bigram" if bigram else "token")
    assert length == pages * page_size
