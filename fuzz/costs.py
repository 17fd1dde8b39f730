"""What a replay did with the cache and what it took: hits, evictions, operations, seconds, memory; as text and JSON.

Seconds and memory are of the run alone and of its whole process. They stand beside a verdict and are never part of a
digest.
"""

import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from kvlockstep.fuzz.ops import Op
from kvlockstep.invariants import Observation

SAY_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one replay on one target. ``check_every`` is the k of `SparseLockstep`; tokens are counted at each match."""

    check_every: int
    operations: int
    refused: int
    prompt_tokens: int
    matched_tokens: int
    evicted_pages: int
    seconds: float
    peak_bytes: int

    @property
    def hit_rate(self) -> float:
        return self.matched_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def lines(self) -> list[str]:
        """Say it below a verdict."""
        return [f"  checked   {self._checked()}", f"  hits      {self._hits()}", f"  took      {self._took()}"]

    def row(self) -> str:
        """Say it in one line."""
        return f"{self._hits()}; {self._took()}; {self._checked()}"

    def _checked(self) -> str:
        if self.check_every == 1:
            return "the whole cache after every operation"
        return f"every operation; the whole cache every {self.check_every:,} operations, and at the end"

    def _hits(self) -> str:
        rate = f"{self.matched_tokens:,} of {self.prompt_tokens:,} prompt tokens ({self.hit_rate:.2%})"
        return f"{rate}, {self.evicted_pages:,} pages evicted"

    def _took(self) -> str:
        return f"{self.seconds:.1f} s, {self.peak_bytes / 1e6:,.0f} MB of memory at its peak"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Cost":
        return cls(**{name: data[name] for name in cls.__slots__})


def peak_bytes() -> int:
    """Return how much memory this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class Progress:
    """Says every few seconds how far a run is: a ``watch`` of a Lockstep. ``say`` prints a line."""

    def __init__(self, n_ops: int, say: Callable[[str], None]) -> None:
        self._n_ops = n_ops
        self._say = say
        self._done = 0
        self._start = monotonic()
        self._next = self._start + SAY_EVERY_S

    def __call__(self, op: Op, seen: Observation) -> None:
        self._done += 1
        if (now := monotonic()) > self._next:
            self._next = now + SAY_EVERY_S
            rate = self._done / (now - self._start)
            self._say(f"{self._done:,} of {self._n_ops:,} operations ({rate:,.0f}/s)")
