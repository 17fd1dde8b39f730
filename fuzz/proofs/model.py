"""Contracts of the model's arithmetic. The first assertion of each is its precondition, the others its claim."""

from kvlockstep.reference.arithmetic import (
    new_pages_needed,
    pages_between,
    pages_covering,
    pages_filled,
    publishable_pages,
)
from kvlockstep.reference.intervals import ownership_intervals
from kvlockstep.reference.keys import Namespace, page_keys, units_of
from kvlockstep.reference.tree import Tree

NAMESPACE: Namespace = (None, None, ())
MOST_TOKENS = 4
"""Up to which length of two token strings the match of the model is searched."""


def page_floor(length: int, page_size: int) -> None:
    """Filled pages fit into a length, and one more does not."""
    assert length >= 0 and page_size >= 1
    pages = pages_filled(length, page_size)
    assert pages >= 0
    assert pages * page_size <= length < (pages + 1) * page_size


def page_ceiling(length: int, page_size: int) -> None:
    """The pages that cover a length hold it, and one fewer does not."""
    assert length >= 0 and page_size >= 1
    pages = pages_covering(length, page_size)
    assert pages >= 0
    assert (pages - 1) * page_size < length <= pages * page_size


def touched_pages(start: int, end: int, page_size: int) -> None:
    """The first page touched holds the first position, the last one the last; so all between are touched."""
    assert 0 <= start < end and page_size >= 1
    first, behind = pages_between(start, end, page_size)
    assert 0 <= first < behind
    assert first * page_size <= start < (first + 1) * page_size
    assert (behind - 1) * page_size < end <= behind * page_size


def new_pages(committed_len: int, n: int, allocated_len: int, page_size: int) -> None:
    """What is held and what is needed cover a pass, without a page too many."""
    assert 0 <= committed_len <= allocated_len and n >= 1 and page_size >= 1
    needed = new_pages_needed(committed_len, n, allocated_len, page_size)
    held = pages_covering(allocated_len, page_size)
    assert needed >= 0
    assert (held + needed) * page_size >= committed_len + n
    assert needed == 0 or (held + needed - 1) * page_size < committed_len + n


def intervals_partition_the_row(protected_len: int, committed_len: int, allocated_len: int) -> None:
    """The intervals are not empty, follow one another, cover the row, and have the owner that the lengths say."""
    assert 0 <= protected_len <= committed_len <= allocated_len
    at = 0
    for start, end, owner in ownership_intervals(protected_len, committed_len, allocated_len):
        assert start == at and start < end
        assert end in (protected_len, committed_len, allocated_len)
        assert (owner == "tree") == (end <= protected_len)
        at = end
    assert at == allocated_len


def units(n_tokens: int, bigram: bool) -> None:
    """Tokens spell themselves, or the pairs between them."""
    assert n_tokens >= 0
    n_units = units_of(n_tokens, "bigram" if bigram else "token")
    assert n_units >= 0
    assert n_units == 0 or n_units + (1 if bigram else 0) == n_tokens
    assert n_units > 0 or n_tokens <= (1 if bigram else 0)


def published_pages(protected_pages: int, more: int, page_size: int, bigram: bool) -> None:
    """A publication gives up nothing, and leaves no whole page unpublished."""
    assert protected_pages >= 0 and more >= 0 and page_size >= 1
    protected_len = protected_pages * page_size
    committed_len = protected_len + more
    key_units = "bigram" if bigram else "token"
    pages = publishable_pages(committed_len, protected_len, page_size, key_units)
    assert protected_pages <= pages
    assert pages * page_size <= committed_len
    assert units_of(committed_len, key_units) - pages * page_size < page_size


def shared_pages(published: list[int], asked: list[int], page_size: int) -> None:
    """A match ends at the longest common prefix in whole pages. Tokens are keys of dicts, so this has many paths."""
    assert 1 <= page_size <= 2 and len(published) <= MOST_TOKENS and len(asked) <= MOST_TOKENS
    tree = Tree()
    keys, keys_asked = (
        page_keys(tokens, "token", page_size, 0, pages_filled(len(tokens), page_size)) for tokens in (published, asked)
    )
    tree.publish(tree.root, NAMESPACE, keys, range(1, len(keys) + 1), 0, 0)
    found = tree.match(NAMESPACE, keys_asked).depth * page_size
    for pos in range(found):
        assert published[pos] == asked[pos]
    if found + page_size <= min(len(published), len(asked)):
        assert any(published[pos] != asked[pos] for pos in range(found, found + page_size))
