"""A lockstep that leaves out laws on purpose, so that damage goes on until another law notices.

A trace that a harness with fewer eyes found, one that looks at content alone, say, stops earlier here than it did
there; with what that harness does not look at left out, it runs as far.
Left out are whole laws, 1 to 12, and the COMPARISON with the model.
"""

from collections.abc import Sequence

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import signature_of
from kvlockstep.fuzz.lockstep import COMPARISON, Lockstep
from kvlockstep.fuzz.ops import Op, kind_of
from kvlockstep.fuzz.registry import Factory
from kvlockstep.fuzz.story import Step, Story, tell
from kvlockstep.fuzz.targets.base import Target
from kvlockstep.fuzz.targets.reference import snapshot_of
from kvlockstep.invariants import Observation, Violation
from kvlockstep.invariants.checks import CHECKS, run_every_check

LAW_OF: dict[type[Violation], int] = {kind: check.law for check in CHECKS for kind in check.violations}


class Lenient(Lockstep):
    """A lockstep that leaves out any number of laws, and can pass over operations that are known to hold.

    Without the comparison the model still has to follow the target. At the first operation where it cannot, the
    lockstep is ``lost``, and runs nothing any more.
    """

    def __init__(self, config: CacheConfig, target: Target, without: frozenset[int] = frozenset()) -> None:
        super().__init__(config, target, without=COMPARISON if COMPARISON in without else None)
        self._left_out = without
        self._looks = True

    @property
    def lost(self) -> bool:
        """Whether the model could not follow the target."""
        return self._lost

    def run_unchecked(self, ops: Sequence[Op]) -> None:
        """Run operations of which all is known to hold, without a look at them."""
        kept, self._looks, self._without = self._without, False, COMPARISON
        for op in ops:
            self.run(op)
        self._looks, self._without = True, kept

    def _check(self, seen: Observation) -> None:
        if not self._looks:
            self._index = None
        elif not self._left_out:
            super()._check(seen)
        else:
            for violation in run_every_check(seen).violations:
                if LAW_OF[type(violation)] not in self._left_out:
                    raise violation


def tell_without(config: CacheConfig, ops: Sequence[Op], factory: Factory, without: frozenset[int]) -> Story:
    """Tell a trace as `tell` does, with these laws left out.

    It ends, too, where the model is lost, and before an operation that cannot be run on what is broken by then.
    """
    if not without:
        return tell(config, ops, factory)
    lockstep = Lenient(config, factory(config), without)
    first, steps = lockstep.now, list[Step]()
    violation = signature = None
    for index, op in enumerate(ops):
        before, outcome, lockstep.seen = lockstep.now, None, None
        try:
            outcome = lockstep.run(op)
        except Violation as broken:
            violation, signature = broken, signature_of(broken, kind_of(op))
        except Exception:
            break
        model = snapshot_of(lockstep.model)
        steps.append(Step(index, op, outcome, before, lockstep.now, model, lockstep.seen))
        if violation is not None or lockstep.lost:
            break
    return Story(config, lockstep.target.name, first, tuple(steps), violation, signature)
