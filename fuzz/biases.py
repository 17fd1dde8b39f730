"""The biases of the generator: which drawn integers mean something special, and the statistic that each is there for.

Drawn evenly, some states are never met. So of the integers that an operation is drawn from a few mean what is wanted
more often, or a mistake that the cache has to refuse. Each `Bias` names the statistic that falls without it; what is
left when it is switched off shows ``benchmarks/biases.py``. Weights of whole operations are in ``machine.py``.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bias:
    """Integers of ``range(of)`` that have one meaning.

    ``statistic`` is what would be rare without it, as the tables of a run call it: a state label, ``KIND: REFUSAL``,
    or an allowance.
    """

    drawn: Collection[int]
    of: int
    statistic: str

    def __contains__(self, number: int) -> bool:
        return number in self.drawn


# submit, by `switch`
TWIN = Bias((*range(4, 14), 28), 32, "duplicate pages freed at checkpoint")  # the prompt of a live request once more
# a prompt that ends right behind a leaf
BEHIND_LEAF = Bias((*range(14, 24), 27), 32, "match of whole prompt minus one")
LONG = Bias((24, 25), 32, "edge of four pages split behind its second")
PRIVATE = Bias((26, 27, 28), 32, "private request published nothing")
LARGEST = Bias((29,), 32, "token of 31 bits published")  # a placeholder such as engines give to images
OVERLONG = Bias((30, 31), 32, "submit: ContextTooLong")
NAME_TAKEN = Bias((31,), 32, "submit: WrongState")

# peek and match, by `who`
PEEK_UNKNOWN = Bias(range(3, 24, 4), 24, "peek: UnknownRequest")
MATCH_UNKNOWN = Bias(range(7, 24, 8), 24, "match: UnknownRequest")
LIVE_AGAIN = Bias((11, 22), 24, "match: WrongState")
PEEK_BEFORE_MATCH = Bias(range(1, 24, 3), 24, "peek renewed a victim")
EVICT_BEFORE_MATCH = Bias(range(2, 24, 3), 24, "victim chosen among several by lru")

# alloc, by `how`
CHUNK = Bias(range(1, 13), 32, "later chunk of a prefill")
EVICT_AHEAD = Bias(range(13, 19), 32, "evicts_before_refusal")
ANY_ROWS = Bias(range(26, 32), 32, "out of rows")  # however few rows are free
DRAFTS_MISPLACED = Bias((27,), 32, "alloc: BadArgument")
OVER_THE_ROW = Bias((28,), 32, "alloc: ContextTooLong")
DRAFTS_OVER_THE_ROW = Bias((29,), 32, "alloc: ContextTooLong")
ONE_KNOWN_TOO_MANY = Bias((30,), 32, "alloc: BadArgument")
ANY_NAMES = Bias((31,), 32, "alloc: UnknownRequest")

# commit, by `how`
KEEP_NONE = Bias((1, 5, 29), 32, "pass thrown away")
KEEP_NO_DRAFT = Bias((2, 6), 32, "draft rejected across page boundary")
KEEP_HALF = Bias((3, 7), 32, "draft rejected across page boundary")
SAMPLE_NOT = Bias((4,), 32, "commit: BadArgument")  # none where one may be, one where none may be
SAMPLE_TWO = Bias((28,), 32, "commit: BadArgument")
SAMPLE_THOUGH_NONE_KEPT = Bias((29,), 32, "commit: BadArgument")
KEEP_BELOW_NONE = Bias((30,), 32, "commit: BadArgument")
KEEP_ONE_TOO_MANY = Bias((31,), 32, "commit: BadArgument")
NOT_IN_FLIGHT = Bias((31,), 32, "commit: UnknownRequest")

# checkpoint, release and retract, by `how`; abort, by `who`
NOT_RUNNING = Bias((22, 23), 24, "checkpoint: WrongState")
RETRACT_ANY = Bias(range(20, 24), 24, "retract: InFlight")
ABORT_UNKNOWN = Bias(range(7, 24, 8), 24, "abort: UnknownRequest")

# evict, by `pages`; reset, by `who`
EVICT_ONE = Bias(range(4), 9, "victim chosen among several by fifo")  # more at once hides the order of victims
EVICT_FROM_ONE_LEAF = Bias((6, 7), 9, "eviction made parent evictable")
EVICT_ANYHOW = Bias((8,), 9, "eviction found nothing")
RESET_WHATEVER = Bias((31,), 32, "reset: WrongState")
END_TO_RESET = Bias(range(0, 32, 4), 32, "reset with old handles alive")
