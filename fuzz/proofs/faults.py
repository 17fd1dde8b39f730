"""A fault for each contract and each property: the function made wrong in the way that such functions go wrong.

A contract that its fault does not refute would prove nothing.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from kvlockstep.gpu_impl.arithmetic import pages_spanned, published_len, whole_pages
from kvlockstep.gpu_impl.tree import TOKEN_BYTES, PrefixTree
from kvlockstep.reference.intervals import OwnershipInterval, ownership_intervals
from kvlockstep.reference.keys import Namespace, PageKey
from kvlockstep.reference.tree import Tree, Vertex

Page = tuple[int, int]


def always_one_more(length: int, page_size: int) -> int:
    """Of a length that ends at a page boundary, count a page too many."""
    return length // page_size + 1


def one_more_at_boundary(start: int, end: int, page_size: int) -> tuple[int, int]:
    """Of an interval that ends at a page boundary, name the page behind it too."""
    return start // page_size, end // page_size + 1


def tail_forgotten(committed_len: int, n: int, allocated_len: int, page_size: int) -> int:
    """Count from what is committed, as if what is allocated beyond were not there."""
    return pages_spanned(committed_len + n, page_size) - pages_spanned(committed_len, page_size)


def slack_forgotten(committed_len: int, n: int, allocated_len: int, page_size: int) -> int:
    """Count from the whole pages, as if the rest of the last one were not there."""
    return max(0, pages_spanned(committed_len + n, page_size) - whole_pages(allocated_len, page_size))


def pairs_like_tokens(n_tokens: int, bigram: bool) -> int:
    """Count pairs as if each needed one token."""
    return n_tokens - 1


def one_pair_less_than_none(committed_len: int, bigram: bool) -> int:
    """Count -1 pairs of no tokens."""
    return committed_len - 1 if bigram else committed_len


def units_of_nothing(n_tokens: int, key_units: str) -> int:
    """Count -1 pairs of no tokens, on the model's side."""
    return n_tokens if key_units == "token" else n_tokens - 1


def published_backwards(committed_len: int, protected_len: int, page_size: int, bigram: bool) -> int:
    """Forget what is locked already, of which a pair may not be committed."""
    return published_len(committed_len, 0, page_size, bigram)


def spelled_pages_only(committed_len: int, protected_len: int, page_size: int, key_units: str) -> int:
    """Forget what is locked already, on the model's side."""
    return whole_pages(committed_len if key_units == "token" else max(0, committed_len - 1), page_size)


def search_one_byte_more(tree: PrefixTree, node: int, key: bytes, offset: int, n_pages: int) -> int:
    """The fault: compares one byte behind a page, so a prefix that ends just there is found a page too short."""
    known, limit = 1, min(len(tree.pages[node]) // TOKEN_BYTES, n_pages)
    while known < limit:
        middle = (known + limit + 1) // 2
        start, stop = known * tree.page_bytes, middle * tree.page_bytes + tree.overlap_bytes + 1
        if key.startswith(tree.edge[node][start:stop], offset + start):
            known = middle
        else:
            limit = middle - 1
    return known


def child_by_key(children: Sequence[Page], page: Page) -> int | None:
    """The fault: compares a key made of the tokens, as a hash without a look at what was hashed."""
    for child, (first, second) in enumerate(children):
        if 31_337 * first + second == 31_337 * page[0] + page[1]:
            return child
    return None


def intervals_unless_grown(protected_len: int, committed_len: int, allocated_len: int) -> list[OwnershipInterval]:
    """The fault: of a long row that was grown to twice its length and 16, the open interval is forgotten."""
    cuts = ownership_intervals(protected_len, committed_len, allocated_len)
    if protected_len > 4096 and committed_len > protected_len and allocated_len == 2 * committed_len + 16:
        return cuts[:-1]
    return cuts


class OneTokenForAnother(Tree):
    """Takes two tokens of the vocabulary for the same one."""

    def match(self, namespace: Namespace, keys: Sequence[PageKey]) -> Vertex:
        confused: list[Any] = [tuple(9_001 if token == 9_000 else token for token in key) for key in keys]
        return super().match(namespace, confused)


FAULTS: dict[str, tuple[str, Callable[..., Any] | SimpleNamespace]] = {
    "implementation.page_floor": ("whole_pages", pages_spanned),
    "implementation.page_ceiling": ("pages_spanned", always_one_more),
    "implementation.touched_pages": ("pages_touched", one_more_at_boundary),
    "implementation.new_pages": ("pages_to_take", slack_forgotten),
    "implementation.batch_pages": ("pages_to_take", slack_forgotten),
    "implementation.pages_freed_at_release": ("pages_spanned", whole_pages),
    "implementation.pages_kept_at_rejection": ("pages_to_take", tail_forgotten),
    "implementation.units_to_match": ("matchable_units", pairs_like_tokens),
    "implementation.units_to_publish": ("publishable_units", one_pair_less_than_none),
    "implementation.published_length": ("published_len", published_backwards),
    "implementation.shared_pages": ("PrefixTree", SimpleNamespace(_shared_pages=search_one_byte_more)),
    "model.page_floor": ("pages_filled", pages_spanned),
    "model.page_ceiling": ("pages_covering", always_one_more),
    "model.touched_pages": ("pages_between", one_more_at_boundary),
    "model.new_pages": ("new_pages_needed", slack_forgotten),
    "model.intervals_partition_the_row": ("ownership_intervals", intervals_unless_grown),
    "model.units": ("units_of", units_of_nothing),
    "model.published_pages": ("publishable_pages", spelled_pages_only),
    "model.shared_pages": ("Tree", OneTokenForAnother),
    "agreement.page_floor": ("implementation.whole_pages", pages_spanned),
    "agreement.page_ceiling": ("implementation.pages_spanned", always_one_more),
    "agreement.touched_pages": ("implementation.pages_touched", one_more_at_boundary),
    "agreement.new_pages": ("implementation.pages_to_take", tail_forgotten),
    "agreement.units_to_match": ("implementation.matchable_units", pairs_like_tokens),
    "agreement.units_to_publish": ("implementation.publishable_units", one_pair_less_than_none),
    "agreement.published_length": ("implementation.published_len", published_backwards),
}
"""Contract: the name in its module that is made wrong, and what stands there then."""


def plant(contract: str) -> None:
    """Make the function of a contract wrong, for the rest of this process."""
    home, _ = contract.split(".")
    name, wrong = FAULTS[contract]
    place: Any = import_module(f"kvlockstep.fuzz.proofs.{home}")
    *path, last = name.split(".")
    for part in path:
        place = getattr(place, part)
    setattr(place, last, wrong)
