"""Recording: what a cache does while others use it, as a trace (docs/record.md).

    target = recording(make(config), config, "recorded.jsonl", target_name="mine:make")

wraps a target; ``targets/sglang_record.py`` does the same for the live caches of SGLang. Each operation is with the
kernel before it runs. A recording never stands in the way of what it records: a full disk, or something that no trace
can say, ends it with one logged line, and the engine goes on. It is bounded, and its end is told where each reader of
the trace looks first, in the ``why`` of the header: that line has a fixed width, and is written again when the
recording ends. One that still says "goes on" was cut off by the death of its process.

Left out: compression, and fsync. What is recorded survives the process, not the machine.
"""

import hashlib
import logging
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

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
from kvlockstep.fuzz.targets.base import AllocResult, RememberingTarget, Target
from kvlockstep.fuzz.trace import MAX_OPS, MAX_VALUES, Header, encode_header, encode_op
from kvlockstep.fuzz.trace_bounds import MAX_LINE, MAX_TOKEN, MAX_TOKENS
from kvlockstep.invariants import Snapshot

OPS_AT_MOST = 1_000_000
BYTES_AT_MOST = 256 << 20
"""Of one recording, unless its owner says otherwise."""

WHY_WIDTH = 300

GOES_ON = "goes on, or its process died"

log = logging.getLogger("kvlockstep.record")


# What a reader must not learn

_ROUNDS = 6
_HALF = 16
_MASK = (1 << _HALF) - 1


class _TokenPseudonyms(dict[int, int]):
    """Pseudonyms of the tokens seen so far; a new one is made when it is asked for."""

    def __init__(self, key: bytes) -> None:
        super().__init__()
        bits = hashlib.shake_256(b"tokens" + key).digest(2 * _ROUNDS << _HALF)
        self._rounds = [array("H", part.tobytes()) for part in np.frombuffer(bits, "<u2").reshape(_ROUNDS, -1)]

    def __missing__(self, token: int) -> int:
        if not 0 <= token <= MAX_TOKEN:
            raise ValueError(f"token {token}: a trace has tokens in 0..{MAX_TOKEN}")
        other = self._permuted(token)
        while other > MAX_TOKEN:  # walk on, so that tokens stay a permutation of tokens
            other = self._permuted(other)
        self[token] = other
        return other

    def _permuted(self, token: int) -> int:
        left, right = token >> _HALF, token & _MASK
        for function in self._rounds:
            left, right = right, left ^ function[right]
        return left << _HALF | right


class Pseudonyms:
    """One-to-one replacements of tokens, names and parts of namespaces, made with a key that is not written.

    The same key gives the same replacements, in any process and order. Who has the file and not the key learns which
    are equal, how often and in which order they occur, and all lengths; and a key that can be guessed is no key.
    """

    def __init__(self, key: str | bytes) -> None:
        given = key.encode() if isinstance(key, str) else key
        self._key = hashlib.blake2b(given, person=b"kvlockstep").digest()
        self._of_token = _TokenPseudonyms(self._key)

    def tokens(self, tokens: Sequence[int]) -> list[int]:
        return list(map(self._of_token.__getitem__, tokens))

    def name(self, name: str) -> str:
        return f"r{self._hashed('name', name)}"

    def namespace(self, namespace: Namespace) -> Namespace:
        extra_key, cache_salt, content_ids = namespace
        return (
            extra_key and self._hashed("extra_key", extra_key),
            cache_salt and self._hashed("cache_salt", cache_salt),
            tuple(one and self._hashed("content_id", one) for one in content_ids),
        )

    def op(self, op: Op) -> Op:
        """Return the operation with everything replaced that a reader must not learn."""
        match op:
            case Submit(request, tokens, namespace):
                names = (self.name(request), tuple(self.tokens(tokens)), self.namespace(namespace))
                return replace(op, request=names[0], tokens=names[1], namespace=names[2])
            case Alloc(batch):
                return Alloc(tuple([AllocItem(self.name(x.request), x.n, tuple(self.tokens(x.drafts))) for x in batch]))
            case Commit(request, kept, sampled):
                return Commit(self.name(request), kept, tuple(self.tokens(sampled)))
            case Evict() | Reset():
                return op
            case _:
                return replace(op, request=self.name(op.request))

    def _hashed(self, kind: str, text: str) -> str:
        data = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self._key, person=kind.encode(), digest_size=8).hexdigest()


# The file


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a recording, between two operations."""

    n_bytes: int
    n_ops: int
    n_values: int


class Recording:
    """A trace file that is written ahead, is bounded, and never raises once it is open.

    Raises OSError where the file cannot be opened, ValueError for a name that ends in ``.gz`` and for a header that is
    none. ``source`` begins the ``why`` of the header.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header,
        *,
        source: str,
        max_ops: int = OPS_AT_MOST,
        max_bytes: int = BYTES_AT_MOST,
        pseudonyms: str | bytes | None = None,
    ) -> None:
        self.path = os.fspath(path)
        if self.path.endswith(".gz"):
            raise ValueError(f"{self.path}: a recording is written plain: name it without .gz, and pack it afterwards")
        self.pseudonyms = None if pseudonyms is None else Pseudonyms(pseudonyms)
        self._source = source[:100] + (" with pseudonyms" if self.pseudonyms else "")
        self._header = header
        self._max_ops = min(max_ops, MAX_OPS)
        self._max_bytes = max_bytes
        self.on_stop: Callable[[], None] | None = None
        self.n_ops = 0
        self.n_bytes = 0
        self._n_values = 0
        self.stopped: str | None = None  # why
        first = self._header_line(GOES_ON)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with self.guarded():
            self._write(first, 0)
            self.n_bytes = len(first)

    def put(self, op: Op) -> None:
        """Append one operation."""
        with self.guarded():
            shown = self.pseudonyms.op(op) if self.pseudonyms else op
            n_values = len(op.tokens) + len(op.namespace[2]) if isinstance(op, Submit) else 0
            n_values += sum([1 + len(item.drafts) for item in op.batch]) if isinstance(op, Alloc) else 0
            self.put_text(f"{encode_op(shown)}\n", 1, n_values)

    def put_text(self, text: str, n_ops: int, n_values: int = 0, at: Mark | None = None) -> None:
        """Append canonical lines, or put them in the place of what was written since ``at``.

        ``n_values`` are the tokens and batch items in them. Before: `guarded`, for this may raise.
        """
        if self.stopped is not None:
            return None
        before = at or Mark(self.n_bytes, self.n_ops, self._n_values)
        data = text.encode("ascii")
        if before.n_ops + n_ops > self._max_ops:
            return self.stop(f"stopped at the bound of {self._max_ops:,} operations")
        if before.n_bytes + len(data) > self._max_bytes:
            return self.stop(f"stopped at the bound of {self._max_bytes:,} bytes")
        if before.n_values + n_values + before.n_ops + n_ops > MAX_VALUES:
            return self.stop(f"stopped at the {MAX_VALUES:,} tokens and batch items that a trace may have")
        written, end = self.n_bytes, before.n_bytes + len(data)
        self.n_bytes, self.n_ops, self._n_values = before.n_bytes, before.n_ops, before.n_values  # if this fails
        self._write(data, before.n_bytes)
        if end < written:
            os.ftruncate(self._file, end)
        self.n_bytes, self.n_ops, self._n_values = end, before.n_ops + n_ops, before.n_values + n_values
        return None

    def mark(self) -> Mark:
        return Mark(self.n_bytes, self.n_ops, self._n_values)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Let nothing out that goes wrong in here: it ends the recording."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the recording for something that was not foreseen."""
        if isinstance(error, OSError):
            what = f"{error.strerror or error}"
        else:
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        self.stop(f"ended early: {what}", trouble=True)

    def stop(self, reason: str, *, trouble: bool = False) -> None:
        """End the recording, say why in its header, and give the file back. Does nothing the second time."""
        if self.stopped is not None:
            return
        self.stopped = reason
        try:
            with suppress(OSError, ValueError):
                self._write(self._header_line(f"{self.n_ops:,} operations, {reason}"), 0)
            with suppress(OSError):
                os.close(self._file)
            level = logging.WARNING if trouble else logging.INFO
            log.log(level, "recording %s: %d operations, %s", self.path, self.n_ops, reason)
        finally:
            if self.on_stop is not None:
                self.on_stop()

    def abandon(self) -> None:
        """Leave the file to the process that this one was forked from."""
        self.stopped = "belongs to another process"
        with suppress(OSError):
            os.close(self._file)

    def _header_line(self, state: str) -> bytes:
        text = f"{self._source}: {state}"
        plain = "".join([char if " " <= char <= "~" and char not in '"\\' else "'" for char in text])
        header = replace(self._header, why=plain[:WHY_WIDTH].ljust(WHY_WIDTH))  # in JSON no character takes two
        return f"{encode_header(header)}\n".encode("ascii")

    def _write(self, data: bytes, at: int) -> None:
        rest = memoryview(data)
        try:
            while rest:
                n = os.pwrite(self._file, rest, at)
                rest, at = rest[n:], at + n
        except OSError:
            if self.n_bytes:  # what is whole stays
                with suppress(OSError):
                    os.ftruncate(self._file, self.n_bytes)
            raise


def tokens_text(tokens: Sequence[int], pseudonyms: Pseudonyms | None) -> str:
    """Spell tokens as a trace does. Raises ValueError for tokens that no trace can hold."""
    shown = pseudonyms.tokens(tokens) if pseudonyms else list(tokens)
    if not shown:
        return "[]"
    if len(shown) > MAX_TOKENS or min(shown) < 0 or max(shown) > MAX_TOKEN:
        raise ValueError(f"a trace has at most {MAX_TOKENS} tokens in 0..{MAX_TOKEN} in one operation")
    text = str(shown).replace(" ", "")
    if len(text) > MAX_LINE // 2:
        raise ValueError(f"a trace has lines of at most {MAX_LINE} bytes")
    return text


# Any target


@dataclass(slots=True)
class _Book:
    """What the trace says of a request."""

    tokens: list[int]
    namespace: Namespace
    priority: int
    private: bool
    live: bool = False
    n: int = 0  # positions of the pass in flight
    drafts: list[int] = field(default_factory=list)
    abort_pending: bool = False


class RecordingTarget:
    """A target that writes down what is asked of another one. Whatever else that one has is reached through it.

    A ``submit`` is written where a name is first seen, or comes back otherwise than it was left. A request of which
    the target never hears is not in the trace.
    """

    def __init__(self, target: Target, file: Recording) -> None:
        self._target = target
        self.recording = file
        self._books: dict[str, _Book] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._target, name)

    def stop(self) -> None:
        """End the recording; the target goes on."""
        self.recording.stop("stopped by its owner")

    def peek(self, request: str, tokens: Sequence[int], namespace: Namespace, private: bool) -> int:
        with self.recording.guarded():
            self._submit(request, tokens, namespace, None, private)
        self.recording.put(Peek(request))
        return self._target.peek(request, tokens, namespace, private)

    def match(self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int, private: bool) -> int:
        with self.recording.guarded():
            self._submit(request, tokens, namespace, priority, private)
        self.recording.put(Match(request))
        matched_len = self._target.match(request, tokens, namespace, priority, private)
        if request in self._books:
            self._books[request].live = True
        return matched_len

    def _submit(
        self, request: str, tokens: Sequence[int], namespace: Namespace, priority: int | None, private: bool
    ) -> None:
        book = self._books.get(request)
        if book is not None and (book.live or _same(book, tokens, namespace, priority, private)):
            return
        if book is not None:
            self.recording.put(Abort(request))
        self._books[request] = _Book(list(tokens), namespace, priority or 0, private)
        self.recording.put(Submit(request, tuple(tokens), namespace, priority or 0, private))

    def alloc(self, batch: Sequence[AllocItem]) -> AllocResult:
        self.recording.put(Alloc(tuple(batch)))
        result = self._target.alloc(batch)
        for item in batch:
            if (book := self._books.get(item.request)) is not None:
                book.n, book.drafts = item.n, list(item.drafts)
        return result

    def commit(self, request: str, kept: int, sampled: Sequence[int]) -> None:
        self.recording.put(Commit(request, kept, tuple(sampled)))
        self._target.commit(request, kept, sampled)
        if (book := self._books.get(request)) is None:
            return
        book.tokens += [*book.drafts[: max(0, kept - (book.n - len(book.drafts)))], *sampled]
        book.n, book.drafts = 0, []
        if book.abort_pending:
            del self._books[request]

    def checkpoint(self, request: str) -> None:
        self.recording.put(Checkpoint(request))
        self._target.checkpoint(request)

    def release(self, request: str) -> None:
        self.recording.put(Release(request))
        self._target.release(request)
        self._books.pop(request, None)

    def abort(self, request: str) -> None:
        self.recording.put(Abort(request))
        self._target.abort(request)
        book = self._books.get(request)
        if book is not None and book.n:
            book.abort_pending = True
        else:
            self._books.pop(request, None)

    def retract(self, request: str, publish: bool) -> None:
        self.recording.put(Retract(request, publish))
        self._target.retract(request, publish)
        if (book := self._books.get(request)) is not None:
            book.live = False

    def evict(self, n_slots: int) -> list[list[int]]:
        self.recording.put(Evict(n_slots))
        return self._target.evict(n_slots)

    def reset(self) -> None:
        self.recording.put(Reset())
        self._target.reset()

    def forget(self, request: str) -> None:
        if self._books.pop(request, None) is not None:
            self.recording.put(Abort(request))
        if hasattr(self._target, "forget"):
            cast(RememberingTarget, self._target).forget(request)

    def snapshot(self) -> Snapshot:
        return self._target.snapshot()


def _same(book: _Book, tokens: Sequence[int], namespace: Namespace, priority: int | None, private: bool) -> bool:
    known = (book.tokens, book.namespace, book.private)
    return known == (list(tokens), namespace, private) and priority in (None, book.priority)


def recording(
    target: Target,
    config: CacheConfig,
    path: str | os.PathLike[str],
    *,
    target_name: str | None = None,
    fault: str | None = None,
    max_ops: int = OPS_AT_MOST,
    max_bytes: int = BYTES_AT_MOST,
    pseudonyms: str | bytes | None = None,
) -> RecordingTarget:
    """Return a target that does what ``target`` does, and records it. Before: nothing was asked of ``target`` yet.

    ``target_name`` is what `replay` calls it; its own ``name`` if that is left out. Raises OSError where the file
    cannot be opened, ValueError for a header that is none.
    """
    header = Header(config, "", None, None, target_name or target.name, getattr(target, "lane", None), fault)
    source = f"Recorded from the target {target_name or target.name}"
    file = Recording(path, header, source=source, max_ops=max_ops, max_bytes=max_bytes, pseudonyms=pseudonyms)
    return RecordingTarget(target, file)
