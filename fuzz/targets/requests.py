"""What every adapter needs and no engine has: names, states, lengths and refusals of the requests a target holds.

An engine trusts its scheduler: it never asks whether a name is live, or whether a pass is in flight. A target has
to say "no" as SPEC section 5 does. `RequestTable` says all of it that does not depend on the engine, in the order of
precedence. An adapter composes one, and each of its methods has the same three parts: ask the table, let the engine
act, tell the table:

    def match(self, request, tokens, namespace, priority, private):
        self.table.refuse_known(request, "match")
        engine_request, matched_len = ...  # the engine's own lookup
        live = self.table.matched(request, tokens, namespace, priority, private, matched_len)
        live.engine = engine_request
        return matched_len

    def alloc(self, batch):
        lives = self.table.batch(batch)
        ...  # refuse with OutOfRows, then OutOfPages; else let the engine take rows and pages
        for live, item in zip(lives, batch, strict=True):
            self.table.launched(live, item.n, item.drafts)

    def commit(self, request, kept, sampled):
        live = self.table.commit(request, kept, sampled)
        if live.abort_pending:
            ...  # the engine gives everything back
            self.table.ended(live)
        else:
            self.table.landed(live, kept, sampled)

Left out, because only the engine knows: `OutOfRows`, `OutOfPages`, the protected length, rows, pages and locks. A
request that waits (NEW) is not in the table: a target first hears of it at ``match`` or ``peek``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvlockstep.fuzz.ops import AllocItem, Namespace
from kvlockstep.fuzz.targets.base import (
    BadArgument,
    ContextTooLong,
    DuplicateInBatch,
    EmptyBatch,
    InFlight,
    UnknownRequest,
    WrongState,
)

LiveState = Literal["MATCHED", "RUNNING", "IN_FLIGHT"]

ALLOWED_IN: dict[str, tuple[LiveState, ...]] = {
    "alloc": ("MATCHED", "RUNNING"),
    "commit": ("IN_FLIGHT",),
    "checkpoint": ("RUNNING",),
    "release": ("RUNNING",),
    "abort": ("MATCHED", "RUNNING", "IN_FLIGHT"),
    "retract": ("MATCHED", "RUNNING"),
}
"""The states in which an operation that names a live request is allowed; ``match`` and ``peek`` in none."""


@dataclass(slots=True, eq=False)
class Live:
    """A request between its match and its release, abort or retract.

    With tokens ``a b c d``, ``a b`` found by the match and a pass over ``c d`` and the guess ``x`` in flight:
    ``committed_len`` 2, ``allocated_len`` 5, ``n`` 3, ``drafts`` ``[x]``.
    """

    request: str
    tokens: list[int]
    namespace: Namespace
    priority: int = 0
    private: bool = False
    state: LiveState = "MATCHED"
    committed_len: int = 0
    allocated_len: int = 0
    n: int = 0  # positions of the pass in flight
    drafts: list[int] = field(default_factory=list)  # those of the pass in flight
    abort_pending: bool = False
    engine: Any = None  # the adapter's own object for this request

    @property
    def uncomputed(self) -> int:
        """Count the known tokens that have no KV yet."""
        return len(self.tokens) - self.committed_len

    @property
    def known_in_flight(self) -> int:
        """Count the positions of the pass in flight that are no guesses."""
        return self.n - len(self.drafts)


class RequestTable:
    """The live requests of one target, by name."""

    def __init__(self, max_context_len: int) -> None:
        self.max_context_len = max_context_len
        self.live: dict[str, Live] = {}

    # Questions. They change nothing, and raise the refusal of an operation that must not run now.

    def refuse_known(self, request: str, operation: str = "match") -> None:
        """Refuse a ``match`` or ``peek`` of a live name; any other name is welcome.

        Refuses: InFlight, WrongState.
        """
        if request in self.live:
            self._refuse_state(self.live[request], operation, ())

    def named(self, request: str, operation: str) -> Live:
        """Return the live request that an operation may act on.

        Refuses: UnknownRequest, InFlight, WrongState.
        """
        live = self.live.get(request)
        if live is None:
            raise UnknownRequest(f"{operation} {request}: no such request")
        self._refuse_state(live, operation, ALLOWED_IN[operation])
        return live

    def batch(self, items: Sequence[AllocItem]) -> list[Live]:
        """Return the live requests of an ``alloc``, in batch order. Rows and pages are the adapter's to refuse.

        Refuses: EmptyBatch, DuplicateInBatch; then item by item UnknownRequest, InFlight, WrongState, BadArgument,
        ContextTooLong.
        """
        if not items:
            raise EmptyBatch("alloc: 0 requests, expected 1 or more")
        seen: set[str] = set()
        for item in items:
            if item.request in seen:
                raise DuplicateInBatch(f"alloc: {item.request} stands in the batch more than once")
            seen.add(item.request)
        return [self._item(item) for item in items]

    def commit(self, request: str, kept: int, sampled: Sequence[int]) -> Live:
        """Return the live request whose pass lands so. With ``abort_pending`` the adapter ends it; else `landed`.

        Refuses: UnknownRequest, WrongState, BadArgument.
        """
        live = self.named(request, "commit")
        known = live.known_in_flight
        if kept != 0 and not known <= kept <= live.n:
            raise BadArgument(f"commit {request}: {kept} kept, expected 0 or {known}..{live.n}")
        if len(sampled) > 1:
            raise BadArgument(f"commit {request}: {len(sampled)} tokens sampled, expected at most 1")
        if sampled and (kept == 0 or known < live.uncomputed):
            raise BadArgument(f"commit {request}: a token sampled before all known tokens are computed")
        return live

    def abort(self, request: str) -> Live | None:
        """Return the live request to end now; None where its pass is in flight, and the abort waits for `commit`.

        Refuses: UnknownRequest.
        """
        live = self.named(request, "abort")
        if live.state == "IN_FLIGHT":
            live.abort_pending = True
            return None
        return live

    def evict_check(self, n_slots: int) -> None:
        """Refuse an ``evict`` of nothing.

        Refuses: BadArgument.
        """
        if n_slots < 1:
            raise BadArgument(f"evict: {n_slots} slots asked, expected 1 or more")

    def reset_check(self) -> None:
        """Refuse a ``reset`` while any request is live.

        Refuses: WrongState.
        """
        for live in self.live.values():
            raise WrongState(f"reset: {live.request} is {live.state}")

    # News. The engine has acted; these cannot fail.

    def matched(
        self,
        request: str,
        tokens: Sequence[int],
        namespace: Namespace,
        priority: int,
        private: bool,
        matched_len: int,
    ) -> Live:
        """Take in a request whose first ``matched_len`` tokens the engine had, and has locked."""
        live = Live(request, list(tokens), namespace, priority, private)
        live.committed_len = live.allocated_len = matched_len
        self.live[request] = live
        return live

    def launched(self, live: Live, n: int, drafts: Sequence[int]) -> None:
        """Note that a pass over ``n`` positions runs, the last ``len(drafts)`` of them guesses."""
        live.n = n
        live.drafts = list(drafts)
        live.allocated_len = max(live.allocated_len, live.committed_len + n)
        live.state = "IN_FLIGHT"

    def landed(self, live: Live, kept: int, sampled: Sequence[int]) -> None:
        """Note that ``kept`` positions stand: accepted guesses, then the sample, become tokens.

        Before: `commit` let it through, and no abort is pending.
        """
        assert not live.abort_pending, f"{live.request} ends here, its abort was pending"
        accepted = max(0, kept - live.known_in_flight)
        live.tokens += [*live.drafts[:accepted], *sampled]
        live.committed_len += kept
        live.n = 0
        live.drafts = []
        live.state = "RUNNING"

    def ended(self, live: Live) -> None:
        """Forget a request that was released, aborted or retracted."""
        del self.live[live.request]

    # Parts of questions.

    def _refuse_state(self, live: Live, operation: str, allowed: tuple[LiveState, ...]) -> None:
        if live.state in allowed:
            return
        if live.state == "IN_FLIGHT":
            raise InFlight(f"{operation} {live.request}: its pass has not landed")
        expected = " or ".join(allowed) or "a name that is not live"
        raise WrongState(f"{operation} {live.request}: state {live.state}, expected {expected}")

    def _item(self, item: AllocItem) -> Live:
        live = self.named(item.request, "alloc")
        known = item.n - len(item.drafts)
        if not 1 <= known <= live.uncomputed:
            raise BadArgument(f"alloc {item.request}: {known} known tokens asked, expected 1..{live.uncomputed}")
        if item.drafts and known < live.uncomputed:
            raise BadArgument(f"alloc {item.request}: drafts after {known} of {live.uncomputed} known tokens")
        end = live.committed_len + item.n
        if end > self.max_context_len:
            raise ContextTooLong(f"alloc {item.request}: {end} positions asked, a row has {self.max_context_len}")
        return live
