"""Page and interval arithmetic: ints in, ints out, importable without torch.

Lengths count tokens (or key units) from the start of a row or key; ranges are half-open. A slot is
``page * page_size + offset``. Nothing here knows of requests, trees or devices.
"""


def pages_spanned(length: int, page_size: int) -> int:
    """Count the pages that ``length`` positions touch, the last one perhaps in part.

    >>> pages_spanned(5, 2), pages_spanned(4, 2), pages_spanned(0, 2)
    (3, 2, 0)
    """
    return -(-length // page_size)


def whole_pages(length: int, page_size: int) -> int:
    """Count the pages that ``length`` positions fill.

    >>> whole_pages(5, 2), whole_pages(4, 2)
    (2, 2)
    """
    return length // page_size


def pages_touched(start: int, end: int, page_size: int) -> tuple[int, int]:
    """Give the range of pages that positions ``[start, end)`` touch.

    Before: ``start < end``.

    >>> pages_touched(1, 5, 2), pages_touched(2, 4, 2)
    ((0, 3), (1, 2))
    """
    return start // page_size, (end - 1) // page_size + 1


def pages_to_take(committed_len: int, n: int, allocated_len: int, page_size: int) -> int:
    """Count the new pages that computing ``n`` more positions takes.

    The rest of the last page, and an over-allocated tail, are used before a page is taken.

    >>> pages_to_take(3, 2, 3, 2)  # [3, 5): position 3 is slack of page 1, position 4 needs page 2
    1
    >>> pages_to_take(3, 2, 6, 2)  # the tail reaches position 6 already
    0
    """
    return max(0, pages_spanned(committed_len + n, page_size) - pages_spanned(allocated_len, page_size))


def matchable_units(n_tokens: int, bigram: bool) -> int:
    """Count the key units that a request of ``n_tokens`` may match: one token is left to compute.

    >>> matchable_units(4, bigram=False), matchable_units(4, bigram=True), matchable_units(1, bigram=True)
    (3, 2, 0)
    """
    return max(0, n_tokens - 2) if bigram else max(0, n_tokens - 1)


def publishable_units(committed_len: int, bigram: bool) -> int:
    """Count the key units that ``committed_len`` committed tokens spell.

    >>> publishable_units(4, bigram=False), publishable_units(4, bigram=True), publishable_units(0, bigram=True)
    (4, 3, 0)
    """
    return max(0, committed_len - 1) if bigram else committed_len


def published_len(committed_len: int, protected_len: int, page_size: int, bigram: bool) -> int:
    """Give the length that a publication reaches: whole pages, and never less than what is locked.

    With pages of 2 and pairs, four committed tokens are three pairs, so one page:

    >>> published_len(4, 0, 2, bigram=True), published_len(4, 4, 2, bigram=True), published_len(5, 2, 2, bigram=False)
    (2, 4, 4)
    """
    return max(protected_len, whole_pages(publishable_units(committed_len, bigram), page_size) * page_size)
