"""Reading trace files: streams, gzip, tails that were cut, and files made to do harm."""

import gzip
import io
import os
import subprocess
import sys
import threading
import tracemalloc

import pytest

from kvlockstep.fuzz import trace as trace_module
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Alloc, AllocItem, Match, Reset, Submit
from kvlockstep.fuzz.trace import Header, Trace, TraceError, TraceReader, encode_header, encode_op, read_trace


def zipped(data, level=9):
    """Compress without the clock: a time in the bytes would give a parameter another name in every process."""
    return gzip.compress(data, level, mtime=0)


HEADER = Header(CacheConfig(), why="A page is handed out twice.")
OPS = [Submit("r0", (1, 2, 3)), Match("r0"), Alloc((AllocItem("r0", 3),)), Reset()]
TEXT = b"".join(f"{line}\n".encode() for line in [encode_header(HEADER), *map(encode_op, OPS)])
RESET = b'{"op":"reset"}\n'


@pytest.fixture
def file(tmp_path):
    """Make a trace file of these bytes."""

    def write(data, name="t.jsonl"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


def error_of(path, **options):
    with pytest.raises(TraceError) as caught:
        read_trace(path, **options)
    text = str(caught.value)
    assert text.startswith(f"{path}:")
    assert text.isprintable()
    return text.removeprefix(f"{path}:")


@pytest.mark.parametrize("data", [TEXT, zipped(TEXT), zipped(TEXT[:150]) + zipped(TEXT[150:])])
def test_read_gives_header_and_operations_of_plain_and_gzipped_files(file, data):
    assert read_trace(file(data)) == Trace(HEADER, OPS)


def test_read_goes_by_content_and_not_by_name(file):
    assert read_trace(file(zipped(TEXT), "t.jsonl")) == read_trace(file(TEXT, "t.jsonl.gz"))


def test_read_accepts_pipe(tmp_path):
    for number, data in enumerate((TEXT, zipped(TEXT))):
        path = tmp_path / f"pipe{number}"
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_bytes, args=(data,))
        writer.start()
        assert read_trace(path) == Trace(HEADER, OPS)
        writer.join()


def test_read_accepts_last_line_without_newline(file):
    assert read_trace(file(TEXT[:-1])) == Trace(HEADER, OPS)


def test_reader_streams_and_stops_when_it_is_closed(file):
    path = file(TEXT + RESET * 50_000)
    tracemalloc.start()
    with TraceReader(path) as reader:
        assert reader.header == HEADER
        n_ops = sum(1 for _ in reader)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert n_ops == 50_004
    assert peak < 1 << 20
    assert next(iter(reader), None) is None


def test_every_cut_of_a_file_is_recovered_or_refused(file):
    """A writer may be killed after any byte; a line without its newline is whole."""
    for end in range(len(TEXT)):
        path = file(TEXT[:end])
        n_whole_lines = TEXT[: end + 1].count(b"\n")
        if n_whole_lines == 0:
            assert error_of(path, allow_cut_tail=True).startswith("1: ")
            continue
        assert read_trace(path, allow_cut_tail=True).ops == OPS[: n_whole_lines - 1]
        if TEXT[end : end + 1] != b"\n" and TEXT[end - 1 : end] != b"\n":
            assert error_of(path).startswith(f"{n_whole_lines + 1}: the last line is cut off: ")


def test_every_cut_of_a_gzip_stream_is_recovered_or_refused(file):
    packed = zipped(TEXT)
    for end in range(len(packed)):
        path = file(packed[:end])
        error_of(path)
        try:
            ops = read_trace(path, allow_cut_tail=True).ops
        except TraceError:
            continue  # not even the header
        assert ops == OPS[: len(ops)]


def test_cut_tail_does_not_excuse_a_whole_line_that_is_wrong(file):
    assert error_of(file(TEXT + b'{"op":"drop"}'), allow_cut_tail=True).startswith("6: unknown operation")
    assert error_of(file(TEXT + b'{"op":\n'), allow_cut_tail=True).startswith("6: not JSON")


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"", "1: an empty file: "),
        (zipped(b""), "1: an empty file: "),
        (b"\n", "1: an empty line: "),
        (TEXT[:20], "1: the last line is cut off: "),
        (RESET, "1: no header: "),
        (b"\xef\xbb\xbf" + TEXT, "1: a byte order mark: "),
        (TEXT.decode().encode("utf-16"), "1: byte 0xff at column 1 is not UTF-8: "),
        (TEXT + b'{"op":"match","request":"\xff"}\n', "6: byte 0xff at column 26 is not UTF-8: "),
        (TEXT + b"\n", "6: an empty line: "),
        (TEXT + TEXT, "6: a second header: "),
        (TEXT.replace(b'"kvlockstep":1', b'"kvlockstep":2'), "1: trace version 2, this kvlockstep reads 1: upgrade"),
        (TEXT + b'{"op":"mat', "6: the last line is cut off: "),
        (b"\x1f\x8bnot really gzip", "1: cannot be read ("),
        (zipped(TEXT)[:-4], "6: the gzip data is cut off: "),
        (zipped(TEXT)[:-8] + bytes(8), "6: cannot be read (CRC check failed"),
        (zipped(TEXT)[:60] + b"\xff" * 60, "1: cannot be read ("),
        (zipped(TEXT) + b"garbage", "6: cannot be read ("),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_read_names_line_and_defect(file, data, wrong):
    assert error_of(file(data)).startswith(wrong)


def test_read_names_file_that_cannot_be_opened(tmp_path):
    assert error_of(tmp_path / "absent.jsonl").startswith("1: cannot be read (No such file or directory): ")
    assert error_of(tmp_path).startswith("1: cannot be read (Is a directory): ")


def test_endless_file_is_refused_at_the_line_bound():
    assert error_of("/dev/zero").startswith("1: a line of more than 16777216 bytes: ")


@pytest.mark.parametrize(
    ("bound", "needed", "wrong"),
    [
        ("MAX_OPS", 4, "5: more than 3 operations: "),
        ("MAX_VALUES", 8, "5: more than 7 tokens and batch items in all: "),
        ("MAX_TEXT", len(TEXT), f"5: more than {len(TEXT) - 1} bytes of text: "),
        ("MAX_LINE", TEXT.index(b"\n") + 1, f"1: a line of more than {TEXT.index(RESET[:5]) - 1} bytes: "),
    ],
)
def test_read_stops_at_bound(file, monkeypatch, bound, needed, wrong):
    path = file(TEXT)
    monkeypatch.setattr(trace_module, bound, needed)
    read_trace(path)
    monkeypatch.setattr(trace_module, bound, needed - 1)

    assert error_of(path).startswith(wrong)


def test_pieces_count_with_their_expanded_tokens(file, monkeypatch):
    piece = (
        b'{"op":"submit","request":"r0","tokens":[[1,1000]],"namespace":[null,null,[]],"priority":0,"private":false}\n'
    )
    monkeypatch.setattr(trace_module, "MAX_VALUES", 1500)

    assert error_of(file(TEXT + piece + piece)).startswith("7: more than 1500 tokens")


MEASURE = """
import resource, sys, time
from kvlockstep.fuzz.trace import TraceError, read_trace
before = resource.getrusage(resource.RUSAGE_SELF)
try:
    read_trace(sys.argv[1])
except TraceError as error:
    after = resource.getrusage(resource.RUSAGE_SELF)
    print((after.ru_maxrss - before.ru_maxrss) >> 10, after.ru_utime - before.ru_utime, error, sep="\\n")
"""


@pytest.mark.parametrize(
    ("unit", "wrong"),
    [
        (b"0" * 64, "2: a line of more than 16777216 bytes: "),
        (RESET, "gzip data that expands over 200-fold: "),
        (b" " * ((1 << 20) - len(RESET)) + RESET, "gzip data that expands over 200-fold: "),
    ],
    ids=["one line", "operations", "padded operations"],
)
def test_gzip_bomb_stops_early_in_little_memory(tmp_path, unit, wrong):
    """10 MB that expand to 10 GB."""
    chunk = unit * ((64 << 20) // len(unit))
    path = tmp_path / "bomb.jsonl.gz"
    packed = zipped(chunk, 9)
    with path.open("wb") as file:
        file.write(zipped(TEXT[: TEXT.index(b"\n") + 1]))
        for _ in range(160):
            file.write(packed)
    assert path.stat().st_size < 20 << 20

    done = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, timeout=60, check=True)

    mib, seconds, error = done.stdout.splitlines()
    assert wrong in error
    assert int(mib) < 100
    assert float(seconds) < 10


def test_reading_closes_the_file(file, monkeypatch):
    opened = []
    real = io.open

    def spy(*arguments):
        opened.append(real(*arguments))
        return opened[-1]

    monkeypatch.setattr(trace_module, "open", spy, raising=False)
    read_trace(file(TEXT))
    error_of(file(TEXT + b"x\n"))
    error_of(file(b"x\n"))

    assert len(opened) == 3
    assert all(one.closed for one in opened)
