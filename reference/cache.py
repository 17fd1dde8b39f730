"""The operations of SPEC section 5. Each happens completely, or raises a refusal and changes nothing.

Every method has the same three parts: refuse, plan (what may still turn out illegal), change (what
cannot fail any more). With pages of 2 and letters for tokens:

>>> cache = Cache(page_size=2, n_pages=4, n_rows=2, max_context_len=8)
>>> ns = (None, None, ())
>>> cache.submit("r0", "abc", ns)
>>> cache.match("r0")
0
>>> cache.alloc([("r0", 3, "")]).write_sets
[[2, 3, 4]]
>>> cache.commit("r0", 3, "d")
>>> cache.checkpoint("r0")
>>> r0 = cache.requests["r0"]
>>> r0.protected_len, r0.committed_len, r0.allocated_len, "".join(r0.tokens)
(2, 3, 3, 'abcd')

Slots 2 and 3 are the tree's now; 4 and its slack 5 are still r0's. Another request finds them:

>>> cache.submit("r1", "abx", ns)
>>> cache.match("r1")
2
>>> cache.alloc([("r1", 1, "")]).write_sets
[[6]]
>>> cache.rows.slots(cache.requests["r1"].row, 0, 3)
[2, 3, 6]
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlockstep.reference.arithmetic import pages_covering, pages_filled
from kvlockstep.reference.choices import Choice, IllegalChoice, prove_pages, prove_rows
from kvlockstep.reference.eviction import Edge, edge_slots, plan_eviction, plan_of_victims
from kvlockstep.reference.keys import Namespace, page_keys, units_of
from kvlockstep.reference.requests import Request
from kvlockstep.reference.state import BatchItem, CacheState
from kvlockstep.reference.tree import Tree

__all__ = ["Allocated", "BatchItem", "Cache", "Choice", "IllegalChoice"]


@dataclass(frozen=True, slots=True)
class Allocated:
    """What an ``alloc`` gave."""

    write_sets: list[list[int]]  # in batch order; slots of positions [committed_len, committed_len + n)
    evicted: list[list[int]]  # freed slots per node, in victim order
    rows: dict[str, int]  # rows newly taken


class Cache(CacheState):
    """The cache of SPEC sections 1 to 6."""

    def submit(
        self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int = 0, private: bool = False
    ) -> None:
        """Make a request known. Touches no row, page or tree."""
        self._refuse("submit", request, tokens)
        self.requests[request] = Request(request, list(tokens), namespace, priority, private)

    def peek(self, request: str) -> int:
        """Return the length that a match would find. Splits and stamps as a match does, but locks nothing."""
        self._refuse("peek", request)
        r = self.requests[request]
        return self.tree.match(r.namespace, self.matchable_keys(r)).depth * self.page_size

    def match(self, request: str) -> int:
        """Lock the longest published prefix and return its length."""
        self._refuse("match", request)
        r = self.requests[request]
        r.anchor = self.tree.match(r.namespace, self.matchable_keys(r))
        r.protected_len = r.committed_len = r.allocated_len = r.anchor.depth * self.page_size
        r.state = "MATCHED"
        return r.protected_len

    def alloc(self, batch: Sequence[BatchItem], choice: Choice | None = None) -> Allocated:
        """Take rows and pages for the next positions of each request; evict where needed.

        Raises IllegalChoice, with nothing changed, if the choice is not one that SPEC leaves free.
        """
        self._refuse("alloc", batch)
        needs = {name: self.new_pages_needed(self.requests[name], n) for name, n, _ in batch}
        plan = self._eviction_for(sum(needs.values()), None if choice is None else choice.victims)
        rows, pages = self._rows_and_pages(needs, plan, choice)

        evicted = self._evict(plan)
        write_sets = []
        for name, n, drafts in batch:
            r = self.requests[name]
            if r.row is None:
                assert r.anchor is not None, f"{name} was matched"
                r.row = rows[name]
                self.rows.take(r.row, r.anchor.pages())
            for page in pages.get(name, ()):
                self.pages.take(page, name)
                self.rows.pages_of[r.row].append(page)
            r.allocated_len = max(r.allocated_len, r.committed_len + n)
            r.in_flight_n = n
            r.drafts = list(drafts)
            r.state = "IN_FLIGHT"
            write_sets.append(self.rows.slots(r.row, r.committed_len, r.committed_len + n))
        return Allocated(write_sets, evicted, dict(rows))

    def commit(self, request: str, kept: int, sampled: Sequence[int]) -> None:
        """Take note that the pass ran: ``kept`` positions stand, accepted drafts and the sample become tokens."""
        self._refuse("commit", request, kept, sampled)
        r = self.requests[request]
        if r.abort_pending:
            self._give_everything_back(r)
            del self.requests[request]
            return
        r.committed_len += kept
        r.tokens += r.drafts[: max(0, kept - r.known_in_flight)]
        r.tokens += sampled
        r.in_flight_n = 0
        r.drafts = []
        r.state = "RUNNING"

    def checkpoint(self, request: str) -> None:
        """Publish the committed whole pages and go on.

        After: duplicates of what the tree held are free, the row names the canonical slots, and the
        lock is at the end of the published path.

        With pages of 2: r1 committed ``a b c`` on slots 4 5 6 while another request published ``a b``
        on slots 2 3. Afterwards r1's row reads 2 3 6, the page of slots 4 5 is free, the page of slots
        6 7 is still r1's, and ``protected_len`` is 2.
        """
        self._refuse("checkpoint", request)
        self._publish(self.requests[request])

    def release(self, request: str) -> None:
        """Publish, then give back what is left."""
        self._refuse("release", request)
        r = self.requests[request]
        self._publish(r)
        self._give_everything_back(r)
        del self.requests[request]

    def abort(self, request: str) -> None:
        """End the request without publishing; while its pass is in flight, once that has landed."""
        self._refuse("abort", request)
        r = self.requests[request]
        if r.state == "IN_FLIGHT":
            r.abort_pending = True
            return
        self._give_everything_back(r)
        del self.requests[request]

    def retract(self, request: str, publish: bool = False) -> None:
        """Take row, tail and lock away and let the request wait again, with all its tokens."""
        self._refuse("retract", request, publish)
        r = self.requests[request]
        if publish and r.state == "RUNNING":
            self._publish(r)
        self._give_everything_back(r)
        r.back_to_new()

    def evict(self, n: int, victims: Sequence[Sequence[int]] | None = None) -> list[list[int]]:
        """Remove whole nodes until ``n`` slots are free or nothing is evictable; return their slots.

        Raises IllegalChoice, with nothing changed, if ``victims`` are not evictable or too few.
        """
        self._refuse("evict", n)
        return self._evict(self._eviction_for(self.pages.n_free + pages_covering(n, self.page_size), victims))

    def prove_evictable(self, victims: Sequence[Sequence[int]]) -> None:
        """Raise IllegalChoice unless each victim is a node that is evictable at its turn. Changes nothing."""
        plan_of_victims(self.tree, self.lock_counts(), victims, self.page_size)

    def adopt_eviction(self, victims: Sequence[Sequence[int]]) -> None:
        """Follow an implementation that evicted ahead of a refusal.

        Raises IllegalChoice, with nothing changed, if a victim is not evictable at its turn.
        """
        self._evict(plan_of_victims(self.tree, self.lock_counts(), victims, self.page_size))

    def reset(self) -> None:
        """Empty the tree. Generations go on: those of its pages are raised, none is set back."""
        self._refuse("reset")
        for vertex in self.tree.vertices():
            self.pages.give_back(vertex.page)
        self.tree = Tree(self.allowances, self.allowed)

    # Parts of operations. None of them refuses.

    def _refuse(self, kind: str, *args: object) -> None:
        refused = self.refusal(kind, *args)
        if refused is not None:
            raise refused

    def _eviction_for(self, need: int, victims: Sequence[Sequence[int]] | None) -> list[Edge]:
        """Plan what to evict so that ``need`` pages are free, or as many as can be."""
        if not victims and need <= self.pages.n_free:
            return []
        locked = self.lock_counts()
        missing = need - self.pages.n_free
        if victims is None:
            return plan_eviction(self.tree, locked, self.policy, missing)
        plan = plan_of_victims(self.tree, locked, victims, self.page_size)
        freed = sum(len(edge) for edge in plan)
        n_evictable = len(self.tree.vertices()) - len(locked)
        if freed < min(missing, n_evictable):
            raise IllegalChoice(f"victims free {freed} pages, expected {missing} of {n_evictable} evictable")
        return plan

    def _rows_and_pages(
        self, needs: dict[str, int], plan: Sequence[Edge], choice: Choice | None
    ) -> tuple[dict[str, int], dict[str, Sequence[int]]]:
        """Adopt the chosen rows and pages once they are proved legal; without a choice take the lowest."""
        takers = [name for name in needs if self.requests[name].row is None]
        free_rows = self.rows.free()
        free_pages = sorted(self.pages.free() + [vertex.page for edge in plan for vertex in edge])
        if choice is not None:
            prove_rows(choice.rows, takers, free_rows)
            prove_pages(choice.pages, needs, frozenset(free_pages))
            return dict(choice.rows), dict(choice.pages)
        rows = dict(zip(takers, free_rows, strict=False))
        lowest = iter(free_pages)
        pages: dict[str, Sequence[int]] = {name: [next(lowest) for _ in range(need)] for name, need in needs.items()}
        return rows, pages

    def _publish(self, r: Request) -> None:
        """Move the boundary of what the tree holds, and with it row and lock."""
        if not self.shares(r):
            return
        assert r.row is not None, f"{r.request} is running"
        assert r.anchor is not None, f"{r.request} is running"
        row_pages = self.rows.pages_of[r.row]
        first, end = pages_filled(r.protected_len, self.page_size), self.publishable_pages(r)
        keys = page_keys(r.tokens, self.key_units, self.page_size, first, end)
        inserted_pages = pages_filled(r.inserted_len, self.page_size)
        r.anchor = self.tree.publish(r.anchor, r.namespace, keys, row_pages[first:end], inserted_pages, r.priority)
        if "prompt_split" in self.allowances:
            prompt_pages = pages_filled(units_of(r.prompt_len, self.key_units), self.page_size)
            self.tree.end_node_at_prompt(r.anchor, prompt_pages, r.priority)
        for i, canonical in enumerate(r.anchor.pages()):
            if i < first:
                continue
            if canonical == row_pages[i]:
                self.pages.publish(canonical)
            else:
                self.pages.give_back(row_pages[i])
                row_pages[i] = canonical
        r.protected_len = r.inserted_len = end * self.page_size

    def _give_everything_back(self, r: Request) -> None:
        """Free tail and row. The lock is the request's anchor and goes with it."""
        for page in self.tail_pages(r):
            self.pages.give_back(page)
        if r.row is not None:
            self.rows.give_back(r.row)

    def _evict(self, plan: Sequence[Edge]) -> list[list[int]]:
        evicted = [edge_slots(edge, self.page_size) for edge in plan]
        for edge in plan:
            self.tree.remove(edge)
            for vertex in edge:
                self.pages.give_back(vertex.page)
        return evicted
