"""The point of no return of a failing trace: from which operation on its failure was bound to come.

After each operation of the trace, and before the first, the cache goes on in ways that the fuzzer draws, and it is
counted how often that breaks the same law. Where the share rises, the damage was done; the operation at which the
law noticed may come much later. Say an eviction leaves the pages of its node in a list that a reset reads: before the
eviction few continuations break anything, after it each that comes to a reset does.

The same trace gives the same numbers, as long as the time suffices: continuations are drawn from a digest of the trace.
They are run in rounds, one from each point a round, so that a budget that ends makes the picture coarser and not cut.

Not told here: what the damage is (``blame.py`` looks for it in what the target shows). The operation that broke the law
ends at 100 % by definition, which says nothing; it is named only where no operation before it stands out.
"""

import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import describe_op
from kvlockstep.fuzz.draws import Draws
from kvlockstep.fuzz.lenient import Lenient
from kvlockstep.fuzz.machine import _RULES, WEIGHTS
from kvlockstep.fuzz.ops import Op, kind_of
from kvlockstep.fuzz.registry import Factory
from kvlockstep.fuzz.story import CannotRun
from kvlockstep.fuzz.targets.base import allowances_of
from kvlockstep.invariants import Violation

WIDTH = 40
"""Characters of the longest bar."""

BEYOND = 24
"""Operations that a continuation may have more than the rest of the trace: damage that is done needs time to show."""

LEAST_RISE = 0.2
"""Of the share: a smaller rise is not named, however sure it is."""

LEAST_EVIDENCE = 4.5
"""Natural logarithm of how much better a rise must explain the counts than none does."""

_KINDS = [kind for kind, weight in WEIGHTS.items() for _ in range(weight.rules)]


@dataclass(frozen=True, slots=True)
class Point:
    """What came of the continuations after so many operations of the trace."""

    length: int
    failed: int
    tried: int

    @property
    def share(self) -> float | None:
        """The part that failed; None where none was tried."""
        return self.failed / self.tried if self.tried else None


@dataclass(frozen=True, slots=True)
class Chances:
    """The whole picture: a point for each number of operations, and the operation at which the share jumps most."""

    law: str
    points: tuple[Point, ...]  # of lengths 0..n, the last one behind the operation that broke the law
    turn: int  # index of the operation that is named
    before: float  # share of the points before it, together
    after: float  # share of those from it on; of the last point alone where that is the one named
    asked: int  # continuations from each point
    in_time: bool
    ops: tuple[str, ...]  # in words

    def sentence_of_shares(self) -> str:
        """``from op 4 (release r0) on 90 % of continuations fail; before it 5 %``."""
        shares = f"{self.after:.0%} of continuations fail; before it {self.before:.0%}".replace("%", " %")
        return f"from op {self.turn} ({self.ops[self.turn]}) on {shares}"

    @property
    def stands_out(self) -> bool:
        """Whether the operation named is one before the last, at which every share ends at 100 %."""
        return self.turn < len(self.ops) - 1

    def sentences(self) -> list[str]:
        """Say which operation is named, and how far it can be relied on."""
        said = [self.sentence_of_shares()]
        if not self.stands_out:
            said.append("no operation before it made the failure much likelier")
        if not self.in_time:
            least = min(point.tried for point in self.points)
            said.append(f"time ran out: {least} of {self.asked} continuations from each point; --seconds gives it more")
        return said

    def chart(self) -> list[str]:
        """Draw a bar for each point, one an operation, with aligned columns."""
        number = len(str(len(self.ops)))
        names = ["before", *[f"op {i:<{number}}  {_shortened(op)}" for i, op in enumerate(self.ops)]]
        room = max(map(len, names))
        lines = []
        for point, name in zip(self.points, names, strict=True):
            share = point.share
            said = "   -" if share is None else f"{share:4.0%}".replace("%", " %")
            mark = "  <-" if point.length - 1 == self.turn else ""
            lines.append(f"{name:<{room}}  {said:>5}  {'#' * round((share or 0.0) * WIDTH)}".rstrip() + mark)
        return lines

    def to_json(self) -> dict[str, Any]:
        """Give the whole picture as data; ``op`` is -1 for the point before the first operation."""
        points = [
            {"op": point.length - 1, "failed": point.failed, "tried": point.tried, "share": point.share}
            for point in self.points
        ]
        named = {"op": self.turn, "before": self.before, "after": self.after, "stands_out": self.stands_out}
        return {
            "law": self.law,
            "ops": list(self.ops),
            "points": points,
            "named": named,
            "asked": self.asked,
            "in_time": self.in_time,
            "sentence": self.sentence_of_shares(),
        }


def _shortened(op: str, limit: int = 36) -> str:
    return op if len(op) <= limit else f"{op[: limit - 2]}.."


def chances(
    config: CacheConfig,
    ops: Sequence[Op],
    factory: Factory,
    law: str,
    *,
    continuations: int = 20,
    seconds: float = 30.0,
    without: frozenset[int] = frozenset(),
    clock: Callable[[], float] = time.monotonic,
) -> Chances:
    """Count failures from each prefix of ``ops``, the last of which breaks ``law``.

    Before: the operations before the last one hold all laws but those ``without`` names. Raises TargetUnusable.
    """
    end = clock() + seconds
    digest = hashlib.blake2b(repr((config, tuple(ops))).encode(), digest_size=16).digest()
    failed, tried = [0] * len(ops), [0] * len(ops)
    in_time = True
    for number in range(continuations):
        for length in _spread(len(ops)):
            if clock() >= end:
                in_time = False
                break
            drawn = random.Random(digest + repr((length, number)).encode())
            failed[length] += _fails(config, ops, length, factory, law, drawn, without)
            tried[length] += 1
        if not in_time:
            break
    points = [Point(length, *counts) for length, counts in enumerate(zip(failed, tried, strict=True))]
    points.append(Point(len(ops), continuations, continuations))
    return Chances(law, tuple(points), *_turn(points), continuations, in_time, tuple(map(describe_op, ops)))


def _spread(count: int) -> Iterator[int]:
    """Count to ``count`` in an order in which whatever was reached is spread evenly over the whole.

    >>> list(_spread(8))
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    width = max(1, (count - 1).bit_length())
    for number in range(1 << width):
        mirrored = int(f"{number:0{width}b}"[::-1], 2)
        if mirrored < count:
            yield mirrored


def _fails(
    config: CacheConfig,
    ops: Sequence[Op],
    length: int,
    factory: Factory,
    law: str,
    drawn: random.Random,
    without: frozenset[int],
) -> bool:
    """Go on after so many operations with what is drawn; tell whether that breaks the law.

    Every fourth operation or so is of the kind at which the law noticed: a reset, say, is drawn too seldom to show
    what waits for one.
    """
    noticing = kind_of(ops[-1])
    lockstep = Lenient(config, factory(config), without)
    lockstep.run_unchecked(ops[:length])
    capabilities = frozenset(lockstep.target.capabilities)
    ahead = "evicts_before_refusal" in allowances_of(lockstep.target)
    draws = Draws(config, lockstep.model, capabilities, may_evict_ahead=ahead)
    for _ in range(len(ops) - length + BEYOND):
        kind = noticing if drawn.randrange(4) == 0 else drawn.choice(_KINDS)
        numbers = {name: drawn.randint(low, high) for name, (low, high) in _RULES[kind].items()}
        op: Op = getattr(draws, kind)(**numbers)
        try:
            lockstep.run(op)
        except Violation as violation:
            return type(violation).__name__ == law
        except CannotRun:
            return False  # what is left out let more break than a lockstep can run on
        if lockstep.stopped is not None:
            return False
    return False


def _turn(points: Sequence[Point]) -> tuple[int, float, float]:
    """Find the operation that parts the points into two levels best, and the levels.

    One that stands out is looked for among those before the last operation, at which the share is 100 % by definition.
    """
    counted = [point for point in points[:-1] if point.tried]
    level = _pooled(counted)
    found: tuple[int, float, float] | None = None
    best = LEAST_EVIDENCE
    for cut in range(1, len(counted)):
        low, high = _pooled(counted[:cut]), _pooled(counted[cut:])
        evidence = _fit(counted[:cut], low) + _fit(counted[cut:], high) - _fit(counted, level)
        if high - low >= LEAST_RISE and evidence > best:
            best, found = evidence, (counted[cut].length - 1, low, high)
    return found or (len(points) - 2, level, 1.0)


def _pooled(points: Sequence[Point]) -> float:
    tried = sum(point.tried for point in points)
    return sum(point.failed for point in points) / tried if tried else 0.0


def _fit(points: Sequence[Point], share: float) -> float:
    """Log-likelihood of what was counted, if each continuation fails with this chance."""
    failed = sum(point.failed for point in points)
    held = sum(point.tried for point in points) - failed
    return (failed * math.log(share) if failed else 0.0) + (held * math.log(1 - share) if held else 0.0)
