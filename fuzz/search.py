"""The search learns: what a worker has met decides where its next cases begin.

Drawn afresh, cases meet the same few situations over and over, and those that faults hide in now and then. So a
worker keeps, for each distinct situation (``states.py``) it has met, the shortest way there: the config and the
operations up to it. Half of its cases begin at the end of such a way, mostly at one that was met least often, and go
on with operations drawn as ever: a trace cut short is a trace. Which way it is depends on an integer that Hypothesis
draws and on the cases before, on nothing else; so the same seed makes the same search.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Op
from kvlockstep.fuzz.states import Situation

LONGEST = 60
"""Operations of a way that is kept; a case of a way and of the operations drawn after it stays readable."""

N_FRESH = 20
"""Cases that begin afresh before any goes on from a way: what is easy to meet is met by them, under many configs."""

N_DRAWN = 1024
"""What is drawn to choose a way is below this; the lower half means a fresh case."""


@dataclass(slots=True)
class _Way:
    """How a situation was met, and how often."""

    config: CacheConfig
    ops: tuple[Op, ...]
    met: int = 1


class Frontier:
    """The situations that a worker has met."""

    def __init__(self) -> None:
        self._ways: dict[Situation, _Way] = {}
        self._rarest: list[_Way] = []  # sorted when it was last asked for
        self._asked = 0
        self._begun = 0

    def __len__(self) -> int:
        return len(self._ways)

    def meet(self, situation: Situation, config: CacheConfig, ops: Sequence[Op]) -> bool:
        """Note that a case has come to a situation by its operations so far. True if it was never met before."""
        way = self._ways.get(situation)
        if way is not None:
            way.met += 1
            if len(ops) < len(way.ops):
                way.config, way.ops = config, tuple(ops)
        elif len(ops) <= LONGEST:
            self._ways[situation] = _Way(config, tuple(ops))
        return way is None

    def begin(self, drawn: int) -> tuple[CacheConfig, tuple[Op, ...]] | None:
        """Give the config and the operations that a case begins with, or None for a fresh one.

        ``drawn`` is below N_DRAWN. The rarer a situation, the more integers lead to it.
        """
        half = N_DRAWN // 2
        self._begun += 1
        if drawn < half or self._begun <= N_FRESH or not self._ways:
            return None
        if self._asked % 16 == 0:
            self._rarest = sorted(self._ways.values(), key=lambda way: (way.met, len(way.ops)))
        self._asked += 1
        way = self._rarest[(drawn - half) ** 2 * len(self._rarest) // half**2]
        return way.config, way.ops
