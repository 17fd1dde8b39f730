"""Page arithmetic of the model: ints in, ints out, one obvious step after the other.

Lengths count positions from 0, ranges are half-open. Both sides have such functions and share none;
`fuzz/proofs` proves each of them, and that they agree.
"""

from kvlockstep.reference.keys import units_of


def pages_filled(length: int, page_size: int) -> int:
    """Count the pages that positions ``[0, length)`` fill.

    >>> [pages_filled(length, 2) for length in (0, 1, 2, 3)]
    [0, 0, 1, 1]
    """
    return length // page_size


def pages_covering(length: int, page_size: int) -> int:
    """Count the pages that positions ``[0, length)`` touch: the filled ones, and one more if that is not all.

    >>> [pages_covering(length, 2) for length in (0, 1, 2, 3)]
    [0, 1, 1, 2]
    """
    filled = pages_filled(length, page_size)
    if filled * page_size == length:
        return filled
    return filled + 1


def pages_between(start: int, end: int, page_size: int) -> tuple[int, int]:
    """Give the first page that positions ``[start, end)`` touch, and the page behind the last.

    Before: there is such a position.

    >>> pages_between(1, 5, 2), pages_between(2, 4, 2)
    ((0, 3), (1, 2))
    """
    return pages_filled(start, page_size), pages_covering(end, page_size)


def new_pages_needed(committed_len: int, n: int, allocated_len: int, page_size: int) -> int:
    """Count the whole new pages for ``n`` more positions: what is allocated already is used first.

    >>> new_pages_needed(3, 2, 3, 2), new_pages_needed(3, 2, 6, 2)
    (1, 0)
    """
    asked = pages_covering(committed_len + n, page_size)
    held = pages_covering(allocated_len, page_size)
    return asked - held if asked > held else 0


def publishable_pages(committed_len: int, protected_len: int, page_size: int, key_units: str) -> int:
    """Count the pages that the tree holds after a publication: those that key units fill, and never fewer.

    >>> publishable_pages(4, 0, 2, "token"), publishable_pages(4, 0, 2, "bigram"), publishable_pages(4, 4, 2, "bigram")
    (2, 1, 2)
    """
    spelled = pages_filled(units_of(committed_len, key_units), page_size)
    held = pages_filled(protected_len, page_size)
    return spelled if spelled > held else held
