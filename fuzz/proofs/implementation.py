"""Contracts of the implementation's arithmetic. The first assertion of each is its precondition, the others its claim.

Precondition and claim are about any integers within the bounds that the precondition states; most state none.

Not verified here: that `cache.py` calls these where it should, which is for the lockstep to find.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from kvlockstep.gpu_impl.arithmetic import (
    matchable_units,
    pages_spanned,
    pages_to_take,
    pages_touched,
    publishable_units,
    published_len,
    whole_pages,
)
from kvlockstep.gpu_impl.tree import TOKEN_BYTES, PrefixTree

MOST_SHARED_PAGES = 6
"""Up to which length of an edge, and of a key, the search for the shared pages is proved."""


def page_floor(length: int, page_size: int) -> None:
    """Whole pages fit into a length, and one more does not."""
    assert length >= 0 and page_size >= 1
    pages = whole_pages(length, page_size)
    assert pages >= 0
    assert pages * page_size <= length < (pages + 1) * page_size


def page_ceiling(length: int, page_size: int) -> None:
    """The pages that a length spans hold it, and one fewer does not."""
    assert length >= 0 and page_size >= 1
    pages = pages_spanned(length, page_size)
    assert pages >= 0
    assert (pages - 1) * page_size < length <= pages * page_size


def touched_pages(start: int, end: int, page_size: int) -> None:
    """The first page touched holds the first position, the last one the last; so all between are touched."""
    assert 0 <= start < end and page_size >= 1
    first, behind = pages_touched(start, end, page_size)
    assert 0 <= first < behind
    assert first * page_size <= start < (first + 1) * page_size
    assert (behind - 1) * page_size < end <= behind * page_size


def new_pages(committed_len: int, n: int, allocated_len: int, page_size: int) -> None:
    """What is held and what is taken cover a pass, without a page too many."""
    assert 0 <= committed_len <= allocated_len and n >= 1 and page_size >= 1
    taken = pages_to_take(committed_len, n, allocated_len, page_size)
    held = pages_spanned(allocated_len, page_size)
    assert taken >= 0
    assert (held + taken) * page_size >= committed_len + n
    assert taken == 0 or (held + taken - 1) * page_size < committed_len + n


def batch_pages(
    committed: int, n: int, allocated: int, committed_other: int, n_other: int, allocated_other: int, page_size: int
) -> None:
    """A batch of two takes just what brings both to the pages they have afterwards."""
    assert (
        page_size >= 1
        and 0 <= committed <= allocated
        and n >= 1
        and 0 <= committed_other <= allocated_other
        and n_other >= 1
    )
    need = sum(
        pages_to_take(committed_len, wanted, allocated_len, page_size)
        for committed_len, wanted, allocated_len in (
            (committed, n, allocated),
            (committed_other, n_other, allocated_other),
        )
    )
    before = pages_spanned(allocated, page_size) + pages_spanned(allocated_other, page_size)
    after = pages_spanned(max(allocated, committed + n), page_size)
    after += pages_spanned(max(allocated_other, committed_other + n_other), page_size)
    assert before + need == after


def pages_freed_at_release(protected_pages: int, tail: int, page_size: int) -> None:
    """The pages behind the protected ones are those of the tail, slack included; none is both."""
    assert protected_pages >= 0 and tail >= 0 and page_size >= 1
    protected_len = protected_pages * page_size
    allocated_len = protected_len + tail
    first_freed = whole_pages(protected_len, page_size)
    freed = pages_spanned(allocated_len, page_size) - first_freed
    assert first_freed == protected_pages
    assert freed == pages_spanned(tail, page_size)
    assert freed == 0 or pages_touched(protected_len, allocated_len, page_size) == (first_freed, first_freed + freed)


def pages_kept_at_rejection(committed_len: int, n: int, kept: int, n_next: int, allocated_len: int, page: int) -> None:
    """A rejection frees no page: the next pass takes what is missing beyond the pages of the rejected drafts."""
    assert 0 <= committed_len <= allocated_len and 0 <= kept <= n and n >= 1 and n_next >= 1 and page >= 1
    taken = pages_to_take(committed_len, n, allocated_len, page)
    allocated_after = max(allocated_len, committed_len + n)
    taken_next = pages_to_take(committed_len + kept, n_next, allocated_after, page)
    reach = max(allocated_after, committed_len + kept + n_next)
    assert taken + taken_next == pages_spanned(reach, page) - pages_spanned(allocated_len, page)
    assert kept + n_next > n or taken_next == 0


def units_to_match(n_tokens: int, bigram: bool) -> None:
    """A match leaves one token to compute, and a pair needs two."""
    assert n_tokens >= 1
    units = matchable_units(n_tokens, bigram)
    last = units if bigram else units - 1  # index of the last token that the units spell
    assert units >= 0
    assert units == 0 or last == n_tokens - 2
    assert units > 0 or n_tokens <= (2 if bigram else 1)


def units_to_publish(committed_len: int, bigram: bool) -> None:
    """Committed tokens spell themselves, or the pairs between them."""
    assert committed_len >= 0
    units = publishable_units(committed_len, bigram)
    assert units >= 0
    assert units == 0 or units + (1 if bigram else 0) == committed_len
    assert units > 0 or committed_len <= (1 if bigram else 0)


def published_length(protected_pages: int, more: int, page_size: int, bigram: bool) -> None:
    """A publication ends at a page boundary, gives up nothing, and leaves no whole page unpublished."""
    assert protected_pages >= 0 and more >= 0 and page_size >= 1
    protected_len = protected_pages * page_size
    committed_len = protected_len + more
    length = published_len(committed_len, protected_len, page_size, bigram)
    assert whole_pages(length, page_size) * page_size == length
    assert protected_len <= length <= committed_len
    assert publishable_units(committed_len, bigram) - length < page_size


class _Edge:
    """Bytes of which only their place counts: a slice is its bounds."""

    def __getitem__(self, part: slice) -> tuple[int, int]:
        return part.start, part.stop


class _Key:
    """A key that agrees with the edge on its first ``agrees`` bytes, and not on the next."""

    def __init__(self, agrees: int, offset: int) -> None:
        self._agrees = agrees
        self._offset = offset

    def startswith(self, part: tuple[int, int], at: int) -> bool:
        start, stop = part
        assert at - self._offset == start, "the same part of both is compared"
        return stop <= self._agrees


Search = Callable[[PrefixTree, int, bytes, int, int], int]
"""`PrefixTree._shared_pages`, or something in its place."""


def shared_by(
    search: Search, edge_pages: int, key_pages: int, page_size: int, agrees: int, offset: int, bigram: bool
) -> int:
    """Run the search itself, over an edge and a key of which is known only up to which byte they agree."""
    tree = SimpleNamespace(
        edge=[_Edge()],
        pages=[range(edge_pages * TOKEN_BYTES)],
        page_bytes=page_size * TOKEN_BYTES,
        overlap_bytes=bigram * TOKEN_BYTES,
    )
    return search(cast(PrefixTree, tree), 0, cast(bytes, _Key(agrees, offset)), offset, key_pages)


def shared_pages(edge_pages: int, key_pages: int, page_size: int, agrees: int, offset: int, bigram: bool) -> None:
    """An edge is split at the end of the longest common prefix in whole pages, their overlap included."""
    assert (
        1 <= edge_pages <= MOST_SHARED_PAGES
        and 1 <= key_pages <= MOST_SHARED_PAGES
        and page_size >= 1
        and offset >= 0
        and agrees >= (page_size + bigram) * TOKEN_BYTES  # a child is found by its first page
    )
    shared = shared_by(PrefixTree._shared_pages, edge_pages, key_pages, page_size, agrees, offset, bigram)
    assert 1 <= shared <= edge_pages and shared <= key_pages
    assert (shared * page_size + bigram) * TOKEN_BYTES <= agrees
    longest = shared == edge_pages or shared == key_pages
    assert longest or ((shared + 1) * page_size + bigram) * TOKEN_BYTES > agrees
