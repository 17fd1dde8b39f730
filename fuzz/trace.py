"""Trace files: read as a stream, written ahead of the operations, or written whole (docs/traces.md).

A trace is a header line and then one operation a line; what stands on a line is settled in
``trace_lines.py``. A gzipped file is known by its first bytes when it is read, and is made when the
name ends in ``.gz``.

Files are data from strangers: lines, operations, tokens and text are bounded, and a gzip bomb stops
after a few MiB of text. Every defect found in reading is one line of TraceError; only writing raises
OSError, so that a caller can tell a bad file from a full disk.
"""

import gzip
import io
import os
import zlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvlockstep.fuzz.files import replacing
from kvlockstep.fuzz.ops import Alloc, Op, Submit
from kvlockstep.fuzz.trace_bounds import MAX_LINE
from kvlockstep.fuzz.trace_lines import (
    Header,
    NotJson,
    TraceError,
    decode_header,
    decode_op,
    encode_header,
    encode_op,
)

__all__ = [
    "Header",
    "Trace",
    "TraceError",
    "TraceReader",
    "TraceWriter",
    "decode_header",
    "decode_op",
    "encode_header",
    "encode_op",
    "read_trace",
    "write_ops",
    "write_trace",
]

MAX_OPS = 5_000_000
MAX_VALUES = 1 << 25  # of one trace: operations, tokens (expanded), batch items, content ids
MAX_TEXT = 1 << 30  # bytes of one trace, after decompression
BOMB_TEXT = 4 << 20  # bytes from which on ...
BOMB_RATIO = 200  # ... a trace is not believed to have compressed so well

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP = 16 + zlib.MAX_WBITS  # asks zlib for the gzip format, which then carries no name and no time


@dataclass(slots=True)
class Trace:
    header: Header
    ops: list[Op]


# Reading


class TraceReader:
    """The header of a file, read at once, and one pass over its operations.

    With ``allow_cut_tail`` the trace ends before a last line that is not whole, or where a gzip stream
    stops: this is what a writer leaves that was killed. The line of an operation is whole before the
    operation runs, so nothing that ran is missing.
    """

    def __init__(self, path: str | os.PathLike[str], allow_cut_tail: bool = False) -> None:
        self._path = os.fspath(path)
        self._allow_cut_tail = allow_cut_tail
        self._lines = _lines(self._path, allow_cut_tail)
        first = next(self._lines, None)
        if first is None:
            raise TraceError(f"{self._path}:1: an empty file: a trace starts with a header")
        where, line, whole = first
        try:
            self.header = decode_header(_decoded(line, where), where)
        except TraceError as error:
            self._lines.close()
            raise _cut_off(where) if _is_cut(whole, error) else error from None

    def __iter__(self) -> Iterator[Op]:
        n_values = 0
        for n_ops, (where, line, whole) in enumerate(self._lines, start=1):
            try:
                op = decode_op(_decoded(line, where), where)
            except TraceError as error:
                if not _is_cut(whole, error):
                    raise
                if self._allow_cut_tail:
                    return
                raise _cut_off(where) from None
            n_values += _n_values(op)
            if n_ops > MAX_OPS:
                raise TraceError(f"{where}: more than {MAX_OPS} operations: split the trace")
            if n_values > MAX_VALUES:
                raise TraceError(f"{where}: more than {MAX_VALUES} tokens and batch items in all: split the trace")
            yield op

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_trace(path: str | os.PathLike[str], allow_cut_tail: bool = False) -> Trace:
    """Read a whole trace into memory, line by line. Raises TraceError."""
    with TraceReader(path, allow_cut_tail) as reader:
        return Trace(reader.header, list(reader))


def _lines(path: str, allow_cut_tail: bool) -> Generator[tuple[str, bytes, bool], None, None]:
    """Yield each line as (``FILE:LINE``, bytes, whether it is whole), and hold the file's size to the bounds."""
    number, n_bytes = 1, 0
    try:
        with open(path, "rb") as file:
            packed = file.peek(2)[:2] == _GZIP_MAGIC
            source = gzip.GzipFile(fileobj=file) if packed else file
            while line := source.readline(MAX_LINE + 1):
                where = f"{path}:{number}"
                n_bytes += len(line)
                if len(line) > MAX_LINE:
                    raise TraceError(f"{where}: a line of more than {MAX_LINE} bytes: is this a trace?")
                if n_bytes > MAX_TEXT:
                    raise TraceError(f"{where}: more than {MAX_TEXT} bytes of text: split the trace")
                if packed and n_bytes > BOMB_TEXT and file.seekable() and n_bytes > BOMB_RATIO * file.tell():
                    raise TraceError(f"{where}: gzip data that expands over {BOMB_RATIO}-fold: is this a trace?")
                yield where, line, line.endswith(b"\n")
                number += 1
    except EOFError:
        if not allow_cut_tail:
            raise TraceError(f"{path}:{number}: the gzip data is cut off: fetch the file again") from None
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}:{number}: cannot be read ({reason}): name a readable, undamaged trace") from None


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        wrong = f"byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8"
        raise TraceError(f"{where}: {wrong}: save as UTF-8") from error


def _is_cut(whole: bool, error: TraceError) -> bool:
    """Tell a line that stops too early from one that is wrong: no prefix of a JSON object is JSON."""
    return not whole and isinstance(error.__cause__, NotJson | UnicodeDecodeError)


def _cut_off(where: str) -> TraceError:
    return TraceError(f"{where}: the last line is cut off: delete it, or fetch the file again")


def _n_values(op: Op) -> int:
    if isinstance(op, Submit):
        return 1 + len(op.tokens) + len(op.namespace[2])
    if isinstance(op, Alloc):
        return 1 + sum(1 + len(item.drafts) for item in op.batch)
    return 1


# Writing


class TraceWriter:
    """A trace written ahead: each line is with the kernel before the operation runs.

    So it survives the death of the process, not of the machine. A write that fails (full disk) raises
    OSError; what was written before stays in the file and is a trace, and the writer takes no more.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        self._packed = os.fspath(path).endswith(".gz")
        self._file = io.FileIO(path, "w")
        try:
            self._begin(header)
        except BaseException:
            self._file.close()
            raise

    def restart(self, header: Header) -> None:
        """Begin another trace in the same open file. The one before is gone."""
        self._file.seek(0)
        self._file.truncate()
        self._begin(header)

    def write(self, op: Op) -> None:
        """Append one operation. Raises ValueError, with nothing written, if the format cannot hold it."""
        self._put_line(encode_op(op))

    def close(self) -> None:
        """Finish the file. Raises OSError if what is left to write does not fit."""
        if self._file.closed:
            return
        try:
            if self._packer is not None and self._failure is None:
                self._put(self._packer.flush())
        finally:
            self._file.close()

    def _begin(self, header: Header) -> None:
        self._end = 0  # of what was written whole
        self._failure: OSError | None = None
        self._packer = zlib.compressobj(wbits=_GZIP) if self._packed else None
        self._put_line(encode_header(header))

    def _put_line(self, line: str) -> None:
        if self._failure is not None:
            raise self._failure
        data = f"{line}\n".encode("ascii")
        if self._packer is not None:
            data = self._packer.compress(data) + self._packer.flush(zlib.Z_SYNC_FLUSH)
        self._put(data)

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._failure = error
            if len(rest) < len(data):  # part of a line: take it back
                self._file.seek(self._end)
                self._file.truncate()
            raise
        self._end += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write a whole trace, as `write_ops` does."""
    write_ops(path, trace.header, trace.ops)


def write_ops(path: str | os.PathLike[str], header: Header, ops: Iterable[Op]) -> None:
    """Write a trace, one operation at a time, and replace the file at once: a reader sees the old or the new one.

    Raises OSError, ValueError if the format cannot hold an operation, and what ``ops`` raises; the old file is then
    untouched.
    """
    with replacing(Path(path), synced=True) as file:
        packer = zlib.compressobj(wbits=_GZIP) if os.fspath(path).endswith(".gz") else None
        for line in _text_of(header, ops):
            file.write(packer.compress(line) if packer else line)
        if packer:
            file.write(packer.flush())


def _text_of(header: Header, ops: Iterable[Op]) -> Iterable[bytes]:
    yield f"{encode_header(header)}\n".encode("ascii")
    for op in ops:
        yield f"{encode_op(op)}\n".encode("ascii")
