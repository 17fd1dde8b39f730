"""The state of the cache, and every question about it that changes nothing.

The main one is `refusal`: what would the operation be refused with now? Its answers follow the
precedence of SPEC section 5: first the shape of a batch, then item by item name, flight, state,
argument and context length, then rows and pages for the whole batch.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from kvlockstep.reference.allowances import ALLOWANCES
from kvlockstep.reference.arithmetic import new_pages_needed, pages_filled, publishable_pages
from kvlockstep.reference.eviction import POLICIES, edge_slots, evictable_nodes, plan_eviction
from kvlockstep.reference.keys import PageKey, page_keys, units_of
from kvlockstep.reference.pages import Pages
from kvlockstep.reference.refusals import (
    BadArgument,
    ContextTooLong,
    DuplicateInBatch,
    EmptyBatch,
    InFlight,
    OutOfPages,
    OutOfRows,
    Refused,
    UnknownRequest,
    WrongState,
)
from kvlockstep.reference.requests import Request
from kvlockstep.reference.rows import Rows
from kvlockstep.reference.tree import Tree, Vertex, lock_counts

BatchItem = tuple[str, int, Sequence[int]]
"""``(request, n, drafts)``."""

ALLOWED_STATES = {
    "peek": ("NEW",),
    "match": ("NEW",),
    "alloc": ("MATCHED", "RUNNING"),
    "commit": ("IN_FLIGHT",),
    "checkpoint": ("RUNNING",),
    "release": ("RUNNING",),
    "abort": ("NEW", "MATCHED", "RUNNING", "IN_FLIGHT"),
    "retract": ("MATCHED", "RUNNING"),
}


class CacheState:
    """Requests, rows, pages and tree of one cache.

    ``allowances`` are differences from SPEC that this cache has; ``allowed`` counts where each made one.
    """

    def __init__(
        self,
        *,
        page_size: int,
        n_pages: int,
        n_rows: int,
        max_context_len: int,
        policy: str = "lru",
        key_units: str = "token",
        prefix_sharing: bool = True,
        allowances: Collection[str] = frozenset(),
    ) -> None:
        assert set(allowances) <= set(ALLOWANCES), f"allowances {sorted(allowances)} are among {ALLOWANCES}"
        assert policy in POLICIES, f"policy {policy} is one of {POLICIES}"
        assert key_units in ("token", "bigram"), f"key_units {key_units} is token or bigram"
        self.page_size = page_size
        self.max_context_len = max_context_len
        self.policy = policy
        self.key_units = key_units
        self.prefix_sharing = prefix_sharing
        self.requests: dict[str, Request] = {}
        self.rows = Rows(n_rows, page_size)
        self.pages = Pages(n_pages)
        self.allowances = frozenset(allowances)
        self.allowed: Counter[str] = Counter()
        self.tree = Tree(self.allowances, self.allowed)

    # Sizes, in slots.

    @property
    def available(self) -> int:
        """Slots of the free pages."""
        return self.pages.n_free * self.page_size

    @property
    def evictable(self) -> int:
        """Slots on nodes that nobody locks."""
        return (len(self.tree.vertices()) - len(self.lock_counts())) * self.page_size

    @property
    def protected(self) -> int:
        """Slots on nodes that somebody locks."""
        return len(self.lock_counts()) * self.page_size

    # Locks and lengths.

    def lock_counts(self) -> dict[Vertex, int]:
        """Count the live locks at or below each page of the tree; pages without one are left out."""
        return lock_counts(r.anchor for r in self.requests.values() if r.anchor is not None)

    def evictable_nodes(self) -> list[list[Vertex]]:
        """List the edges of the nodes that eviction may take now."""
        return evictable_nodes(self.tree.vertices(), self.lock_counts())

    def shares(self, r: Request) -> bool:
        """Tell whether this request matches and publishes at all."""
        return self.prefix_sharing and not r.private

    def matchable_keys(self, r: Request) -> list[PageKey]:
        """Spell the pages that a match may find: those of all tokens but the last."""
        if not self.shares(r):
            return []
        n_units = units_of(len(r.tokens) - 1, self.key_units)
        return page_keys(r.tokens, self.key_units, self.page_size, 0, pages_filled(n_units, self.page_size))

    def publishable_pages(self, r: Request) -> int:
        """Count the pages that a publication of this request makes the tree hold, from position 0."""
        if not self.shares(r):
            return 0
        return publishable_pages(r.committed_len, r.protected_len, self.page_size, self.key_units)

    def tail_pages(self, r: Request) -> list[int]:
        """List the pages of ``[protected_len, allocated_len)``: the request's own, slack included."""
        if r.row is None:
            return []
        return self.rows.pages_of[r.row][pages_filled(r.protected_len, self.page_size) :]

    # What an alloc needs.

    def new_pages_needed(self, r: Request, n: int) -> int:
        """Count the whole new pages for ``n`` more positions: what is allocated already is used first."""
        return new_pages_needed(r.committed_len, n, r.allocated_len, self.page_size)

    def pages_needed(self, batch: Sequence[BatchItem]) -> int:
        """Count the new pages of a whole batch: *Need* of SPEC section 5.

        Before: the batch names live requests.
        """
        return sum(self.new_pages_needed(self.requests[name], n) for name, n, _ in batch)

    def victims_in_order(self, n_pages: int | None = None) -> list[list[int]]:
        """List the slots of the nodes that eviction takes for ``n_pages``, or all that it can, first victim first."""
        n_pages = self.pages.n_pages if n_pages is None else n_pages
        plan = plan_eviction(self.tree, self.lock_counts(), self.policy, n_pages)
        return [edge_slots(edge, self.page_size) for edge in plan]

    def generous_need(self, batch: Sequence[BatchItem]) -> int:
        """Count the slots up to which ``pages_overestimated`` lets a batch evict, needed or not.

        Before: the batch names live requests.
        """
        if "pages_overestimated" not in self.allowances or self.page_size == 1:
            return 0
        new = sum(self._new_positions(self.requests[name], n) for name, n, _ in batch)
        return new + self.page_size * len(batch) if new else 0

    def _new_positions(self, r: Request, n: int) -> int:
        """Count the positions of a pass that nothing is allocated for yet."""
        return max(0, r.committed_len + n - r.allocated_len)

    # Refusals.

    def refusal(self, kind: str, *args: Any) -> Refused | None:
        """Tell what the operation would be refused with now, or None. Arguments are those of the method.

        Only what SPEC section 5 looks at counts: not the choice of an ``alloc``, nor the victims of an
        ``evict``.
        """
        match kind:
            case "submit":
                return self._submit_refusal(args[0], args[1])
            case "alloc":
                return self._alloc_refusal(args[0])
            case "commit":
                return self._commit_refusal(args[0], args[1], args[2])
            case "evict":
                return None if args[0] >= 1 else BadArgument(f"{args[0]} slots asked, expected 1 or more")
            case "reset":
                return self._reset_refusal()
        return self._name_refusal(kind, args[0])

    def _name_refusal(self, kind: str, name: str) -> Refused | None:
        """Check name and state for an operation that names one request."""
        if name not in self.requests:
            return UnknownRequest(f"{kind} {name}: no such request")
        state = self.requests[name].state
        if state in ALLOWED_STATES[kind]:
            return None
        if state == "IN_FLIGHT":
            return InFlight(f"{kind} {name}: its pass has not landed")
        return WrongState(f"{kind} {name}: state {state}, expected {' or '.join(ALLOWED_STATES[kind])}")

    def _submit_refusal(self, name: str, tokens: Sequence[int]) -> Refused | None:
        if name in self.requests:
            return WrongState(f"submit {name}: the name is live, state {self.requests[name].state}")
        if len(tokens) == 0:
            return BadArgument(f"submit {name}: 0 tokens, expected 1 or more")
        if len(tokens) > self.max_context_len:
            return ContextTooLong(f"submit {name}: {len(tokens)} tokens, a row has {self.max_context_len} positions")
        return None

    def _commit_refusal(self, name: str, kept: int, sampled: Sequence[int]) -> Refused | None:
        refused = self._name_refusal("commit", name)
        if refused is not None:
            return refused
        r = self.requests[name]
        known, n = r.known_in_flight, r.in_flight_n
        if kept != 0 and not known <= kept <= n:
            return BadArgument(f"commit {name}: {kept} kept, expected 0 or {known}..{n}")
        if len(sampled) > 1:
            return BadArgument(f"commit {name}: {len(sampled)} tokens sampled, expected 1 at most")
        if sampled and kept < known:
            return BadArgument(f"commit {name}: a token sampled from a pass that is thrown away")
        if sampled and known != r.uncomputed:
            return BadArgument(f"commit {name}: a token sampled after {known} of {r.uncomputed} known tokens")
        return None

    def _reset_refusal(self) -> Refused | None:
        for name, r in self.requests.items():
            if r.state != "NEW":
                return WrongState(f"reset: {name} is {r.state}")
        return None

    def _alloc_refusal(self, batch: Sequence[BatchItem]) -> Refused | None:
        if len(batch) == 0:
            return EmptyBatch("alloc: 0 requests, expected 1 or more")
        names = [name for name, _, _ in batch]
        for name in names:
            if names.count(name) > 1:
                return DuplicateInBatch(f"alloc: {name} stands {names.count(name)} times in the batch")
        for item in batch:
            refused = self._item_refusal(item)
            if refused is not None:
                return refused
        takers = [name for name in names if self.requests[name].row is None]
        if len(takers) > self.rows.n_free:
            return OutOfRows(f"{len(takers)} rows asked, {self.rows.n_free} free")
        need, n_free = self.pages_needed(batch), self.pages.n_free
        if need > n_free:
            n_evictable = self.evictable // self.page_size
            if need > n_free + n_evictable:
                return OutOfPages(f"{need} pages asked, {n_free} free and {n_evictable} evictable")
        return None

    def _item_refusal(self, item: BatchItem) -> Refused | None:
        name, n, drafts = item
        refused = self._name_refusal("alloc", name)
        if refused is not None:
            return refused
        r = self.requests[name]
        known = n - len(drafts)
        if not 1 <= known <= r.uncomputed:
            return BadArgument(f"alloc {name}: {known} known tokens asked, expected 1..{r.uncomputed}")
        if drafts and known != r.uncomputed:
            return BadArgument(f"alloc {name}: drafts after {known} of {r.uncomputed} known tokens")
        if r.committed_len + n > self.max_context_len:
            end = r.committed_len + n
            return ContextTooLong(f"alloc {name}: {end} positions asked, a row has {self.max_context_len}")
        return None
