"""The contract of a target: one class with these methods makes a cache testable.

Only lists, ints and the plain dataclasses named here cross this line, never a tensor.

Beyond the members of `Target` a target may have:

* ``options: tuple[str, ...]``: its own switches. Each is drawn on or off for a case and then stands in
  ``CacheConfig.options``; the default config has none on. A factory raises for one that it does not know.
* ``page_sizes: tuple[int, ...]``: those that are drawn for it, in place of `PAGE_SIZES`.
* ``allowances: frozenset[str]``: named differences from SPEC, from ``reference/allowances.py``.
* ``glance(request, start)``: one request without the rest of the cache, for long traces on large pools (``sparse.py``).
* ``forget(request)``: called when a waiting request that it has seen in ``peek`` or ``retract`` ends unmatched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from kvlockstep.fuzz.ops import AllocItem, Namespace
from kvlockstep.invariants import RequestView, Snapshot


class Refused(Exception):
    """An expected "no". Nothing has changed, except that a ``legal`` target may have evicted."""

    def __init__(self, text: str = "", evicted: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(text)
        self.evicted = [list(slots) for slots in evicted]


class EmptyBatch(Refused):
    """An ``alloc`` of nothing."""


class DuplicateInBatch(Refused):
    """One request stands twice in a batch."""


class UnknownRequest(Refused):
    """The name is not live."""


class InFlight(Refused):
    """The request's pass has not landed."""


class WrongState(Refused):
    """The operation is not allowed in the request's state."""


class BadArgument(Refused):
    """A number or token list that no state would allow."""


class ContextTooLong(Refused):
    """More positions than a row has."""


class OutOfRows(Refused):
    """No row left for one more request."""


class OutOfPages(Refused):
    """Free and evictable pages do not cover the need."""


REFUSALS: tuple[type[Refused], ...] = (
    EmptyBatch,
    DuplicateInBatch,
    UnknownRequest,
    InFlight,
    WrongState,
    BadArgument,
    ContextTooLong,
    OutOfRows,
    OutOfPages,
)
"""In order of precedence."""


@dataclass(slots=True)
class AllocResult:
    """What an accepted ``alloc`` did."""

    write_sets: list[list[int]]  # in batch order; slots of positions [committed_len, committed_len + n)
    evicted: list[list[int]] = field(default_factory=list)  # freed slots per node, in victim order


@runtime_checkable
class Target(Protocol):
    """A cache under test. Every method may raise a subclass of Refused; anything else it raises is a crash."""

    name: str
    conformance: Literal["exact", "legal"]
    capabilities: frozenset[str]

    def peek(self, request: str, tokens: Sequence[int], namespace: Namespace, private: bool) -> int: ...

    def match(self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int, private: bool) -> int: ...

    def alloc(self, batch: Sequence[AllocItem]) -> AllocResult: ...

    def commit(self, request: str, kept: int, sampled: Sequence[int]) -> None: ...

    def checkpoint(self, request: str) -> None: ...

    def release(self, request: str) -> None: ...

    def abort(self, request: str) -> None: ...

    def retract(self, request: str, publish: bool) -> None: ...

    def evict(self, n_slots: int) -> list[list[int]]: ...

    def reset(self) -> None: ...

    def snapshot(self) -> Snapshot: ...


class RememberingTarget(Target, Protocol):
    """A target that keeps something of a request that waits."""

    def forget(self, request: str) -> None: ...


class GlancingTarget(Target, Protocol):
    """A target that can show one request in a time that does not grow with the cache."""

    def glance(self, request: str, start: int) -> tuple[RequestView, list[int]] | None:
        """Give the request as a snapshot does, and what its row names from ``start`` on; None if it is not live."""


class KvTarget(Target, Protocol):
    """A target with the capability ``"kv"``: one 32-bit fingerprint a slot, in every layer's K and V."""

    def write_kv(self, slots: Sequence[int], values: Sequence[int]) -> None: ...

    def read_kv(self, row: int, length: int) -> list[int]: ...

    def read_slots(self, slots: Sequence[int]) -> list[int]: ...


PAGE_SIZES = (1, 2, 3, 4, 16)
"""What is drawn for a target that names none of its own."""


def options_of(target: object) -> tuple[str, ...]:
    """Return the switches that may be drawn for a target."""
    return tuple(getattr(target, "options", ()))


def page_sizes_of(target: object) -> tuple[int, ...]:
    """Return the page sizes that are drawn for a target."""
    return tuple(getattr(target, "page_sizes", PAGE_SIZES))


def allowances_of(target: object) -> frozenset[str]:
    """Return the differences from SPEC that a target declares."""
    return frozenset(getattr(target, "allowances", ()))
