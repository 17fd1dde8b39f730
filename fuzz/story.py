"""Runs a trace and keeps all that was seen of it, step by step: what pictures, lives and explanations are made of.

Both sides are kept after each operation. At the step that breaks a law the model is where the check found it: before
the operation, if that is an alloc or an evict whose choices were not accepted, else after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import signature_of
from kvlockstep.fuzz.lockstep import Lockstep, Outcome
from kvlockstep.fuzz.ops import Op, kind_of
from kvlockstep.fuzz.registry import Factory
from kvlockstep.fuzz.targets.reference import snapshot_of
from kvlockstep.invariants import Observation, Snapshot, Violation


@dataclass(frozen=True, slots=True)
class Step:
    """One operation and what it did. ``seen`` is None where the target raised before anything could be seen."""

    index: int
    op: Op
    outcome: Outcome | None  # None at the step that breaks a law
    before: Snapshot  # of the target
    after: Snapshot  # of the target; at a step that could not be seen the one before
    model: Snapshot
    seen: Observation | None


@dataclass(frozen=True, slots=True)
class Story:
    """A trace as it was run, up to and with the first violation."""

    config: CacheConfig
    target: str
    first: Snapshot  # of the target, before anything
    steps: tuple[Step, ...]
    violation: Violation | None
    signature: str | None
    stopped: str | None = None  # why it ends before the trace does, if no law was broken


class CannotRun(Exception):
    """An operation cannot be run on what is broken by then; the text is half a sentence that says which, and why."""


def tell(config: CacheConfig, ops: Sequence[Op], factory: Factory) -> Story:
    """Run ``ops`` from a fresh state until the first violation, if there is one. Raises TargetUnusable."""
    return follow(Lockstep(config, factory(config)), ops)


def follow(lockstep: Lockstep, ops: Sequence[Op]) -> Story:
    """Run ``ops`` on a fresh lockstep until the first violation, or until it stops."""
    first, steps = lockstep.now, list[Step]()
    violation, stopped = None, None
    for index, op in enumerate(ops):
        before, outcome, lockstep.seen = lockstep.now, None, None
        try:
            outcome = lockstep.run(op)
        except Violation as broken:
            violation = broken
        except CannotRun as error:
            stopped = str(error)
            break
        model = snapshot_of(lockstep.model)
        steps.append(Step(index, op, outcome, before, lockstep.now, model, lockstep.seen))
        stopped = lockstep.stopped
        if violation is not None or stopped is not None:
            break
    signature = signature_of(violation, kind_of(steps[-1].op)) if violation is not None else None
    return Story(lockstep.config, lockstep.target.name, first, tuple(steps), violation, signature, stopped)
