"""Plays the model: writes a fingerprint where a forward pass would write keys and values, and reads them back.

The KV of a token depends on every token before it and on the namespace, so a fingerprint does too. It is
written into the slots that ``alloc`` returned, kept until the pass lands and never looked up again in the
row; and it is read back through the cache's own gather path (SPEC section 8). Any aliasing, stale row,
wrong canonical copy, cross-namespace sharing or late write then reads as a wrong fingerprint, whatever
the bookkeeping says.

Not done here: the comparison (``invariants/content.py``, ``invariants/writes.py``).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvlockstep.fuzz.ops import Namespace
from kvlockstep.fuzz.targets.base import KvTarget
from kvlockstep.invariants import Read

_MASK = (1 << 64) - 1


class RequestFacts(Protocol):
    """What the runner reads of a request of the model."""

    tokens: list[int]
    namespace: Namespace
    private: bool
    committed_len: int
    row: int | None


@dataclass(slots=True)
class Pass:
    """A forward pass in flight: the slots it may write, as ``alloc`` returned them, and what it will write."""

    slots: list[int]
    values: list[int]


def seed_of(namespace: Namespace, private_to: str | None) -> int:
    """Return the 64-bit start of the rolling hash of one namespace; a private request has one of its own."""
    text = json.dumps([namespace, private_to])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def extend(state: int, tokens: Sequence[int]) -> tuple[int, list[int]]:
    """Roll ``state`` over ``tokens``; return the new state and one 32-bit fingerprint a token.

    The step is the xor-multiply-shift of Steele's SplitMix64 with the token folded in.
    """
    fingerprints = []
    for token in tokens:
        state = ((state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 31
        fingerprints.append(state >> 32)
    return state, fingerprints


class ModelRunner:
    """Fingerprints of every live request, passes in flight, and a shadow of what the pool must hold.

    Works without a pool too (``target`` None): then nothing is written or read, and ``written`` still
    says what each slot would hold, which is what law 10 asks.
    """

    def __init__(self, target: KvTarget | None, n_slots: int) -> None:
        self.target = target
        self.written: dict[int, int] = {}
        self._all_slots = list(range(n_slots))
        self.pool_expected = self.read_pool()
        self._states: dict[str, int] = {}
        self._fingerprints: dict[str, list[int]] = {}
        self._passes: dict[str, Pass] = {}

    def fingerprints(self, name: str, request: RequestFacts) -> list[int]:
        """Return the fingerprints of all tokens of a live request, one a position."""
        known = self._fingerprints.get(name)
        if known is None:
            self._states[name] = seed_of(request.namespace, name if request.private else None)
            known = self._fingerprints[name] = []
        if len(known) < len(request.tokens):
            self._states[name], more = extend(self._states[name], request.tokens[len(known) :])
            known += more
        return known

    def forget(self, name: str) -> None:
        """Drop a name that is no longer live; a later request of that name is another one."""
        self._fingerprints.pop(name, None)
        self._states.pop(name, None)

    def launch(self, name: str, request: RequestFacts, slots: list[int], drafts: Sequence[int]) -> None:
        """Start the pass over positions ``[committed_len, committed_len + len(slots))``, drafts last."""
        known = self.fingerprints(name, request)
        values = known[request.committed_len : request.committed_len + len(slots) - len(drafts)]
        if drafts:
            values += extend(self._states[name], drafts)[1]
        self._passes[name] = Pass(list(slots), values)

    def land(self, name: str) -> None:
        """Write what the pass of this request computed, drafts included, into the slots it was given.

        Writes: exactly the write set of the ``alloc`` that launched it.
        """
        landed = self._passes.pop(name)
        self.written.update(zip(landed.slots, landed.values, strict=True))
        if self.target is None:
            return
        self.target.write_kv(landed.slots, landed.values)
        if self.pool_expected is not None:
            for slot, value in zip(landed.slots, landed.values, strict=True):
                self.pool_expected[slot] = value

    def in_flight(self) -> dict[str, list[int]]:
        """Give the write set of each pass in flight, by request."""
        return {name: flying.slots for name, flying in self._passes.items()}

    def read_row(self, name: str, request: RequestFacts) -> Read | None:
        """Read ``[0, committed_len)`` of one row through the gather path; None where there is no pool or no row."""
        if self.target is None or request.row is None:
            return None
        expected = self.fingerprints(name, request)[: request.committed_len]
        got = self.target.read_kv(request.row, request.committed_len)
        return Read(name, request.row, expected, _ints("read_kv", got))

    def read_end(self, name: str, request: RequestFacts, slots: list[int]) -> Read | None:
        """Read the last committed positions of one request, which its row names as ``slots``.

        None where there is no row, or a target without ``read_slots``.
        """
        if self.target is None or request.row is None or not hasattr(self.target, "read_slots"):
            return None
        end = request.committed_len
        expected = self.fingerprints(name, request)[end - len(slots) : end]
        return Read(name, request.row, expected, _ints("read_slots", self.target.read_slots(slots)))

    def read_rows(self, live: dict[str, RequestFacts]) -> list[Read]:
        """Read ``[0, committed_len)`` of every live row back through the cache's gather path."""
        reads = [self.read_row(name, request) for name, request in live.items() if request.committed_len]
        return [read for read in reads if read is not None]

    def read_pool(self) -> list[int] | None:
        """Read every slot of the pool, the padding page's included; None if the target has no ``read_slots``."""
        if self.target is None or not hasattr(self.target, "read_slots"):
            return None
        return _ints("read_slots", self.target.read_slots(self._all_slots))


def _ints(method: str, values: object) -> list[int]:
    """Refuse what is no list of plain ints, told by its first entry: numbers of other libraries compare otherwise."""
    if not isinstance(values, list) or (values and type(values[0]) is not int):
        raise TypeError(f"{method} returned {type(values).__name__}, expected a list of plain ints")
    return values
