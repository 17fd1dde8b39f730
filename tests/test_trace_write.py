"""Writing trace files: ahead of each operation, whole at once, and onto a disk that is full."""

import gzip
import os
import signal
import subprocess
import sys

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Evict, Match, Reset, Submit
from kvlockstep.fuzz.trace import Header, Trace, TraceWriter, encode_header, encode_op, read_trace, write_trace

HEADER = Header(CacheConfig())
OPS = [Submit("r0", (1, 2, 3)), Match("r0"), Evict(4), Reset()]
NAMES = ["t.jsonl", "t.jsonl.gz"]


@pytest.mark.parametrize("name", NAMES)
def test_line_is_in_the_file_before_write_returns(tmp_path, name):
    path = tmp_path / name
    with TraceWriter(path, HEADER) as writer:
        assert read_trace(path, allow_cut_tail=True) == Trace(HEADER, [])
        for n_written, op in enumerate(OPS, start=1):
            writer.write(op)
            assert read_trace(path, allow_cut_tail=True).ops == OPS[:n_written]

    assert read_trace(path) == Trace(HEADER, OPS)


@pytest.mark.parametrize("name", NAMES)
def test_restart_leaves_only_the_new_trace(tmp_path, name):
    other = Header(CacheConfig(page_size=2), target="sglang:radix")
    path = tmp_path / name
    with TraceWriter(path, HEADER) as writer:
        for op in OPS * 10:
            writer.write(op)
        writer.restart(other)
        writer.write(Reset())

    assert read_trace(path) == Trace(other, [Reset()])


def test_writer_refuses_operation_that_could_not_be_read_back(tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, HEADER) as writer:
        writer.write(OPS[0])
        with pytest.raises(ValueError, match="expected"):
            writer.write(Match("../r0"))
        writer.write(OPS[1])

    assert read_trace(path).ops == OPS[:2]


@pytest.mark.parametrize("name", NAMES)
def test_written_lines_survive_a_kill(tmp_path, name):
    path = tmp_path / name
    script = f"""
import os, signal
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Match
from kvlockstep.fuzz.trace import Header, TraceWriter
writer = TraceWriter({str(path)!r}, Header(CacheConfig()))
for n in range(100):
    writer.write(Match(f"r{{n}}"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)

    assert done.returncode == -signal.SIGKILL
    assert read_trace(path, allow_cut_tail=True).ops == [Match(f"r{n}") for n in range(100)]


def test_full_device_surfaces_as_os_error():
    with pytest.raises(OSError, match="No space left"):
        TraceWriter("/dev/full", HEADER)


@pytest.mark.parametrize("name", NAMES)
def test_full_disk_keeps_what_was_written(tmp_path, name):
    """A file-size limit stands for the disk; some bytes of the line that fails still fit.

    Space that comes back does not start the writer again: a trace with a hole would replay as another trace.
    """
    path = tmp_path / name
    script = f"""
import resource
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Submit
from kvlockstep.fuzz.trace import Header, TraceWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (5001, 9000))
writer = TraceWriter({str(path)!r}, Header(CacheConfig()))
n = 0
while True:
    try:
        writer.write(Submit(f"r{{n}}", (n * 7919 % 1000003, n * 104729 % 1000003)))
    except OSError as error:
        print(n, error.strerror)
        break
    n += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
try:
    writer.write(Submit("late", ()))
except OSError as error:
    print("still", error.strerror)
writer.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stdout.splitlines()
    n_written = int(first.split()[0])

    assert first == f"{n_written} File too large"
    assert second == "still File too large"
    assert n_written > 20
    packed = name.endswith(".gz")
    assert [op.request for op in read_trace(path, allow_cut_tail=packed).ops] == [f"r{n}" for n in range(n_written)]


@pytest.mark.parametrize("name", NAMES)
def test_write_trace_is_canonical_and_the_same_every_time(tmp_path, name):
    path = tmp_path / name
    lines = [encode_header(HEADER), *map(encode_op, OPS)]
    text = "".join(f"{line}\n" for line in lines).encode()
    write_trace(path, Trace(HEADER, OPS))
    first = path.read_bytes()
    write_trace(path, read_trace(path))

    assert path.read_bytes() == first
    assert (gzip.decompress(first) if name.endswith(".gz") else first) == text
    assert os.listdir(tmp_path) == [name]


def test_write_trace_leaves_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    write_trace(path, Trace(HEADER, OPS))
    with pytest.raises(ValueError, match="expected"):
        write_trace(path, Trace(HEADER, [Reset(), Match("a/b")]))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_trace(path, Trace(HEADER, []))

    assert read_trace(path) == Trace(HEADER, OPS)
    assert os.listdir(tmp_path) == ["t.jsonl"]


def test_write_trace_names_folder_that_is_absent(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_trace(tmp_path / "absent" / "t.jsonl", Trace(HEADER, OPS))
