"""A lockstep that leaves out laws on purpose, so that damage goes on until another law notices.

A trace that a harness with fewer eyes found, one that looks at content alone, say, stops earlier here than it did
there; with what that harness does not look at left out, it runs as far.
Left out are whole laws, 1 to 12, and the COMPARISON with the model.
"""

from collections.abc import Sequence

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import describe_op
from kvlockstep.fuzz.lockstep import COMPARISON, Lockstep, Outcome
from kvlockstep.fuzz.ops import Op
from kvlockstep.fuzz.registry import Factory
from kvlockstep.fuzz.story import CannotRun, Story, follow, tell
from kvlockstep.fuzz.targets.base import Target
from kvlockstep.invariants import Observation, Violation
from kvlockstep.invariants.checks import CHECKS, run_every_check

LAW_OF: dict[type[Violation], int] = {kind: check.law for check in CHECKS for kind in check.violations}


class Lenient(Lockstep):
    """A lockstep that leaves out any number of laws, and can pass over operations that are known to hold.

    Without the comparison the model still has to follow the target. At the first operation where it cannot, the
    lockstep has ``stopped``. An operation that cannot be run at all, on what is broken by then, raises CannotRun.
    """

    def __init__(self, config: CacheConfig, target: Target, without: frozenset[int] = frozenset()) -> None:
        super().__init__(config, target, without=COMPARISON if COMPARISON in without else None)
        self._left_out = without
        self._looks = True

    def run(self, op: Op) -> Outcome:
        try:
            return super().run(op)
        except Violation:
            raise
        except Exception as error:
            if not self._left_out:
                raise
            raise CannotRun(f"{describe_op(op)} cannot be run: {type(error).__name__}: {error}") from error

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
    """Tell a trace as `tell` does, with these laws left out. Raises TargetUnusable."""
    return follow(Lenient(config, factory(config), without), ops) if without else tell(config, ops, factory)
