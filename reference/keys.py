"""Identity of a prefix (SPEC section 3): namespaces and key units, cut into whole pages.

A namespace is compared part by part, which tuples do: ``("a", "bc", ())`` is not ``("ab", "c", ())``,
and an absent part (None) is not an empty one.
"""

from collections.abc import Sequence

Namespace = tuple[str | None, str | None, tuple[str, ...]]
"""``(extra_key, cache_salt, content_ids)``."""

PageKey = tuple[int, ...] | tuple[tuple[int, int], ...]
"""The key units of one whole page."""


def units_of(n_tokens: int, key_units: str) -> int:
    """Count the key units that ``n_tokens`` tokens spell: themselves, or the pairs of neighbours.

    >>> [units_of(n, "token") for n in (0, 1, 3)], [units_of(n, "bigram") for n in (0, 1, 3)]
    ([0, 1, 3], [0, 0, 2])
    """
    return n_tokens if key_units == "token" else max(0, n_tokens - 1)


def page_keys(tokens: Sequence[int], key_units: str, page_size: int, first: int, end: int) -> list[PageKey]:
    """Spell pages ``[first, end)`` of a request's tokens in key units.

    Before: the tokens spell at least ``end * page_size`` units.

    >>> page_keys("abcde", "token", 2, 0, 2)
    [('a', 'b'), ('c', 'd')]
    >>> page_keys("abcde", "bigram", 2, 1, 2)
    [(('c', 'd'), ('d', 'e'))]
    """
    starts = range(first * page_size, end * page_size, page_size)
    if key_units == "token":
        return [tuple(tokens[start : start + page_size]) for start in starts]
    return [
        tuple(zip(tokens[start : start + page_size], tokens[start + 1 : start + page_size + 1], strict=True))
        for start in starts
    ]
