"""The corpus: shortest traces are noted, the least that cover all are kept, and a run that begins with it covers it."""

from dataclasses import replace

from kvlockstep.fuzz.campaign.corpus import Corpus, Entry, Notes, distilled
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.labels import Memory
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import Alloc, AllocItem, Commit, Match, Peek, Release, Submit
from kvlockstep.fuzz.states import StateClass
from kvlockstep.fuzz.statistics import CaseWatcher, Statistics
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.trace import Header, Trace, read_trace
from kvlockstep.fuzz.worker import Order, Plan, Stored, Worker

CONFIG = CacheConfig(page_size=2, n_pages=4, n_rows=2, max_context_len=8)
HEADER = Header(CONFIG, target="reference")
EMPTY = StateClass("roomy", "empty", "none", "none", "some")
FULL = StateClass("full", "empty", "none", "some", "some")

ONE, TWO, THREE = [(kind, EMPTY, FULL) for kind in ("submit", "match", "alloc")]

OPS = (
    Submit("r0", (1, 2, 3), (None, None, ()), 0, False),
    Match("r0"),
    Alloc((AllocItem("r0", 3, ()),)),
    Commit("r0", 3, ()),
    Release("r0"),
)


def entry(*covers, n_ops=3, tag="a"):
    return Entry(("header", *(f"{tag} {n}" for n in range(n_ops))), covers)


def run(ops, notes):
    done = []
    notes.begin(CONFIG, done)
    watch = CaseWatcher(Statistics(), Memory(CONFIG), None, notes.note)
    lockstep = Lockstep(CONFIG, ReferenceTarget(CONFIG), watch=watch)
    for op in ops:
        done.append(op)
        lockstep.run(op)


def kinds_covered(entries):
    return {kind for one in entries for kind, _, _ in one.covers}


def test_notes_hold_what_was_done_and_nothing_that_was_refused():
    notes = Notes(HEADER)
    run([Peek("r9"), *OPS], notes)
    entries = notes.take()

    assert kinds_covered(entries) == {"submit", "match", "alloc", "commit", "release"}
    assert notes.take() == []


def test_shorter_way_to_a_transition_is_noted_and_a_longer_one_is_not():
    notes = Notes(HEADER)
    run([*OPS[:2], Peek("r9"), *OPS[2:]], notes)
    notes.take()
    run([*OPS[:2], Peek("r9"), Peek("r9"), *OPS[2:]], notes)
    assert notes.take() == []

    run(OPS, notes)
    assert [one.n_ops for one in notes.take()] == [len(OPS)]


def test_entry_is_a_trace_that_can_be_read(tmp_path):
    notes = Notes(HEADER)
    run(OPS, notes)
    (made,) = notes.take()
    (tmp_path / made.name).write_text(made.text)
    trace = read_trace(tmp_path / made.name)

    assert isinstance(trace, Trace)
    assert (trace.header.config, trace.header.target, tuple(trace.ops)) == (CONFIG, "reference", OPS)
    assert Entry.from_json(made.to_json()) == made


def test_least_entries_that_cover_all_are_kept_whatever_their_order():
    both, first, second = entry(ONE, TWO, tag="b"), entry(ONE, tag="f"), entry(TWO, THREE, tag="s", n_ops=9)
    choice = distilled([first, second, both], {ONE, TWO, THREE})

    assert choice == [both, second]
    assert distilled([both, second, first], {ONE, TWO, THREE}) == choice
    assert distilled([first], {TWO}) == []


def test_corpus_writes_what_it_keeps_and_removes_what_it_no_longer_needs(tmp_path):
    corpus = Corpus(tmp_path)
    long = entry(ONE, tag="long", n_ops=9)
    corpus.add(long)
    corpus.save()
    assert [path.name for path in tmp_path.iterdir()] == [long.name]

    short = entry(ONE, TWO, tag="short", n_ops=2)
    corpus.add(short)
    assert corpus.save() == 1
    assert [path.name for path in tmp_path.iterdir()] == [short.name]
    assert (tmp_path / short.name).read_text() == short.text

    corpus.add(entry(ONE, tag="late", n_ops=3))
    assert corpus.save() == 1
    assert (len(corpus), corpus.transitions) == (1, 2)


def test_corpus_leaves_the_files_of_others_alone(tmp_path):
    (tmp_path / "0123456789abcdef.jsonl").write_text("somebody else's\n")
    corpus = Corpus(tmp_path)
    corpus.add(entry(ONE))
    corpus.save()

    assert (tmp_path / "0123456789abcdef.jsonl").exists()
    assert len(list(tmp_path.iterdir())) == 2


def reports_of(order):
    events = []
    Worker(order, ReferenceTarget, lambda event, **facts: events.append({"event": event, **facts})).fuzz()
    return events


def order_in(out, **plan):
    return Order("reference", None, 60.0, 0, str(out), "w", canary=False, plan=Plan("base", 1, 0, units=1, **plan))


def transitions_of(events):
    return {
        (kind, tuple(before), tuple(after))
        for event in events
        if event["event"] == "end"
        for kind, before, after, _ in event["statistics"]["transitions"]
    }


def test_corpus_of_a_run_covers_in_few_operations_what_the_run_reached(tmp_path):
    learned = reports_of(order_in(tmp_path, notes=True))
    corpus = Corpus(tmp_path / "corpus")
    for event in learned:
        if event["event"] == "notes":
            for one in event["entries"]:
                corpus.add(Entry.from_json(one))
    n = corpus.save()
    stored = replace(order_in(tmp_path), stored=(Stored(str(corpus.folder)),))
    verdicts = []

    def note(event, **facts):
        if event == "stored":
            verdicts.append(facts["verdict"])

    repeated = Worker(stored, ReferenceTarget, note)
    repeated._run_stored()

    reached = {(kind, tuple(a), tuple(b)) for kind, a, b in repeated.statistics.transitions}
    assert reached == transitions_of(learned)
    assert verdicts == ["clean"] * n
    assert repeated.statistics.done < sum(count for *_, count in learned[-1]["statistics"]["transitions"]) * 0.75


def test_trace_that_no_campaign_wrote_does_not_hold_up_the_start(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "large.jsonl").write_text("x" * 2000)
    (tmp_path / "corpus" / "small.jsonl").write_text("x")
    order = replace(order_in(tmp_path), stored=(Stored(str(tmp_path / "corpus"), largest=1000),))
    said = {event["file"]: event["text"] for event in reports_of(order) if event["event"] == "stored"}

    assert "2000 bytes, at most 1000: remove it" in said["large.jsonl"]
    assert "small.jsonl:1" in said["small.jsonl"]
