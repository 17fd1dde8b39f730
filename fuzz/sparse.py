"""A lockstep for long traces on large pools: every operation on both sides, the whole cache every k-th.

To see all of a cache, hold it to the laws, compare it with the model and read its pool takes as long as the cache is
large. So here most operations are checked by what is near them: result, refusal, write set, evicted slots, and of each
request they name its state, its lengths, its row and what the row names from the new positions on. Of the content are
read: new positions at once; whole rows at the first commit after a match, at every checkpoint and before a release
(SPEC section 8). Every k-th operation, and the last one, is run as `Lockstep` runs each: the cache is seen whole
before and after it, all laws hold, the model is the same; in addition every row and the pool are read, whatever the
operation was.

What breaks in between is seen late, or under another name. Since a trace is deterministic, it can be run once more
with closer looks at the last stretch (`narrow`).

Not seen: what is broken between two looks and whole again at the second, and outside of the requests that the
operations named.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, cast

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import Lockstep, Outcome
from kvlockstep.fuzz.ops import Alloc, Checkpoint, Commit, Match, Op, Release, kind_of, named_requests
from kvlockstep.fuzz.targets.base import GlancingTarget
from kvlockstep.invariants import Hold, Observation, Read, RequestView, Violation
from kvlockstep.invariants.agreement import RequestsDiffer, RowsDiffer
from kvlockstep.invariants.content import ContentWrong
from kvlockstep.invariants.owners import listing

LARGEST_LOOKED_AT = 1 << 14
"""Slots of a pool that is seen whole after every operation, if nobody says otherwise."""

SHORT = 64
"""Operations; a stretch that is not longer is looked at after each."""


def automatic_every(config: CacheConfig) -> int:
    """Return the k for a cache of this size: 1 for those that fuzzing draws, and 1,024 for 262,144 slots."""
    return 1 if config.n_slots <= LARGEST_LOOKED_AT else config.n_slots >> 8


@dataclass(frozen=True, slots=True)
class Looks:
    """At which steps the cache is seen whole: every k-th, the last, and in one stretch closer.

    >>> looks = Looks(every=4, n_ops=10)
    >>> [step for step in range(10) if looks.at(step)], looks.stretch_to(6)
    ([3, 7, 9], range(4, 7))
    >>> closer = replace(looks, stretch=range(4, 7), every_in_stretch=1)
    >>> [step for step in range(10) if closer.at(step)], closer.stretch_to(6)
    ([3, 4, 5, 6, 7, 9], range(6, 7))
    """

    every: int
    n_ops: int
    stretch: range = range(0)
    every_in_stretch: int = 1

    def at(self, step: int) -> bool:
        if step in self.stretch and (step - self.stretch.start + 1) % self.every_in_stretch == 0:
            return True
        return (step + 1) % self.every == 0 or step == self.n_ops - 1

    def stretch_to(self, step: int) -> range:
        """Give the steps after the last look before ``step``, up to it."""
        start = step
        while start and not self.at(start - 1):
            start -= 1
        return range(start, step + 1)


Found = tuple[Violation, int]
"""A violation, and at which step."""


def narrow(found: Found, looks: Looks, again: Callable[[Looks], Found | None]) -> Found:
    """Run a trace again, with closer and closer looks before the step at which something was found.

    After: what is returned was found by a look at that step and the one before it; or else a run found nothing, or
    nothing sooner than the last one did, which a trace that is deterministic does not do, and then what it was.
    """
    stretch = looks.stretch_to(found[1])
    while len(stretch) > 1:
        every = 1 if len(stretch) <= SHORT else isqrt(len(stretch))
        looks = replace(looks, stretch=stretch, every_in_stretch=every)
        sooner = again(looks)
        if sooner is None or sooner[1] not in stretch:
            return found
        found, stretch = sooner, looks.stretch_to(sooner[1])
    return found


class SparseLockstep(Lockstep):
    """A lockstep that sees the whole cache only where ``looks`` says so.

    Of a target without ``glance`` it has to see all where a request takes its row.
    """

    def __init__(self, *arguments: Any, looks: Looks, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.looks = looks
        self._whole = True  # the operation at hand is checked in full
        self._is_old = False  # self.now is of an earlier moment
        self._catches_up = False  # the operation at hand is the first in a while that is checked in full
        self._glances: dict[str, tuple[RequestView, list[int]] | None] = {}
        self._starts: dict[str, int] = {}
        self._read_since_match: set[str] = set()
        self._can_glance = hasattr(self.target, "glance")

    def _run(self, op: Op) -> Outcome:
        self._whole = self.looks.at(self.step) or (not self._can_glance and self._takes_row(op))
        self._catches_up = self._whole and self._is_old
        if self._catches_up:
            self._see_before()
        self._is_old = not self._whole
        if isinstance(op, Release) and not self._whole and self.model.refusal("release", op.request) is None:
            self._check_reads([self._guarded(self.runner.read_row, op.request, self.model.requests[op.request])])
        if isinstance(op, Match):
            self._read_since_match.discard(op.request)
        settled = self._is_settled_by_model(op)
        outcome = super()._run(op)
        if settled and self._catches_up:
            self._look_around(op, outcome)
        return outcome

    def _look_around(self, op: Op, outcome: Outcome) -> None:
        """Check the whole cache at an operation that never reaches it."""
        seen = Observation(self.step, kind_of(op), named_requests(op), -1, outcome.refused, self.now, self.now)
        seen.written, seen.holds = self.runner.written, dict(self.holds)
        self._read(seen)
        self._check(seen)
        self._compare_states(seen)

    def _takes_row(self, op: Op) -> bool:
        requests = self.model.requests
        return isinstance(op, Alloc) and any(
            item.request in requests and requests[item.request].row is None for item in op.batch
        )

    def _see_before(self) -> None:
        """See the cache before an operation that is checked in full, and what is in flight, as if always watched."""
        self.now = self._snapshot()
        self._index = None
        rows = {view.request: view for view in self.now.rows or []}
        generations = self.now.pools["full"].page_generations or []
        row_generations = self.now.row_generations or []
        self.holds = {}
        for name, slots in self.runner.in_flight().items():
            if (view := rows.get(name)) is not None:
                pages = sorted({slot // self.config.page_size for slot in view.slots})
                held = {page: generations[page] if 0 <= page < len(generations) else 0 for page in pages}
                generation = row_generations[view.row] if 0 <= view.row < len(row_generations) else 0
                self.holds[name] = Hold(view.row, generation, held, list(slots))

    def _look(self, op: Op, seen: Observation, value: object, *, done: bool) -> None:
        if self._whole:
            super()._look(op, seen, value, done=done)
            if self._catches_up and seen.pool_got is None:
                self._read(seen)
            return
        self._glances.clear()
        for name in seen.requests if self._can_glance else ():
            request = self.model.requests.get(name)
            start = 0 if request is None else request.committed_len
            self._starts[name] = start = start - op.kept if done and isinstance(op, Commit) else start
            glance = self._guarded(cast(GlancingTarget, self.target).glance, name, start)
            self._glances[name] = cast(tuple[RequestView, list[int]] | None, glance)
        if done and isinstance(op, Commit | Checkpoint) and op.request in self.model.requests:
            self._read_near(op, seen)

    def _read_near(self, op: Commit | Checkpoint, seen: Observation) -> None:
        """Read the whole row at a checkpoint and at the first commit after a match, else the new positions."""
        name, request = op.request, self.model.requests[op.request]
        glance = self._glances.get(name)
        if isinstance(op, Checkpoint) or name not in self._read_since_match:
            read = self._guarded(self.runner.read_row, name, request)
            self._read_since_match.add(name)
        elif glance is None:
            return
        else:
            read = self._guarded(self.runner.read_end, name, request, glance[1][: op.kept])
        seen.reads = [] if read is None else [cast(Read, read)]

    def _check(self, seen: Observation) -> None:
        if self._whole:
            super()._check(seen)
        else:
            self._check_reads(seen.reads)

    def _check_reads(self, reads: Any) -> None:
        """Compare what was read with what belongs there; whose it is instead, the closer look tells."""
        for read in reads:
            if read is not None and read.expected != read.got:
                length = max(len(read.expected), len(read.got))  # a position that only one of them has is wrong
                wrong = [pos for pos in range(length) if read.expected[pos : pos + 1] != read.got[pos : pos + 1]]
                raise ContentWrong(
                    f"request {read.request} reads {len(wrong)} of {len(read.expected)} positions wrong, expected 0",
                    [("positions read", str(len(read.got))), ("wrong ones", listing(wrong))],
                )

    def _rows_of(self, seen: Observation) -> dict[str, int] | None:
        if self._whole or not self._can_glance:
            return super()._rows_of(seen)
        views = [glance[0] for glance in self._glances.values() if glance is not None]
        return {view.request: view.row for view in views if view.row is not None}

    def _compare_states(self, seen: Observation) -> None:
        if self._whole:
            super()._compare_states(seen)
            return
        for name, glance in self._glances.items():
            request = self.model.requests.get(name)
            expected, row = None, list[int]()
            if request is not None and request.state != "NEW":
                lengths = (request.protected_len, request.committed_len, request.allocated_len)
                expected = (request.state, *lengths, request.row)
                if request.row is not None:
                    row = self.model.rows.slots(request.row, self._starts[name], request.allocated_len)
            view = None if glance is None else glance[0]
            got = view and (view.state, view.protected_len, view.committed_len, view.allocated_len, view.row)
            if expected != got:
                facts = [("reference", str(expected)), (self.target.name, str(got))]
                raise RequestsDiffer(f"request {name} differs in state, lengths or row", facts)
            if glance is not None and row != glance[1]:
                facts = [("reference", listing(row)), (self.target.name, listing(glance[1]))]
                raise RowsDiffer(f"the row of request {name} differs from position {self._starts[name]} on", facts)

    def _finish(self, op: Op, seen: Observation, outcome: Outcome) -> None:
        seen.whole = self._whole
        super()._finish(op, seen, outcome)

    def _shown_after(self, seen: Observation) -> tuple[object, ...]:
        return super()._shown_after(seen) if self._whole else ()
