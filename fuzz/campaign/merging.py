"""Makes one campaign of all shards that met in a store, as if they had been parties in one folder.

What is made depends on what the store holds and on nothing else, neither on when the shards came nor on who merges: of
each cause the shortest failure that is whole, all traces of the corpus, each shard once, as a party. Doing it again
changes nothing; doing it later adds what has come since.

Before: the folder is new, empty, or was made by an earlier merge, whose parts are then replaced.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlockstep.fuzz.campaign.folder import FORMAT, FolderUnusable, Lane, Progress
from kvlockstep.fuzz.campaign.record import PartyRecord, Record
from kvlockstep.fuzz.campaign.store import (
    FLAKE,
    MAX_TRACE,
    SHARD,
    Failure,
    Store,
    StoreUnusable,
    corpus_in,
    failures_of,
    printable_lines,
    read_shard,
)
from kvlockstep.fuzz.failures import replay_line, replay_script
from kvlockstep.fuzz.statistics import Statistics

MARK = "merged.json"
MADE = ("failures", "corpus", "flakes", "parties")


@dataclass(frozen=True, slots=True)
class Merged:
    """A campaign that was made of shards."""

    campaign: Path
    progress: Progress  # of all together
    shards: int
    traces: int  # of the corpus
    seconds: float  # of the shard that worked longest
    skipped: Sequence[str]  # what the store holds that no shard writes, or that is not whole

    @property
    def failures(self) -> Path:
        return self.campaign / "failures"


def check_out(out: Path) -> None:
    """See that a merge may be made in a folder. Raises FolderUnusable and OSError."""
    theirs = [name for name in MADE if (out / name).is_dir() and any((out / name).iterdir())]
    if theirs and not (out / MARK).exists():
        raise FolderUnusable(f"{out}: holds a campaign of its own, not a merged one: name another folder")


def merge(store: Store, out: Path) -> Merged:
    """Make the campaign of a store in ``out``. Raises StoreUnusable, FolderUnusable, OSError and what fsspec raises."""
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for left in out.glob(".merge-*"):  # by one that was killed
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=".merge-", dir=out))
        try:
            return _merge(store, out, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        os.close(descriptor)


def _merge(store: Store, out: Path, scratch: Path) -> Merged:
    new, skipped = scratch / "new", list[str]()
    for name in MADE:
        (new / name).mkdir(parents=True)
    folders = _place_failures(failures_of(store, skipped), new / "failures", out / "failures")
    traces = 0
    for target, name, data in corpus_in(store, None, skipped):
        (new / "corpus" / target).mkdir(exist_ok=True)
        (new / "corpus" / target / name).write_bytes(data)
        traces += 1
    records = _place_shards(store, folders, new, scratch, skipped)
    if not records:
        left = f"; left out: {skipped[0]}" if skipped else ""
        raise StoreUnusable(f"{store.shown}: no shard has stored anything yet{left}")
    (out / MARK).write_text(json.dumps({"kvlockstep_merged": FORMAT}) + "\n", encoding="utf-8")
    for name in MADE:
        if (out / name).exists():
            (out / name).rename(scratch / name)
        (new / name).rename(out / name)
    seconds = max(record.progress.seconds for record in records)
    return Merged(out, _together(out, records), len(records), traces, seconds, skipped)


def _place_failures(failures: Iterable[Failure], new: Path, final: Path) -> dict[tuple[str, str, str], str]:
    """Write a folder for each cause; return their names. They depend on the causes alone, as all else in them."""
    shortest: dict[tuple[str, str, str], Failure] = {}
    for failure in failures:
        other = shortest.get(failure.key)
        if other is None or failure.rank < other.rank:
            shortest[failure.key] = failure
    names: dict[tuple[str, str, str], str] = {}
    for key, failure in sorted(shortest.items()):
        number, name = 1, failure.signature
        while (new / name).exists():
            number += 1
            name = f"{failure.signature}.{number}"
        names[key] = name
        (new / name).mkdir()
        for part, data in failure.files.items():
            if part == "verdict.txt":
                line = replay_line(final / name / "trace.jsonl", failure.target)
                text = printable_lines(data.decode(errors="replace")).rstrip("\n")
                data = f"{text}\n  replay    {line}\n".encode()
            (new / name / part).write_bytes(data)
        script = new / name / "replay.sh"  # made here: what a stranger wrote is not run
        script.write_text(replay_script(failure.header), encoding="utf-8")
        script.chmod(0o755)
    return names


def _place_shards(
    store: Store, folders: Mapping[tuple[str, str, str], str], new: Path, scratch: Path, skipped: list[str]
) -> list[PartyRecord]:
    """Write a party for each shard, in the order of their names."""
    files: dict[str, list[str]] = {}
    for name in store.names("shards"):
        if (found := SHARD.fullmatch(name)) is None:
            skipped.append(name)
        else:
            files.setdefault(f"shards/{found[1]}/{found[2]}", []).append(found[3])
    records: list[PartyRecord] = []
    for place, parts in sorted(files.items()):
        number = len(records) + 1
        try:
            record = read_shard(store, place, scratch / f"shard-{number}")
        except FolderUnusable as error:
            skipped.append(str(error))
            shutil.rmtree(scratch / f"shard-{number}")
            continue
        if record is None or record.settings is None:
            skipped.append(f"{place}: no party.json")
            shutil.rmtree(scratch / f"shard-{number}")
            continue
        for cause in record.progress.causes.values():
            cause.folder = folders.get((cause.signature, cause.target, cause.fault or ""), "")
        party = new / "parties" / f"{number:04}"
        party.mkdir()
        _write(party / "party.json", {"kvlockstep_party": FORMAT, **asdict(record.settings)}, indent=1)
        _write(party / "progress.json", {"kvlockstep_progress": FORMAT, **asdict(record.progress)}, indent=1)
        _write(party / "journal.jsonl", *(_with_flake(event, number) for event in record.events))
        for part in parts:
            if (found := FLAKE.fullmatch(part)) and (data := store.get(f"{place}/{part}", MAX_TRACE)) is not None:
                (new / "flakes" / f"{number:04}-{found[1]}").write_bytes(data)
        records.append(record)
    return records


def _with_flake(event: dict[str, Any], number: int) -> dict[str, Any]:
    """Let an event name the trace of a flake as it is named here."""
    if event["event"] != "flake" or not isinstance(event.get("trace"), str):
        return event
    return event | {"trace": f"{number:04}-{event['trace'].partition('-')[2]}"}


def _write(path: Path, *lines: dict[str, Any], indent: int | None = None) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(_clean(line), indent=indent) + "\n" for line in lines)


def _clean(value: Any) -> Any:
    """Take from all texts what moves the cursor of a terminal."""
    if isinstance(value, str):
        return printable_lines(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(one) for key, one in value.items()}
    return [_clean(one) for one in value] if isinstance(value, list | tuple) else value


def _together(out: Path, records: Sequence[PartyRecord]) -> Progress:
    """Add up what all shards have done."""
    lanes: dict[tuple[str, str | None], Lane] = {}
    counts: dict[tuple[str, str | None], Statistics] = {}
    for lane in (lane for record in records for lane in record.progress.lanes):
        key = lane.target, lane.lane
        sum_of = lanes.setdefault(key, Lane(lane.target, lane.lane, {}))
        counts.setdefault(key, Statistics()).add(Statistics.from_json(lane.statistics))
        sum_of.seconds += lane.seconds
        sum_of.capabilities = lane.capabilities or sum_of.capabilities
        sum_of.hidden = sorted({*sum_of.hidden, *lane.hidden})
        sum_of.unobserved += [one for one in lane.unobserved if one not in sum_of.unobserved]
        sum_of.canaries += lane.canaries
    for key, statistics in counts.items():
        lanes[key].statistics = statistics.to_json()
    starts, deaths = Counter[str](), Counter[str]()
    for record in records:
        starts.update(record.progress.starts)
        deaths.update(record.progress.deaths)
    return Progress(
        seconds=sum(record.progress.seconds for record in records),
        lanes=list(lanes.values()),
        causes={finding.cause.key: finding.cause for finding in Record(out, records).findings},
        starts=dict(starts),
        deaths=dict(deaths),
        twins_compared=sum(record.progress.twins_compared for record in records),
        twins_differed=sum(record.progress.twins_differed for record in records),
        ended=all(record.progress.ended for record in records),
    )
