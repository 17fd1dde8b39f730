"""Wrong targets: the honest one with one bug each, so that an adopter's wiring is proved to notice.

``kvlockstep fuzz --target kvlockstep.fuzz.targets.wrong:LeaksOnAbort`` must end with exit code 1. A harness that
calls one of these clean does not see what it should: KV that is never read back, refusals that are swallowed,
snapshots that come from counters. Start at `WRONG`.

Not here: bugs in the source of an implementation (``fuzz/faults``).
"""

import random
from collections.abc import Sequence

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import TargetRaised
from kvlockstep.fuzz.ops import AllocItem, Namespace
from kvlockstep.fuzz.targets.base import AllocResult, OutOfPages, OutOfRows
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.invariants import FULL, Snapshot, Violation
from kvlockstep.invariants.agreement import OutcomeDiffers
from kvlockstep.invariants.content import ContentWrong, MatchedUncommitted
from kvlockstep.invariants.ownership import PageLeaked, PageOwnedTwice
from kvlockstep.invariants.sizes import SizesDoNotRecount
from kvlockstep.invariants.writes import SlotChangedOutsideWriteSet
from kvlockstep.reference.cache import Choice
from kvlockstep.reference.requests import Request


class WritesLate(ReferenceTarget):
    """The last slot of a pass is written when the next pass lands: a copy that nobody waits for."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self.late: list[tuple[int, int]] = []

    def write_kv(self, slots: Sequence[int], values: Sequence[int]) -> None:
        pairs = list(zip(slots, values, strict=True))
        self.kv.update(self.late + pairs[:-1])
        self.late = pairs[-1:]


class WritesOneSlotMore(ReferenceTarget):
    """The slot behind the last one of a pass is written too: a mask that lets one lane too many through."""

    def write_kv(self, slots: Sequence[int], values: Sequence[int]) -> None:
        super().write_kv(slots, values)
        behind = (slots[-1] + 1) % len(self.kv)
        if behind not in slots:
            self.kv[behind] = values[-1]


class FindsOtherNamespaces(ReferenceTarget):
    """A match takes the longest prefix of any namespace: the key of the lookup is the tokens alone."""

    def peek(self, request: str, tokens: Sequence[int], namespace: Namespace, private: bool) -> int:
        found = self._longest(tokens, namespace, private)
        return super().peek(request, tokens, found, private)

    def match(self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int, private: bool) -> int:
        found = self._longest(tokens, namespace, private)
        matched_len = super().match(request, tokens, found, priority, private)
        self.cache.requests[request].namespace = namespace
        return matched_len

    def _longest(self, tokens: Sequence[int], namespace: Namespace, private: bool) -> Namespace:
        keys = self.cache.matchable_keys(Request("", list(tokens), namespace, 0, private))
        tree = self.cache.tree
        found = [namespace, *(child.namespace for child in tree.root.children.values())]
        return max(found, key=lambda candidate: tree.descend(tree.root, candidate, keys).depth)


class CountsOneSlotMore(ReferenceTarget):
    """It reports one slot more than the free pages have: a counter that started with the padding slot."""

    def snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        snapshot.pools[FULL].available = self.cache.available + 1
        return snapshot


class LeaksOnAbort(ReferenceTarget):
    """An abort forgets the last page of the tail: the clean-up counts whole pages only."""

    def abort(self, request: str) -> None:
        r = self.cache.requests.get(request)
        forgotten = self.cache.tail_pages(r)[-1:] if r is not None and r.state != "IN_FLIGHT" else []
        super().abort(request)
        for page in forgotten:
            self.cache.pages.take(page, request)


class FreesPartialPageTwice(ReferenceTarget):
    """A release frees a page that is not full twice: once with the tail, once as slack."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self.freed_twice: list[int] = []

    def release(self, request: str) -> None:
        r = self.cache.requests.get(request)
        partial = r is not None and r.state == "RUNNING" and r.allocated_len % self.cache.page_size != 0
        last = self.cache.tail_pages(r)[-1:] if r is not None and partial else []
        super().release(request)
        self.freed_twice += last

    def snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        free = self.cache.pages.free()
        snapshot.pools[FULL].free_pages = free + [page for page in self.freed_twice if page in free]
        return snapshot


class RaisesKeyError(ReferenceTarget):
    """A retraction of a request that has no row yet looks its row up: a path nobody takes in tests."""

    def retract(self, request: str, publish: bool) -> None:
        r = self.cache.requests.get(request)
        if r is not None and r.state == "MATCHED":
            raise KeyError(request)
        super().retract(request, publish)


class BlamesPagesForRows(ReferenceTarget):
    """Out of rows it says that it is out of pages: one error for every kind of full."""

    def alloc(self, batch: Sequence[AllocItem]) -> AllocResult:
        try:
            return super().alloc(batch)
        except OutOfRows as refused:
            raise OutOfPages(str(refused)) from refused


class HandsOutRandomPages(ReferenceTarget):
    """It takes any free page, another one in every run: legal, but a trace no longer repeats byte by byte."""

    def alloc(self, batch: Sequence[AllocItem]) -> AllocResult:
        items = [(item.request, item.n, item.drafts) for item in batch]
        if self.cache.refusal("alloc", items) is not None or self.cache.pages_needed(items) > self.cache.pages.n_free:
            return super().alloc(batch)
        free_pages = self.cache.pages.free()
        random.SystemRandom().shuffle(free_pages)
        chosen = iter(free_pages)
        free_rows = iter(self.cache.rows.free())
        rows, pages = {}, {}
        for name, n, _ in items:
            r = self.cache.requests[name]
            pages[name] = [next(chosen) for _ in range(self.cache.new_pages_needed(r, n))]
            if r.row is None:
                rows[name] = next(free_rows)
        done = self.cache.alloc(items, Choice(rows, pages))
        return AllocResult(done.write_sets, done.evicted)


WRONG: dict[type[ReferenceTarget], tuple[type[Violation], ...]] = {
    WritesLate: (ContentWrong, SlotChangedOutsideWriteSet),
    WritesOneSlotMore: (SlotChangedOutsideWriteSet, ContentWrong),
    FindsOtherNamespaces: (MatchedUncommitted,),
    CountsOneSlotMore: (SizesDoNotRecount,),
    LeaksOnAbort: (PageLeaked,),
    FreesPartialPageTwice: (PageOwnedTwice,),
    RaisesKeyError: (TargetRaised,),
    BlamesPagesForRows: (OutcomeDiffers,),
    HandsOutRandomPages: (),
}
"""Each wrong target with the violations that it must be caught as; none where only a repeated run shows it.

Where there are two, the second is what is seen if nobody reads the slot just then, or if somebody does.
"""
