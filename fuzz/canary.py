"""The canary: a mistake that every worker makes on purpose, and has to notice, before its own run counts for anything.

Between the harness and the target it is about to fuzz stands `RepeatsWriteSlot`, which lets the last slot of a batch's
write set be the first one again: two tokens written to one place, the charter's third law. It needs nothing of a
target but ``alloc``. A worker that does not find it draws nothing, calls nothing or checks nothing; one that does has
its target, the drawing of operations, the model and the checks at work. How long it takes is counted in operations, so
that a busy machine does not make a blind worker of a seeing one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

from hypothesis.errors import FlakyStrategyDefinition

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import AllocItem, Op
from kvlockstep.fuzz.targets.base import AllocResult, Target
from kvlockstep.invariants import Violation
from kvlockstep.invariants.writes import WriteSlotRepeated

CANARY_OPERATIONS = 400
"""Operations in which the canary must be found: less than a second of the slowest target that is built in."""


Promises = tuple[frozenset[str], Sequence[int], Sequence[str]]
"""Capabilities, page sizes and options of a target."""

Start = Callable[[CacheConfig], Lockstep]


class RepeatsWriteSlot:
    """A target whose batches end in the slot that they begin with; all else is the target's own."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def alloc(self, batch: Sequence[AllocItem]) -> AllocResult:
        done = self._target.alloc(batch)
        done.write_sets[-1][-1] = done.write_sets[0][0]
        return done


@dataclass(frozen=True, slots=True)
class Canary:
    """What became of the canary: found as what, if at all, after how many operations and seconds."""

    law: str | None
    operations: int
    seconds: float

    @property
    def caught(self) -> bool:
        return self.law == WriteSlotRepeated.__name__


class _Over(BaseException):
    """Ends the case and the batch; not an Exception, so that Hypothesis neither replays nor shrinks it."""


class _Run:
    """The cases that look for the canary. Implements `machine.Case`."""

    config: CacheConfig | None = CacheConfig()  # has room for more than one token, as a drawn one may not have

    def __init__(self, promised: Promises, start: Start) -> None:
        self.capabilities, self.page_sizes, self.options = promised
        self._start = start
        self.operations = 0
        self.law: str | None = None
        self.trouble: Exception | None = None

    def start(self, config: CacheConfig) -> Lockstep:
        with self._over_at_trouble():
            return self._start(config)

    def run(self, lockstep: Lockstep, op: Op) -> None:
        if self.operations == CANARY_OPERATIONS:
            raise _Over
        self.operations += 1
        with self._over_at_trouble():
            try:
                lockstep.run(op)
            except Violation as violation:
                self.law = type(violation).__name__
                raise _Over from violation

    @contextmanager
    def _over_at_trouble(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.trouble = error
            raise _Over from error


def look_for_canary(promised: Promises, start: Start, seed: int) -> Canary:
    """Draw cases until the canary is found, or until it ought to have been; raises whatever ``start`` raised.

    ``start`` begins a case on a target with the mistake in it; ``promised`` is what may be drawn for that target.
    """
    from kvlockstep.fuzz.machine import run_cases

    run, began = _Run(promised, start), monotonic()
    batch = 0
    while run.law is None and run.operations < CANARY_OPERATIONS:
        before = run.operations
        try:
            run_cases(run, (seed << 20) + batch, n_cases=20, steps=90)
        except (_Over, FlakyStrategyDefinition):  # see Worker.fuzz
            if run.trouble is not None:
                raise run.trouble from None
        batch += 1
        if run.operations == before:
            break
    return Canary(run.law, run.operations, monotonic() - began)
