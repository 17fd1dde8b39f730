"""The cache: what a request may do, planned on the host and applied on the device.

`KvCache` keeps, for each request it knows, three lengths and the list of its pages from position 0 on, so
nothing is ever read back from the device::

    0 <= protected_len <= committed_len <= allocated_len <= max_context_len

    [0, protected_len)              the tree's pages, locked by this request
    [protected_len, allocated_len)  the request's own pages, the slack of the last one included

Each operation first refuses or decides everything on the host, then changes the host's state, then launches
at most one kernel. Requests are known from ``match`` until ``release``, ``abort`` or ``retract``.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .arithmetic import matchable_units, pages_spanned, pages_to_take, published_len, whole_pages
from .config import CacheConfig
from .device import DeviceState
from .free_stack import FreeStack
from .lane import choose_lane
from .native import PrefixTree, int32_bytes, slots_of
from .plan import BatchPlan
from .refusals import (
    BadArgument,
    ContextTooLong,
    DuplicateInBatch,
    EmptyBatch,
    InFlight,
    OutOfPages,
    OutOfRows,
    UnknownRequest,
    WrongState,
)
from .tree import Namespace

NO_NAMESPACE: Namespace = (None, None, ())

MATCHED, IN_FLIGHT, RUNNING = "MATCHED", "IN_FLIGHT", "RUNNING"


def no_tokens() -> "array[int]":
    return array("q")


@dataclass(frozen=True, slots=True)
class Extend:
    """One request of an ``alloc`` batch: ``n`` positions to compute, the last ``len(drafts)`` of them drafts."""

    request: str
    n: int
    drafts: "array[int]" = field(default_factory=no_tokens)


@dataclass(frozen=True, slots=True)
class Allocation:
    """What an ``alloc`` gave: one write set for the batch, and whose part of it is whose."""

    write_set: Tensor  # int32, on the device
    offsets: list[int]  # of each request of the batch in ``write_set``
    lengths: list[int]
    evicted: "list[NDArray[np.int32]]"  # slots per removed node, in victim order


@dataclass(slots=True)
class Request:
    """What the cache knows of a live request."""

    tokens: "array[int]"
    namespace: Namespace
    priority: int
    shares: bool  # may match and publish
    anchor: int  # node that the lock is at
    pages: "array[int]"  # of positions [0, allocated_len)
    protected_len: int
    committed_len: int
    allocated_len: int
    state: str = MATCHED
    row: int | None = None
    inserted_len: int = 0  # what this admission has published so far
    in_flight_n: int = 0
    drafts: "array[int]" = field(default_factory=no_tokens)
    abort_pending: bool = False

    @property
    def open_tokens(self) -> int:
        """Tokens known but not committed."""
        return len(self.tokens) - self.committed_len


def _check_buffer(tokens: "array[int]") -> None:
    if not isinstance(tokens, array) or tokens.typecode != "q":
        raise TypeError(f"tokens: expected an array('q'), got {type(tokens).__name__}")


def _check_range(tokens: "array[int]") -> None:
    for token in tokens:
        if not -(1 << 31) <= token < 1 << 31:
            raise OverflowError(f"token {token}: expected one that int32 holds")


class KvCache:
    """Rows, pages, prefix tree and KV pool of one model on one device. Not for several threads at once."""

    def __init__(
        self,
        config: CacheConfig,
        lane: str | None = None,
        device: Callable[[CacheConfig, str], DeviceState] = DeviceState,
    ) -> None:
        self.config = config
        self.lane = choose_lane(lane)
        self.device = device(config, self.lane)
        self.free_pages = FreeStack(config.n_pages)
        self.free_rows = FreeStack(config.n_rows)
        self.tree = PrefixTree(config.page_size, config.bigram, config.policy)
        self.requests: dict[str, Request] = {}

    # Sizes, in slots

    @property
    def available(self) -> int:
        """Slots of the free pages."""
        return len(self.free_pages) * self.config.page_size

    @property
    def evictable(self) -> int:
        """Slots that eviction can free now."""
        return self.tree.evictable * self.config.page_size

    @property
    def protected(self) -> int:
        """Published slots that a live request has locked."""
        return self.tree.protected * self.config.page_size

    # Admission

    def peek(
        self, request: str, tokens: "array[int]", namespace: Namespace = NO_NAMESPACE, private: bool = False
    ) -> int:
        """Give the length that ``match`` would find now, and count as a use of it; lock nothing.

        Refuses: InFlight and WrongState for a name that is live, BadArgument, ContextTooLong.
        """
        self._check_admission(request, tokens)
        _, pages = self._find(tokens, namespace, self.config.prefix_sharing and not private, lock=False)
        return len(pages) * self.config.page_size

    def match(
        self,
        request: str,
        tokens: "array[int]",
        namespace: Namespace = NO_NAMESPACE,
        priority: int = 0,
        private: bool = False,
    ) -> int:
        """Admit a request: find and lock the longest published prefix of its tokens and return its length.

        ``tokens`` is an ``array('q')`` and is copied. One token is always left to compute. Here and wherever tokens
        come in, another buffer is a TypeError, and a token that int32 cannot hold an OverflowError.
        Refuses: as `peek`.
        """
        self._check_admission(request, tokens)
        shares = self.config.prefix_sharing and not private
        anchor, pages = self._find(tokens, namespace, shares, lock=True)
        matched_len = len(pages) * self.config.page_size
        self.requests[request] = Request(
            tokens=tokens[:],
            namespace=namespace,
            priority=priority,
            shares=shares,
            anchor=anchor,
            pages=pages,
            protected_len=matched_len,
            committed_len=matched_len,
            allocated_len=matched_len,
        )
        return matched_len

    def _check_admission(self, request: str, tokens: "array[int]") -> None:
        live = self.requests.get(request)
        if live is not None:
            if live.state == IN_FLIGHT:
                raise InFlight(f"{request}: its pass has not landed")
            raise WrongState(f"{request}: expected a name that is not live, it is {live.state}")
        _check_buffer(tokens)
        if not tokens:
            raise BadArgument(f"{request}: no tokens")
        # A retracted request can hold one token more than a row has positions: the last one sampled.
        if len(tokens) > self.config.max_context_len + 1:
            raise ContextTooLong(f"{request}: {len(tokens)} tokens, a row has {self.config.max_context_len} positions")

    def _find(self, tokens: "array[int]", namespace: Namespace, shares: bool, lock: bool) -> "tuple[int, array[int]]":
        n_pages = 0
        if shares:
            n_pages = whole_pages(matchable_units(len(tokens), self.config.bigram), self.config.page_size)
            _check_range(tokens[n_pages * self.config.page_size :])  # those before are narrowed for the key
        return self.tree.match(namespace, self._key(tokens, 0, n_pages), n_pages, lock)

    def _key(self, tokens: "array[int]", start: int, n_pages: int) -> bytes:
        """Cut the bytes of ``n_pages`` pages of key units out of ``tokens``, from position ``start`` on."""
        overlap = 1 if self.config.bigram and n_pages else 0
        return int32_bytes(tokens, start, n_pages * self.config.page_size + overlap)

    # A forward pass

    def alloc(self, batch: Sequence[Extend]) -> Allocation:
        """Make room for the next pass of every request in ``batch``, evicting where needed; all or nothing.

        Writes: the rows of the batch. The write set names each request's slots at
        ``[committed_len, committed_len + n)``, in batch order.
        Refuses: EmptyBatch, DuplicateInBatch, then per item UnknownRequest, InFlight, WrongState, BadArgument
        and ContextTooLong, then OutOfRows, OutOfPages.
        """
        requests = self._check_batch(batch)
        n_new_rows = sum(request.row is None for request in requests)
        if n_new_rows > len(self.free_rows):
            raise OutOfRows(f"{n_new_rows} asked, {len(self.free_rows)} free")
        page_size = self.config.page_size
        takes = [
            pages_to_take(request.committed_len, item.n, request.allocated_len, page_size)
            for request, item in zip(requests, batch, strict=True)
        ]
        need = sum(takes)
        if need > len(self.free_pages) + self.tree.evictable:
            raise OutOfPages(f"{need} asked, {len(self.free_pages)} free and {self.tree.evictable} evictable")
        evicted = self._evict_pages(need - len(self.free_pages))

        plan = BatchPlan(page_size)
        new_rows = iter(self.free_rows.take(n_new_rows))
        for request, item, n_pages in zip(requests, batch, takes, strict=True):
            row_start = request.allocated_len
            if request.row is None:
                request.row = next(new_rows)
                row_start = 0
            request.pages.extend(self.free_pages.take(n_pages))
            end = request.committed_len + item.n
            request.allocated_len = max(request.allocated_len, end)
            request.in_flight_n = item.n
            request.drafts = item.drafts[:]
            request.state = IN_FLIGHT
            plan.add(request.row, row_start, request.committed_len, end, request.pages)
        return Allocation(self.device.apply(plan), plan.offsets, plan.lengths, evicted)

    def _check_batch(self, batch: Sequence[Extend]) -> list[Request]:
        if not batch:
            raise EmptyBatch("a batch of no requests")
        names = [item.request for item in batch]
        if len(set(names)) < len(names):
            raise DuplicateInBatch(f"a batch names a request twice: {' '.join(names)}")
        requests = []
        for item in batch:
            request = self._live(item.request, MATCHED, RUNNING)
            n_known = item.n - len(item.drafts)
            if not 1 <= n_known <= request.open_tokens:
                raise BadArgument(f"{item.request}: {n_known} known tokens asked, {request.open_tokens} uncommitted")
            if item.drafts and n_known != request.open_tokens:
                raise BadArgument(f"{item.request}: drafts follow {n_known} of {request.open_tokens} known tokens")
            if request.committed_len + item.n > self.config.max_context_len:
                raise ContextTooLong(
                    f"{item.request}: {request.committed_len + item.n} positions asked, "
                    f"a row has {self.config.max_context_len}"
                )
            _check_buffer(item.drafts)
            _check_range(item.drafts)
            requests.append(request)
        return requests

    def commit(self, request: str, kept: int, sampled: "array[int] | None" = None) -> None:
        """Accept the first ``kept`` positions of the pass that ran, and the token sampled at its end.

        ``kept`` is 0 (the pass is thrown away) or all known tokens plus the accepted drafts. If an abort is
        pending, the request ends here.
        Refuses: UnknownRequest, WrongState where nothing is in flight, BadArgument.
        """
        live = self._live(request, IN_FLIGHT)
        n_known = live.in_flight_n - len(live.drafts)
        if kept != 0 and not n_known <= kept <= live.in_flight_n:
            raise BadArgument(f"{request}: kept {kept}, expected 0 or {n_known}..{live.in_flight_n}")
        sampled = no_tokens() if sampled is None else sampled
        _check_buffer(sampled)
        _check_range(sampled)
        if len(sampled) > 1:
            raise BadArgument(f"{request}: {len(sampled)} tokens sampled, expected at most 1")
        if sampled and (kept == 0 or n_known != live.open_tokens):
            raise BadArgument(f"{request}: a token sampled, but not after its last known token")
        if live.abort_pending:
            self._settle(request)
            return
        if kept:
            live.committed_len += kept
            live.tokens.extend(live.drafts[: kept - n_known])
            live.tokens.extend(sampled)
        live.state = RUNNING
        live.in_flight_n = 0
        live.drafts = no_tokens()

    def checkpoint(self, request: str) -> None:
        """Publish the committed whole pages of a running request; it goes on.

        After: the row names the canonical slots for what is published, duplicates are free, the lock is at
        the end of the published path.
        Refuses: UnknownRequest, InFlight, WrongState.
        """
        self._publish(self._live(request, RUNNING))

    def _publish(self, live: Request) -> None:
        if not live.shares:
            return
        page_size = self.config.page_size
        start_page = whole_pages(live.protected_len, page_size)
        end = published_len(live.committed_len, live.protected_len, page_size, self.config.bigram)
        own_pages = live.pages[start_page : whole_pages(end, page_size)]
        key = self._key(live.tokens, live.protected_len, len(own_pages))
        anchor, canonical = self.tree.publish(
            live.anchor, live.namespace, key, own_pages, whole_pages(live.inserted_len, page_size), live.priority
        )
        if canonical:
            assert live.row is not None, "a running request has a row"
            live.pages[start_page : start_page + len(canonical)] = canonical
            self.free_pages.give_back(own_pages[: len(canonical)])
            self.device.rewrite_row(live.row, live.protected_len, canonical)
        live.anchor = anchor
        live.protected_len = live.inserted_len = end

    # Endings

    def release(self, request: str) -> None:
        """End a running request: publish its committed whole pages, free the rest.

        Refuses: UnknownRequest, InFlight, WrongState.
        """
        self._publish(self._live(request, RUNNING))
        self._settle(request)

    def abort(self, request: str) -> None:
        """End a request in any state and publish nothing. In flight, it ends when its pass lands.

        Refuses: UnknownRequest.
        """
        live = self._live(request, MATCHED, RUNNING, IN_FLIGHT)
        if live.state == IN_FLIGHT:
            live.abort_pending = True
        else:
            self._settle(request)

    def retract(self, request: str, publish: bool = False) -> "array[int]":
        """Take everything from a request under memory pressure, and return its tokens for a later `match`.

        Refuses: UnknownRequest, InFlight.
        """
        live = self._live(request, MATCHED, RUNNING)
        if publish and live.state == RUNNING:
            self._publish(live)
        self._settle(request)
        return live.tokens

    def _settle(self, request: str) -> None:
        """Free the request's own pages, unlock, give the row back and forget the name."""
        live = self.requests.pop(request)
        self.free_pages.give_back(live.pages[whole_pages(live.protected_len, self.config.page_size) :])
        self.tree.unlock(live.anchor)
        if live.row is not None:
            self.free_rows.give_back(array("i", [live.row]))

    # Memory pressure

    def evict(self, n_slots: int) -> "list[NDArray[np.int32]]":
        """Remove nodes in policy order until ``n_slots`` are freed or none is left; return the slots per node.

        Refuses: BadArgument.
        """
        if n_slots < 1:
            raise BadArgument(f"evict: {n_slots} slots asked, expected at least 1")
        return self._evict_pages(pages_spanned(n_slots, self.config.page_size))

    def _evict_pages(self, n_pages: int) -> "list[NDArray[np.int32]]":
        evicted = []
        freed = 0
        while freed < n_pages:
            pages = self.tree.evict_one()
            if pages is None:
                break
            self.free_pages.give_back(pages)
            freed += len(pages)
            evicted.append(slots_of(pages, self.config.page_size))
        return evicted

    def reset(self) -> None:
        """Empty the tree. Generations go on, so that handles from before can be told.

        Refuses: WrongState while any request is live.
        """
        if self.requests:
            raise WrongState(f"reset: live requests {' '.join(self.requests)}")
        self.free_pages.give_back(self.tree.all_pages())
        self.tree.clear()

    # KV

    def write_kv(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write ``k`` and ``v`` [layers, n, kv_heads, head_dim] to ``slots`` (int32), bit for bit.

        Before: ``slots`` is a write set, or a part of one, whose pass has not been committed.
        Writes: exactly these slots, in every layer.
        Refuses: BadArgument for another shape or dtype.
        """
        self.device.write_kv(slots, k, v)

    def read_kv(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Read K and V [layers, length, kv_heads, head_dim] at positions ``[0, length)`` of a row.

        Refuses: BadArgument for positions that there are not.
        """
        return self.device.read_kv(row, length)

    def _live(self, request: str, *allowed: str) -> Request:
        """Find a live request in one of the ``allowed`` states.

        Refuses: UnknownRequest; InFlight or WrongState for one in another state.
        """
        live = self.requests.get(request)
        if live is None:
            raise UnknownRequest(f"{request}: not known")
        if live.state not in allowed:
            if live.state == IN_FLIGHT:
                raise InFlight(f"{request}: its pass has not landed")
            raise WrongState(f"{request}: expected {' or '.join(allowed)}, it is {live.state}")
        return live
