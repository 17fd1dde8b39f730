"""Campaigns from the command line: whatever becomes of a worker, the parent or the disk, nothing found is lost."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from kvlockstep.fuzz.campaign.folder import Cause, Progress, Settings, join, journal_of, progress_of
from kvlockstep.fuzz.campaign.seeds import Shard
from kvlockstep.fuzz.campaign.supervisor import POSTMORTEM, Bounds, Supervisor
from kvlockstep.fuzz.campaign.witness import Case, Witnesses
from kvlockstep.fuzz.commands.campaign import print_causes
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.crew import WorkerState, _Crew, _Member, _pump
from kvlockstep.fuzz.exits import CLEAN, INTERRUPTED, UNKNOWN, USAGE, VIOLATION, make_console
from kvlockstep.fuzz.failures import store_failure
from kvlockstep.fuzz.ops import Match, Peek, Submit
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.replay import run_ops
from kvlockstep.fuzz.trace import Header, Trace, encode_header, encode_op, read_trace
from kvlockstep.fuzz.worker import ROOT_S, Order, Plan, Worker

TARGETS = """
import os, signal, time
from kvlockstep.fuzz.targets.reference import ReferenceTarget

class Good(ReferenceTarget): pass

class Bad(ReferenceTarget):
    def retract(self, request, publish):
        if publish:
            self.harm()
        return super().retract(request, publish)

class Segfaults(Bad):
    def harm(self):
        os.kill(os.getpid(), signal.SIGSEGV)

class Hangs(Bad):
    def harm(self):
        time.sleep(3600)

class Eats(Bad):
    def harm(self):
        self.hoard = []
        for _ in range(40):
            self.hoard.append(b"x" * (100 << 20))
            time.sleep(0.05)

class Fickle(ReferenceTarget):
    def peek(self, request, tokens, namespace, private):
        if os.environ.get("PYTHONHASHSEED") == "20011":
            raise ValueError("as one does where it depends on the order of a set")
        return super().peek(request, tokens, namespace, private)

class HangsAgain(ReferenceTarget):
    def peek(self, request, tokens, namespace, private):
        if os.environ.get("PYTHONHASHSEED") == "20011":
            time.sleep(3600)
        return super().peek(request, tokens, namespace, private)

class Forks(ReferenceTarget):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if os.fork() == 0:
            time.sleep(3600)

def raises(config):
    raise RuntimeError("no cache today")
"""

FAULTS = "checkpoint-keeps-row,partial-page-freed-twice"


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "targets_here.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def words(*options):
    return [sys.executable, "-P", "-m", "kvlockstep", "fuzz", "--out", "c", "--workers", "1", *options]


def campaign(*options, **variables):
    return subprocess.run(words(*options), capture_output=True, text=True, timeout=180, env=os.environ | variables)


@contextmanager
def started(*options):
    process = subprocess.Popen(words(*options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(happens, seconds=60.0):
    until = time.monotonic() + seconds
    while not (found := happens()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.1)
    return found


def events(folder, name=None, party=1):
    return [event for event in journal_of(folder / "c", party) if name in (None, event["event"])]


def causes(folder, party=1):
    return {cause.signature: cause for cause in progress_of(folder / "c", party).causes.values()}


def pids_of(folder, module):
    """Return the processes of a campaign in a folder that run a module."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            place = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue
        if module.encode() in line and place == str(folder):
            found.append(int(pid))
    return found


def test_clean_campaign_says_so_with_what_it_rests_on_and_learns_a_corpus(here):
    done = campaign("--target", "targets_here:Good", "--for", "10m", "--units", "4", "--base", "B")

    assert (done.returncode, done.stderr) == (CLEAN, "")
    assert "clean: no law was broken, and every required state was reached" in done.stdout
    assert re.search(r"cases run twice: [1-9]\d*, different: 0", done.stdout)
    corpus = list((here / "c" / "corpus" / "targets_here-Good").iterdir())
    assert len(corpus) > 50
    assert {read_trace(path).header.target for path in corpus} == {"targets_here:Good"}
    progress = progress_of(here / "c", 1)
    assert progress.ended
    assert events(here, "sample")[-1]["corpus"] == len(corpus)

    again = campaign("--target", "targets_here:Good", "--for", "1s")
    assert again.returncode in (CLEAN, UNKNOWN)
    assert progress_of(here / "c", 2).lanes[0].statistics["cases"] >= len(corpus)


def test_faults_are_found_as_causes_of_their_own_and_folders_can_be_replayed_alone(here):
    done = campaign("--lanes", "torch", "--fault", FAULTS, "--units", "4", "--for", "10m", "--base", "B")
    found = causes(here)

    assert done.returncode == VIOLATION
    assert {cause.fault for cause in found.values()} == set(FAULTS.split(","))
    assert all(cause.replays for cause in found.values())
    assert max(cause.times for cause in found.values()) > 1
    for cause in found.values():
        folder = here / "c" / "failures" / cause.folder
        assert read_trace(folder / "trace.jsonl").header.fault == cause.fault
        script = folder / "replay.sh"
        assert len(script.read_text().splitlines()) <= 10
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        replayed = subprocess.run([script], capture_output=True, text=True, env=os.environ | {"PATH": path})
        assert replayed.returncode == VIOLATION
        assert f"FAILED: {cause.signature}" in replayed.stdout

    campaign("--lanes", "torch", "--fault", FAULTS, "--units", "4", "--for", "10m", "--base", "B")
    assert {(s, c.times, c.found_len) for s, c in causes(here, 2).items()} == {
        (s, c.times, c.found_len) for s, c in found.items()
    }


@pytest.mark.parametrize(
    ("target", "signature"),
    [("Segfaults", "Died.retract.SIGSEGV"), ("Hangs", "Hung.retract"), ("Eats", "OutOfMemory.retract")],
)
def test_target_that_kills_its_worker_is_a_cause_and_the_worker_goes_on(here, target, signature):
    options = "--hang-seconds", "2", "--memory", "1400M", "--units", "1"
    done = campaign("--target", f"targets_here:{target}", "--for", "60s", *options)
    cause = causes(here)[signature]

    assert done.returncode == VIOLATION
    assert (cause.replays, cause.minimized_len < 15) == (True, True)
    assert 1 <= len(events(here, "death")) <= 2  # a look at the memory may come late
    assert events(here, "postmortem")[0]["verdict"] == signature
    assert progress_of(here / "c", 1).units == {"targets_here": 1}


def test_worker_killed_from_outside_does_its_unit_again(here):
    with started("--target", "targets_here:Good", "--for", "10m", "--units", "2", "--base", "B") as process:
        (worker,) = wait_for(lambda: pids_of(here, "kvlockstep.fuzz.worker"))
        wait_for(lambda: (here / "c/parties/0001/targets_here.current.jsonl").exists())
        time.sleep(2.0)
        os.kill(worker, signal.SIGKILL)
        out, _ = process.communicate(timeout=120)

    (death,) = events(here, "death")
    assert "killed by SIGKILL" in death["how"]
    assert events(here, "postmortem")[0]["verdict"] == "did not happen again"
    assert [event["unit"] for event in events(here, "start")] == [0, death["unit"]]
    assert progress_of(here / "c", 1).units == {"targets_here": 2}
    assert "died 1 times" in out
    assert process.returncode in (CLEAN, UNKNOWN)


def test_parent_killed_leaves_no_process_and_resume_goes_on_with_all_that_was_found(here):
    options = "--lanes", "torch", "--fault", FAULTS, "--base", "B", "--units", "6"
    with started("--for", "10m", *options) as process:
        wait_for(lambda: causes(here))  # the journal has it before; one that only that has is adopted
        process.kill()
        process.wait()
    wait_for(lambda: not pids_of(here, "kvlockstep.fuzz.worker"))
    before = causes(here)

    done = campaign("--for", "10m", *options, "--resume")
    first, second = [event for event in events(here) if event["event"] == "begin"]

    assert done.returncode == VIOLATION
    assert "party 1 of the campaign in c, goes on after" in done.stdout
    assert (first["resumed"], second["resumed"], second["after_kill"]) == (False, True, True)
    assert before.keys() <= causes(here).keys()
    assert progress_of(here / "c", 1).units == {"torch": 6}


def test_failure_stored_by_a_worker_whose_parent_could_not_count_it_any_more_is_adopted(here):
    options = "--lanes", "torch", "--fault", "checkpoint-keeps-row", "--base", "B", "--units", "1"
    campaign("--for", "10m", *options)
    (cause,) = causes(here).values()
    progress = here / "c" / "parties" / "0001" / "progress.json"
    data = json.loads(progress.read_text())
    progress.write_text(json.dumps(data | {"causes": {}, "ended": False}))

    done = campaign("--for", "10m", *options, "--resume")
    (adopted,) = causes(here).values()

    assert done.returncode == VIOLATION
    assert (adopted.signature, adopted.minimized_len) == (cause.signature, cause.minimized_len)
    assert adopted.replays


def test_interrupted_campaign_can_be_resumed_and_one_at_its_end_cannot(here):
    with started("--target", "targets_here:Good", "--for", "10m") as process:
        wait_for(lambda: pids_of(here, "kvlockstep.fuzz.worker"))
        time.sleep(3.0)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (INTERRUPTED, "")
    assert "interrupted; the same command with --resume goes on" in out

    resumed = campaign("--target", "targets_here:Good", "--for", "1s", "--resume")
    assert "party 1 of the campaign in c, goes on after" in resumed.stdout
    third = campaign("--target", "targets_here:Good", "--for", "1s", "--resume")
    assert "nothing that could be resumed was found, so it begins" in third.stdout
    assert progress_of(here / "c", 2).ended


def test_full_disk_stops_it_with_all_failures_kept(here):
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode:
        pytest.skip("needs a user namespace in which a tmpfs can be mounted")
    fuzz = shlex.join(words("--lanes", "torch", "--fault", FAULTS, "--for", "60s"))
    fill = "(until ls c/failures/*/replay.sh; do sleep 0.1; done; head -c 9M /dev/zero > c/filler) 2>/dev/null >&2 &"
    copy = "code=$?; rm c/filler; cp -r c/failures c/parties kept; exit $code"
    script = f"mkdir c kept && mount -t tmpfs -o size=4M none c && {{ {fill} {fuzz}; {copy}; }}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=180)

    assert done.returncode == VIOLATION
    assert "could not write" in done.stdout
    assert "what was found before is kept" in done.stdout
    found = list((here / "kept" / "failures").glob("[!.]*"))
    assert found
    for folder in found:
        assert read_trace(folder / "trace.jsonl").header.signature in done.stdout


def test_two_campaigns_share_a_folder(here):
    with (
        started("--target", "targets_here:Good", "--for", "6s") as one,
        started("--target", "targets_here:Good", "--for", "6s") as two,
    ):
        codes = [process.wait(120) for process in (one, two)]

    assert set(codes) <= {CLEAN, UNKNOWN}
    assert [progress_of(here / "c", party).ended for party in (1, 2)] == [True, True]


def test_case_that_depends_on_the_hash_seed_is_a_flake_and_no_cause(here):
    done = campaign("--target", "targets_here:Fickle", "--for", "10m", "--units", "2", PYTHONHASHSEED="1")

    assert done.returncode == UNKNOWN
    assert "cases that were run twice did not give the same" in done.stderr
    assert causes(here) == {}
    flake = events(here, "flake")[0]
    assert read_trace(here / "c" / "flakes" / flake["trace"]).header.target == "targets_here:Fickle"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--for", "never"], "'never' is not a time such as 8h, 90m or 45s"),
        (["--for", "8h30"], "'8h30' is not a time such as 8h, 90m or 45s"),
        (["--for", "8h", "--seed", "1"], "--seed: not with --for"),
        (["--resume"], "belongs to a campaign, say --for 8h with it"),
        (["--for", "1m", "--memory", "lots"], "'lots' is not a size such as 4G or 512M"),
        (["--for", "1m", "--shard", "3/2"], "expected an index from 1 to the number of shards"),
        (["--for", "1m", "--fault", "no-such-fault"], "unknown fault 'no-such-fault'"),
        (["--for", "1m", "--target", "targets_here:raises"], "its factory raised RuntimeError: no cache today"),
        (["--for", "1m"], "--workers 1: expected at least one for each target and lane, 2"),
    ],
)
def test_wrong_usage_is_one_line(here, options, line):
    done = campaign(*options)

    assert done.returncode == USAGE
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_worker_that_dies_before_its_first_operation_again_and_again_is_given_up(tmp_path):
    settings = Settings(("reference",), ("torch",), 1, 60.0, Shard(), "B", "2026-01-01T00:00:00Z")
    with join(tmp_path, settings, resume=False) as party:
        supervisor = Supervisor(party, [("reference", None, "w")], Bounds())
        (command,) = supervisor.first_commands()
        for _ in range(4):
            state = WorkerState(command.order, trouble="died: killed by SIGILL")
            command = supervisor.next_order(state)
            assert command is not None
        assert supervisor.next_order(WorkerState(command.order, trouble="died: killed by SIGILL")) is None
        supervisor.settle()

        assert supervisor.places[0].given_up
        assert isinstance(party.progress, Progress)
        assert party.progress.deaths == {"w": 5}


def test_witness_gives_the_digest_that_the_worker_gave_and_another_for_another_case():
    config, ops = CacheConfig(), [Submit("r0", (1, 2, 3), (None, None, ()), 0, False), Match("r0")]
    run = run_ops(config, ops, factory_for("reference"), digest=True)
    lines = [encode_header(Header(config, target="reference")), *map(encode_op, ops)]
    witnesses = Witnesses(60.0)
    for digest in (run.digest, "another"):
        witnesses.ask(Case("reference", None, None, lines, digest))
    witnesses.wait(60.0)
    cases = []
    wait_for(lambda: cases.extend(witnesses.take()) or len(cases) == 2)
    witnesses.close()
    good, wrong = cases

    assert good.again == good.digest
    assert wrong.again == run.digest != wrong.digest


def test_witness_that_hangs_holds_nobody_up_and_its_case_is_a_flake(here):
    ops = [Submit("r0", (1, 2, 3), (None, None, ()), 0, False), Peek("r0")]
    lines = [encode_header(Header(CacheConfig(), target="targets_here:HangsAgain")), *map(encode_op, ops)]
    lines += lines[-1:] * 10_000  # more than a pipe holds
    cases = [Case("targets_here:HangsAgain", None, None, lines, f"{number}") for number in range(3)]
    witnesses = Witnesses(8.0)
    asking = threading.Thread(target=lambda: list(map(witnesses.ask, cases)), daemon=True)
    asking.start()
    asking.join(5.0)
    assert not asking.is_alive()

    taken = []
    wait_for(lambda: taken.extend(witnesses.take()) or taken)
    assert [(case.digest, case.again) for case in taken] == [("0", None)]
    wait_for(lambda: not pids_of(here, "kvlockstep.fuzz.campaign.witness"))
    witnesses.close()


def test_witness_leaves_nothing_that_its_target_started(here):
    lines = [encode_header(Header(CacheConfig(), target="targets_here:Forks"))]
    witnesses = Witnesses(60.0)
    witnesses.ask(Case("targets_here:Forks", None, None, lines, ""))
    wait_for(lambda: witnesses.take())
    assert len(pids_of(here, "kvlockstep.fuzz.campaign.witness")) == 2
    witnesses.close()

    wait_for(lambda: not pids_of(here, "kvlockstep.fuzz.campaign.witness"), 10.0)


def test_witness_ends_with_its_parent(here):
    with started("--target", "targets_here:HangsAgain", "--for", "10m") as process:
        wait_for(lambda: pids_of(here, "kvlockstep.fuzz.campaign.witness"))
        process.kill()
        process.wait()
    wait_for(lambda: not pids_of(here, "kvlockstep.fuzz.campaign.witness"), 20.0)


def test_start_is_no_hang_however_little_an_operation_may_take(here):
    (here / "slow_here.py").write_text("import time\ntime.sleep(4)\nfrom targets_here import Good\n")
    done = campaign("--target", "slow_here:Good", "--for", "1s", "--hang-seconds", "1")

    assert "died 0 times" in done.stdout


@pytest.mark.parametrize(
    ("file", "text"), [("progress.json", '{"kvlockstep_progress": 1}'), ("journal.jsonl", "no event\n")]
)
def test_folder_that_no_campaign_wrote_is_one_line(here, file, text):
    options = "--target", "targets_here:Good", "--for", "1s"
    campaign(*options)
    progress = here / "c/parties/0001/progress.json"
    progress.write_text(progress.read_text().replace('"ended": true', '"ended": false'))
    (here / "c/parties/0001" / file).write_text(text)
    done = campaign(*options, "--resume")

    assert done.returncode == USAGE
    assert re.fullmatch(rf"kvlockstep: c/parties/0001/{file}.*: (name another folder|delete this line)\n", done.stderr)


FAILURE = {
    "event": "failure",
    "signature": "PageLeaked.abort",
    "folder": "c/failures/PageLeaked.abort",
    "operations": 9,
    "found_len": 8,
    "minimized_len": 7,
    "ending": "minimized",
}


@pytest.mark.parametrize("met_again", [True, False])
def test_cause_of_a_unit_that_is_done_again_after_a_kill_is_counted_once(here, met_again):
    settings = Settings(("reference",), ("torch",), 1, 60.0, Shard(), "B", "2026-01-01T00:00:00Z")
    places = [("reference", None, "w")]
    with join(here / "c", settings, resume=False) as party:
        supervisor = Supervisor(party, places, Bounds())
        supervisor.begin("now")
        (command,) = supervisor.first_commands()
        supervisor.hear(WorkerState(command.order), FAILURE)  # what is on disk now is what a kill leaves
        supervisor._pool.shutdown()
    with join(here / "c", settings, resume=True) as party:
        supervisor = Supervisor(party, places, Bounds())
        if met_again:
            supervisor.hear(WorkerState(command.order), {"event": "again", "signature": "PageLeaked.abort"})
        supervisor.settle()
        supervisor.end(VIOLATION, [], interrupted=False)

    assert [cause.times for cause in causes(here).values()] == [1]


def test_failure_that_nobody_counted_is_counted_once_though_its_unit_is_done_again(here):
    settings = Settings(("reference",), ("torch",), 1, 60.0, Shard(), "B", "2026-01-01T00:00:00Z")
    places = [("reference", None, "w")]
    header = Header(CacheConfig(), "why", "PageLeaked", "PageLeaked.abort", "reference")
    trace = Trace(header, [Submit("r0", (1,), (None, None, ()), 0, False)])
    with join(here / "c", settings, resume=False) as party:
        (command,) = Supervisor(party, places, Bounds()).first_commands()
        party.save()
        store_failure(party.failures, trace, trace, "text", lambda stored: True)
        torn = store_failure(
            party.failures,
            Trace(replace(header, signature="PageLeaked.evict"), trace.ops),
            trace,
            "",
            lambda stored: True,
        )
        (torn / "original.jsonl").unlink()
    with join(here / "c", settings, resume=True) as party:
        supervisor = Supervisor(party, places, Bounds())
        supervisor.begin("now")
        supervisor.hear(WorkerState(command.order), {"event": "again", "signature": "PageLeaked.abort"})
        supervisor.settle()
        supervisor.end(VIOLATION, [], interrupted=False)

    assert {cause.signature: cause.times for cause in causes(here).values()} == {"PageLeaked.abort": 1}
    assert "original.jsonl" in events(here, "unreadable")[0]["text"]


def test_failure_whose_folder_is_gone_is_still_a_violation_and_said(here, capsys):
    settings = Settings(("reference",), ("torch",), 1, 60.0, Shard(), "B", "2026-01-01T00:00:00Z")
    with join(here / "c", settings, resume=False) as party:
        party.progress.causes["a"] = Cause(
            "PageLeaked.abort",
            "reference",
            None,
            "PageLeaked.abort",
            "PageLeaked",
            None,
            "w",
            1.0,
            9,
            8,
            7,
            replays=True,
        )
        print_causes(make_console(), party)

    assert "PageLeaked.abort: what was stored of it cannot be read: " in capsys.readouterr().out


def test_worker_whose_parent_is_gone_says_so_plainly_wherever_it_reports(tmp_path):
    def report(event, **facts):
        if event == "twin":
            raise BrokenPipeError

    order = Order(
        "reference", None, 60.0, 0, f"{tmp_path}", "w", canary=False, plan=Plan("B", 1, 0, units=1, twins=True)
    )
    with pytest.raises(BrokenPipeError):
        Worker(order, factory_for("reference"), report).fuzz()


@pytest.mark.parametrize(("silent", "is_hung"), [(ROOT_S + 2.0, False), (ROOT_S + 10.0, True)])
def test_search_for_a_root_is_no_hang_however_little_an_operation_may_take(silent, is_hung):
    state = WorkerState(Order("reference", None, 0.0, 0, "", "w", minimize_seconds=1.0), stage="minimizing")
    with subprocess.Popen(["sleep", "60"]) as process:
        crew = _Crew([], SimpleQueue(), None, None)
        crew.members[0] = _Member(0, state, process, time.monotonic() - silent, 0.0, None)
        crew.end_silent_ones(2.0, 60.0)
        process.kill()

    assert (state.trouble is not None) is is_hung


def test_worker_that_said_its_last_word_is_not_dead_because_its_parent_is_late(here):
    state = WorkerState(Order("reference", None, 0.0, 0, "", "w"), stage="running")
    with subprocess.Popen(["echo", '{"event": "end"}'], stdout=subprocess.PIPE, text=True) as process:
        process.wait()
        crew = _Crew([], SimpleQueue(), None, None)
        member = crew.members[0] = _Member(0, state, process, time.monotonic(), 0.0, None)
        _pump(0, member, crew.events)
        member.heard -= 60.0
        crew.end_silent_ones(1.0, 1.0)
        crew.take_events()

    assert (state.ended, state.trouble, crew.members) == (True, None, {})


@pytest.mark.parametrize(
    ("signature", "unit", "times"), [("PageLeaked.abort", 0, 0), ("Died.abort.SIGSEGV", 1, 1)], ids=["law", "death"]
)
@pytest.mark.parametrize("known", [False, True])
def test_unit_in_which_the_parent_was_killed_is_left_out_only_if_it_kills_workers(here, signature, unit, times, known):
    settings = Settings(("reference",), ("torch",), 1, 60.0, Shard(), "B", "2026-01-01T00:00:00Z")
    with join(here / "c", settings, resume=False) as party:
        supervisor = Supervisor(party, [("reference", None, "w")], Bounds())
        (command,) = supervisor.first_commands()
        if known:
            cause = Cause(signature, "reference", None, "x", "x", None, "w", 1.0, 9, 8, 7, replays=True)
            party.progress.causes[cause.key] = cause
        looking = WorkerState(replace(command.order, name=f"w{POSTMORTEM}"))
        looking.failure = None if known else FAILURE | {"signature": signature}
        supervisor.hear(looking, {"event": "again", "signature": signature} if known else looking.failure)
        after = supervisor.next_order(looking)
        supervisor.settle()

    assert after.order.plan.unit == unit
    assert causes(here)[signature].times == times + known
