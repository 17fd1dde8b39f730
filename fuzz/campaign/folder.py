"""What a campaign keeps on disk, so that it can be resumed after any kill, shared, and reported on.

``parties/NNNN/`` belongs to one command, a party; no two have the same as long as both run:

- ``party.json``, written once: what was asked for (`Settings`);
- ``journal.jsonl``, a line for each event and each sample of the curves, with the seconds of work at which it came;
- ``progress.json``, replaced as a whole: how far each worker has come, and all counts (`Progress`);
- the traces that workers run, and those that some died on.

Shared by all parties are ``failures/`` with a folder for each cause (``fuzz/failures.py``), ``corpus/`` with one for
each target (``corpus.py``), and ``flakes/``: traces that did not give the same twice. Nothing here is ever unpickled.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvlockstep.fuzz.campaign.seeds import Shard
from kvlockstep.fuzz.files import replace_file
from kvlockstep.fuzz.trace import Header, read_trace

FORMAT = 1


class FolderUnusable(Exception):
    """What lies in a folder is no campaign of this version; the text is one line: ``FILE[:LINE]: what: remedy``."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one party was asked to do."""

    targets: tuple[str, ...]
    lanes: tuple[str, ...]
    workers: int
    seconds: float
    shard: Shard
    base: str  # of the seeds; where none was given, the date at which it was started
    started: str  # UTC, ISO 8601
    faults: tuple[str, ...] = ()  # planted, one at random for each start of a worker
    units: int | None = None  # for each worker; None: until the time is over
    environment: dict[str, str] = field(default_factory=dict)
    host: str = ""
    commit: str | None = None
    sanitize: bool = False  # kernels run under the sanitizer, each start of a worker with a seed of its own

    def same_work(self, other: "Settings") -> bool:
        """Tell whether another party was asked the same, so that one can go on where the other was."""
        mine, others = ((s.targets, s.lanes, s.workers, s.shard, s.faults, s.units, s.sanitize) for s in (self, other))
        return mine == others


@dataclass(slots=True)
class Cause:
    """What is known of the failures with one signature on one target: one form in which a cause shows itself.

    Those with the same ``root`` (``fuzz/root.py``) are forms of the same cause, as far as can be told.
    """

    signature: str
    target: str
    fault: str | None
    folder: str  # name, in failures/
    law: str
    lane: str | None
    worker: str
    seconds: float  # of work of the party, when it was found first
    operations: int  # of the worker, until it was found first
    found_len: int
    minimized_len: int
    minimize_ending: str = "minimized"
    root: str = ""  # signature; of an empty one nothing is known
    times: int = 1
    replays: bool | None = None  # in a fresh process; None: not tried yet
    known: bool = False  # named by --known
    old: bool = False  # fails on the base too

    @property
    def root_key(self) -> tuple[str, str, str | None]:
        """What the forms of one cause have in common."""
        return self.root or self.signature, self.target, self.fault

    @property
    def key(self) -> str:
        return f"{self.signature} {self.target} {self.fault or ''}"


@dataclass(slots=True)
class Lane:
    """All that the workers of one target and lane have done, in the form in which workers report it."""

    target: str
    lane: str | None
    statistics: dict[str, Any]
    seconds: float = 0.0  # of all its workers together
    capabilities: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    unobserved: list[tuple[int, str, list[str]]] = field(default_factory=list)
    canaries: list[dict[str, Any]] = field(default_factory=list)  # found by each worker process: law, operations


@dataclass(slots=True)
class Progress:
    """How far a party has come. ``units`` gives for each worker the unit at which it is.

    While it is at work, the statistics of lanes are those of whole units: after a kill the unit at hand is done again.
    """

    seconds: float = 0.0
    units: dict[str, int] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    causes: dict[str, Cause] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)  # of each worker
    deaths: dict[str, int] = field(default_factory=dict)
    twins_compared: int = 0
    twins_differed: int = 0
    half: dict[str, int] = field(default_factory=dict)  # of each cause: times that are of units not done yet
    ended: bool = False  # its time is over, or it was stopped by what it says in its last line of the journal


class Party:
    """The folder of this command in a campaign, which nobody else has as long as it is open."""

    def __init__(self, campaign: Path, number: int, settings: Settings, progress: Progress, lock: int) -> None:
        self.campaign = campaign
        self.number = number
        self.settings = settings
        self.progress = progress
        self._lock = lock
        _cut_half_line(self.folder / "journal.jsonl")
        self._journal = (self.folder / "journal.jsonl").open("a", encoding="utf-8")

    @property
    def folder(self) -> Path:
        return _folder_of(self.campaign, self.number)

    @property
    def failures(self) -> Path:
        return self.campaign / "failures"

    @property
    def flakes(self) -> Path:
        return self.campaign / "flakes"

    def note(self, event: str, **facts: Any) -> None:
        """Append a line to the journal; it is with the kernel when this returns. Raises OSError."""
        line = {"t": round(self.progress.seconds, 1), "event": event, **facts}
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()

    def adopt(self, progress: Progress, events: Iterable[dict[str, Any]]) -> None:
        """Go on where this party was on another machine: with that progress and that journal. Raises OSError."""
        self.progress = progress
        self._journal.truncate(0)
        self._journal.writelines(json.dumps(event) + "\n" for event in events)
        self._journal.flush()
        self.save()

    def save(self) -> None:
        """Replace the file with the progress. Raises OSError, and the old one is then untouched."""
        _write(self.folder / "progress.json", {"kvlockstep_progress": FORMAT, **asdict(self.progress)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._journal.close()
        os.close(self._lock)


def join(campaign: Path, settings: Settings, *, resume: bool, same_base: bool = False) -> Party:
    """Begin a party in a campaign, or with ``resume`` go on with one that did the same and is not at its end.

    One that goes on has the time that is given now; all else of it stays.

    With ``same_base`` go on with one that did the same from the same base, whether at its end or not.
    After: the folder is there, with those that all parties share. Raises OSError, and FolderUnusable.
    """
    for shared in ("failures", "corpus", "flakes", "parties"):
        (campaign / shared).mkdir(parents=True, exist_ok=True)
    if resume or same_base:
        for number in numbers_of(campaign):
            earlier, progress = settings_of(campaign, number), progress_of(campaign, number)
            if earlier is None or not earlier.same_work(settings):
                continue
            if earlier.base != settings.base if same_base else progress.ended:
                continue
            if (lock := _lock(campaign, number)) is not None:
                return Party(campaign, number, replace(earlier, seconds=settings.seconds), progress, lock)
    for number in count(1 + max(numbers_of(campaign), default=0)):
        try:
            _folder_of(campaign, number).mkdir()
        except FileExistsError:  # somebody else has just begun
            continue
        lock = _lock(campaign, number)
        assert lock is not None, "a folder that was made here is nobody else's"
        _write(
            _folder_of(campaign, number) / "party.json",
            {"kvlockstep_party": FORMAT, **asdict(settings)},
        )
        return Party(campaign, number, settings, Progress(), lock)
    raise AssertionError("there is no last number")


def is_running(campaign: Path, number: int) -> bool:
    """Tell whether some process is at work as this party."""
    lock = _lock(campaign, number)
    if lock is not None:
        os.close(lock)
    return lock is None


def numbers_of(campaign: Path) -> list[int]:
    """List the parties of a campaign, in the order in which they began; none, if it is none."""
    parties = campaign / "parties"
    names = os.listdir(parties) if parties.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch("[0-9]{4,}", name))


def settings_of(campaign: Path, number: int) -> Settings | None:
    """Read what a party was asked to do; None if it was killed before it wrote that. Raises FolderUnusable."""
    path = _folder_of(campaign, number) / "party.json"
    with _as_written(path):
        data = _read(path, "kvlockstep_party")
        if data is None:
            return None
        lists = {name: tuple(data[name]) for name in ("targets", "lanes", "faults")}
        return Settings(**data | lists | {"shard": Shard(**data["shard"])})


def progress_of(campaign: Path, number: int) -> Progress:
    """Read how far a party has come. Raises FolderUnusable."""
    path = _folder_of(campaign, number) / "progress.json"
    with _as_written(path):
        data = _read(path, "kvlockstep_progress")
        if data is None:
            return Progress()
        lanes = [
            Lane(**lane | {"unobserved": [(law, name, needs) for law, name, needs in lane["unobserved"]]})
            for lane in data["lanes"]
        ]
        causes = {key: Cause(**cause) for key, cause in data["causes"].items()}
        return Progress(**data | {"lanes": lanes, "causes": causes})


def journal_of(campaign: Path, number: int) -> Iterator[dict[str, Any]]:
    """Read the journal of a party, but for a last line that was cut by the death of its writer. Raises FolderUnusable.

    Each line has at least ``t``, the seconds of work at which it was written, and ``event``.
    """
    path = _folder_of(campaign, number) / "journal.jsonl"
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:  # a line with other bytes is named, if it is no event
        for line_number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                event = json.loads(line)
                event["t"], event["event"]
            except (ValueError, TypeError, KeyError) as error:
                raise FolderUnusable(f"{path}:{line_number}: no event of a campaign: delete this line") from error
            yield event


def causes_of(campaign: Path) -> set[str]:
    """Return the keys of all causes that some party has counted. Raises FolderUnusable."""
    return {key for number in numbers_of(campaign) for key in progress_of(campaign, number).causes}


def adopted(folder: Path, header: Header, party: int) -> Cause:
    """Return the cause of a failure folder that nobody has counted: its writer was killed before it could say so.

    It was met no times yet, for the unit in which it was found is done again. Raises TraceError.
    """
    assert header.signature, "a failure has a signature"
    found, shortest = (len(read_trace(folder / name).ops) for name in ("original.jsonl", "trace.jsonl"))
    law = header.violates or header.signature.partition(".")[0]
    worker = f"a worker of party {party} that was killed"
    ending = "interrupted" if found == shortest else "minimized"
    where = header.signature, header.target, header.fault, folder.name, law, header.lane, worker
    return Cause(*where, 0.0, 0, found, shortest, ending, times=0)


def ended_well(campaign: Path, number: int) -> bool:
    """Tell whether the last process of a party came to an end, or was interrupted, and so left nothing undone."""
    last = None
    for event in journal_of(campaign, number):
        last = event["event"]
    return last in ("end", "interrupted", None)


def corpus_of(campaign: Path, target: str) -> Path:
    """Return the folder of the traces that are kept for a target."""
    return campaign / "corpus" / re.sub(r"[^A-Za-z0-9_.-]", "-", target)


def _folder_of(campaign: Path, number: int) -> Path:
    return campaign / "parties" / f"{number:04}"


def _lock(campaign: Path, number: int) -> int | None:
    """Lock a party for this process and return the descriptor; None if another process has it."""
    descriptor = os.open(_folder_of(campaign, number) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _cut_half_line(path: Path) -> None:
    """Take back a last line that was cut by the death of its writer."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)


def _write(path: Path, data: dict[str, Any]) -> None:
    replace_file(path, json.dumps(data, indent=1), synced=True)


def _read(path: Path, mark: str) -> dict[str, Any] | None:
    """Read a file that `_write` wrote; None if there is none. Raises FolderUnusable, and what `_as_written` takes."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if data.pop(mark) != FORMAT:
        raise FolderUnusable(f"{path}: of another version of kvlockstep: name another folder")
    return dict(data)


@contextmanager
def _as_written(path: Path) -> Iterator[None]:
    """Say of a file whose content cannot be taken apart that a campaign did not write it. Raises FolderUnusable."""
    try:
        yield
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise FolderUnusable(f"{path}: not what a campaign writes: name another folder") from error
