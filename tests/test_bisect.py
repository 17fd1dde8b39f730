"""``bisect`` on small repositories made here: a cache in a subfolder, whose bug came with a commit in the middle.

What a commit is worth is looked up where only the walk through the history is tested; replays are real elsewhere.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvlockstep.fuzz.bisect import CannotBisect, Checkouts, Tried, bisect
from kvlockstep.fuzz.commands.bisect import bisect_command
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.exits import Stop
from kvlockstep.fuzz.ops import Abort, Match, Submit
from kvlockstep.fuzz.trace import Header, Trace, write_trace

CLEAN, USAGE, UNKNOWN, INTERRUPTED = 0, 2, 10, 130

HONEST = "from kvlockstep.fuzz.targets.reference import ReferenceTarget as make\n"
RAISES = """
from kvlockstep.fuzz.targets.reference import ReferenceTarget

class make(ReferenceTarget):
    def abort(self, request):
        raise KeyError(request)
"""
DIFFERENT = """
from kvlockstep.fuzz.targets.reference import ReferenceTarget

class make(ReferenceTarget):
    def match(self, *arguments):
        raise RuntimeError("not this one")
"""
NO_PYTHON = "this is no Python\n"
STORED = "TargetRaised.abort.KeyError"


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """An empty repository, and all checkouts of it under one folder; the current folder is its ``engine``."""
    folder = tmp_path / "repository"
    (folder / "engine").mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    monkeypatch.chdir(folder / "engine")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def commit(repository, subject, text=None):
    """Commit, with another cache where ``text`` is given, and return the hash."""
    if text is not None:
        (repository / "engine" / "mine.py").write_text(text)
        git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", subject)
    return git(repository, "rev-parse", "HEAD")


def merge(repository, branch):
    git(repository, "merge", "--quiet", "--no-ff", "--message", f"Merge {branch}", branch)
    return git(repository, "rev-parse", "HEAD")


def assert_nothing_is_left(repository):
    assert git(repository, "worktree", "list").count("\n") == 0
    assert [path.name for path in repository.parent.glob("kvlockstep-*")] == []
    assert git(repository, "for-each-ref", "refs/bisect") == ""


@pytest.fixture
def trace(tmp_path):
    ops = [Submit("r0", (1, 2, 3)), Match("r0"), Abort("r0")]
    header = Header(CacheConfig(), "", STORED.partition(".")[0], STORED, "mine:make")
    write_trace(tmp_path / "trace.jsonl", Trace(header, ops))
    return tmp_path / "trace.jsonl"


def run(*words):
    done = CliRunner().invoke(bisect_command, list(map(str, words)))
    if isinstance(done.exception, Stop):
        return done.exception.code, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


# Real replays


def test_first_bad_commit_is_found_past_one_that_cannot_be_imported(repository, trace):
    """The search meets a commit that is no Python and one that fails in another way, and a merged branch."""
    commit(repository, "Begin", HONEST)
    git(repository, "branch", "side")
    good = commit(repository, "Say more")
    git(repository, "checkout", "--quiet", "side")
    commit(repository, "Aside")
    git(repository, "checkout", "--quiet", "main")
    merge(repository, "side")
    commit(repository, "Break the import", NO_PYTHON)
    commit(repository, "Break matches", DIFFERENT)
    repaired = commit(repository, "Repair", HONEST)
    guilty = commit(repository, "Make aborts faster", RAISES)
    commit(repository, "Later")
    (repository / "engine" / "mine.py").write_text("not committed\n")
    code, out = run(trace, f"{good}..main", "--target", "mine:make")

    assert code == CLEAN, out
    lines = out.splitlines()
    assert lines[0] == f"looking for the first commit in {good}..main on which the trace fails with {STORED}"
    assert lines[1].endswith(f"bad: FAILED: {STORED} at step 2, the last of 3 operations, as stored")
    assert lines[2] == f"{good[:12]} good: FIXED: 3 operations without a violation, stored was {STORED}"
    assert any("left after it, about " in line for line in lines[3:]), out
    end = lines.index(f"first bad commit: {guilty}")
    assert lines[end + 1].startswith("  date      20")
    assert lines[end + 2 :] == [
        "  subject   Make aborts faster",
        f"  bad       {guilty[:12]} FAILED: {STORED} at step 2, the last of 3 operations, as stored",
        f"  good      {repaired[:12]} FIXED: 3 operations without a violation, stored was {STORED}",
    ]
    assert (repository / "engine" / "mine.py").read_text() == "not committed\n"
    assert_nothing_is_left(repository)


def test_commits_that_cannot_be_run_leave_several(repository, trace):
    good = commit(repository, "Begin", HONEST)
    no_import = commit(repository, "Break the import", NO_PYTHON)
    other = commit(repository, "Break matches", DIFFERENT)
    bad = commit(repository, "Repair all but one", RAISES)
    code, out = run(trace, f"{good}..{bad}", "--target", "mine:make")

    assert code == UNKNOWN, out
    assert f"{no_import[:12]} skipped: SyntaxError: invalid syntax" in out
    assert f"{other[:12]} skipped: DIFFERENT: TargetRaised.match.RuntimeError at step 1" in out
    assert "; it fails in another way, which says nothing of this failure" in out
    left = out[out.index("unknown: commits that were skipped leave 3") :].splitlines()[1:4]
    assert sorted(line.split()[0] for line in left) == sorted([no_import, other, bad])
    assert_nothing_is_left(repository)


def test_command_replays_in_the_folder_of_each_checkout(repository, trace):
    """Without a target that could be imported; --keep leaves what is to be looked at."""
    good = commit(repository, "Begin", "CLEAN: nothing\n")
    bad = commit(repository, "Break", "FAILED: something\n")
    command = "test -s {file} && echo built && cat mine.py"
    code, out = run(trace, f"{good}..{bad}", "--command", command, "--keep")

    assert code == CLEAN, out
    assert f"first bad commit: {bad}\n" in out
    kept = Path(next(line.split()[1] for line in out.splitlines() if line.startswith("  kept ")))
    assert (kept / "engine" / "mine.py").read_text() == "FAILED: something\n"
    git(repository, *next(line for line in out.splitlines() if line.startswith("  remove ")).split()[2:])
    kept.parent.rmdir()
    assert_nothing_is_left(repository)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ((HONEST, HONEST), "HEAD (%s) is not bad: FIXED: 3 operations without a violation, stored was " + STORED),
        ((RAISES, RAISES), f"HEAD~1 (%s) is not good: FAILED: {STORED} at step 2, the last of 3 operations, as stored"),
        ((NO_PYTHON, RAISES), "HEAD~1 (%s) is not good: SyntaxError: invalid syntax"),
    ],
    ids=["bad is good", "good is bad", "good cannot be run"],
)
def test_ends_that_are_not_what_they_are_said_to_be_are_wrong_usage(repository, trace, texts, said):
    commits = [commit(repository, "One", texts[0]), commit(repository, "Two", texts[1])]
    code, out = run(trace, "HEAD~1..HEAD", "--target", "mine:make")

    assert (code, out) == (USAGE, said % commits["HEAD (" in said][:12])
    assert_nothing_is_left(repository)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_no_checkout(repository, trace, number):
    """The commit at hand takes for ever, and so does what it started."""
    good = commit(repository, "Begin", "CLEAN: nothing\n")
    bad = commit(repository, "Break", "FAILED: something\n")
    words = ["bisect_command", str(trace), f"{good}..{bad}", "--command", "touch begun; sleep 600; true"]
    program = (
        "from kvlockstep.fuzz.commands.bisect import bisect_command\n"
        "from kvlockstep.fuzz.exits import run_and_exit\n"
        "run_and_exit(bisect_command)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, *words[1:]], stdout=subprocess.PIPE, text=True)
    while not list(repository.parent.glob("kvlockstep-base-*/base/engine/begun")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=20)

    assert process.returncode == INTERRUPTED
    assert_nothing_is_left(repository)


# The walk, with the worth of each commit known


def judged(worth):
    """Judge commits by a table; what does not stand in it is good."""
    asked = []

    def judge(name):
        asked.append(name)
        return Tried(worth.get(name, "good"), f"line of {name}")

    judge.asked = asked
    return judge


def test_search_asks_of_each_commit_once_and_about_log_n_of_them(repository):
    commits = [commit(repository, f"Number {i}") for i in range(40)]
    judge = judged(dict.fromkeys(commits[23:], "bad"))
    steps = []
    found = bisect(commits[0], commits[-1], judge, steps.append)

    assert [one.commit for one in found.candidates] == [commits[23]]
    assert (found.bad[0].subject, found.good[0].subject) == ("Number 23", "Number 22")
    assert found.bad[1].line == f"line of {commits[23]}"
    assert len(judge.asked) == len(set(judge.asked)) == len(steps) <= 2 + 7
    assert [step.left is None for step in steps[:3]] == [True, True, False]
    assert_nothing_is_left(repository)


def test_bug_of_a_merged_branch_is_found_on_the_branch(repository):
    good = commit(repository, "Begin")
    git(repository, "checkout", "--quiet", "-b", "side")
    side = [commit(repository, f"Side {i}") for i in range(4)]
    git(repository, "checkout", "--quiet", "main")
    for i in range(4):
        commit(repository, f"Main {i}")
    merged = merge(repository, "side")
    last = commit(repository, "Last")
    worth = dict.fromkeys([*side[2:], merged, last], "bad")
    found = bisect(good, last, judged(worth), lambda step: None)

    assert [one.subject for one in found.candidates] == ["Side 2"]
    assert found.good[0].subject == "Side 1"


def test_bug_that_only_the_merge_has_is_found_there(repository):
    good = commit(repository, "Begin")
    git(repository, "checkout", "--quiet", "-b", "side")
    commit(repository, "Side")
    git(repository, "checkout", "--quiet", "main")
    commit(repository, "Main")
    merged = merge(repository, "side")
    found = bisect(good, merged, judged({merged: "bad"}), lambda step: None)

    assert [one.commit for one in found.candidates] == [merged]


def test_skipped_commits_elsewhere_leave_one_candidate(repository):
    commits = [commit(repository, f"Number {i}") for i in range(16)]
    worth = dict.fromkeys(commits[11:], "bad") | dict.fromkeys(commits[4:9], "skip")
    found = bisect(commits[0], commits[-1], judged(worth), lambda step: None)

    assert [one.commit for one in found.candidates] == [commits[11]]


def test_search_of_somebody_else_in_the_checkout_goes_on(repository):
    commits = [commit(repository, f"Number {i}") for i in range(6)]
    git(repository, "bisect", "start", commits[-1], commits[0])
    before = git(repository, "bisect", "log"), git(repository, "rev-parse", "HEAD")
    found = bisect(commits[0], commits[-1], judged(dict.fromkeys(commits[4:], "bad")), lambda step: None)

    assert [one.commit for one in found.candidates] == [commits[4]]
    assert (git(repository, "bisect", "log"), git(repository, "rev-parse", "HEAD")) == before


def test_bug_that_was_repaired_between_the_ends_is_told(repository):
    """GOOD is on a branch, and what both come from is bad."""
    base = commit(repository, "Begin")
    git(repository, "checkout", "--quiet", "-b", "side")
    good = commit(repository, "Repaired")
    git(repository, "checkout", "--quiet", "main")
    bad = commit(repository, "Not repaired")

    with pytest.raises(CannotBisect, match="merge base"):
        bisect(good, bad, judged({base: "bad", bad: "bad"}), lambda step: None)
    assert_nothing_is_left(repository)


@pytest.mark.parametrize(
    ("commits", "said"),
    [
        ("HEAD", "HEAD: expected GOOD..BAD, two commits with two dots between them"),
        ("HEAD...HEAD", "HEAD...HEAD: expected GOOD..BAD, two commits with two dots between them"),
        ("..HEAD", "..HEAD: expected GOOD..BAD, two commits with two dots between them"),
        ("v9..HEAD", "v9: no such commit here; a shallow clone has the last ones only"),
        ("--all..HEAD", "--all: no such commit here; a shallow clone has the last ones only"),
        ("HEAD..HEAD", "HEAD..HEAD: both are %s, expected two commits"),
    ],
)
def test_range_that_is_none_is_wrong_usage(repository, trace, commits, said):
    head = commit(repository, "Begin")
    code, out = run("--target", "mine:make", "--", trace, commits)

    assert (code, out.splitlines()[-1]) == (USAGE, said.replace("%s", head[:12]))


def test_target_of_a_trace_is_imported_only_if_it_is_named(repository, trace):
    commit(repository, "Begin", HONEST)

    assert run(trace, "HEAD~1..HEAD") == (
        USAGE,
        f"{trace}: found on target 'mine:make'; to import that, say --target mine:make",
    )


def test_folder_outside_a_repository_is_named(tmp_path, trace, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    with pytest.raises(CannotBisect, match=r"^this folder is in no git checkout"):
        Checkouts(trace, "mine:make")
