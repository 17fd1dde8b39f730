"""Where the shards of a campaign meet: a folder, or whatever fsspec reaches by a URL.

::

    kvlockstep-store.json                               the version of all this
    failures/SIGNATURE/TARGET+FAULT/000006-DIGEST/      a failure: number of operations, digest of its files
    corpus/TARGET/DIGEST.jsonl                          a trace of the corpus
    shards/CAMPAIGN/INDEX-of-TOTAL/                     party.json, progress.json, journal.jsonl and flakes/ of a shard

Failures and traces are named by what is in them, so that two who store the same store it once, and no one replaces
what another found. The folder of a shard has one owner, who replaces its files as wholes. Nothing is ever removed.

What comes out of a store is data of strangers: a name is taken only if it has the form of ours and is never part of a
path outside of the campaign, a file only up to a size, a failure and a trace only if its digest is that of its name.
How a store is reached, with which credentials, is fsspec's business. Merging is in ``merging.py``.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, TypeVar
from uuid import uuid4

from kvlockstep.fuzz.campaign.folder import FolderUnusable, Party, Settings, corpus_of
from kvlockstep.fuzz.campaign.record import PartyRecord, read_record
from kvlockstep.fuzz.failures import store_failure
from kvlockstep.fuzz.files import replace_file
from kvlockstep.fuzz.trace import Header, TraceError, decode_header, decode_op, read_trace

VERSION = 1
MARK = "kvlockstep-store.json"

REACH_S = 60.0
"""A store that does not answer for so long at the start cannot be reached."""

FINAL_S = 120.0
"""So long may the last push take."""

CORPUS_EVERY = 300.0
"""Seconds between pushes of the corpus, of which many traces are replaced by shorter ones soon."""

JOURNAL_EVERY = 60.0
"""Seconds between pushes of the journal, which grows."""

MAX_FILE = 64 << 20
MAX_TRACE = 16 << 20
MAX_FILES = 500_000
MAX_TOTAL = 8 << 30
"""Bytes of one file of a shard, of a trace; number of files of a store, and bytes that are read of it."""

PARTS = ("trace.jsonl", "original.jsonl", "verdict.txt", "environment.json")
"""The files of a failure."""

NAME = r"[A-Za-z0-9_+=-][A-Za-z0-9_.+=-]{0,149}"
FAILURE = re.compile(rf"failures/({NAME})/({NAME})/([0-9]{{6,9}}-[0-9a-f]{{12}})/({'|'.join(map(re.escape, PARTS))})")
TRACE = re.compile(rf"corpus/({NAME})/([0-9a-f]{{16}})\.jsonl")
SHARD = re.compile(rf"shards/({NAME})/([0-9]{{1,7}}-of-[0-9]{{1,7}})/(.+)")
FLAKE = re.compile(r"flakes/([0-9]{1,9}\.jsonl)")

Result = TypeVar("Result")


class StoreUnusable(Exception):
    """A store cannot be reached, or holds something else; the text is one line."""


def slug(text: str) -> str:
    """Return a name for any text: the text, if it is one, else what is left of it with a digest.

    >>> slug("gpu_impl"), slug("sglang:radix")
    ('gpu_impl', 'sglang-radix.5c21dbbb')
    """
    if re.fullmatch(NAME, text) and len(text) <= 100:
        return text
    left = re.sub(r"[^A-Za-z0-9_.+=-]", "-", text)[:80].lstrip(".") or "-"
    return f"{left}.{sha256(text.encode()).hexdigest()[:8]}"


class Store:
    """The files of a store, by their names in it. ``check`` comes first.

    Reading raises StoreUnusable, whatever went wrong; ``put`` raises what the file system of fsspec raises.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # a cache that is fuzzed where it lives need not have it
        from fsspec.implementations.local import LocalFileSystem

        self.shown = re.sub(r"//[^/@]*@", "//***@", url)  # a URL may hold a password
        self.read_bytes = 0
        try:
            self._files, root = url_to_fs(url)
        except Exception as error:  # an unknown protocol, a package that is not installed
            raise StoreUnusable(
                f"{self.shown}: {_one_line(error)}: name a folder, or a URL that fsspec knows"
            ) from error
        self._root = root.rstrip("/")
        self._is_local = isinstance(self._files, LocalFileSystem)

    def check(self, *, write: bool) -> None:
        """See that the store answers, and that it is one of this version; begin one if it is to be written to.

        Raises StoreUnusable.
        """
        try:
            found = within(REACH_S, lambda: self.get(MARK, 1 << 10))
            if found is None and write:
                within(REACH_S, lambda: self.put(MARK, json.dumps({"kvlockstep_store": VERSION}).encode() + b"\n"))
        except StoreUnusable:
            raise
        except TimeoutError as error:
            raise StoreUnusable(f"{self.shown}: no answer in {REACH_S:.0f} s: check the URL and the network") from error
        except Exception as error:  # each file system of fsspec has its own
            raise self._unreadable(error) from error
        if found is None and not write:
            raise StoreUnusable(f"{self.shown}: no store of kvlockstep: name what fuzz was given as --store")
        with suppress(ValueError, AttributeError):
            if found is None or json.loads(found).get("kvlockstep_store") == VERSION:
                return
        raise StoreUnusable(f"{self.shown}: a store of another version of kvlockstep: name another")

    def put(self, name: str, data: bytes) -> None:
        """Write a file whole, in place of one of that name."""
        path = f"{self._root}/{name}"
        if self._is_local:
            _put_local(Path(path), data)
            return
        try:
            self._files.pipe_file(path, data)
        except FileNotFoundError:
            # object stores have no folders, and a bucket is not made here
            if getattr(self._files, "async_impl", False):
                raise
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data)

    def get(self, name: str, limit: int) -> bytes | None:
        """Read a file; None if there is none, or if it is larger than ``limit``."""
        try:
            with self._files.open(f"{self._root}/{name}", "rb") as file:
                data: bytes = file.read(limit + 1)
        except (FileNotFoundError, IsADirectoryError):
            return None
        except Exception as error:
            raise self._unreadable(error) from error
        self.read_bytes += len(data)
        if self.read_bytes > MAX_TOTAL:
            raise StoreUnusable(f"{self.shown}: more than {MAX_TOTAL >> 30} GiB to be read: begin another store")
        return data if len(data) <= limit else None

    def names(self, folder: str) -> list[str]:
        """List the files under a folder, sorted. Links and what is no file are left out."""
        path = f"{self._root}/{folder}"
        try:
            self._files.invalidate_cache()
            found: Mapping[str, Mapping[str, Any]] = self._files.find(path, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._unreadable(error) from error
        if len(found) > MAX_FILES:
            raise StoreUnusable(f"{self.shown}: more than {MAX_FILES:,} files in {folder}: begin another store")
        files = [name for name, info in found.items() if info["type"] == "file" and not info.get("islink")]
        return sorted(name[len(self._root) + 1 :] for name in files if name.startswith(f"{path}/"))

    def _unreadable(self, error: Exception) -> StoreUnusable:
        return StoreUnusable(f"{self.shown}: cannot be reached: {_one_line(error)}: check the URL and the access to it")


def _put_local(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.{uuid4().hex[:12]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Call a function that may hang, in a thread that is left behind if it does. Raises its errors and TimeoutError."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    for error in errors:
        raise error
    if not results:
        raise TimeoutError(f"no answer in {seconds:.0f} s")
    return results[0]


def _one_line(error: BaseException) -> str:
    """Say what an error of a file system says, which may have several lines, or none."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())[:300]


# Failures


@dataclass(frozen=True, slots=True)
class Failure:
    """The folder of a failure, as bytes."""

    header: Header  # of the shortest trace
    n_ops: int
    files: Mapping[str, bytes]  # PARTS; without the line of the verdict that replays it where it was found

    @property
    def signature(self) -> str:
        assert self.header.signature is not None, "a failure has one"
        return self.header.signature

    @property
    def target(self) -> str:
        return self.header.target

    @property
    def key(self) -> tuple[str, str, str]:
        """What failures of the same cause have in common."""
        return self.signature, self.target, self.header.fault or ""

    @property
    def rank(self) -> str:
        """The name of its folder in a store. Of the failures with one cause the least is one of the shortest."""
        digest = sha256()
        for part in PARTS:
            digest.update(f"{part} {len(self.files[part])}\n".encode())
            digest.update(self.files[part])
        return f"{self.n_ops:06}-{digest.hexdigest()[:12]}"

    @property
    def place(self) -> str:
        return f"failures/{slug(self.signature)}/{slug(f'{self.target}+{self.header.fault}')}/{self.rank}"


def failure_from(files: Mapping[str, bytes], where: str) -> Failure:
    """Take the files of a failure for one, after they were checked. Raises TraceError."""
    for part in ("trace.jsonl", "original.jsonl"):
        try:
            header, *ops = files[part].decode().splitlines()
        except ValueError as error:
            raise TraceError(f"{where}/{part}: no trace") from error
        found = decode_header(header, f"{where}/{part}:1")
        for number, op in enumerate(ops, 2):
            decode_op(op, f"{where}/{part}:{number}")
        if part == "trace.jsonl":
            shortest, n_ops = found, len(ops)
    if shortest.signature is None:
        raise TraceError(f"{where}/trace.jsonl:1: no signature")
    return Failure(shortest, n_ops, dict(files))


def failure_in(folder: Path) -> Failure:
    """Read the folder of a failure of a campaign. Raises OSError and TraceError."""
    files = {part: (folder / part).read_bytes() for part in PARTS}
    if (large := max(map(len, files.values()))) > MAX_TRACE:
        raise TraceError(f"{folder}: {large >> 20} MiB, at most {MAX_TRACE >> 20} travel")
    text, line, _ = files["verdict.txt"].rstrip(b"\n").rpartition(b"\n  replay ")
    if line:
        files["verdict.txt"] = text + b"\n"
    return failure_from(files, str(folder))


def printable_lines(text: str) -> str:
    """Return a text of a stranger without what moves the cursor of a terminal."""
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def failures_of(store: Store, skipped: list[str]) -> Iterator[Failure]:
    """Read all failures of a store, of each cause the shortest that is whole. What is not is named in ``skipped``."""
    folders: dict[tuple[str, str], dict[str, set[str]]] = {}
    for name in store.names("failures"):
        if (found := FAILURE.fullmatch(name)) is None:
            skipped.append(name)
        else:
            folders.setdefault((found[1], found[2]), {}).setdefault(found[3], set()).add(found[4])
    for cause, ranks in sorted(folders.items()):
        for rank, parts in sorted(ranks.items()):
            where = "/".join(("failures", *cause, rank))
            if parts != set(PARTS):
                skipped.append(f"{where}: not all of {', '.join(PARTS)}")  # its writer was killed, or is at it
                continue
            files = {part: store.get(f"{where}/{part}", MAX_TRACE) for part in PARTS}
            try:
                failure = failure_from({part: data or b"" for part, data in files.items()}, where)
            except TraceError as error:
                skipped.append(str(error))
                continue
            if failure.place != where:
                skipped.append(f"{where}: is not what its name says")
                continue
            yield failure
            break


def corpus_in(store: Store, target: str | None, skipped: list[str]) -> Iterator[tuple[str, str, bytes]]:
    """Read the traces of one target, or of all: folder, file name, text."""
    for name in store.names("corpus" if target is None else f"corpus/{_corpus_name(target)}"):
        found = TRACE.fullmatch(name)
        data = store.get(name, MAX_TRACE) if found is not None else None
        if found is None or data is None or sha256(data).hexdigest()[:16] != found[2]:
            skipped.append(f"{name}: is not what its name says")
            continue
        yield found[1], f"{found[2]}.jsonl", data


def _corpus_name(target: str) -> str:
    return corpus_of(Path(), target).name


# Shards


def campaign_of(settings: Settings) -> str:
    """Name the campaign that a shard is of: all shards that have the same base and do the same have the same name."""
    s = settings
    same = s.base, s.targets, s.lanes, s.workers, s.faults, s.units, s.sanitize
    digest = sha256(json.dumps(same).encode()).hexdigest()[:8]
    return f"{slug(settings.base)[:80]}.{digest}"


def shard_folder(settings: Settings) -> str:
    return f"shards/{campaign_of(settings)}/{settings.shard.index:04}-of-{settings.shard.total:04}"


def read_shard(store: Store, place: str, scratch: Path) -> PartyRecord | None:
    """Read what a shard has stored, as the only party of a campaign in ``scratch``, an empty folder; None if nothing.

    Raises FolderUnusable for what no shard writes.
    """
    party = scratch / "parties" / "0001"
    party.mkdir(parents=True)
    for name in ("party.json", "progress.json", "journal.jsonl"):
        data = store.get(f"{place}/{name}", MAX_FILE)
        if data is not None:
            (party / name).write_bytes(data)
        elif name == "party.json":
            return None
    try:
        return read_record(scratch).parties[0]
    except FolderUnusable as error:
        raise FolderUnusable(str(error).replace(str(party), f"{store.shown}/{place}")) from error
    except RecursionError as error:
        raise FolderUnusable(f"{store.shown}/{place}: not what a campaign writes") from error


class Link:
    """Keeps the folder of one shard in a store up to date, while its party is at work.

    ``sync`` does so in the background: it neither waits nor raises what a store raises. That is said once in the
    journal, and tried again at the next call. ``finish`` waits for the last push, for some time.
    """

    def __init__(self, store: Store, party: Party) -> None:
        self.store = store
        self.party = party
        self.place = shard_folder(party.settings)
        self.stored = False  # at least once all that there was
        self.trouble: str | None = None  # of the last push
        self._noted = False
        self._thread: threading.Thread | None = None
        self._done: dict[str, Any] = {}  # what was pushed, by its name here or there
        self._next_corpus = self._next_journal = 0.0

    # From the store

    def pull(self) -> str | None:
        """Take over the corpus, and the progress of this shard if it is further there than here; say what was done.

        Raises StoreUnusable, FolderUnusable and OSError.
        """
        self._pull_corpus()
        told = self._pull_progress()
        self.party.progress.ended = False
        return told

    def _pull_corpus(self) -> None:
        for target in self.party.settings.targets:
            folder = corpus_of(self.party.campaign, target)
            for _, name, data in corpus_in(self.store, target, []):
                self._done[f"{target} {name}"] = True
                if not (folder / name).exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    replace_file(folder / name, data)

    def _pull_progress(self) -> str | None:
        mine = self.party.progress
        with TemporaryDirectory(prefix="kvlockstep-") as scratch:
            there = read_shard(self.store, self.place, Path(scratch) / "shard")
            if there is None or there.progress.seconds <= mine.seconds:
                return None
            causes = {(c.signature, c.target, c.fault or ""): c for c in there.progress.causes.values()}
            for failure in failures_of(self.store, []):
                if (cause := causes.get(failure.key)) is not None:
                    cause.folder = self._take_failure(failure, Path(scratch)).name
        self.party.adopt(there.progress, there.events)
        return f"shard {self.party.settings.shard} goes on where it was in the store"

    def _take_failure(self, failure: Failure, scratch: Path) -> Path:
        for part in PARTS:
            (scratch / part).write_bytes(failure.files[part])
        shortest, found = (read_trace(scratch / part) for part in PARTS[:2])
        text = failure.files["verdict.txt"].decode(errors="replace").rstrip("\n")
        folder = store_failure(self.party.failures, shortest, found, printable_lines(text), lambda trace: True)
        self._done[str(folder)] = _state_of(folder)  # it need not travel back
        return folder

    # To the store

    def sync(self) -> None:
        """Begin to push what has changed, unless that is still being done. Raises OSError of the journal."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self.trouble is not None and not self._noted:
            self._noted = True
            self.party.note("store", what=self.trouble)
        self._thread = threading.Thread(target=self._push, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Push all that there is, and wait for it."""
        deadline = monotonic() + FINAL_S
        self._join(deadline)
        self._next_corpus = self._next_journal = 0.0
        self.sync()
        self._join(deadline)

    @property
    def nothing_stored(self) -> str | None:
        """Say why nothing is in the store, if nothing is."""
        return None if self.stored else f"--store {self.store.shown}: nothing could be stored: {self.trouble}"

    @property
    def said(self) -> str:
        """Say what became of the store."""
        if self.trouble is None:
            return f"the store {self.store.shown} has all of this"
        had = "what came since an earlier push is missing in the store" if self.stored else "nothing could be stored in"
        return f"{had} {self.store.shown}: {self.trouble}; what was found is kept here"

    def _join(self, deadline: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - monotonic()))
            if self._thread.is_alive():
                self.trouble = f"no answer in {FINAL_S:.0f} s"

    def _push(self) -> None:
        try:
            self._push_changed()
        except Exception as error:  # each file system of fsspec has its own
            self.trouble = _one_line(error)
        else:
            self.stored, self.trouble = True, None

    def _push_changed(self) -> None:
        """Push failures before the progress that names them: who reads the one finds the others."""
        folder = self.party.folder
        progress = (folder / "progress.json").read_bytes() if (folder / "progress.json").exists() else None
        if progress is not None:
            for cause in json.loads(progress)["causes"].values():
                self._push_failure(self.party.failures / cause["folder"])
        for path in sorted(self.party.flakes.glob(f"{self.party.number:04}-*.jsonl")):
            number = path.name.partition("-")[2]
            self._put_once(path, f"{self.place}/flakes/{number}")
        now = monotonic()
        if now >= self._next_corpus:
            self._next_corpus = now + CORPUS_EVERY
            self._push_corpus()
        self._put_changed("party.json", (folder / "party.json").read_bytes())
        if now >= self._next_journal:
            self._next_journal = now + JOURNAL_EVERY
            self._put_changed("journal.jsonl", (folder / "journal.jsonl").read_bytes())
        if progress is not None:
            self._put_changed("progress.json", progress)

    def _push_failure(self, folder: Path) -> None:
        try:
            seen = _state_of(folder)
            if self._done.get(str(folder)) == seen:
                return
            failure = failure_in(folder)
        except FileNotFoundError:  # a worker is putting a shorter trace in its place
            return
        except TraceError as error:
            raise OSError(None, str(error)) from error
        for part in reversed(PARTS):
            self.store.put(f"{failure.place}/{part}", failure.files[part])
        self._done[str(folder)] = seen

    def _push_corpus(self) -> None:
        for target in self.party.settings.targets:
            folder = corpus_of(self.party.campaign, target)
            for path in sorted(folder.glob("*.jsonl")):
                if f"{target} {path.name}" in self._done:
                    continue
                with suppress(FileNotFoundError):  # a shorter one has come
                    data = path.read_bytes()
                    if sha256(data).hexdigest()[:16] == path.stem:
                        self.store.put(f"corpus/{folder.name}/{path.name}", data)
                        self._done[f"{target} {path.name}"] = True

    def _put_once(self, path: Path, name: str) -> None:
        if name not in self._done:
            self.store.put(name, path.read_bytes())
            self._done[name] = True

    def _put_changed(self, name: str, data: bytes) -> None:
        digest = sha256(data).digest()
        if self._done.get(name) != digest:
            self.store.put(f"{self.place}/{name}", data)
            self._done[name] = digest


def _state_of(folder: Path) -> tuple[int, int, int]:
    """Tell whether a failure was replaced: what is another file has other numbers."""
    state = os.stat(folder / "trace.jsonl")
    return state.st_mtime_ns, state.st_ino, state.st_size
