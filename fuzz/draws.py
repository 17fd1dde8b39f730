"""Turns small drawn integers into operations that make sense in the model's present state.

Lists that Hypothesis draws stay too short to cross a page, so lengths, cut points and seeds are drawn as
small integers and tokens are built from them. Prompts come from a few shared families, cut and extended at
``kP - 1``, ``kP``, ``kP + 1`` over an alphabet of three tokens, so that prefixes collide at every page size;
namespaces are chosen to collide when joined as text.

Only the model's state is read. Every function returns an operation, whatever the integers and the state:
where no request can take the operation, mostly the step that comes before it is made, and now and then the
operation is made all the same, to be refused.
"""

from collections.abc import Callable

from kvlockstep.fuzz import biases
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import (
    Abort,
    Alloc,
    AllocItem,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Namespace,
    Op,
    Peek,
    Release,
    Reset,
    Retract,
    Submit,
)
from kvlockstep.fuzz.trace_bounds import MAX_DRAFTS
from kvlockstep.reference.cache import Cache

N_NAMES = 6
NAMES = tuple(f"r{i}" for i in range(N_NAMES))
N_FAMILIES = 3
ALPHABET = 3
LARGEST_TOKEN = (1 << 31) - 1  # a placeholder such as engines give to images

NAMESPACES: tuple[Namespace, ...] = (
    (None, None, ()),
    ("a", "bc", ()),
    ("ab", "c", ()),
    ("abc", None, ()),
    (None, "abc", ()),
    ("", None, ()),
    (None, None, ("a", "b")),
    (None, None, ("b", "a")),
    (None, None, ("ab",)),
)


def token_at(stream: int, pos: int) -> int:
    """Token of an endless stream at a position; a mix of both numbers, so that pages of a stream differ."""
    mixed = (stream * 0x9E3779B1 + pos * 0x85EBCA6B + 0x27D4EB2F) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed ^= mixed >> 13
    return 1 + mixed % ALPHABET


def around(pages: int, delta: int, page_size: int) -> int:
    """Return a length at ``kP - 1``, ``kP`` or ``kP + 1``, at least 0."""
    return max(0, pages * page_size + delta)


def prompt(family: int, cut: int, branch: int, extra: int) -> tuple[int, ...]:
    """Build ``cut`` tokens of a shared family, then ``extra`` tokens of a branch."""
    shared = [token_at(family, pos) for pos in range(cut)]
    return tuple(shared + [token_at(N_FAMILIES + branch, pos) for pos in range(extra)])


class Draws:
    """Operations for one case, of the features that the target of this case promises.

    With ``may_evict_ahead`` the target may evict before it refuses, which takes a batch that its room does not hold.
    """

    def __init__(
        self, config: CacheConfig, model: Cache, capabilities: frozenset[str], *, may_evict_ahead: bool = False
    ) -> None:
        self.config = config
        self.model = model
        self.capabilities = capabilities
        self.may_evict_ahead = may_evict_ahead
        self._namespaces = [space for space in NAMESPACES if not space[2] or "content_ids" in capabilities]
        if "namespaces" not in capabilities:
            self._namespaces = [NAMESPACES[0]]

    def _in(self, *states: str) -> list[str]:
        return [name for name, request in self.model.requests.items() if request.state in states]

    def _pick(self, names: list[str], who: int) -> str | None:
        return names[who % len(names)] if names else None

    def _unknown_left(self, name: str) -> int:
        request = self.model.requests[name]
        return len(request.tokens) - request.committed_len

    def submit(self, family: int, pages: int, delta: int, extra: int, space: int, switch: int) -> Op:
        size = self.config.page_size
        extra, space = extra % 9, space % (2 * len(NAMESPACES))
        free = [name for name in NAMES if name not in self.model.requests]
        if not free and switch not in biases.NAME_TAKEN:
            return self.release(family, switch)
        name = free[0] if free else NAMES[space % N_NAMES]
        cut = around(2 * pages if switch in biases.LONG else pages, delta, size)
        tail = around(extra // 3, extra % 3 - 1, size) if extra > 2 else extra
        tokens = prompt(family % N_FAMILIES, cut, family // N_FAMILIES, tail)
        if switch not in biases.OVERLONG:
            tokens = tokens[: self.config.max_context_len] or (token_at(family, 0),)
        if switch in biases.LARGEST:
            tokens = (*tokens[:-1], LARGEST_TOKEN)
        # half of all requests live in the plain namespace, so that sharing stays the normal case
        namespace = self._namespaces[max(0, space - len(NAMESPACES)) % len(self._namespaces)]
        private = switch in biases.PRIVATE and "private" in self.capabilities
        priority = switch % 4 if "priority" in self.capabilities else 0
        if switch in biases.TWIN and (twin := self._pick(self._in("NEW", "MATCHED", "RUNNING", "IN_FLIGHT"), family)):
            # two requests that compute one prefix at the same time: the only way to a duplicate page
            request = self.model.requests[twin]
            tokens = tuple(request.tokens[: cut or None]) + tokens[cut:]
            tokens, namespace = tokens[: self.config.max_context_len], request.namespace
        if switch in biases.BEHIND_LEAF and (leaf := self._published_leaf(family)):
            # a prompt that ends right behind a leaf: it uses the leaf again, without adding to it
            tokens, namespace = leaf
            if self.config.key_units == "token" or family % 2:  # a leaf of pairs holds one token more than it has pages
                tokens = (*tokens, token_at(family, len(tokens)))
            tokens = tokens[: self.config.max_context_len]
        return Submit(name, tokens, namespace, priority, private)

    def _published_leaf(self, which: int) -> tuple[tuple[int, ...], Namespace] | None:
        """Pick a leaf that nobody locks; give the tokens of its path and its namespace."""
        leaves = self.model.evictable_nodes()
        if not leaves:
            return None
        end = leaves[which % len(leaves)][-1]
        tokens: list[int] = []
        for unit in [unit for vertex in end.path() for unit in vertex.key]:
            # neighbouring pairs share a token
            tokens[-1:] = unit if isinstance(unit, tuple) else [*tokens[-1:], unit]
        return tuple(tokens), end.namespace

    def peek(self, who: int) -> Op:
        if live := self._live(who):
            return Peek(live)
        name = self._pick(self._in("NEW"), who) or (NAMES[who % N_NAMES] if who in biases.PEEK_UNKNOWN else None)
        return Peek(name) if name else self.submit(who, 1 + who % 2, 0, who // 3, who, 14 + who % 10)

    def _live(self, who: int) -> str | None:
        """Pick a request that lives, to be matched again by mistake, also while others wait."""
        return self._pick(self._in("MATCHED", "RUNNING", "IN_FLIGHT"), who) if who in biases.LIVE_AGAIN else None

    def match(self, who: int) -> Op:
        if live := self._live(who):
            return Match(live)
        name = self._pick(self._in("NEW"), who) or (NAMES[who % N_NAMES] if who in biases.MATCH_UNKNOWN else None)
        if name and len(self.model.evictable_nodes()) > 1:
            # a look at a leaf and then an eviction, before the match uses the leaf anyway: the victim is another one
            if who in biases.PEEK_BEFORE_MATCH:
                return Peek(name)
            if who in biases.EVICT_BEFORE_MATCH:
                return Evict(1)
        return Match(name) if name else self.submit(who, who % 3, who % 3 - 1, who // 3, who, who)

    def alloc(self, who: int, size: int, how: int, drafts: int) -> Op:
        limit = self.config.max_context_len + (how in biases.OVER_THE_ROW)
        ready = [
            name
            for name in self._in("MATCHED", "RUNNING")
            if self._unknown_left(name) and self.model.requests[name].committed_len < limit
        ]
        if how in biases.ANY_NAMES:
            names = [NAMES[(who + i) % N_NAMES] for i in range(size)]
            if who % 4 == 0:
                names = names + names[:1] if who % 8 else []
            return Alloc(tuple(AllocItem(name, 1 + drafts) for name in names))
        holders = [name for name, request in self.model.requests.items() if request.row is not None]
        if how not in biases.ANY_ROWS and len(holders) == self.config.n_rows:
            ready = [name for name in ready if name in holders]
            if not ready:
                return self.commit(who, 8, drafts) if self._in("IN_FLIGHT") else self.release(who, how % 23)
        if not ready:
            if self._in("NEW"):
                return self.match(who)
            if stuck := self._pick(self._in("MATCHED"), who):
                return Abort(stuck)  # what it matched fills a row: nothing but an end can come
            return self.submit(who, 1 + how % 3, drafts % 3 - 1, how, who, how)
        first = who % len(ready)
        if self.may_evict_ahead and how in biases.EVICT_AHEAD and (decoding := self._decoding(ready)):
            # what an engine may evict for and still refuse: all that decode, with as many guesses as their rows hold
            return Alloc(tuple(self._guessing(name, drafts) for name in decoding))
        batch = (ready[first:] + ready[:first])[: 1 + size % 3]
        newcomers = [name for name in batch if name not in holders]
        if how not in biases.ANY_ROWS and len(newcomers) > self.config.n_rows - len(holders):
            batch = batch[:1]
        return Alloc(tuple(self._item(name, how, drafts) for name in batch))

    def _item(self, name: str, how: int, drafts: int) -> AllocItem:
        left = self._unknown_left(name)
        size = self.config.page_size
        chunks = (1, size - 1, size, size + 1)
        known = min(chunks[how % 4], left) if how in biases.CHUNK else left + (how in biases.ONE_KNOWN_TOO_MANY)
        known = max(1, known)
        guessed: list[int] = []
        if (
            how in biases.DRAFTS_MISPLACED and "drafts" in self.capabilities
        ):  # no known token, or drafts behind only some of them
            return AllocItem(name, 1, (1,)) if drafts % 2 else AllocItem(name, left, (1,))
        if known == left and "drafts" in self.capabilities:
            request = self.model.requests[name]
            count = (0, 0, 1, size - 1, size, size + 1)[drafts % 6]
            room = self.config.max_context_len - request.committed_len - known
            count = count if how in biases.DRAFTS_OVER_THE_ROW else max(0, min(count, room))
            guessed = [token_at(drafts % N_FAMILIES, len(request.tokens) + i) for i in range(count)]
        return AllocItem(name, known + len(guessed), tuple(guessed))

    def _decoding(self, ready: list[str]) -> list[str]:
        return [name for name in self._in("RUNNING") if name in ready and self._unknown_left(name) == 1]

    def _guessing(self, name: str, drafts: int) -> AllocItem:
        request = self.model.requests[name]
        room = self.config.max_context_len - request.committed_len - 1 if "drafts" in self.capabilities else 0
        room = min(room, MAX_DRAFTS)
        guessed = tuple(token_at(drafts % N_FAMILIES, len(request.tokens) + i) for i in range(room))
        return AllocItem(name, 1 + room, guessed)

    def commit(self, who: int, how: int, token: int) -> Op:
        flying = self._in("IN_FLIGHT")
        name = self._pick(flying, who)
        if name is None:
            if how in biases.NOT_IN_FLIGHT:
                return Commit(NAMES[who % N_NAMES], 1)
            return self.alloc(who, how, (6 + how) % 32, token)
        request = self.model.requests[name]
        n, n_drafts = request.in_flight_n, len(request.drafts)
        known = n - n_drafts
        kept = self._kept(how, known, n_drafts)
        may_sample = known == len(request.tokens) - request.committed_len and kept >= known
        if how in biases.SAMPLE_NOT:  # no sampling after the last chunk, or a token too early
            return Commit(name, kept, () if may_sample else (1,))
        if how in biases.SAMPLE_TWO:
            return Commit(name, kept, (1, 1))
        if how in biases.SAMPLE_THOUGH_NONE_KEPT:
            return Commit(name, kept, (1,))
        pos = len(request.tokens) + max(0, kept - known)
        return Commit(name, kept, (token_at(token % N_FAMILIES, pos),) if may_sample else ())

    def _kept(self, how: int, known: int, n_drafts: int) -> int:
        """Choose how much of a pass of so many known tokens and drafts is kept."""
        if how in biases.KEEP_ONE_TOO_MANY:
            return known + n_drafts + 1
        if how in biases.KEEP_BELOW_NONE:
            return -1
        if how in biases.KEEP_NONE and "discards" in self.capabilities:
            return 0
        if how in biases.KEEP_NO_DRAFT:
            return known
        return known + (n_drafts // 2 if how in biases.KEEP_HALF else n_drafts)

    def _running_or_earlier(self, who: int, refused: bool, make: Callable[[str], Op]) -> Op:
        if refused:
            wrong = self._in("NEW", "MATCHED", "IN_FLIGHT") if who % 4 else []
            return make(self._pick(wrong, who) or NAMES[who % N_NAMES])
        name = self._pick(self._in("RUNNING"), who)
        return make(name) if name else self.commit(who, 8, who)

    def checkpoint(self, who: int, how: int) -> Op:
        return self._running_or_earlier(who, how in biases.NOT_RUNNING, Checkpoint)

    def release(self, who: int, how: int) -> Op:
        return self._running_or_earlier(who, how in biases.NOT_RUNNING, Release)

    def abort(self, who: int) -> Op:
        name = self._pick(list(self.model.requests), who)
        name = name or (NAMES[who % N_NAMES] if who in biases.ABORT_UNKNOWN else None)
        return Abort(name) if name else self.submit(who, who % 3, who % 3 - 1, who // 3, who, who)

    def retract(self, who: int, how: int) -> Op:
        if how in biases.RETRACT_ANY:
            wrong = (self._in("IN_FLIGHT") or self._in("NEW")) if who % 4 else []
            return Retract(self._pick(wrong, who) or NAMES[who % N_NAMES], bool(how & 1))
        name = self._pick(self._in("MATCHED", "RUNNING"), who)
        return Retract(name, bool(how & 1)) if name else self.commit(who, 8, how)

    def evict(self, pages: int, delta: int) -> Op:
        """Mostly one node, and where there is a choice: nothing else shows the order of victims."""
        wanted = 0 if pages in biases.EVICT_ANYHOW else 1 if pages in biases.EVICT_FROM_ONE_LEAF else 2
        if len(self.model.evictable_nodes()) < wanted:
            return self.release(pages, pages)
        return Evict(1 if pages in biases.EVICT_ONE else around(pages - 5, delta, self.config.page_size))

    def reset(self, who: int) -> Op:
        """While requests live, mostly bring one to its end; a cache that is drained again and again stays empty."""
        live = self._in("MATCHED", "RUNNING", "IN_FLIGHT")
        if not live or who in biases.RESET_WHATEVER:
            return Reset()
        if who not in biases.END_TO_RESET:
            return self.checkpoint(who, who % 23)
        name = live[who % len(live)]
        if name in self._in("IN_FLIGHT"):
            return Commit(name, 0 if "discards" in self.capabilities else self.model.requests[name].in_flight_n)
        return Release(name) if who & 8 else Abort(name)
