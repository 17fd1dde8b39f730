"""The page of a campaign: what it shows of folders made by hand, what it says to do first, and how its command ends."""

import json
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest

from kvlockstep.fuzz.campaign import advice, curves
from kvlockstep.fuzz.campaign.advice import first_thing
from kvlockstep.fuzz.campaign.folder import Cause, Lane, Settings, join
from kvlockstep.fuzz.campaign.page import MOST_ROWS, page_of
from kvlockstep.fuzz.campaign.record import read_record
from kvlockstep.fuzz.campaign.seeds import Shard
from kvlockstep.fuzz.commands.report import report
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import printable
from kvlockstep.fuzz.exits import run_and_exit
from kvlockstep.fuzz.labels import LABELS, name_of
from kvlockstep.fuzz.ops import OPS
from kvlockstep.fuzz.states import StateClass
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.target_check import CAPABILITIES
from kvlockstep.fuzz.trace import Header, Trace, write_trace

CLEAN, USAGE, UNKNOWN, CRASHED, BROKEN = 0, 2, 10, 11, 12
SIGNATURE = "PageOwnedTwice.checkpoint.tree+free"
BUSY = StateClass("tight", "locked", "one", "some", "some")
IDLE = StateClass("roomy", "empty", "none", "none", "some")
KINDS = [op.__name__.lower() for op in OPS]
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """A page taken apart: refuses a tag that is not closed, or closed in the wrong order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.links, self.tables, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "a":
            self.links.append(dict(attributes)["href"])
        if tag == "tr":
            self.tables.append([])
        if tag in ("td", "th"):
            self.tables[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)
            if {"td", "th"}.intersection(self.open):
                self.tables[-1][-1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def row(self, *cells):
        """Return the one row that begins with these cells."""
        found = [row for row in self.tables if [cell.strip() for cell in row[: len(cells)]] == list(cells)]
        assert len(found) == 1, f"{len(found)} rows begin with {cells}"
        return [" ".join(cell.split()) for cell in found[0]]


def settings(**changes):
    usual = Settings(("gpu_impl",), ("torch",), 2, 3600.0, Shard(1, 2), "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z")
    return replace(usual, **changes)


def statistics(transitions=None, labels=None):
    """Counts of a run that is clean, but for what is changed."""
    counts = Statistics(cases=500, cases_under_pressure=400, distinct_cases=490)
    counts.outcomes.update(dict.fromkeys(((kind, "done") for kind in KINDS), 100_000))
    counts.outcomes["alloc", "OutOfPages"] = 77
    counts.labels.update(dict.fromkeys(map(name_of, LABELS), 100_000) | (labels or {}))
    counts.transitions.update(transitions or dict.fromkeys(((kind, BUSY, BUSY) for kind in KINDS), 5))
    return counts


def lane(target="gpu_impl", name="torch", counts=None, **changes):
    canaries = [{"law": "WriteSlotRepeated", "operations": 13, "seconds": 0.1}]
    usual = Lane(target, name, (counts or statistics()).to_json(), 60.0, list(CAPABILITIES), canaries=canaries)
    return replace(usual, **changes)


def cause(signature=SIGNATURE, **changes):
    law = signature.partition(".")[0]
    usual = Cause(signature, "gpu_impl", None, signature, law, "torch", "torch-1", 30.0, 4321, 60, 6, replays=True)
    return replace(usual, **changes)


def store(folder, failure):
    """Write the folder of a failure as a worker does."""
    place = folder / "failures" / failure.folder
    place.mkdir(parents=True)
    header = Header(CacheConfig(), target=failure.target, signature=failure.signature, violates=failure.law)
    for name in ("trace.jsonl", "original.jsonl"):
        write_trace(place / name, Trace(header, []))
    (place / "verdict.txt").write_text(f"{failure.law}: page 3 has 2 owners, expected 1\n")
    (place / "environment.json").write_text("{}\n")
    return failure


def add_party(folder, *events, asked=None, lanes=None, causes=(), end=(CLEAN, ["clean"]), seconds=600.0, **progress):
    """Add a party with these events, (time, name, facts), to the campaign in a folder."""
    with join(folder, asked or settings(), resume=False) as party:
        party.note("begin", resumed=False, after_kill=False, when="2026-01-01T00:00:00Z")
        party.progress.lanes = [lane()] if lanes is None else lanes
        party.progress.causes = {one.key: one for one in causes}
        for name, value in progress.items():
            setattr(party.progress, name, value)
        for t, name, facts in events:
            party.progress.seconds = t
            party.note(name, **facts)
        party.progress.seconds = seconds
        if end is not None:
            party.progress.ended = True
            party.note("end", code=end[0], lines=end[1])
        party.save()
        return party.number


def sample(t, **facts):
    return t, "sample", facts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a campaign that is still to be made, below the current one."""
    monkeypatch.chdir(tmp_path)
    return Path("night")


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command, and return its exit code and both outputs."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlockstep", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            run_and_exit(click.Group("kvlockstep", commands=[report]))
        return stopped.value.code, *capsys.readouterr()

    return run


def page_in(folder, page="report.html"):
    text, _ = page_of(read_record(folder), folder / page)
    return Page(text)


def first_in(folder):
    return first_thing(read_record(folder))


# What is shown


def test_page_shows_all_parties_with_their_states(folder):
    add_party(folder, asked=settings(base="abc", commit="f00d", environment={"torch": "2.13"}, host="box"))
    add_party(folder, asked=settings(shard=Shard(2, 2)), end=None)
    add_party(folder, (600, "interrupted", {"code": 130, "lines": []}), end=None)

    page = page_in(folder)

    one = page.row("1", "ended, exit code 0")
    assert one[2:] == [
        "gpu_impl", "torch", "2", "1:00 h", "10:00 min", "abc", "1/2", "no limit", "-", "2026-01-01T00:00:00Z", "box",
        "f00d",
    ]  # fmt: skip
    assert "Versions of party 1: torch 2.13." in page.text
    assert page.row("2", "killed before its end")[8] == "2/2"
    assert page.row("3", "interrupted")
    assert "so far: party 2 was killed before its end, party 3 was interrupted." in page.text


def test_page_needs_nothing_from_elsewhere(folder):
    failure = cause()
    add_party(folder, causes=[failure])
    store(folder, failure)

    page = page_in(folder)

    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "form"})
    named = [attributes for _, attributes in page.tags if {"src", "srcset", "onclick", "style"} & attributes.keys()]
    assert named == []
    assert all(not href.startswith(("/", "http", "javascript")) for href in page.links)


def test_counts_of_lanes_and_operations_are_those_of_the_progress(folder):
    add_party(
        folder, lanes=[lane(), lane(name="interpret", canaries=[{"law": None, "operations": 400, "seconds": 1.0}])]
    )

    page = page_in(folder)

    done = 100_000 * len(KINDS)
    row = page.row("gpu_impl torch, party 1")
    assert row[1:] == ["60", f"{done:,}", f"{done / 60:,.0f}", "77", "500", "490", "80%", "found after 13 operations"]
    assert page.row("gpu_impl interpret, party 1")[-1] == "not found in 400 operations"
    assert page.row("alloc", "200,000")[1:] == ["200,000", "154", "154 OutOfPages"]


def test_failures_of_several_parties_are_one_row(folder):
    early, late = cause(seconds=30.0, operations=111, minimized_len=9), cause(seconds=90.0, minimized_len=6, times=4)
    add_party(folder, causes=[late])
    add_party(folder, causes=[early])
    store(folder, early)

    page = page_in(folder)
    row = page.row("law 1, PageOwnedTwice")

    assert row[1] == f"{SIGNATURE} trace.jsonl, original.jsonl, verdict.txt, environment.json"
    assert row[2:7] == [
        "gpu_impl", "5", "30 s, 111 operations of worker torch-1 on lane torch, parties 1, 2", "6 of 60", "yes",
    ]  # fmt: skip
    assert "verdict PageOwnedTwice: page 3 has 2 owners, expected 1 line to paste kvlockstep replay" in page.text


def test_failure_links_to_its_files_from_where_the_page_lies(folder):
    failure = cause("Page#1 %.x", law="PageLeaked", folder="Page#1 %.x")
    add_party(folder, causes=[failure])
    store(folder, failure)

    names = ["trace.jsonl", "original.jsonl", "verdict.txt", "environment.json"]
    assert page_in(folder).links == [f"failures/Page%231%20%25.x/{name}" for name in names]
    assert page_in(folder, "../else/where.html").links == [f"../night/failures/Page%231%20%25.x/{n}" for n in names]


def test_top_of_the_page_says_what_was_found_and_leads_to_its_picture(folder):
    drawn, other_form = cause(minimized_len=5, root="R"), cause("PageOwnedTwice.release.tree", root="R")
    plain = cause("PageLeaked.abort", fault="abort-keeps-tail", known=True)
    add_party(folder, causes=[drawn, other_form, plain])
    for one in (drawn, other_form, plain):
        store(folder, one)
    place = folder / "failures" / drawn.folder
    (place / "page.html").write_text("<p>")
    with (place / "verdict.txt").open("a") as file:
        file.write("  meaning   Page 3 is <r1>'s too.\n  replay    kvlockstep replay x\n")

    page = page_in(folder)
    top = page.text.partition("To do first:")[0]

    assert "What was found: Page 3 is <r1>'s too. law 1, PageOwnedTwice, on gpu_impl, in 5 operations. Picture" in top
    assert "PageLeaked: page 3 has 2 owners, expected 1 law 1, PageLeaked, on gpu_impl with the planted fault " in top
    assert top.count("PageOwnedTwice,") == 1
    assert page.links[0] == "failures/PageOwnedTwice.checkpoint.tree%2Bfree/page.html"
    assert page.links.count("failures/PageOwnedTwice.checkpoint.tree%2Bfree/page.html") == 2
    assert page.text.count("kvlockstep show ") == 2
    assert f"kvlockstep show night/failures/{plain.folder}/trace.jsonl" in page.text


def test_of_many_causes_the_first_are_told_at_the_top(folder):
    causes = [cause(f"PageLeaked.abort.{n}", folder="") for n in range(9)]
    add_party(folder, causes=causes)

    page = page_in(folder)

    assert "4 more: see Failures ." in page.text.partition("To do first:")[0]
    assert page.links == ["#failures"]


@pytest.mark.parametrize("name", ["..", "../../secret", "", "a/b", "absent"])
def test_failure_without_a_folder_of_its_own_links_nowhere(folder, name):
    add_party(folder, causes=[cause(folder=name)])
    (folder.parent / "secret").mkdir()
    (folder.parent / "secret" / "verdict.txt").write_text("not to be shown")

    page = page_in(folder)

    assert page.links == []
    assert page.row("law 1, PageOwnedTwice")[1] == f"{SIGNATURE} its folder is gone"
    assert "not to be shown" not in page.text


def test_failures_show_fault_ending_and_what_is_known(folder):
    odd = cause(fault="abort-keeps-lock", known=True, old=True, minimize_ending="time ran out", replays=None)
    add_party(folder, causes=[odd])

    row = page_in(folder).row("law 1, PageOwnedTwice")

    assert row[2] == "gpu_implplanted fault abort-keeps-lock"
    assert row[5:] == ["6 of 60time ran out; kvlockstep minimize goes on", "not tried yetknownfails on the base too"]


def test_page_says_what_was_not_reached(folder):
    label = name_of(next(iter(LABELS)))
    counts = statistics(
        {**dict.fromkeys(((kind, BUSY, BUSY) for kind in KINDS), 5), ("evict", IDLE, IDLE): 9}, {label: 0}
    )
    hidden = [(2, "every_anchor_hangs_on_the_root", ["anchors"])]
    capabilities = [name for name in CAPABILITIES if name != "drafts"]
    add_party(
        folder,
        asked=settings(targets=("gpu_impl", "sglang:radix"), lanes=("torch", "interpret")),
        lanes=[lane(counts=counts, unobserved=hidden, capabilities=capabilities)],
    )

    page = page_in(folder)

    assert f"never reached: {label}" in page.text
    assert page.row(label) == [label, "0", "too seldom"]
    assert "gpu_impl on lane interpret, sglang:radix on lane torch, sglang:radix on lane interpret" in page.text
    assert "Law 2 of the charter was not observed." in page.text
    assert "not observed: law 2, every anchor hangs on the root (needs anchors)" in page.text
    assert "not drawn, because the target does not promise them: drafts" in page.text
    assert page.row("match", "1") == ["match", "1", "1 of 2", str(IDLE), "9"]
    assert page.row("evict", "2")[2:] == ["2 of 2", "-", ""]


def test_workers_show_deaths_and_rates_against_their_like(folder):
    rates = {"torch-1": 1000, "torch-2": 900, "torch-3": 300, "interpret-1": 50}
    add_party(
        folder,
        sample(10, done=1, rates=rates),
        sample(20, done=1, rates=rates),
        (21, "death", {"worker": "torch-3", "unit": 7, "how": "killed by SIGSEGV", "trace": "a/torch-3.died-1.jsonl"}),
        (25, "postmortem", {"worker": "torch-3", "verdict": "Died.match.SIGSEGV"}),
        (30, "death", {"worker": "torch-3", "unit": 8, "how": "said nothing for 60 s", "trace": None}),
        (40, "given up", {"worker": "torch-2", "why": "it is <b>gone</b>"}),
        starts={"torch-1": 2, "torch-2": 1, "torch-3": 3, "interpret-1": 1},
        deaths={"torch-3": 2},
        units={"torch-1": 60, "torch-3": 8},
    )
    (folder / "parties" / "0001" / "torch-3.died-1.jsonl").write_text("{}")

    page = page_in(folder)

    assert page.row("1", "torch-1") == ["1", "torch-1", "60", "2", "0", "1,000", "111%", ""]
    assert page.row("1", "torch-2")[-1] == "given up: it is <b>gone</b>"
    assert page.row("1", "torch-3") == ["1", "torch-3", "8", "3", "2", "300", "33%", "slow"]
    assert page.row("1", "interpret-1")[-2:] == ["100%", ""]
    assert page.row("1", "21 s", "torch-3")[3:] == [
        "7",
        "killed by SIGSEGV",
        "Died.match.SIGSEGV",
        "torch-3.died-1.jsonl",
    ]
    assert page.row("1", "30 s", "torch-3")[3:] == ["8", "said nothing for 60 s", "none", "-"]
    assert "parties/0001/torch-3.died-1.jsonl" in page.links


def test_flakes_show_what_differed_and_what_did_not_replay(folder):
    facts = {"trace": "0001-1.jsonl", "lane": None, "target": "gpu_impl", "expected": "aa", "got": "bb"}
    add_party(folder, (5, "flake", facts), causes=[cause(replays=False)], twins_compared=40, twins_differed=1)
    (folder / "flakes" / "0001-1.jsonl").write_text("{}")

    page = page_in(folder)

    assert page.row("1", "40") == ["1", "40", "1"]
    assert page.row("1", "5 s", "gpu_impl")[3:] == ["-", "aa", "bb", "0001-1.jsonl"]
    assert page.links == ["flakes/0001-1.jsonl"]
    assert f"Did not replay in a fresh process: {SIGNATURE} on gpu_impl" in page.text


def test_events_show_facts_that_nobody_knows(folder):
    add_party(folder, (3, "moon", {"phase": [1, {"full": True}], "seen": False}), (4, "start", {"worker": "torch-1"}))

    page = page_in(folder)

    assert page.row("1", "3 s", "moon")[3] == 'phase[1, {"full": true}]seenno'
    assert page.row("1", "10:00 min", "end")[3] == "code0linesclean"
    assert not [row for row in page.tables if row[2:3] == ["start"]]


def test_of_very_many_events_the_first_and_last_are_shown(folder):
    add_party(folder, *((t, "slow", {"worker": f"w{t}"}) for t in range(1, 1001)))

    page = page_in(folder)

    assert "602 more between the first and the last" in page.text
    shown = [row[3] for row in page.tables if row[2:3] == ["slow"]]
    assert (shown[0], shown[-1], len(shown)) == ("workerw1", "workerw1000", MOST_ROWS - 2)


def test_facts_that_are_missing_leave_a_page(folder):
    names = (
        "begin",
        "sample",
        "cause",
        "replayed",
        "death",
        "postmortem",
        "flake",
        "given up",
        "disk full",
        "slow",
        "end",
    )
    add_party(folder, *((i, name, {}) for i, name in enumerate(names)))

    assert "Unfinished: the disk was full." in page_in(folder).text


def test_party_that_was_killed_at_once_leaves_a_page(folder):
    (folder / "parties" / "0001").mkdir(parents=True)

    page = page_in(folder)

    assert page.row("1", "killed before its end")[2] == "killed before it wrote what it was asked to do"
    assert "No worker has reported anything." in page.text
    assert first_in(folder).kind == advice.UNKNOWN


def test_campaign_at_work_is_labelled_as_running(folder, command):
    with join(folder, settings(), resume=False) as party:
        party.note("begin", resumed=False)
        page = page_in(folder)
        code, out, _ = command(folder)

    assert page.row("1", "running")
    assert "Still running:" in page.text
    assert (code, "party 1 running" in out) == (CLEAN, True)
    assert page_in(folder).row("1", "killed before its end")


# Texts of strangers

EVIL = '<script>alert("1")</script>\'&amp;\x1b[2J\u202e\ud800\x00'


def test_no_text_of_a_stranger_becomes_markup(folder):
    """Each text that a folder holds is put into the page, and shown as it is."""
    bad = cause(EVIL, target=EVIL, fault=EVIL, folder="x", law=EVIL, lane=EVIL, worker=EVIL, minimize_ending=EVIL)
    facts = {"worker": EVIL, "how": EVIL, "why": EVIL, "what": EVIL, "trace": EVIL, "verdict": EVIL, "expected": EVIL}
    events = [(1, name, facts) for name in ("death", "postmortem", "flake", "given up", "disk full", EVIL)]
    add_party(
        folder,
        sample(1, rates={EVIL: 1}),
        *events,
        (2, "moon", {EVIL: EVIL, "deep": {EVIL: [EVIL]}}),
        asked=settings(
            targets=(EVIL,), lanes=(EVIL,), base=EVIL, started=EVIL, faults=(EVIL,), host=EVIL, commit=EVIL,
            environment={EVIL: EVIL},
        ),
        lanes=[lane(EVIL, EVIL, hidden=[EVIL], unobserved=[(1, EVIL, [EVIL])], capabilities=[EVIL])],
        causes=[bad],
        end=(UNKNOWN, [EVIL]),
        starts={EVIL: 1},
        deaths={EVIL: 1},
    )  # fmt: skip
    store(folder, replace(cause(), folder="x"))
    (folder / "failures" / "x" / "verdict.txt").write_bytes(EVIL.encode("utf-8", "surrogatepass") + b"\xff")

    text, _ = page_of(read_record(folder), folder / "report.html")
    page = Page(text)

    assert text.lower().count("<script") == 0
    assert "script" not in {tag for tag, _ in page.tags}
    shown = '<script>alert("1")</script>\'&amp;\\x1b[2J\\u202e\\ud800\\x00'
    assert page.text.count(shown) > 30
    assert printable(text) == text
    assert text.encode()


def test_command_prints_no_control_characters(folder, command):
    add_party(folder, causes=[cause(EVIL, folder="x")])

    code, out, _ = command(folder)

    assert code == CLEAN
    assert printable(out) == out
    assert "\\x1b[2J" in out


# What to do first


def spoil(folder, name, *more, **changes):
    """Make a campaign that is clean but for one thing that a rule speaks of; return what is to be done first."""
    add_party(folder, *more, **changes)
    return first_in(folder)


def test_first_comes_the_shortest_failure_that_replays(folder):
    long, short = cause("PageLeaked.release.free", minimized_len=8), cause(minimized_len=5)
    unsteady, known = cause("A.b", minimized_len=1, replays=False), cause("K.k", minimized_len=2, known=True)
    for one in (long, short, unsteady, known):
        store(folder, one)
    add_party(folder, (1, "disk full", {"what": "x"}), causes=[long, unsteady, known, short])

    said = first_in(folder)

    assert (said.kind, said.verdict) == (advice.VIOLATION, "Violation: 2 causes of failure.")
    assert said.sentence == f"Replay {SIGNATURE} on gpu_impl: law 1, PageOwnedTwice, in 5 operations."
    assert said.line == f"kvlockstep replay night/failures/{SIGNATURE}/trace.jsonl"


def test_line_to_paste_names_and_quotes_a_target_of_ones_own(folder):
    own = cause("A.b", target="my cache:make;ls", folder="A b")
    store(folder, replace(own, target="gpu_impl"))
    add_party(folder, causes=[own])

    assert first_in(folder).line == "kvlockstep replay --target 'my cache:make;ls' 'night/failures/A b/trace.jsonl'"


def test_failure_not_replayed_yet_comes_before_trouble(folder):
    failure = store(folder, cause(replays=None))
    add_party(folder, (1, "disk full", {"what": "x"}), causes=[failure])

    said = first_in(folder)

    assert said.kind == advice.VIOLATION
    assert "was not tried yet" in said.verdict
    assert said.line == f"kvlockstep replay night/failures/{SIGNATURE}/trace.jsonl"


def test_full_disk_comes_before_workers_given_up(folder):
    add_party(folder, (1, "given up", {"worker": "w", "why": "x"}), (2, "disk full", {"what": "could not write y"}))

    said = first_in(folder)

    assert said.verdict == "Unfinished: the disk was full."
    assert said.sentence == "Make room for party 1, and give its command again: could not write y"
    assert said.line == "df -h night"


def test_disk_that_was_full_before_a_resumption_is_past(folder):
    add_party(
        folder, (1, "disk full", {"what": "x"}), (1, "given up", {"worker": "w"}), (2, "begin", {"resumed": True})
    )

    assert first_in(folder).kind == advice.CLEAR


def test_worker_given_up_comes_before_flakes(folder):
    header = Header(CacheConfig(), target="gpu_impl")
    death = {"worker": "torch-1", "unit": 0, "how": "died", "trace": "/elsewhere/torch-1.died-1.jsonl"}
    flake, gone = {"trace": "0001-1.jsonl"}, {"worker": "torch-1", "why": "died: killed by SIGSEGV"}
    add_party(folder, (1, "flake", flake), (1, "death", death), (2, "given up", gone))
    write_trace(folder / "parties" / "0001" / "torch-1.died-1.jsonl", Trace(header, []))

    said = first_in(folder)

    assert said.verdict == "Not clean: a worker was given up."
    assert said.sentence == "See why worker torch-1 of party 1 cannot work: died: killed by SIGSEGV"
    assert said.line == "kvlockstep replay night/parties/0001/torch-1.died-1.jsonl"


def test_worker_given_up_without_a_trace_asks_the_doctor(folder):
    add_party(folder, (2, "given up", {"worker": "torch-1", "why": "died"}))

    assert first_in(folder).line == "kvlockstep doctor"


def test_flake_comes_before_what_was_not_observed(folder):
    add_party(folder, (1, "flake", {"trace": "0001-1.jsonl"}), lanes=[lane(unobserved=[(1, "x", ["nodes"])])])
    write_trace(folder / "flakes" / "0001-1.jsonl", Trace(Header(CacheConfig(), target="own:make"), []))

    said = first_in(folder)

    assert said.verdict == "Not clean: a case did not give the same twice."
    assert said.line == "kvlockstep replay --target own:make night/flakes/0001-1.jsonl"


def test_failure_that_did_not_replay_is_no_violation(folder):
    failure = store(folder, cause(replays=False))
    add_party(folder, causes=[failure])

    said = first_in(folder)

    assert said.kind == advice.TROUBLE
    assert said.verdict == "Not clean: a failure was found that did not replay in a fresh process."
    assert said.line == f"kvlockstep replay night/failures/{SIGNATURE}/trace.jsonl"


@pytest.mark.parametrize(
    ("verdict", "kind"), [("did not happen again", advice.TROUBLE), (None, advice.TROUBLE), ("Died.x", advice.CLEAR)]
)
def test_death_that_nothing_explains_is_not_clean(folder, verdict, kind):
    settled = [(2, "postmortem", {"worker": "w", "verdict": verdict})] if verdict is not None else []
    add_party(folder, (1, "death", {"worker": "w", "how": "grew to 5,000 MiB"}), *settled)

    assert first_in(folder).kind == kind


@pytest.mark.parametrize("lanes", [[], [lane(counts=Statistics())]])
def test_campaign_in_which_nothing_was_done_is_not_clean(folder, lanes):
    add_party(folder, lanes=lanes, end=None)

    said = first_in(folder)

    assert (said.kind, said.sentence) == (advice.UNKNOWN, "See why nothing was done on gpu_impl on lane torch.")
    assert said.line == "kvlockstep doctor"


def test_charter_law_that_was_not_observed_is_named(folder):
    unseen = [(2, "every_anchor_hangs_on_the_root", ["nodes", "anchors"]), (9, "x", ["pool"])]
    label = name_of(next(iter(LABELS)))
    add_party(folder, lanes=[lane(counts=statistics(labels={label: 0}), unobserved=unseen)], end=(UNKNOWN, ["law 2"]))

    said = first_in(folder)

    assert (said.kind, said.verdict) == (advice.UNKNOWN, "Unknown: law 2 was not observed on gpu_impl.")
    assert said.sentence == "Let gpu_impl show what law 2 is checked on: anchors, nodes."


def test_charter_law_that_was_accepted_is_repeated(folder):
    said = ["clean but for law 2: not observed, accepted by --accept-unobserved 2"]
    add_party(folder, lanes=[lane(unobserved=[(2, "x", ["nodes"])])], end=(CLEAN, said))

    assert first_in(folder).kind == advice.CLEAR
    assert "but for law 2: not observed, and accepted" in first_in(folder).verdict


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"counts": statistics(labels={name_of(next(iter(LABELS))): 0})}, "never reached: "),
        ({"canaries": [{"law": None, "operations": 400, "seconds": 1.0}]}, "the canary, a batch that ends in the slot"),
        ({"canaries": []}, "it did not run"),
        ({"counts": replace(statistics(), cases_under_pressure=5)}, "1% of cases evicted"),
    ],
)
def test_what_was_reached_too_seldom_asks_for_a_longer_run(folder, changes, said):
    add_party(folder, lanes=[lane(**changes)])

    first = first_in(folder)

    assert (first.kind, first.verdict) == (advice.UNKNOWN, "Unknown: too little was reached.")
    assert said in first.sentence
    assert first.line == "kvlockstep fuzz --target gpu_impl --lanes torch --for 2h --workers 2 --shard 1/2 --out night"


def test_party_that_did_too_little_for_its_time_is_named(folder):
    add_party(folder)
    add_party(folder, seconds=1e6)

    assert first_in(folder).sentence.startswith("Run it for longer: worker gpu_impl torch, party 2: 1")


def test_party_that_is_not_at_its_end_is_to_go_on(folder):
    low = lane(counts=statistics(labels={name_of(next(iter(LABELS))): 0}))
    add_party(folder, lanes=[low])
    add_party(folder, lanes=[low], end=None, asked=settings(seconds=90.0, faults=("a", "b"), units=7, shard=Shard()))

    said = first_in(folder)

    assert said.sentence.startswith("Let party 2 go on to its end: never reached: ")
    assert said.line == (
        "kvlockstep fuzz --target gpu_impl --lanes torch --for 90s --workers 2 --fault a,b --units 7"
        " --out night --resume"
    )


def test_campaign_under_the_sanitizer_says_so_and_goes_on_under_it(folder):
    low = lane(name="interpret", counts=statistics(labels={name_of(next(iter(LABELS))): 0}))
    add_party(folder, lanes=[low], end=None, asked=settings(sanitize=True, lanes=("interpret",), shard=Shard()))

    assert first_in(folder).line == (
        "kvlockstep fuzz --target gpu_impl --lanes interpret --for 1h --workers 2 --out night --sanitize --resume"
    )
    assert "interpret, under the sanitizer" in page_of(read_record(folder), folder / "report.html")[0]


def test_campaign_at_work_is_to_run_on(folder):
    with join(folder, settings(), resume=False) as party:
        party.progress.lanes = [lane(counts=statistics(labels={name_of(next(iter(LABELS))): 0}))]
        party.save()

        assert (first_in(folder).sentence[:14], first_in(folder).line) == ("Let it run on:", None)


def test_party_that_calls_itself_not_clean_is_believed(folder):
    add_party(folder)
    add_party(folder, end=(CRASHED, ["worker torch-1 died"]))

    said = first_in(folder)

    assert said.verdict == "Not clean: party 2 ended with exit code 11."
    assert (said.kind, said.sentence) == (advice.TROUBLE, "See what it was: worker torch-1 died")


def test_party_that_calls_itself_unknown_is_believed(folder):
    add_party(folder, end=(UNKNOWN, ["not run: sglang:radix"]))

    assert (first_in(folder).kind, first_in(folder).sentence) == (
        advice.UNKNOWN,
        "See what it was: not run: sglang:radix",
    )


def test_transition_never_tried_comes_last(folder):
    counts = statistics({**dict.fromkeys(((kind, BUSY, BUSY) for kind in KINDS), 5), ("evict", IDLE, IDLE): 9})
    add_party(folder, lanes=[lane(counts=counts)])

    said = first_in(folder)

    assert said.verdict == "Clean: no law was broken, and every required state was reached."
    assert said.sentence.startswith("Run it for longer, if there is time: ")
    assert said.sentence.endswith(f"was never done with {IDLE}, where 9 operations began.")


def test_clean_campaign_leaves_nothing_to_do(folder):
    add_party(folder, causes=[cause(known=True)])

    said = first_in(folder)

    assert said == advice.Advice(
        advice.CLEAR,
        "Clean: no law was broken, and every required state was reached, but for 1 known cause.",
        "There is nothing to do.",
    )


# Curves


def events_of(*pairs, fact="done"):
    return [{"event": "sample", "t": t, fact: value} for t, value in pairs]


def test_rate_is_that_between_samples():
    assert curves.rate_points(events_of((10, 1000), (20, 3000), (40, 3000))) == [(10, 100.0), (20, 200.0), (40, 0.0)]


def test_curve_leaves_out_what_a_kill_undid():
    lost = [*events_of((10, 1), (20, 2), (30, 3)), {"event": "begin", "t": 20}, *events_of((25, 2), (35, 4))]

    assert curves.points_of(lost, "done") == [(10, 1), (25, 2), (35, 4)]


def test_curve_passes_over_samples_without_the_fact():
    odd = events_of((1, None), (2, "many"), (3, float("nan")), (4, True), (5, 5.5))

    assert curves.points_of([*odd, {"event": "sample", "t": 6}], "done") == [(5, 5.5)]


def test_long_curve_is_thinned_and_keeps_end_and_peak():
    events = events_of(*((10 * i, 999 if i == 700 else i % 10) for i in range(1, 3601)), fact="memory_mib")

    points = curves.points_of(events, "memory_mib", choose=max)

    assert len(points) <= curves.MOST_POINTS
    assert points[-1][0] == 36000
    assert max(value for _, value in points) == 999


def test_charts_draw_each_party_where_its_samples_are(folder):
    add_party(folder, sample(50, transitions=20, classes=3), sample(100, transitions=40, classes=4))
    add_party(folder, sample(100, transitions=10))

    chart, *_ = curves.charts_of(read_record(folder).parties)

    assert [(line.name, list(line.points)) for line in chart.lines] == [
        ("party 1", [(50, 20), (100, 40)]),
        ("party 2", [(100, 10)]),
    ]
    drawn = [(tag, attributes) for tag, attributes in Page(str(chart.svg)).tags if tag in ("path", "circle")]
    assert drawn[0] == ("path", {"class": "line c0", "d": "M276.0 96.0L488.0 12.0"})  # halfway, then the upper right
    assert drawn[3] == ("path", {"class": "line c1", "d": "M488.0 138.0"})
    assert "party 1, 50 s: 20 transitions" in str(chart.svg)
    assert [text for text in Page(str(chart.svg)).words if text.isdigit()] == ["0", "10", "20", "30", "40"]


def test_causes_of_failure_rise_in_steps(folder):
    add_party(folder, sample(50, causes=0), sample(100, causes=2))

    causes = curves.charts_of(read_record(folder).parties)[3]

    assert 'd="M276.0 180.0H488.0V12.0"' in str(causes.svg)


def test_charts_without_samples_say_so(folder):
    add_party(folder)

    assert page_in(folder).text.count("no samples") == 5


def test_many_parties_have_lines_that_differ(folder):
    for _ in range(curves.N_COLOURS + 1):
        add_party(folder, sample(10, transitions=1))

    page = page_in(folder)

    legend = [a["class"] for tag, a in page.tags if tag == "path" and a["d"] == "M1 5H25"]
    assert len(set(legend)) == curves.N_COLOURS + 1
    assert legend[-1] == "line c0 dashed"


# The command


def test_command_writes_the_page_into_the_folder_and_says_what_to_do(folder, command):
    failure = store(folder, cause())
    add_party(folder, causes=[failure])

    code, out, errors = command(folder)

    assert (code, errors) == (CLEAN, "")
    assert out.splitlines() == [
        "night/report.html",
        "party 1 ended, exit code 0",
        "Violation: 1 cause of failure.",
        f"to do first: Replay {SIGNATURE} on gpu_impl: law 1, PageOwnedTwice, in 6 operations.",
        f"  kvlockstep replay night/failures/{SIGNATURE}/trace.jsonl",
    ]
    assert Page((folder / "report.html").read_text()).text
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_same_folder_gives_the_same_bytes(folder, command):
    add_party(folder, sample(5, done=3, rates={"b-1": 1, "a-1": 2}), causes=[cause()], starts={"b-1": 1, "a-1": 1})

    command(folder)
    first = (folder / "report.html").read_bytes()
    command(folder)

    assert (folder / "report.html").read_bytes() == first


def test_command_writes_where_it_is_told(folder, command):
    add_party(folder)

    code, _, _ = command(folder, "--out", "page.html")

    assert (code, Path("page.html").exists(), (folder / "report.html").exists()) == (CLEAN, True, False)


def test_page_that_cannot_be_written_is_exit_12(folder, command):
    add_party(folder)

    code, _, errors = command(folder, "--out", "/dev/full")

    assert (code, errors) == (BROKEN, "kvlockstep: --out /dev/full: No space left on device\n")


@pytest.mark.parametrize("kind", ["absent", "file", "empty"])
def test_folder_that_is_no_campaign_is_wrong_usage(folder, command, kind):
    if kind == "file":
        folder.write_text("x")
    elif kind == "empty":
        folder.mkdir()

    code, out, errors = command(folder)

    assert (code, out) == (USAGE, "")
    assert errors.startswith("kvlockstep: ")
    assert "night" in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    "line", ["{", '{"t": 1}', "[]", '{"t": "x", "event": "end"}', '{"t": NaN, "event": "end"}', '{"t": 1, "event": 2}']
)
def test_bad_line_of_a_journal_is_named(folder, command, line):
    add_party(folder)
    journal = folder / "parties" / "0001" / "journal.jsonl"
    journal.write_text(journal.read_text() + line + "\n")

    code, _, errors = command(folder)

    assert (code, errors) == (USAGE, f"kvlockstep: {journal}:3: no event of a campaign: delete this line\n")


def test_line_that_was_cut_by_a_kill_is_passed_over(folder, command):
    add_party(folder)
    with (folder / "parties" / "0001" / "journal.jsonl").open("a") as file:
        file.write('{"t": 9, "eve')

    assert command(folder)[0] == CLEAN


def change_progress(folder, change):
    path = folder / "parties" / "0001" / "progress.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("lanes"),
        lambda data: data.update(lanes=3),
        lambda data: data.update(more=1),
        lambda data: data.update(seconds="long"),
        lambda data: data["lanes"][0].update(statistics={}),
        lambda data: data["lanes"][0].update(canaries=[{}]),
        lambda data: data["starts"].update({"torch-1": None}),
        lambda data: data["causes"].update(x={"signature": "y"}),
    ],
)
def test_bad_progress_is_named(folder, command, change):
    add_party(folder)
    change_progress(folder, change)

    code, _, errors = command(folder)

    named = folder / "parties" / "0001" / "progress.json"
    assert (code, errors) == (USAGE, f"kvlockstep: {named}: not what a campaign writes: name another folder\n")


def test_bytes_that_are_no_text_are_wrong_usage(folder, command):
    add_party(folder)
    (folder / "parties" / "0001" / "journal.jsonl").write_bytes(b"\xff\n")

    code, _, errors = command(folder)

    assert code == USAGE
    assert "parties/0001/journal.jsonl" in errors


def test_template_is_in_the_package():
    from importlib import resources

    assert resources.files("kvlockstep.fuzz.campaign").joinpath("page.html.jinja").is_file()
    assert '"kvlockstep.fuzz.campaign" = ["*.jinja"]' in (Path(__file__).parents[1] / "pyproject.toml").read_text()
