# cython: annotation_typing=False
# cython: boundscheck=False
# cython: wraparound=False
"""Runs of integers between the formats of engine, tree and rows: token ids as int32 bytes, pages as slots."""

from array import array

import numpy as np
from numpy.typing import NDArray


def int32_bytes(tokens: "array[int]", start: int, n: int) -> bytes:
    """Spell ``n`` token ids, from index ``start`` on, as the bytes of int32. ``tokens`` is an ``array('q')``.

    Raises OverflowError for one that int32 cannot hold: cut to size, it would equal another token.

    >>> int32_bytes(array("q", [7, 8, 9]), 1, 2) == array("i", [8, 9]).tobytes()
    True
    """
    if not 0 <= start <= start + n <= len(tokens):
        raise IndexError(f"{n} tokens from index {start} on, of {len(tokens)}")
    narrow = np.empty(n, dtype=np.int32)
    into = narrow
    lost = 0
    for i in range(n):
        token = tokens[start + i]
        into[i] = token
        lost |= token ^ into[i]
    if lost:
        raise OverflowError("a token id does not fit into int32")
    return narrow.tobytes()


def slots_of(pages: "array[int]", page_size: int) -> "NDArray[np.int32]":
    """List the slots of ``pages``, an ``array('i')``, in order.

    >>> slots_of(array("i", [5, 2]), page_size=2)
    array([10, 11,  4,  5], dtype=int32)
    """
    slots = np.empty(len(pages) * page_size, dtype=np.int32)
    into = slots
    at = 0
    for i in range(len(pages)):
        slot = pages[i] * page_size
        for _ in range(page_size):
            into[at] = slot
            slot += 1
            at += 1
    return slots
