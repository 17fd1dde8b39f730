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


def tell(config: CacheConfig, ops: Sequence[Op], factory: Factory) -> Story:
    """Run ``ops`` from a fresh state until the first violation, if there is one. Raises TargetUnusable."""
    lockstep = Lockstep(config, factory(config))
    first, steps = lockstep.now, list[Step]()
    for index, op in enumerate(ops):
        before, outcome, violation = lockstep.now, None, None
        lockstep.seen = None
        try:
            outcome = lockstep.run(op)
        except Violation as broken:
            violation = broken
        model = snapshot_of(lockstep.model)
        steps.append(Step(index, op, outcome, before, lockstep.now, model, lockstep.seen))
        if violation is not None:
            signature = signature_of(violation, kind_of(op))
            return Story(config, lockstep.target.name, first, tuple(steps), violation, signature)
    return Story(config, lockstep.target.name, first, tuple(steps), None, None)
