"""Finds the root of a failure: the simplest trace on which the same law breaks, whatever operation it ends with.

One mistake shows itself in several forms. A split that forgets a lock is seen after the match that splits, or after
a release that does; a row with a hole names free pages, or those of others. Each form has a signature of its own, and
is kept. But forms that come down to the same simplest one are, as far as can be told, one cause, and are shown as
one. Two mistakes that break the same law in the same place would look like one too: then the second one shows when the
first is repaired, for its traces are still there.
"""

from collections.abc import Iterator

from kvlockstep.fuzz.minimize import Minimizer, Ops
from kvlockstep.fuzz.ops import (
    Abort,
    Alloc,
    AllocItem,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Op,
    Peek,
    Release,
    Reset,
    Retract,
    kind_of,
    named_requests,
)

ORDER = ("submit", "peek", "match", "alloc", "commit", "checkpoint", "release", "abort", "retract", "evict", "reset")
"""Of endings that do the same the first is taken."""


class RootSearch(Minimizer):
    """A minimizer that minds the law only. After ``run``, ``signature`` is that of the root, as far as it came."""

    def run(self) -> bool:
        """Search in place. Return True if no further step helped, False if the time ran out first."""
        if not super().run():
            return False
        while self._end_otherwise():
            if not super().run():
                return False
        return not self.is_late()

    def is_same(self, signature: str | None) -> bool:
        """Tell whether a candidate breaks the same law; what it is called may change."""
        if signature is None or signature.partition(".")[0] != self.signature.partition(".")[0]:
            return False
        self.signature = signature
        return True

    def _end_otherwise(self) -> bool:
        """Let the trace end sooner, with any operation; True if one breaks the law with less, or in a plainer way."""
        for n_kept in range(len(self.ops)):
            for ending in _endings(self.ops[:n_kept]):
                as_long = n_kept == len(self.ops) - 1
                if as_long and ORDER.index(kind_of(ending)) >= ORDER.index(kind_of(self.ops[-1])):
                    break
                if self._accept(self.config, (*self.ops[:n_kept], ending)):
                    return True
                if self.is_late():
                    return False
        return False


def _endings(ops: Ops) -> Iterator[Op]:
    """Yield operations that a trace may end with, the plainer ones first."""
    names = list(dict.fromkeys(name for op in ops for name in named_requests(op)))
    for name in names:
        yield Peek(name)
    for name in names:
        yield Match(name)
    for name in names:
        yield Alloc((AllocItem(name, 1, ()),))
    for name in names:
        yield from (Commit(name, kept, ()) for kept in (0, 1))
    for kind in (Checkpoint, Release, Abort):
        yield from (kind(name) for name in names)
    yield from (Retract(name, False) for name in names)
    yield Evict(1)
    yield Reset()
