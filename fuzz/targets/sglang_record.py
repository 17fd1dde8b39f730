"""Recordings of live SGLang caches: one call in the process of the scheduler, and what its caches do is a trace.

    from kvlockstep.fuzz.targets.sglang_record import record
    with record(scheduler, "recorded.jsonl"):
        ...

It begins where the cache is empty and idle, at once or after the next flush, and ends at its bound, at ``stop`` or
where something happens that no trace can say: then with one line that says what, and never with a wrong trace. The
engine's own objects and functions are hooked, its behaviour stays as it is, and when the recording ends they are as
they were. Importing this imports parts of SGLang, and prepares nothing.

=====================================  ===============================================================================
`match_prefix` for a request           ``submit`` where it is new, and ``peek``; once it has its lock, ``match``
`match_prefix`, `touch_prefix` of      ``peek`` of a request made for that, with one token more, which no match takes
other lengths
`alloc_for_extend`, `..._decode`,      the ``commit`` of the pass before for each request, then ``alloc``; evictions on
`..._spec_decode`                      the way are part of it
`checkpoint_kv_cache`                  ``commit`` and ``checkpoint``
`release_kv_cache`                     ``commit`` and ``release``; without a checkpoint ``abort``, or ``retract`` where
                                       the request has not finished
`evict`, `evict_for_alloc`, `reset`    ``evict``, ``reset``, outside of those above
=====================================  ===============================================================================

What a pass landed is read off its request at that request's next operation. Where SGLang launches a pass before it
knows what the one before sampled (overlap scheduling), or does not tell drafts when it allocates for them, the lines
that wait for those tokens are held back, and all behind them: these are not ahead of their operations, and a process
that dies loses them. A checkpoint of a prompt whose first decode is in flight already is written ahead of that decode,
as the tree would be told if nothing overlapped; where that could matter to what an eviction took, the recording ends.

Left out: second pools, host tiers, sessions, beams, diffusion, sharded pools, prefill and decode on two machines;
speculative passes that overlap.
"""

import atexit
import functools
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sglang.srt.mem_cache import allocation, common
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import get_disagg, get_memory, get_serving, get_spec

from kvlockstep.fuzz.config import MAX_TABLE, CacheConfig
from kvlockstep.fuzz.ops import Abort, Namespace, Submit
from kvlockstep.fuzz.recorder import BYTES_AT_MOST, OPS_AT_MOST, Mark, Recording, log, tokens_text
from kvlockstep.fuzz.targets.sglang_dump import tree_of
from kvlockstep.fuzz.trace import Header, encode_op

FUNCTIONS = {
    "alloc_for_extend": allocation,
    "alloc_for_decode": allocation,
    "alloc_for_spec_decode": allocation,
    "checkpoint_kv_cache": common,
    "release_kv_cache": common,
}
"""What the scheduler calls, by the module that defines it; other modules have copies of the name."""

ANY_TOKEN = 0
"""Stands where a token has to be and is never read: behind a look, and for drafts that were rejected."""


class Inexpressible(Exception):
    """No trace can say what the engine does."""


def record(
    scheduler: Any,
    path: str | os.PathLike[str],
    *,
    policy: str | None = None,
    max_ops: int = OPS_AT_MOST,
    max_bytes: int = BYTES_AT_MOST,
    pseudonyms: str | bytes | None = None,
    claim: Callable[[Path], Path] | None = None,
) -> "LiveRecording":
    """Record what the cache of a scheduler does; ``scheduler`` may be the cache itself.

    Call it in the thread of the scheduler, between two of its steps. ``policy`` is that of evictions, which a Rust
    core does not tell; left out, it is what the server was started with. ``claim`` makes the name of the file from
    ``path`` when the recording begins.

    Raises TypeError for a cache of another kind (a second pool, a host tier), ValueError for one that is recorded
    already, and for what `Recording` refuses. The file is made when the recording begins.
    """
    cache = getattr(scheduler, "tree_cache", scheduler)
    return LiveRecording(cache, Path(path), policy, max_ops, max_bytes, pseudonyms, claim or Path)


class _Known:
    """A request that the trace knows."""

    __slots__ = (
        "committed",
        "item",
        "kept_one",
        "late",
        "lock_before",
        "look",
        "look_len",
        "n",
        "n_outputs",
        "n_tokens",
        "name",
        "ref",
        "req",
        "spec",
        "state",
        "watch",
    )

    def __init__(self, name: str, shown: str, req: Any, watch: Any) -> None:
        self.name = name
        self.ref = f'"request":"{shown}"'
        self.item = f'["{shown}",1,[]]'
        self.kept_one = f'{{"op":"commit",{self.ref},"kept":1,"sampled":['
        self.watch = watch  # tells when the engine drops the request while it waits
        self.req: Any = req  # while it holds something; a waiting one is the engine's alone
        self.state = "NEW"
        self.n_tokens = 0
        self.n_outputs = 0  # of its tokens, those that passes gave
        self.committed = 0
        self.n = 0  # positions of the pass in flight
        self.spec: _SpecItem | None = None
        self.late: _Late | None = None
        self.lock_before: Any = None
        self.look: str | None = None  # the request made to look further than it may match
        self.look_len = 0


class _Lines:
    """Lines that are ready, as one piece."""

    __slots__ = ("n_ops", "n_values", "text")

    def __init__(self, text: str, n_ops: int, n_values: int) -> None:
        self.text = text
        self.n_ops = n_ops
        self.n_values = n_values

    def ready(self) -> bool:
        return True


class _Alloc:
    """An ``alloc`` without drafts; while it is held back, a request may be taken out of it."""

    __slots__ = ("evicted", "items", "n_ops", "n_values")

    def __init__(self, items: dict[_Known, str]) -> None:
        self.items = items
        self.n_ops = 1
        self.n_values = len(items)
        self.evicted = False  # something on its way

    def ready(self) -> bool:
        return True

    @property
    def text(self) -> str:
        return f'{{"op":"alloc","batch":[{",".join(self.items.values())}]}}\n'


class _Look(_Lines):
    """A ``peek`` that may turn out to be a ``match``."""

    __slots__ = ("known", "mark", "settled")

    def __init__(self, known: _Known | None, text: str, n_ops: int, n_values: int, mark: Mark | None) -> None:
        super().__init__(text, n_ops, n_values)
        self.known = known
        self.mark = mark  # where it stands in the file; None while it is held back
        self.settled = False

    def ready(self) -> bool:
        return self.settled

    def match(self) -> None:
        assert self.known is not None, "only what a request asked can become its match"
        self.text = self.text.replace(f'"op":"peek",{self.known.ref}', f'"op":"match",{self.known.ref}')


class _Late:
    """The ``commit`` of a pass whose sampled token is not known yet."""

    __slots__ = ("at", "committed", "head", "known", "n_ops", "n_values", "outputs", "recording", "token")

    def __init__(self, known: _Known, req: Any, at: int, kept: int, recording: Recording) -> None:
        self.known = known
        self.outputs = req
        self.at = at
        self.head = f'{{"op":"commit",{known.ref},"kept":{kept},"sampled":['
        self.n_ops = 1
        self.n_values = 0
        self.committed = known.committed
        self.token: int | None = None
        self.recording = recording

    def ready(self) -> bool:
        if self.token is None and len(self.outputs.output_ids) > self.at:
            self.token = self.outputs.output_ids[self.at]
        return self.token is not None

    @property
    def text(self) -> str:
        assert self.token is not None, "only what is ready is written"
        return f"{self.head}{tokens_text((self.token,), self.recording.pseudonyms)[1:]}}}\n"


class _SpecItem:
    """One request of a speculative ``alloc``; its drafts are known when the pass has landed."""

    __slots__ = ("drafts", "known", "n")

    def __init__(self, known: _Known, n: int) -> None:
        self.known = known
        self.n = n
        self.drafts: list[int] | None = [] if n == 1 else None


class _SpecAlloc:
    __slots__ = ("items", "n_ops", "n_values", "recording")

    def __init__(self, items: list[_SpecItem], recording: Recording) -> None:
        self.items = items
        self.n_ops = 1
        self.n_values = sum([item.n for item in items])
        self.recording = recording

    def ready(self) -> bool:
        return all(item.drafts is not None for item in self.items)

    @property
    def text(self) -> str:
        spelled = [tokens_text(item.drafts or [], self.recording.pseudonyms) for item in self.items]
        batch = [f"{item.known.item[:-6]},{item.n},{drafts}]" for item, drafts in zip(self.items, spelled, strict=True)]
        return f'{{"op":"alloc","batch":[{",".join(batch)}]}}\n'


class LiveRecording:
    """The recording of one cache; also a context manager. See `record`."""

    def __init__(
        self,
        cache: Any,
        path: Path,
        policy: str | None,
        max_ops: int,
        max_bytes: int,
        pseudonyms: str | bytes | None,
        claim: Callable[[Path], Path],
    ) -> None:
        self.path = path
        self._claim = claim
        self.stopped: str | None = None  # why
        self._tree = tree_of(cache)
        if id(cache) in _LIVE:
            raise ValueError(f"{self.path}: this cache is recorded already, to {_LIVE[id(cache)].path}")
        if path.suffix == ".gz":
            raise ValueError(f"{self.path}: a recording is written plain: name it without .gz, and pack it afterwards")
        self._cache = cache
        self._allocator = cache.token_to_kv_pool_allocator
        self._rows = cache.req_to_token_pool
        self._policy = policy
        self._bounds = (max_ops, max_bytes)
        self._pseudonyms = pseudonyms
        self._file: Recording | None = None
        self._page_size: int = cache.page_size
        self._bigram = bool((cache if self._tree == "radix" else cache.tree_core).is_eagle)
        self._inside = 0  # an operation of the engine, whose parts are no operations
        self._evicted = False  # on the way of an allocation
        self._known: dict[int, _Known] = {}  # by id of the Req
        self._n_names = 0
        self._dead: list[str] = []  # waiting requests that the engine dropped
        self._held: deque[Any] = deque()
        self._looks: list[_Look] = []  # since the last operation that was none
        self._behind: tuple[_Known, _Alloc, Any] | None = None  # a checkpoint that is written when it is done
        self._was_reset = False
        self._max_context_len = 0
        self._hooks: list[tuple[Any, str, Any, Any]] = []
        _LIVE[id(cache)] = self
        try:
            _hook_functions()
            self._hook_objects()
        except BaseException:
            self._unhook()
            raise

    # Ends

    @property
    def n_ops(self) -> int:
        """Operations written so far."""
        return self._file.n_ops if self._file else 0

    @property
    def n_bytes(self) -> int:
        return self._file.n_bytes if self._file else 0

    def stop(self, reason: str = "stopped by its owner") -> None:
        """End the recording. Does nothing the second time."""
        if self.stopped is not None:
            return
        if self._file is not None and self._file.stopped is None:
            with self._guarded():
                self._settle()
                self._advance()
        self._end(reason, trouble=False)

    def _end(self, reason: str, *, trouble: bool) -> None:
        if self.stopped is not None:
            return
        self.stopped = reason
        self._unhook()
        if self._file is None:
            log.log(30 if trouble else 20, "recording %s: nothing recorded, %s", self.path, reason)
        else:
            self._file.stop(reason, trouble=trouble)
            self.stopped = self._file.stopped
        self._known.clear()
        self._held.clear()
        self._looks.clear()

    def abandon(self) -> None:
        """Leave the file to the process that this one was forked from."""
        if self._file is not None:
            self._file.abandon()
        self.stopped = "belongs to another process"
        self._unhook()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, Inexpressible):
            self._end(f"ended early: {error}", trouble=True)
        elif self._file is not None:
            self._file.fail(error)  # which ends this one, too
        else:
            self._end(f"ended early: {type(error).__name__}: {' '.join(str(error).split())[:120]}", trouble=True)

    # Hooks

    def _hook_objects(self) -> None:
        cache = self._cache
        for name in ("match_prefix", "touch_prefix"):
            self._hook(cache, name, self._around(getattr(cache, name), getattr(self, f"_on_{name}")))
        for name in ("evict", "evict_for_alloc", "reset"):
            self._hook(cache, name, self._around(getattr(cache, name), getattr(self, f"_on_{name}")))
        self._hook(cache, "unlock", self._before(cache.unlock, self._on_unlock))
        for name in ("checkpoint", "insert"):
            self._hook(cache, name, self._part(getattr(cache, name), f"{name} of the tree"))
        for name in ("alloc", "alloc_extend", "alloc_decode", "free", "free_segment", "free_segments"):
            self._hook(self._allocator, name, self._part(getattr(self._allocator, name), f"{name} of slots"))
        for name in ("alloc", "free"):
            self._hook(self._rows, name, self._part(getattr(self._rows, name), f"{name} of rows"))
        self._hook(self._allocator, "free_group_end", self._around(self._allocator.free_group_end, _nothing))
        for owner in (self._allocator, self._rows):
            self._hook(owner, "clear", self._before(owner.clear, self._on_clear))

    def _hook(self, owner: Any, name: str, hook: Any) -> None:
        mine = vars(owner).get(name)
        functools.update_wrapper(hook, getattr(owner, name))
        setattr(owner, name, hook)
        self._hooks.append((owner, name, hook, mine))

    def _unhook(self) -> None:
        for owner, name, hook, mine in reversed(self._hooks):
            if vars(owner).get(name) is not hook:
                continue  # somebody hooked it after us, and calls ours, which only passes on now
            if mine is None:
                delattr(owner, name)
            else:
                setattr(owner, name, mine)
        self._hooks.clear()
        if _LIVE.get(id(self._cache)) is self:
            del _LIVE[id(self._cache)]
        if not _LIVE:
            _unhook_functions()

    def _around(self, original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        """Note an operation before it runs, and take what it calls for parts of it."""

        def hook(*arguments: Any, **named: Any) -> Any:
            if self.stopped is not None:
                return original(*arguments, **named)
            return self.run(original, note, arguments, named)

        return hook

    def _before(self, original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def hook(*arguments: Any, **named: Any) -> Any:
            if self.stopped is None and not self._inside:
                with self._guarded():
                    note(*arguments, **named)
            return original(*arguments, **named)

        return hook

    def _part(self, original: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Watch what only happens as a part of an operation."""

        def hook(*arguments: Any, **named: Any) -> Any:
            if not self._inside and self.stopped is None and self._file is not None:
                self._fail(Inexpressible(f"{what} outside of what is recorded"))
            return original(*arguments, **named)

        return hook

    def run(
        self,
        original: Callable[..., Any],
        note: Callable[..., None],
        arguments: Sequence[Any],
        named: dict[str, Any],
        after: Callable[..., None] | None = None,
    ) -> Any:
        """Call an operation of the engine; what it raises ends the recording, which has it as its last line."""
        if self._inside:
            if note == self._on_evict or note == self._on_evict_for_alloc:
                self._evicted = True
            return original(*arguments, **named)
        try:
            note(*arguments, **named)
        except Exception as error:
            self._fail(error)
        self._inside = 1
        try:
            value = original(*arguments, **named)
        except BaseException as error:
            what = getattr(original, "__name__", "an operation")
            self._fail(Inexpressible(f"{what} raised {type(error).__name__}"))
            raise
        finally:
            self._inside = 0
        if after is not None and self.stopped is None:
            try:
                after(*arguments, **named)
            except Exception as error:
                self._fail(error)
        return value

    # The begin

    def _begins(self) -> bool:
        """Tell whether it records; begin where the cache is empty and idle."""
        if self._file is not None:
            return True
        cache = self._cache
        if cache.evictable_size() or cache.protected_size() or not self._is_free():
            return False
        header = self._header()
        self.path = self._claim(self.path)
        max_ops, max_bytes = self._bounds
        self._file = file = Recording(
            self.path,
            header,
            source="Recorded from a live SGLang",
            max_ops=max_ops,
            max_bytes=max_bytes,
            pseudonyms=self._pseudonyms,
        )
        if file.stopped is not None:
            self._end(file.stopped, trouble=False)  # it has said so itself
            return False
        file.on_stop = lambda: self._end(str(file.stopped), trouble=False)
        return True

    def _is_free(self) -> bool:
        return bool(
            self._rows.available_size() == self._rows.size
            and self._allocator.available_size() == self._allocator.size // self._page_size * self._page_size
        )

    def _header(self) -> Header:
        cache, allocator, rows = self._cache, self._allocator, self._rows
        tree_of(cache)  # a host tier may have come since
        kinds = (type(allocator) in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator), type(rows) is ReqToTokenPool)
        if not all(kinds) or allocator.page_size != self._page_size:
            raise Inexpressible(f"pools of the kinds {type(allocator).__name__} and {type(rows).__name__}")
        if self._tree != "radix" and (cache.enable_session_radix_cache or cache.linker is not None):
            raise Inexpressible("sessions or an external cache behind the tree")
        if get_serving().strip_thinking_cache or get_disagg().disaggregation_mode not in (None, "null"):
            raise Inexpressible("strip_thinking_cache, or prefill and decode apart")
        options = ["need_sort"] if allocator.need_sort else []
        options += ["no_speculation"] if get_spec().speculative_algorithm is None else []
        n_pages = allocator.size // self._page_size
        self._max_context_len = min(rows.max_context_len, MAX_TABLE // (rows.size + 1))
        config = CacheConfig(
            page_size=self._page_size,
            n_pages=n_pages,
            n_rows=rows.size,
            max_context_len=self._max_context_len,
            policy=self._policy_of(),
            key_units="bigram" if self._bigram else "token",
            prefix_sharing=not cache.disable,
            layers=1,
            options=tuple(options),
        )
        config.validate()
        if (excess := config.excess()) is not None:
            raise Inexpressible(f"a cache too large to be replayed, {excess}")
        return Header(config, target=f"sglang:{self._tree}", lane="torch")

    def _policy_of(self) -> str:
        told = self._policy or getattr(self._cache, "eviction_policy", None) or get_memory().radix_eviction_policy
        return str(told).lower()

    # Requests

    def _find(self, req: Any) -> _Known:
        """Return what the trace knows of a request, with a ``submit`` where that is nothing yet."""
        known = self._known.get(id(req))
        if known is not None:
            return known
        if req.session is not None or req.session_id is not None:
            raise Inexpressible("a request of a session")
        if req.input_embeds is not None or req.beam_group is not None or req.is_dllm():
            raise Inexpressible("a request with embeddings in place of tokens, of a beam search, or of diffusion")
        if req.kv.holds_kv or len(req.output_ids):
            raise Inexpressible("a request that began before the recording")
        name = self._new_name("r")
        return self._submitted(req, name)

    def _submitted(self, req: Any, name: str) -> _Known:
        key = id(req)
        known = _Known(name, self._shown(name), None, weakref.ref(req, lambda _: self._dropped(key)))
        known.n_tokens = len(req.origin_input_ids)
        known.lock_before = req.lock
        self._known[key] = known
        namespace = (req.extra_key, req.cache_salt or None, ())
        private = req.positional_embed_overrides is not None
        self._submit(name, req.origin_input_ids, namespace, req.priority or 0, private)
        return known

    def _submit(self, name: str, tokens: Any, namespace: Namespace, priority: int = 0, private: bool = False) -> None:
        assert self._file is not None
        pseudonyms = self._file.pseudonyms
        if pseudonyms is not None:
            namespace = pseudonyms.namespace(namespace)
        line = encode_op(Submit(self._shown(name), (), namespace, priority, private))
        text = line.replace('"tokens":[]', f'"tokens":{tokens_text(tokens, pseudonyms)}', 1)
        self._look(None, f"{text}\n", 1, len(tokens))

    def _shown(self, name: str) -> str:
        return self._file.pseudonyms.name(name) if self._file and self._file.pseudonyms else name

    def _new_name(self, letter: str) -> str:
        self._n_names += 1
        return f"{letter}{self._n_names - 1}"

    def _dropped(self, key: int) -> None:
        """Hear that a waiting request is gone; called wherever that happens to be."""
        known = self._known.pop(key, None)
        if known is not None:
            self._dead.append(known.name)
            self._dead += [known.look] if known.look else []

    def _names_abort(self, name: str) -> str:
        return f"{encode_op(Abort(self._shown(name)))}\n"

    def _running(self, req: Any, operation: str) -> _Known:
        known = self._known.get(id(req))
        if known is None:
            raise Inexpressible(f"{operation} of a request that was never matched")
        return known

    # Lines

    def _emit(self, text: str, n_ops: int, n_values: int = 0) -> None:
        if self._held:
            self._held.append(_Lines(text, n_ops, n_values))
        else:
            assert self._file is not None
            self._file.put_text(text, n_ops, n_values)

    def _look(self, known: _Known | None, text: str, n_ops: int, n_values: int = 0) -> None:
        """Write a line that belongs to a look, until it is known what the look was for."""
        assert self._file is not None
        if self._held:
            look = _Look(known, text, n_ops, n_values, None)
            self._held.append(look)
        else:
            look = _Look(known, text, n_ops, n_values, self._file.mark())
            self._file.put_text(text, n_ops, n_values)
        self._looks.append(look)

    def _settle(self) -> None:
        """Find out which looks were matches: those whose request has its lock since. Then drop who died waiting."""
        if self._looks:
            self._settle_looks()
        if self._dead:
            dead, self._dead = self._dead, []
            self._emit("".join(map(self._names_abort, dead)), len(dead))
        if self._was_reset:
            self._was_reset = False
            if not self._is_free():
                raise Inexpressible("rows or slots that are still held after a reset")

    def _settle_looks(self) -> None:
        assert self._file is not None
        looks, self._looks = self._looks, []
        first: int | None = None
        for at in range(len(looks) - 1, -1, -1):
            look = looks[at]
            look.settled = True
            known = look.known
            if known is None or known.state != "NEW":
                continue
            req = known.watch()
            if req is None or req.lock is None or req.lock is known.lock_before:
                continue
            look.match()
            known.state, known.req, known.committed = "MATCHED", req, req.prefix_len
            if look.mark is not None:
                first = at
        if first is not None:
            again = [look for look in looks[first:] if look.mark is not None]
            text = "".join([look.text for look in again])
            n_ops, n_values = sum([look.n_ops for look in again]), sum([look.n_values for look in again])
            self._file.put_text(text, n_ops, n_values, at=again[0].mark)

    def _advance(self) -> None:
        """Write what is held back, up to the first line that still waits for a token."""
        held = self._held
        if not held or not held[0].ready():
            return
        pieces, n_ops, n_values = [], 0, 0
        while held and held[0].ready():
            one = held.popleft()
            if type(one) is _Late:
                one.known.late = None
            pieces.append(one.text)
            n_ops += one.n_ops
            n_values += one.n_values
        assert self._file is not None
        self._file.put_text("".join(pieces), n_ops, n_values)

    # Looks

    def _on_match_prefix(self, params: Any) -> None:
        if not self._begins():
            return
        if self._held:
            self._advance()
        key, req = params.key, params.req
        if req is None:
            self._look_at(key)
            return
        known = self._find(req)
        if known.state == "MATCHED" or known.n or known.state == "RUNNING":
            raise Inexpressible(f"{known.name} is matched again while it holds what it was given")
        n_tokens, n_outputs = len(req.origin_input_ids) + len(req.output_ids), len(req.output_ids)
        if n_tokens != known.n_tokens:
            if n_outputs:
                raise Inexpressible(f"{known.name} comes back with other tokens than it had")
            self._look(None, self._names_abort(known.name), 1)  # its prompt was replaced while it waited
            known = self._submitted(req, self._new_name("r"))
        length = self._raw_len(key)
        private = req.positional_embed_overrides is not None
        if length == 0 if private else self._n_units(length) == self._n_units(n_tokens - 1):
            known.lock_before = req.lock
            self._look(known, f'{{"op":"peek",{known.ref}}}\n', 1)
            return
        if length < n_tokens - 1:
            raise Inexpressible(f"{known.name} may match {length} of its {n_tokens} tokens only")
        if known.look is None or known.look_len != length:
            if known.look is not None:
                self._look(None, self._names_abort(known.look), 1)
            known.look, known.look_len = f"{known.name}.look", length
            self._submit(known.look, [*key.raw_token_ids(), ANY_TOKEN], (key.extra_key, key.cache_salt, ()))
        self._look(None, f'{{"op":"peek","request":"{self._shown(known.look)}"}}\n', 1)

    def _on_touch_prefix(self, key: Any) -> None:
        if self._begins():
            if self._held:
                self._advance()
            self._look_at(key)

    def _look_at(self, key: Any) -> None:
        """Say that someone looked at a prefix, whoever it was."""
        if not self._raw_len(key):
            return
        name = self._new_name("look")
        self._submit(name, [*key.raw_token_ids(), ANY_TOKEN], (key.extra_key, key.cache_salt, ()))
        self._look(None, f'{{"op":"peek","request":"{self._shown(name)}"}}\n', 1)
        self._look(None, self._names_abort(name), 1)

    @staticmethod
    def _raw_len(key: Any) -> int:
        n_tokens = len(key.token_ids)
        return n_tokens if key.limit is None else min(n_tokens, key.limit)

    def _n_units(self, n_tokens: int) -> int:
        """Count the units of so many tokens that stand in whole pages."""
        return max(0, n_tokens - self._bigram) // self._page_size * self._page_size

    def _on_unlock(self, lock: Any) -> None:
        """Tell the lock of a matched request that gives up from one that was only tried."""
        if lock is None or self._file is None:
            return
        for look in self._looks:
            if look.known is not None and (req := look.known.watch()) is not None and req.lock is lock:
                self._settle()
                break
        for known in list(self._known.values()):  # a request that the collector takes leaves it at any moment
            if known.state == "MATCHED" and known.req.lock is lock:
                self._settle()
                self._advance()
                self._emit(f'{{"op":"retract",{known.ref},"publish":false}}\n', 1)
                self._waits(known)
                return

    def _waits(self, known: _Known) -> None:
        known.lock_before = known.req.lock
        known.state, known.req, known.committed = "NEW", None, 0

    # Passes

    def on_alloc_for_extend(self, batch: Any) -> None:
        if self._file is None:
            return
        self._settle()
        self._advance()
        items, lines = dict[_Known, str](), list[Any]()
        for req, n, prefix_len in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
            known = self._running(req, "a prefill")
            if known.state == "RUNNING":
                self._land(known, lines, launches=True)
            elif known.state != "MATCHED":
                raise Inexpressible(f"{known.name} is prefilled long after it was matched")
            if known.committed != prefix_len:
                raise Inexpressible(f"{known.name} goes on at {prefix_len}, expected {known.committed}")
            if prefix_len + n > self._max_context_len:
                raise Inexpressible(f"{known.name} has {prefix_len + n} positions, a replay {self._max_context_len}")
            known.state = "RUNNING"
            known.n = n
            items[known] = f"{known.item[:-6]},{n},[]]"
        self._put_lines([*lines, self._allocates(items)])

    def on_alloc_for_decode(self, batch: Any, token_per_req: int) -> None:
        if self._file is None:
            return
        self._settle()
        self._advance()
        if token_per_req != 1:
            raise Inexpressible(f"{token_per_req} tokens of a request in one decode")
        pseudonyms, known_by_id = self._file.pseudonyms, self._known
        items, lines, text, n_ops = dict[_Known, str](), list[Any](), list[str](), 0
        for req in batch.reqs:
            known = known_by_id.get(id(req))
            if known is not None and known.n == 1:  # mostly it decoded before, and has its token
                outputs, n_outputs, n_tokens = req.output_ids, known.n_outputs + 1, known.n_tokens
                if len(outputs) == n_outputs and known.committed + 1 == n_tokens < self._max_context_len:
                    token = outputs[-1] if pseudonyms is None else pseudonyms.tokens(outputs[-1:])[0]
                    text.append(f"{known.kept_one}{token}]}}\n")
                    n_ops += 1
                    known.n_outputs = n_outputs
                    known.committed = n_tokens
                    known.n_tokens = n_tokens + 1
                    items[known] = known.item
                    continue
            if known is None or known.state != "RUNNING":
                raise Inexpressible("a decode of a request that was never prefilled")
            if text:
                lines.append(_Lines("".join(text), n_ops, 0))
                text, n_ops = [], 0
            self._land(known, lines, launches=True)
            if known.committed + 1 != known.n_tokens:
                raise Inexpressible(f"{known.name} decodes with {known.n_tokens - known.committed} tokens to compute")
            if known.n_tokens > self._max_context_len:
                raise Inexpressible(f"{known.name} has {known.n_tokens} positions, a replay {self._max_context_len}")
            known.n = 1
            items[known] = known.item
        if text:
            lines.append(_Lines("".join(text), n_ops, 0))
        self._put_lines([*lines, self._allocates(items)])

    def _allocates(self, items: dict[_Known, str]) -> _Alloc:
        self._evicted = False
        return _Alloc(items)

    def _last_alloc(self) -> _Alloc | None:
        """Return the ``alloc`` behind which nothing is held back, if the last line held back is one."""
        last = self._held[-1] if self._held else None
        return last if isinstance(last, _Alloc) else None

    def _put_lines(self, lines: list[Any]) -> None:
        """Write lines as one piece, or hold them back from the first one on that is not ready."""
        if not self._held and all(line.ready() for line in lines):
            text = "".join([line.text for line in lines])
            self._emit(text, sum([line.n_ops for line in lines]), sum([line.n_values for line in lines]))
        else:
            self._held.extend(lines)
            self._advance()

    def after_alloc(self, batch: Any, token_per_req: int = 1) -> None:
        """Remember that an allocation that is held back evicted something on its way."""
        if (alloc := self._last_alloc()) is not None:
            alloc.evicted = self._evicted

    def on_alloc_for_spec_decode(
        self, tree_cache: Any, req_to_token_pool: Any, *, reqs: Any, nxt_kv_lens_cpu: Any, **others: Any
    ) -> None:
        if self._file is None:
            return
        self._settle()
        items, lines = [], list[Any]()
        for req, end in zip(reqs, nxt_kv_lens_cpu.tolist(), strict=True):
            known = self._running(req, "a speculative decode")
            if known.state != "RUNNING" or known.late is not None:
                raise Inexpressible(f"{known.name} decodes while its prefill is in flight")
            self._land(known, lines, launches=True)
            n = end - known.committed
            if known.committed + 1 != known.n_tokens or n < 1 or req.kv.kv_committed_len != known.committed:
                raise Inexpressible(f"{known.name} has speculative passes that overlap")
            if end > self._max_context_len:
                raise Inexpressible(f"{known.name} has {end} positions, a replay {self._max_context_len}")
            known.n = n
            known.spec = _SpecItem(known, n)
            items.append(known.spec)
        self._put_lines([*lines, _SpecAlloc(items, self._file)])

    def _land(self, known: _Known, lines: list[Any], *, launches: bool = False, owned: int | None = None) -> None:
        """Add the ``commit`` of the pass of a request, if one is in flight.

        With ``launches`` another pass follows, and needs the token that this one sampled, known or not. ``owned`` is
        how many positions count for a request that ends.
        """
        if not known.n:
            return
        if known.spec is not None:
            self._land_spec(known, known.spec, lines, owned)
            return
        assert self._file is not None
        req = known.req
        n, known.n = known.n, 0
        known.committed += n
        n_new = len(req.output_ids) - known.n_outputs
        samples = known.committed == known.n_tokens
        head = f'{{"op":"commit",{known.ref},"kept":{n},"sampled":['
        if samples and n_new == 1:
            lines.append(_Lines(f"{head}{tokens_text(req.output_ids[-1:], self._file.pseudonyms)[1:]}}}\n", 1, 0))
        elif samples and launches and n_new == 0:
            known.late = _Late(known, req, known.n_outputs, n, self._file)
            lines.append(known.late)
        elif n_new > 0:
            raise Inexpressible(f"{known.name} has {n_new} tokens from a pass that gives {int(samples)}")
        elif n_new < 0 and launches:
            raise Inexpressible(f"{known.name} has three passes in flight")
        else:
            lines.append(_Lines(f"{head}]}}\n", 1, 0))
            return
        known.n_outputs += 1
        known.n_tokens += 1

    def _land_spec(self, known: _Known, item: _SpecItem, lines: list[Any], owned: int | None) -> None:
        assert self._file is not None
        outputs = known.req.output_ids[known.n_outputs :].tolist()
        kept = len(outputs)
        if owned is not None and kept:  # the request ends inside of what was accepted
            kept = max(1, min(kept, owned - known.committed))
            outputs = outputs[:kept]
        if kept > item.n:
            raise Inexpressible(f"{known.name} has {kept} tokens from a pass over {item.n}")
        item.drafts = (outputs[:-1] + [ANY_TOKEN] * item.n)[: item.n - 1]
        known.n, known.spec = 0, None
        known.committed += max(1, kept)
        known.n_tokens += kept
        known.n_outputs += kept
        sampled = tokens_text(outputs[-1:], self._file.pseudonyms)
        lines.append(_Lines(f'{{"op":"commit",{known.ref},"kept":{max(1, kept)},"sampled":{sampled}}}\n', 1, 0))

    # Publications and ends

    def on_checkpoint_kv_cache(self, req: Any, tree_cache: Any) -> None:
        if self._file is None:
            return
        self._settle()
        if req.skip_radix_cache_insert:
            return
        known = self._running(req, "a checkpoint")
        if known.state != "RUNNING":
            raise Inexpressible(f"a checkpoint of {known.name}, which waits")
        if known.late is not None:
            self._behind = self._see_behind(known, known.late, req)
            return
        self._advance()
        lines = list[Any]()
        self._land(known, lines)
        if self._n_units(req.extend_end) != self._n_units(known.committed):
            raise Inexpressible(f"{known.name} publishes {req.extend_end} of {known.committed} computed tokens")
        self._put_lines([*lines, _Lines(f'{{"op":"checkpoint",{known.ref}}}\n', 1, 0)])

    def _see_behind(self, known: _Known, late: _Late, req: Any) -> tuple[_Known, _Alloc, Any]:
        """Prepare to put the checkpoint of a prompt in front of the decode that was launched before it had landed."""
        alloc = self._last_alloc()
        if alloc is None or known not in alloc.items:
            raise Inexpressible(f"a checkpoint of {known.name} behind another operation that overlaps its prefill")
        if self._n_units(req.extend_end) != self._n_units(late.committed):
            raise Inexpressible(f"{known.name} publishes {req.extend_end} of {late.committed} computed tokens")
        return known, alloc, self._row_of(req) if alloc.evicted else None

    def after_checkpoint(self, req: Any, tree_cache: Any) -> None:
        if self._behind is None:
            return
        (known, alloc, row), self._behind = self._behind, None
        if row is not None and row != self._row_of(req):
            raise Inexpressible(f"a checkpoint of {known.name} that frees pages, behind an eviction that overlaps it")
        self._put_in_front(alloc, [_Lines(f'{{"op":"checkpoint",{known.ref}}}\n', 1, 0)])

    def _put_in_front(self, alloc: _Alloc, lines: list[Any]) -> None:
        """Hold lines back in front of the last one; before: that one is ``alloc``."""
        self._held.pop()
        self._held.extend(lines)
        if alloc.items:
            self._held.append(alloc)
        self._advance()

    def _row_of(self, req: Any) -> list[int]:
        slots: list[int] = self._rows.req_to_token[req.kv.req_pool_idx, : req.extend_end].tolist()
        return slots

    def on_release_kv_cache(self, req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
        if self._file is None or not req.kv.holds_kv:
            return
        self._settle()
        self._advance()
        known = self._running(req, "the end")
        if known.state != "RUNNING":
            raise Inexpressible(f"the end of {known.name}, which waits")
        publishes = checkpoint and not req.skip_radix_cache_insert
        retracts = not checkpoint and not req.finished() and req.to_finish is None
        late = known.late
        if late is not None and not late.ready():
            if publishes or retracts:
                raise Inexpressible(f"{known.name} ends before its last token is known")
            late.token = ANY_TOKEN
        owned = req.owned_kv_len() if publishes else None
        lines = list[Any]()
        alloc = None if retracts else self._overtaken(known, owned)
        if alloc is not None and known in alloc.items:  # as if the pass behind its last token had not been launched
            del alloc.items[known]
            alloc.n_values -= 1
            known.n = 0
        self._land(known, lines, owned=owned)
        if owned is not None and self._n_units(owned) != self._n_units(known.committed):
            raise Inexpressible(f"{known.name} ends with {owned} of {known.committed} computed tokens")
        if publishes:
            last = f'{{"op":"release",{known.ref}}}\n'
        elif retracts:
            last = f'{{"op":"retract",{known.ref},"publish":false}}\n'
        else:
            last = f'{{"op":"abort",{known.ref}}}\n'
        if alloc is None:
            self._put_lines([*lines, _Lines(last, 1, 0)])
        else:
            self._put_in_front(alloc, [*lines, _Lines(last, 1, 0)])
        if retracts:
            self._waits(known)
            known.lock_before = None  # release gives the lock back
        else:
            del self._known[id(req)]
            if known.look:
                self._dead.append(known.look)

    def _overtaken(self, known: _Known, owned: int | None) -> _Alloc | None:
        """Return the ``alloc`` held back in front of which the end of a request may stand.

        That is where the results of the pass before it belong, for others of them may be checkpoints, which have to
        stand there. Not if it evicted; nor if it gave the request a page, or a place that counts for its publication.
        """
        alloc = self._last_alloc()
        if alloc is None or alloc.evicted:
            return None
        if known not in alloc.items:
            return alloc
        same = self._n_units(known.committed) == self._n_units(owned or 0) and known.committed % self._page_size
        return alloc if owned is None or same else None

    # The tree

    def _on_evict(self, params: Any) -> None:
        if self._file is None:
            return
        if params.swa_num_tokens or params.mamba_num:
            raise Inexpressible("an eviction from a second pool")
        self._settle()
        self._advance()
        if params.num_tokens >= 1 and not self._cache.disable:
            self._emit(f'{{"op":"evict","n":{int(params.num_tokens)}}}\n', 1)

    def _on_evict_for_alloc(self, params: Any, *, allocation_reclaim_satisfied: Any = None) -> None:
        if allocation_reclaim_satisfied is not None:
            raise Inexpressible("an eviction for two pools at once")
        self._on_evict(params)

    def _on_reset(self) -> None:
        if self._file is None:
            return
        self._settle()
        self._advance()
        busy = [known.name for known in self._known.values() if known.state != "NEW"]
        if busy or self._held:
            raise Inexpressible(f"a reset while {', '.join(busy[:3]) or 'a pass'} runs")
        self._emit('{"op":"reset"}\n', 1)
        self._was_reset = True

    def _on_clear(self) -> None:
        if self._file is not None and not self._was_reset:
            raise Inexpressible("pools that are cleared without a reset of the tree")


def _nothing(*arguments: Any, **named: Any) -> None:
    """Stands for the note of what is no operation."""


# Functions of the engine, hooked once for all recordings of this process

_AFTER = {
    "alloc_for_extend": "after_alloc",
    "alloc_for_decode": "after_alloc",
    "checkpoint_kv_cache": "after_checkpoint",
}
_LIVE: dict[int, LiveRecording] = {}
_ORIGINALS: dict[str, Any] = {}
_HOOKED: dict[str, Any] = {}


def _cache_of(name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    if name in ("alloc_for_extend", "alloc_for_decode"):
        return (arguments[0] if arguments else named["batch"]).tree_cache
    if name == "alloc_for_spec_decode":
        return arguments[0] if arguments else named["tree_cache"]
    return arguments[1] if len(arguments) > 1 else named["tree_cache"]


def _hooked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    note_name = f"on_{name}"
    after_name = _AFTER.get(name)

    @functools.wraps(original)
    def hook(*arguments: Any, **named: Any) -> Any:
        live = _LIVE.get(id(_cache_of(name, arguments, named)))
        if live is None or live.stopped is not None:
            return original(*arguments, **named)
        after = getattr(live, after_name) if after_name else None
        return live.run(original, getattr(live, note_name), arguments, named, after)

    return hook


def _hook_functions() -> None:
    if _HOOKED:
        return
    for name, module in FUNCTIONS.items():
        _ORIGINALS[name] = getattr(module, name)
        _HOOKED[name] = _hooked(name, _ORIGINALS[name])
    _replace(_ORIGINALS, _HOOKED)


def _unhook_functions() -> None:
    _replace(_HOOKED, _ORIGINALS)
    _HOOKED.clear()
    _ORIGINALS.clear()


def _replace(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Put each function in the place of the other, wherever a module has it under its name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is not dict or names is globals():
            continue
        for name, function in old.items():
            if names.get(name) is function:
                names[name] = new[name]


def _at_exit() -> None:
    for live in list(_LIVE.values()):
        live.stop("its process ended")


def _in_child() -> None:
    for live in list(_LIVE.values()):
        live.abandon()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
