"""Turns a request log into a trace: who arrived when, how long prompts and outputs were, which prefixes were equal.

A log is JSON Lines in the format of the Mooncake project, one request a line in order of arrival:

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}

``timestamp`` is in ms. A block is 512 tokens, the last one of a prompt maybe less; equal ids in the same order mean an
equal prefix. So a prompt is written as pieces ``[block, length]``, blocks numbered in the order in which the log first
names them, and the tokens that request ``i`` of the log gives out are those of block ``OUTPUTS + i`` (docs/traces.md
has the formula of a block): no two requests give out the same.

The schedule is that of an engine with a step of its own, and asks no model. In each step one batch decodes, a token
for every request whose prompt is computed; and up to ``chunk`` tokens of prompts are computed, first come, first
served, with a checkpoint after each pass. Pages are counted as if nothing were shared, so that nothing the trace asks
for can be refused for want of room. A request is admitted if its prompt and ``RESERVE`` tokens of its output fit too;
when the decoding ones then outgrow the pool, the one that was admitted last is retracted, without publishing (as
SGLang does; its prompt has been published by then), and waits at the head of the queue.

How much of a prompt a cache finds is not known here, for each cache may find another part. It is whole pages, though,
and so the passes over a prompt are whole chunks, as many as there would be if nothing were found; then one of each
half of a chunk, quarter, and so on down to a page; then what is less than a page. Those that are longer than what is
left are refused, and the others add up to it. With pages of 16, chunks of 64 and a prompt of 150, of which 48 were
found: the passes are 64, 64, 32, 16, 6; the second is refused, as 38 are left, and so is the fourth.

The clock is simulated: a step takes `STEP_MS` and `PREFILL_MS` more for each token of a prompt, found or not.
"""

import gzip
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from kvlockstep.fuzz import strict_json
from kvlockstep.fuzz.ops import Alloc, AllocItem, Checkpoint, Commit, Match, Op, Release, Retract, Submit
from kvlockstep.fuzz.pieces import Pieces
from kvlockstep.fuzz.trace_bounds import MAX_LINE, BadLine, block_tokens, shown

BLOCK = 512
"""Tokens of a block of the log."""

OUTPUTS = 1 << 30
"""Request ``i`` of a log, the first being 0, gives out the tokens of block ``OUTPUTS + i``."""

RESERVE = 512
"""Tokens of output for which there must be room when a request is admitted."""

STEP_MS = 20.0
PREFILL_MS = 0.025

MAX_LENGTH = 1 << 20
MOST_MS = 1 << 40
"""From the first request to the last: 34 years. Nanoseconds since 1970 taken for milliseconds are more."""

MAX_ID = (1 << 63) - 1
ONE_A_LINE = "a request log has one JSON object a line"
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class LogError(ValueError):
    """A log that cannot be read, in one line: ``FILE:LINE: what is wrong: remedy``."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One request of a log."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_log(path: str | PathLike[str], n_requests: int | None = None) -> Iterator[Logged]:
    """Read the first requests of a log, or all; gzipped or not, a line at a time.

    Raises LogError for a line that is none, is longer than a trace's may be, or is out of order; OSError.
    """
    with open(path, "rb") as file:
        packed = file.peek(2)[:2] == b"\x1f\x8b"
        source = gzip.GzipFile(fileobj=file) if packed else file
        first, last, number = None, 0, 0
        try:
            while (n_requests is None or number < n_requests) and (line := source.readline(MAX_LINE + 1)):
                number += 1
                request = _logged(line, f"{path}:{number}")
                if request.timestamp < last:
                    raise LogError(
                        f"{path}:{number}: timestamp {request.timestamp} after {last}: sort the log by timestamp"
                    )
                last = request.timestamp
                first = last if first is None else first
                if last - first > MOST_MS:
                    raise LogError(
                        f"{path}:{number}: timestamp {last} is {last - first:,} ms after the first: write milliseconds"
                    )
                yield request
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise LogError(f"{path}:{number + 1}: {error}: fetch the file again") from None
    if number == 0:
        raise LogError(f"{path}:1: an empty file: {ONE_A_LINE}")


def _logged(line: bytes, where: str) -> Logged:
    if len(line) > MAX_LINE:
        raise LogError(f"{where}: a line of more than {MAX_LINE} bytes: is this a request log?")
    try:
        body = strict_json.decode(line.decode("utf-8-sig"), fractions=True, remedy=ONE_A_LINE)
    except BadLine as error:
        raise LogError(f"{where}: {error}") from None
    except ValueError:
        raise LogError(f"{where}: not JSON: {ONE_A_LINE}") from None
    if type(body) is not dict:
        raise LogError(f"{where}: expected a JSON object, got {shown(body)}: is this a request log?")
    for name in _FIELDS:
        if name not in body:
            raise LogError(f"{where}: missing field {name!r}: a request has {', '.join(_FIELDS)}")
    timestamp = _number(body, "timestamp", 0, where)
    input_length, output_length = _number(body, "input_length", 1, where), _number(body, "output_length", 0, where)
    ids, n_blocks = body["hash_ids"], -(-input_length // BLOCK)
    if type(ids) is not list or not all(type(one) is int and abs(one) <= MAX_ID for one in ids):
        raise LogError(f"{where}: hash_ids: expected a list of integers of 64 bits, got {shown(ids)}")
    if len(ids) != n_blocks:
        raise LogError(
            f"{where}: {len(ids)} hash_ids for {input_length} tokens: expected {n_blocks}, one for {BLOCK} tokens each"
        )
    return Logged(timestamp, input_length, output_length, tuple(ids))


def _number(body: dict[str, Any], name: str, least: int, where: str) -> int:
    high = MAX_LENGTH if name.endswith("length") else MAX_ID
    value: Any = body[name]
    if type(value) is not int or not least <= value <= high:
        raise LogError(f"{where}: {name}: expected an integer in {least}..{high}, got {shown(value)}")
    return value


@dataclass(frozen=True, slots=True)
class Room:
    """What the schedule has to do with. ``chunk`` is the page size times a power of two."""

    page_size: int
    n_pages: int
    n_rows: int
    max_context_len: int
    chunk: int


@dataclass(slots=True, eq=False)
class _Request:
    name: str
    prompt: Pieces
    outputs: tuple[int, ...]
    n_given: int = 0  # tokens of the output so far
    passes: "deque[int]" = field(default_factory=deque)  # lengths of those that its prompt still needs, as far as known
    held_len: int = 0  # positions that it holds, or will once its prompt is computed, if nothing is shared

    @property
    def known_len(self) -> int:
        return len(self.prompt) + self.n_given

    def next_token(self) -> tuple[int, ...]:
        """Return the token that it gives out next, none where its output is complete."""
        return (self.outputs[self.n_given],) if self.n_given < len(self.outputs) else ()


class Schedule:
    """Makes the operations of a log, one after the other. What it left out and did again is counted as it goes."""

    def __init__(self, room: Room) -> None:
        assert room.chunk % room.page_size == 0, f"a chunk of {room.chunk} is whole pages of {room.page_size}"
        self.room = room
        self.requests = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.too_long = 0  # requests that no empty cache could hold, and that are not in the trace
        self.retractions = 0
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []  # in the order in which they were admitted
        self._block_of: dict[int, int] = {}
        self._clock = 0.0

    def ops(self, log: Iterator[Logged]) -> Iterator[Op]:
        """Run the whole log; its time begins with the first request. Raises what reading it raises."""
        later = next(log, None)
        start = later.timestamp if later is not None else 0
        number = 0
        while later is not None or self._waiting or self._running:
            if later is not None and not self._waiting and not self._running:
                self._clock = max(self._clock, float(later.timestamp - start))
            while later is not None and later.timestamp - start <= self._clock:
                yield from self._arrive(later, number)
                number += 1
                later = next(log, None)
            yield from self._decode()
            yield from self._prefill()
            self._clock += STEP_MS

    def _arrive(self, logged: Logged, number: int) -> Iterator[Op]:
        room, n_tokens = self.room, logged.input_length + logged.output_length
        if n_tokens > room.max_context_len or self._pages(n_tokens) + 2 > room.n_pages:
            self.too_long += 1
            return
        lengths = [BLOCK] * len(logged.hash_ids)
        lengths[-1] = logged.input_length - BLOCK * (len(lengths) - 1)
        blocks = [self._block_of.setdefault(one, len(self._block_of)) for one in logged.hash_ids]
        outputs = block_tokens(OUTPUTS + number, logged.output_length)
        request = _Request(f"r{number}", Pieces(tuple(zip(blocks, lengths, strict=True))), outputs)
        self.requests += 1
        self.prompt_tokens += logged.input_length
        self.output_tokens += logged.output_length
        self._waiting.append(request)
        yield Submit(request.name, request.prompt)

    def _pages(self, n_tokens: int) -> int:
        return -(-n_tokens // self.room.page_size)

    def _pages_held(self) -> int:
        """Count the pages of all that run if nothing is shared, and one more for each, which some engines ask for."""
        return sum([self._pages(request.held_len) + 1 for request in self._running])

    def _decode(self) -> Iterator[Op]:
        """Compute one more token of each request whose prompt is done; retract the youngest where there is no room."""
        for request in self._running:
            if not request.passes:
                request.held_len += 1
        while self._pages_held() > self.room.n_pages:
            yield from self._retract(self._running.pop())
        batch = [request for request in self._running if not request.passes]
        if not batch:
            return
        yield Alloc(tuple([AllocItem(request.name, 1) for request in batch]))
        for request in batch:
            yield Commit(request.name, 1, request.next_token())
            request.n_given += 1
        yield from self._release(batch)

    def _release(self, batch: list[_Request]) -> Iterator[Op]:
        for request in batch:
            if request.n_given == len(request.outputs):
                self._running.remove(request)
                yield Release(request.name)

    def _retract(self, request: _Request) -> Iterator[Op]:
        self.retractions += 1
        request.passes.clear()
        self._waiting.appendleft(request)
        yield Retract(request.name)

    def _prefill(self) -> Iterator[Op]:
        """Compute up to a chunk of prompts, those of requests that are admitted for it too."""
        chunk = budget = self.room.chunk
        while budget:
            request = next((one for one in self._running if one.passes), None)
            if request is None:
                request = self._admissible()
                if request is None:
                    return
                self._admit(request)
                yield Match(request.name)
            length = chunk if request.passes[0] == chunk else request.known_len % chunk
            if length > budget:
                return
            budget -= length
            self._clock += PREFILL_MS * length
            yield from self._compute(request)
            yield Checkpoint(request.name)
            if not request.passes:
                request.n_given += len(request.next_token())
                yield from self._release([request])

    def _admissible(self) -> _Request | None:
        """Return the request that waits at the head of the queue, if there is a row and room for it."""
        if not self._waiting or len(self._running) == self.room.n_rows:
            return None
        request = self._waiting[0]
        left = len(request.outputs) - request.n_given
        pages = self._pages(request.known_len + min(RESERVE, left)) + 1
        return request if self._pages_held() + pages <= self.room.n_pages else None

    def _admit(self, request: _Request) -> None:
        """Plan the passes over what is known of a request, of which a cache may find any number of whole pages."""
        self._running.append(self._waiting.popleft())
        request.held_len = request.known_len
        size = self.room.chunk
        request.passes.extend([size] * (request.known_len // size))
        while (size := size // 2) >= self.room.page_size:
            if size <= request.known_len:
                request.passes.append(size)
        if request.known_len % self.room.page_size:
            request.passes.append(request.known_len % self.room.page_size)

    def _compute(self, request: _Request) -> Iterator[Op]:
        """Run the next pass over a prompt if that is a whole chunk, else all that are left.

        The last one that is not refused gives a token. Where a prompt is whole pages nobody knows which that is: each
        may be, and is landed with the token, which is refused unless it was the last, and then without.
        """
        last_in_pages = request.known_len % self.room.page_size == 0
        n_passes = 1 if request.passes[0] == self.room.chunk else len(request.passes)
        for _ in range(n_passes):
            length = request.passes.popleft()
            yield Alloc((AllocItem(request.name, length),))
            if last_in_pages or not request.passes:
                yield Commit(request.name, length, request.next_token())
            if (last_in_pages and request.next_token()) or (not last_in_pages and request.passes):
                yield Commit(request.name, length)
