"""A prompt as pieces ``[block, length]``, which stay pieces until somebody asks for the tokens.

A request log names blocks and no text. Spelled out, its prompts would fill gigabytes; as pieces they are as long as
the log is. The tokens of a block are those of ``block_tokens``, the same everywhere, and equal tokens of one block are
one object for as long as the block is remembered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import overload

from kvlockstep.fuzz.trace_bounds import block_tokens

_remembered_tokens = lru_cache(maxsize=1024)(block_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces(Sequence[int]):
    """The tokens of ``pieces``, one piece after the other. Equal to any tuple of the same tokens.

    >>> prompt = Pieces(((7, 3), (9, 1)))
    >>> len(prompt), prompt[2:], prompt == (1707401417, 1587770896, 475632927, 1574205349)
    (4, (475632927, 1574205349), True)
    """

    pieces: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum([length for _, length in self.pieces])

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable([_remembered_tokens(block, length) for block, length in self.pieces])

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...

    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Pieces) and self.pieces == other.pieces:
            return True
        return tuple(self) == (tuple(other) if isinstance(other, Pieces) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))
