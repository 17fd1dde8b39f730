"""The operations of SPEC section 5 as data: what is generated, printed, stored, replayed and minimized.

An operation names requests (``r0``), never objects, and is total: on a name that is not live, or in
the wrong state, both sides refuse it and nothing changes. So every sub-list of a trace is a trace.
"""

from dataclasses import dataclass

from kvlockstep.fuzz.pieces import Pieces

Namespace = tuple[str | None, str | None, tuple[str, ...]]
NO_NAMESPACE: Namespace = (None, None, ())


@dataclass(frozen=True, slots=True)
class Submit:
    request: str
    tokens: tuple[int, ...] | Pieces
    namespace: Namespace = NO_NAMESPACE
    priority: int = 0
    private: bool = False


@dataclass(frozen=True, slots=True)
class Peek:
    request: str


@dataclass(frozen=True, slots=True)
class Match:
    request: str


@dataclass(frozen=True, slots=True)
class AllocItem:
    """``n`` positions to compute for one request, the last ``len(drafts)`` of them drafts."""

    request: str
    n: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Alloc:
    batch: tuple[AllocItem, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """The pass of ``request`` ran: ``kept`` of its ``n`` positions stand, ``sampled`` has at most one token."""

    request: str
    kept: int
    sampled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    request: str


@dataclass(frozen=True, slots=True)
class Release:
    request: str


@dataclass(frozen=True, slots=True)
class Abort:
    request: str


@dataclass(frozen=True, slots=True)
class Retract:
    request: str
    publish: bool = False


@dataclass(frozen=True, slots=True)
class Evict:
    n: int  # slots


@dataclass(frozen=True, slots=True)
class Reset:
    pass


Op = Submit | Peek | Match | Alloc | Commit | Checkpoint | Release | Abort | Retract | Evict | Reset
OPS: tuple[type[Op], ...] = (
    Submit,
    Peek,
    Match,
    Alloc,
    Commit,
    Checkpoint,
    Release,
    Abort,
    Retract,
    Evict,
    Reset,
)


def kind_of(op: Op) -> str:
    """Name of the operation in traces, statistics and messages: ``alloc`` for an Alloc."""
    return type(op).__name__.lower()


def named_requests(op: Op) -> list[str]:
    """Requests that the operation names, in batch order."""
    if isinstance(op, Alloc):
        return [item.request for item in op.batch]
    if isinstance(op, Evict | Reset):
        return []
    return [op.request]
