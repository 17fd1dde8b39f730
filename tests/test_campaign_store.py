"""Stores where shards meet: merged the same in any order and any number of times, and nothing lost when either dies.

What a store holds may be a stranger's: names that lead elsewhere, files that are too large or half, texts that move a
cursor. The shards that run are processes of their own; most tests write what a shard would.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from errno import ENOSPC
from itertools import permutations
from threading import Thread

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kvlockstep.fuzz.campaign import store as stores
from kvlockstep.fuzz.campaign.corpus import Entry
from kvlockstep.fuzz.campaign.folder import (
    Cause,
    FolderUnusable,
    Lane,
    Settings,
    corpus_of,
    join,
    journal_of,
    progress_of,
)
from kvlockstep.fuzz.campaign.merging import merge
from kvlockstep.fuzz.campaign.record import read_record
from kvlockstep.fuzz.campaign.seeds import Shard
from kvlockstep.fuzz.campaign.store import Link, Store, StoreUnusable, failures_of, shard_folder, slug
from kvlockstep.fuzz.campaign.supervisor import Bounds, Supervisor
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.crew import WorkerState
from kvlockstep.fuzz.failures import store_failure
from kvlockstep.fuzz.ops import Match, Reset, Submit
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.trace import Header, Trace, encode_header, encode_op, read_trace

CLEAN, VIOLATION, USAGE, BROKEN, INTERRUPTED = 0, 1, 2, 12, 130
LOCK, ROW = "LockCountWrong.abort.too-many", "RowOffCanonicalPath.checkpoint.tree+free"

HONEST = """
class Honest(ReferenceTarget):
    pass
"""
SLIPS = {"TargetRaised.evict.KeyError", "TargetRaised.retract.IndexError"}


def settings(index=1, total=3, base="B", units=None):
    shard = Shard(index, total)
    return Settings(("gpu_impl",), ("torch",), 1, 60.0, shard, base, "2026-01-01T00:00:00Z", units=units)


def trace_of(signature, n_ops, target="gpu_impl"):
    header = Header(CacheConfig(), "why", signature.partition(".")[0], signature, target, "torch")
    return Trace(header, [Submit("r0", (1, 2)), *[Match("r0")] * (n_ops - 1)])


def corpus_entry(n_ops):
    return Entry((encode_header(Header(CacheConfig())), *[encode_op(Reset())] * n_ops), ())


def shard_at_work(folder, index, lengths, *, seconds=10.0, **kinds):
    """Make what a shard has on disk that found causes by traces of these lengths."""
    party = join(folder, settings(index, **kinds), resume=False)
    statistics = Statistics(Counter({("match", "done"): 100 * index}), cases=index, distinct_cases=index)
    canary = {"law": "X", "operations": 3, "seconds": 0.1}
    lane = Lane("gpu_impl", "torch", statistics.to_json(), seconds, canaries=[canary])
    party.progress.lanes.append(lane)
    party.progress.seconds, party.progress.units = seconds, {"torch": index}
    party.note("begin", resumed=False)
    for signature, n_ops in lengths.items():
        trace = trace_of(signature, n_ops)
        where = store_failure(party.failures, trace, trace_of(signature, 40), f"{signature}: is wrong", lambda _: True)
        cause = Cause(signature, "gpu_impl", None, where.name, "Law", "torch", "torch", 5.0, 7, 40, n_ops, times=index)
        cause.replays = True
        party.progress.causes[cause.key] = cause
    entry = corpus_entry(index)
    corpus_of(folder, "gpu_impl").mkdir(exist_ok=True)
    (corpus_of(folder, "gpu_impl") / entry.name).write_text(entry.text)
    (party.flakes / f"{party.number:04}-1.jsonl").write_text(f"flake of {index}\n")
    party.note("flake", trace=f"{party.number:04}-1.jsonl", expected="1", got="2")
    party.save()
    return party


@pytest.fixture
def parties(tmp_path):
    """Three shards: they share a cause, found at different lengths, and each has a cause of its own."""
    lengths = [{LOCK: 9, "A.one": 4}, {LOCK: 6, "B.two": 5}, {LOCK: 8, ROW: 3}]
    return [shard_at_work(tmp_path / f"shard-{i}", i, each) for i, each in enumerate(lengths, 1)]


@pytest.fixture
def memory_store():
    yield "memory://campaign"
    MemoryFileSystem.store.clear()


def begun(url):
    store = Store(str(url))
    store.check(write=True)
    return store


def push(store, *parties):
    for party in parties:
        link = Link(store, party)
        link.finish()
        assert link.trouble is None


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# Merging


def test_merge_is_the_same_in_any_order_and_again(tmp_path, parties):
    trees = []
    for number, order in enumerate(permutations(parties)):
        store = begun(tmp_path / f"store-{number}")
        push(store, *order, order[0])
        for _ in range(2):
            merge(store, tmp_path / "merged")
            trees.append(tree(tmp_path / "merged"))

    assert len(trees) == 12
    assert trees.count(trees[0]) == 12
    assert f"failures/{LOCK}/trace.jsonl" in trees[0]


def test_merge_as_shards_come_ends_where_one_merge_of_all_does(tmp_path, parties, memory_store):
    store = begun(memory_store)
    for party in parties[::-1]:
        push(store, party)
        merge(store, tmp_path / "merged")
    as_they_came = tree(tmp_path / "merged")
    folder = begun(tmp_path / "store")
    push(folder, *parties)
    merge(folder, tmp_path / "merged")

    assert tree(tmp_path / "merged") == as_they_came


def test_merged_campaign_has_all_causes_each_with_its_shortest_trace(tmp_path, parties):
    store = begun(tmp_path / "store")
    push(store, *parties)
    merged = merge(store, tmp_path / "merged")
    record = read_record(tmp_path / "merged")

    assert (merged.shards, merged.traces, merged.skipped) == (3, 3, [])
    found = {finding.cause.signature: finding.cause for finding in record.findings}
    assert {s: len(read_trace(record.folder_of(c) / "trace.jsonl").ops) for s, c in found.items()} == {
        LOCK: 6,
        "A.one": 4,
        "B.two": 5,
        ROW: 3,
    }
    assert found[LOCK].times == 1 + 2 + 3
    assert merged.progress.causes.keys() == {cause.key for cause in found.values()}
    (lane,) = merged.progress.lanes
    assert Statistics.from_json(lane.statistics).done == 600
    assert [party.settings.shard.index for party in record.parties] == [1, 2, 3]
    for party in record.parties:
        (flake,) = party.named("flake")
        assert record.file_named(flake["trace"], party.number).read_text() == f"flake of {party.number}\n"
    text = (tmp_path / "merged" / "failures" / LOCK / "verdict.txt").read_text()
    assert text == f"{LOCK}: is wrong\n  replay    kvlockstep replay {tmp_path}/merged/failures/{LOCK}/trace.jsonl\n"


def test_failures_of_two_targets_with_one_signature_are_two(tmp_path, parties):
    other = trace_of(LOCK, 2, target="mine:make")
    where = store_failure(parties[0].failures, other, other, "text", lambda _: True)
    cause = Cause(LOCK, "mine:make", None, where.name, "Law", None, "mine", 1.0, 1, 2, 2)
    parties[0].progress.causes[cause.key] = cause
    parties[0].save()
    store = begun(tmp_path / "store")
    push(store, *parties)
    merge(store, tmp_path / "merged")
    record = read_record(tmp_path / "merged")

    folders = {f.cause.target: record.folder_of(f.cause) for f in record.findings if f.cause.signature == LOCK}
    assert {t: read_trace(folder / "trace.jsonl").header.target for t, folder in folders.items()} == {
        "gpu_impl": "gpu_impl",
        "mine:make": "mine:make",
    }


def test_merge_spares_a_campaign_that_is_none_of_its_own(tmp_path, parties):
    store = begun(tmp_path / "store")
    push(store, *parties)
    before = tree(parties[0].campaign)

    with pytest.raises(FolderUnusable, match="holds a campaign of its own"):
        merge(store, parties[0].campaign)
    assert tree(parties[0].campaign) == before


def test_shards_may_push_at_the_same_time(tmp_path, parties):
    """Three that found the same, at once and over and over."""
    same = [shard_at_work(tmp_path / f"same-{i}", i, {LOCK: 5}) for i in (1, 2, 3)]
    store = begun(tmp_path / "store")
    links = [Link(Store(str(tmp_path / "store")), party) for party in same for _ in range(3)]
    threads = [Thread(target=link.finish) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [link.trouble for link in links] == [None] * 9
    merged = merge(store, tmp_path / "merged")
    assert (merged.shards, merged.skipped, len(merged.progress.causes)) == (3, [], 1)
    assert list((tmp_path / "store").rglob(".*")) == []


# Going on


def test_shard_goes_on_elsewhere_with_causes_counts_and_corpus(tmp_path, parties, memory_store):
    store = begun(memory_store)
    push(store, *parties)
    here = join(tmp_path / "elsewhere", settings(2), resume=False)
    told = Link(store, here).pull()

    assert told == "shard 2/3 goes on where it was in the store"
    theirs = progress_of(parties[1].campaign, 1)
    assert progress_of(here.campaign, here.number) == here.progress == theirs
    assert list(journal_of(here.campaign, here.number)) == list(journal_of(parties[1].campaign, 1))
    for cause in here.progress.causes.values():
        assert len(read_trace(here.failures / cause.folder / "trace.jsonl").ops) == cause.minimized_len
    names = {path.name for path in corpus_of(here.campaign, "gpu_impl").iterdir()}
    assert names == {corpus_entry(n).name for n in (1, 2, 3)}
    here.note("later")
    push(store, here)
    assert merge(store, tmp_path / "merged").shards == 3


def test_what_is_here_is_kept_if_it_is_further(tmp_path, parties, memory_store):
    store = begun(memory_store)
    push(store, *parties)
    here = shard_at_work(tmp_path / "elsewhere", 2, {}, seconds=11.0)

    assert Link(store, here).pull() is None
    assert here.progress.seconds == 11.0


@pytest.mark.parametrize("other", [{"base": "C"}, {"units": 7}, {"total": 4}])
def test_shard_that_does_other_work_begins_anew(tmp_path, parties, memory_store, other):
    store = begun(memory_store)
    push(store, *parties)
    here = join(tmp_path / "elsewhere", settings(2, **other), resume=False)

    assert Link(store, here).pull() is None
    assert here.progress.units == {}


def test_party_of_the_same_base_is_gone_on_with_even_at_its_end(tmp_path):
    party = shard_at_work(tmp_path / "here", 1, {})
    party.progress.ended = True
    party.save()
    party.__exit__(None, None, None)

    assert join(tmp_path / "here", settings(1, base="C"), resume=False, same_base=True).number == 2
    assert join(tmp_path / "here", settings(1), resume=False, same_base=True).number == 1


def unit_event(state, done, unit):
    state.statistics = Statistics(Counter({("match", "done"): done}), cases=done, distinct_cases=done)
    return {"event": "unit", "unit": unit}


def supervised(party):
    supervisor = Supervisor(party, [("gpu_impl", "torch", "torch")], Bounds(), twins=False)
    (command,) = supervisor.first_commands()
    return supervisor, WorkerState(command.order, "torch")


def test_unit_that_is_done_again_after_a_kill_counts_once(tmp_path):
    """Two units of 100 operations; the worker is killed with its supervisor in the second, after 60 of them."""
    party = join(tmp_path, settings(units=2), resume=False)
    trace = trace_of(LOCK, 3)
    where = store_failure(party.failures, trace, trace, "text", lambda _: True)
    again = {"event": "again", "signature": LOCK}
    found = {"event": "failure", "signature": LOCK, "folder": str(where), "operations": 9, "found_len": 3}
    found |= {"minimized_len": 3, "ending": "minimized", "unit": 1}
    supervisor, state = supervised(party)
    supervisor.hear(state, unit_event(state, 100, 0))
    unit_event(state, 160, 1)
    supervisor.hear(state, found)
    supervisor.hear(state, again)
    supervisor._save()
    supervisor._pool.shutdown(wait=True)
    party.__exit__(None, None, None)

    party = join(tmp_path, settings(units=2), resume=True)
    (cause,) = party.progress.causes.values()
    assert cause.times == 2
    supervisor, state = supervised(party)
    assert state.order.plan.unit == 1
    supervisor.hear(state, again)
    supervisor.hear(state, again)
    supervisor.hear(state, again)
    supervisor.hear(state, unit_event(state, 100, 1))
    supervisor._absorb(supervisor.places[0], state)
    supervisor._save()
    (cause,) = progress_of(tmp_path, 1).causes.values()
    (lane,) = progress_of(tmp_path, 1).lanes
    assert cause.times == 3
    assert Statistics.from_json(lane.statistics).done == 200


# Strangers


def test_names_that_lead_elsewhere_are_left_out(tmp_path, parties):
    store = begun(tmp_path / "deep" / "store")
    push(store, parties[0])
    bad = "".join(f"{line}\n" for line in (encode_header(Header(CacheConfig())),))
    root = tmp_path / "deep" / "store"
    for name in (
        "corpus/gpu_impl/..jsonl",
        "corpus/..gpu_impl/0123456789abcdef.jsonl",
        "corpus/a\nb/0123456789abcdef.jsonl",
        "failures/.x/y/000001-0123456789ab/trace.jsonl",
        "failures/x/y/000001-0123456789ab/other.jsonl",
        "shards/.hidden/0001-of-0001/party.json",
        "shards/x/0001-of-0001/flakes/..%2f..%2fx.jsonl",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(bad)
    secret = tmp_path / "secret"
    secret.mkdir()
    entry = corpus_entry(7)
    (secret / entry.name).write_text(entry.text)
    (root / "corpus" / "linked").symlink_to(secret)
    (root / "corpus" / "gpu_impl" / entry.name).symlink_to(secret / entry.name)
    progress = json.loads((root / shard_folder(settings(1)) / "progress.json").read_text())
    for cause in progress["causes"].values():
        cause["folder"] = "../../../secret"
        cause["worker"] = "\x1b[2Jtorch"
    (root / shard_folder(settings(1)) / "progress.json").write_text(json.dumps(progress))
    outside = set(tree(tmp_path))
    merged = merge(store, tmp_path / "out" / "merged")

    new = {name for name in set(tree(tmp_path)) - outside if not f"{name}/".startswith("out/")}
    assert new == set()
    assert merged.traces == 1
    assert len(merged.skipped) == 7
    for cause in progress_of(tmp_path / "out" / "merged", 1).causes.values():
        assert cause.folder == cause.signature
        assert "\x1b" not in cause.worker


def test_store_that_lists_names_from_elsewhere_leads_nowhere(tmp_path, memory_store, monkeypatch):
    store = begun(memory_store)
    names = ["/campaign/corpus/../../x/0123456789abcdef.jsonl", "/campaign/corpus/../../../etc/passwd", "/etc/passwd"]
    listed = {name: {"type": "file", "size": 1} for name in names}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda self, path, **options: listed)

    with pytest.raises(StoreUnusable, match="no shard has stored anything"):
        merge(store, tmp_path / "merged")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def edit(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("trace.jsonl", lambda data: data + data.splitlines(keepends=True)[-1]),
        ("trace.jsonl", lambda data: data.replace(LOCK.encode(), b"../../../../x")),
        ("trace.jsonl", lambda data: b"\xff\xfe"),
        ("trace.jsonl", lambda data: b""),
        ("trace.jsonl", lambda data: data[: len(data) // 2]),
        ("original.jsonl", lambda data: b"{}\n"),
        ("verdict.txt", lambda data: b"another\n"),
        ("environment.json", lambda data: b"x" * (stores.MAX_TRACE + 1)),
    ],
    ids=["longer", "signature", "bytes", "empty", "half", "original", "verdict", "large"],
)
def test_failure_that_is_not_what_its_name_says_gives_way_to_the_next(tmp_path, parties, part, change):
    store = begun(tmp_path / "store")
    push(store, *parties)
    (shortest,) = (tmp_path / "store" / "failures" / LOCK).glob("*/000006-*")
    edit(shortest / part, change)
    merged = merge(store, tmp_path / "merged")

    assert len(merged.skipped) == 1
    assert len(read_trace(tmp_path / "merged" / "failures" / LOCK / "trace.jsonl").ops) == 8


def test_failure_whose_writer_was_killed_is_left_out(tmp_path, parties):
    store = begun(tmp_path / "store")
    push(store, *parties)
    (shortest,) = (tmp_path / "store" / "failures" / LOCK).glob("*/000006-*")
    (shortest / "trace.jsonl").unlink()

    assert {failure.signature: failure.n_ops for failure in failures_of(store, [])}[LOCK] == 8


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("progress.json", "{"),
        ("progress.json", "[" * 100_000),
        ("progress.json", '{"kvlockstep_progress": 1, "lanes": 3}'),
        ("party.json", '{"kvlockstep_party": 1}'),
        ("party.json", '{"kvlockstep_party": 99}'),
        ("journal.jsonl", "nonsense\n"),
    ],
)
def test_shard_that_no_campaign_wrote_is_left_out_and_named(tmp_path, parties, file, text):
    store = begun(tmp_path / "store")
    push(store, *parties)
    place = shard_folder(settings(2))
    (tmp_path / "store" / place / file).write_text(text)
    merged = merge(store, tmp_path / "merged")

    assert merged.shards == 2
    (line,) = merged.skipped
    assert f"{place}" in line
    assert "\n" not in line
    assert str(tmp_path / "merged") not in line


def test_file_that_is_too_large_is_not_taken(tmp_path, parties, monkeypatch):
    store = begun(tmp_path / "store")
    push(store, *parties)
    monkeypatch.setattr(stores, "MAX_FILE", 100)

    with pytest.raises(StoreUnusable, match="no shard has stored anything"):
        merge(store, tmp_path / "merged")


def test_store_of_too_many_bytes_is_refused(tmp_path, parties, monkeypatch):
    store = begun(tmp_path / "store")
    push(store, *parties)
    monkeypatch.setattr(stores, "MAX_TOTAL", 1000)

    with pytest.raises(StoreUnusable, match="to be read"):
        merge(store, tmp_path / "merged")


def test_slugs_of_different_texts_differ():
    texts = ["a", "a:b", "a-b", "a/b", "..", ".", "", "../x", "x" * 101, "x" * 102, "ä"]

    assert len({slug(text) for text in texts}) == len(texts)
    assert all(stores.re.fullmatch(stores.NAME, slug(text)) for text in texts)


# Trouble


def test_trouble_with_a_store_is_noted_once_and_tried_again(tmp_path, parties, monkeypatch):
    party = parties[0]
    link = Link(begun(tmp_path / "store"), party)
    put = Store.put
    error = OSError(ENOSPC, os.strerror(ENOSPC))
    monkeypatch.setattr(Store, "put", lambda *arguments: (_ for _ in ()).throw(error))
    for _ in range(3):
        link.sync()
        link._join(time.monotonic() + 10)
    assert link.nothing_stored == f"--store {tmp_path}/store: nothing could be stored: No space left on device"
    monkeypatch.setattr(Store, "put", put)
    link.finish()

    assert [e["what"] for e in journal_of(party.campaign, 1) if e["event"] == "store"] == ["No space left on device"]
    assert (link.nothing_stored, link.trouble) == (None, None)
    assert merge(link.store, tmp_path / "merged").shards == 1


def test_store_that_hangs_holds_nobody_up(tmp_path, parties, monkeypatch):
    link = Link(begun(tmp_path / "store"), parties[0])
    monkeypatch.setattr(stores, "FINAL_S", 0.3)
    monkeypatch.setattr(Store, "put", lambda *arguments: time.sleep(20))
    began = time.monotonic()
    link.sync()
    link.sync()
    link.finish()

    assert time.monotonic() - began < 5
    assert "no answer" in link.nothing_stored


def test_only_what_changed_is_pushed(tmp_path, parties, monkeypatch):
    pushed = []
    put = Store.put
    monkeypatch.setattr(Store, "put", lambda self, name, data: (pushed.append(name), put(self, name, data)))
    link = Link(begun(tmp_path / "store"), parties[0])
    link.finish()
    first = len(pushed)
    link.finish()
    assert len(pushed) == first
    parties[0].progress.seconds += 1
    parties[0].save()
    link.finish()

    assert pushed[first:] == [f"{shard_folder(settings(1))}/progress.json"]


def run(folder, *arguments, **options):
    command = [sys.executable, "-P", "-m", "kvlockstep", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.fixture
def folder(tmp_path, slips):
    (tmp_path / "mine.py").write_text(slips + HONEST)
    return tmp_path


OF_SHARD = ("fuzz", "--for=120s", "--target=mine:Slips", "--workers=1", "--base=B", "--shard=1/2")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nope://x", "Protocol not known: nope: name a folder, or a URL that fsspec knows"),
        ("/proc/none/store", "cannot be reached: No such file or directory: check the URL and the access to it"),
        ("mine.py/store", "cannot be reached: Not a directory: check the URL and the access to it"),
    ],
)
def test_store_that_cannot_be_reached_is_wrong_usage(folder, url, said):
    done = run(folder, *OF_SHARD, "--store", url)

    assert done.returncode == USAGE
    assert done.stderr == f"kvlockstep: --store {url}: {said}\n"
    assert not (folder / "out").exists()


def test_store_belongs_to_a_campaign(folder):
    done = run(folder, "fuzz", "--store", "x")

    assert (done.returncode, done.stderr) == (
        USAGE,
        "kvlockstep: --store: belongs to a campaign, say --for 8h with it\n",
    )


def test_password_in_a_url_is_not_shown():
    assert Store("ftp://me:secret@host/x".replace("ftp", "memory")).shown == "memory://***@host/x"


@pytest.mark.parametrize("kind", ["none", "empty", "other"])
def test_merge_of_what_is_no_store_is_wrong_usage(folder, kind):
    (folder / "store").mkdir()
    if kind == "empty":
        begun(folder / "store")
    if kind == "other":
        (folder / "store" / "kvlockstep-store.json").write_text('{"kvlockstep_store": 7}')
    done = run(folder, "merge", "store", "--out", "merged")

    assert done.returncode == USAGE
    assert done.stderr.startswith("kvlockstep: store: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("target", "code"), [("Slips", VIOLATION), ("Honest", BROKEN)])
def test_store_on_a_full_disk_does_not_end_the_night_but_is_said(folder, target, code):
    """The store is a file system of one page, which holds the mark of a store and nothing else."""
    script = "mkdir store && mount -t tmpfs -o size=4k none store && exec " + " ".join(
        [sys.executable, "-P", "-m", "kvlockstep", *OF_SHARD, "--units=1", "--store=store", f"--target=mine:{target}"]
    )
    allowed = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    if allowed.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {allowed.stderr.decode().strip()}")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == code  # a violation is here, and counts for more than that it is not there
    assert "nothing could be stored in store: No space left on device; what was found is kept here" in done.stdout
    found = {path.name for path in (folder / "out" / "failures").iterdir() if path.is_dir()}
    assert found == (SLIPS if target == "Slips" else set())


def stored_units(folder):
    """Read how far the only shard in a store is."""
    for path in folder.glob("shards/*/*/progress.json"):
        return max(json.loads(path.read_text())["units"].values(), default=0)
    return 0


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come so far"
        time.sleep(0.2)


def test_shard_that_is_killed_goes_on_on_another_machine(folder):
    """Killed without a word once its first progress is stored; then started again in another, empty folder."""
    command = [sys.executable, "-P", "-m", "kvlockstep", *OF_SHARD, "--units=10", "--store=store", "--out"]
    first = subprocess.Popen(
        [*command, "one"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: stored_units(folder / "store") > 0)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    there = stored_units(folder / "store")
    second = run(folder, *command[4:], "two")
    third = run(folder, *command[4:], "three")
    merged = run(folder, "merge", "store", "--out", "merged")

    assert (second.returncode, third.returncode, merged.returncode) == (VIOLATION, VIOLATION, CLEAN), merged.stderr
    assert "shard 1/2 goes on where it was in the store" in second.stdout
    record = read_record(folder / "merged")
    (party,) = record.parties
    starts = [event["unit"] for event in party.named("start")]
    assert starts == sorted(starts)
    assert starts[1] >= there > 0
    assert party.progress.units == {"mine": 10}
    assert {finding.cause.signature for finding in record.findings} == SLIPS
    assert len(starts) == 2, "a shard that is at its end has nothing to do"


def test_campaign_ends_with_its_parent_and_stores_what_it_has(folder):
    command = " ".join([sys.executable, "-P", "-m", "kvlockstep", *OF_SHARD, "--store=store"])
    parent = subprocess.Popen(
        ["sh", "-c", f"{command} --end-with-parent $$ & echo $!; wait"], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    try:
        wait_until(lambda: any((folder / "out" / "parties").glob("*/mine.current.jsonl")))
    finally:
        parent.kill()
    parent.wait()
    wait_until(lambda: not os.path.exists(f"/proc/{child}"), 20.0)

    wait_until(lambda: list((folder / "store").glob("shards/*/*/progress.json")), 1.0)
