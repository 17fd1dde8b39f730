"""``gate`` as a job of continuous integration runs it: what shuts it, what does not, and what it leaves behind.

The targets are an adopter's own module in a folder, or a repository, of its own.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvlockstep.fuzz.commands.gate import gate as command
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.gate.known import NoBase, checked_out, find_revision
from kvlockstep.fuzz.ops import Abort, Match, Retract, Submit
from kvlockstep.fuzz.trace import Header, Trace, write_trace
from kvlockstep.fuzz.ward import LIMITS

CLEAN, VIOLATION, USAGE, UNKNOWN, CRASHED, BROKEN, INTERRUPTED = 0, 1, 2, 10, 11, 12, 130
ROOT = Path(__file__).resolve().parents[1]
LEAK, RAISED = "PageLeaked.abort.nobody+was-request", "TargetRaised.retract.KeyError"
SEGFAULT = "Died.retract.SIGSEGV"

TARGETS = '''
"""A cache, and what is wrong with it."""
import os, pathlib, signal, time
from kvlockstep.fuzz.targets import wrong
from kvlockstep.fuzz.targets.reference import ReferenceTarget

class Honest(ReferenceTarget):
    def __init__(self, config):
        super().__init__(config)
        self.capabilities = frozenset({"no_sharing", "policy:lru", "kv"})

class OnRetract(Honest):
    """Does something where a request is retracted that holds no row yet."""
    def retract(self, request, publish):
        found = self.cache.requests.get(request)
        if found is not None and found.state == "MATCHED":
            self.happen()
        super().retract(request, publish)

class Raises(OnRetract):
    def happen(self):
        raise KeyError("r0")

class Segfaults(OnRetract):
    def happen(self):
        os.kill(os.getpid(), signal.SIGSEGV)

class DiesOnce(OnRetract):
    def happen(self):
        try:
            os.mkdir("died")
        except FileExistsError:
            return
        os._exit(3)

class Leaks(wrong.LeaksOnAbort):
    name = "leaks"

class LeaksAndRaises(Leaks):
    def retract(self, request, publish):
        found = self.cache.requests.get(request)
        if found is not None and found.state == "MATCHED":
            raise KeyError("r0")
        super().retract(request, publish)

class Repeats(Leaks):
    """Fails in one process only."""
    def __init__(self, config):
        super().__init__(config)
        mine = pathlib.Path("mine")
        if not mine.exists():
            mine.write_text(str(os.getpid()))
        self.fails = mine.read_text() == str(os.getpid())
    def abort(self, request):
        if self.fails:
            super().abort(request)
        else:
            ReferenceTarget.abort(self, request)

def factory_that_raises(config):
    raise RuntimeError("100% of 2, no: :: more\\n::error::hostile")
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(TARGETS)
    return tmp_path


def start(folder, target, *options, variables=None):
    words = ["gate", "--target", target, "--workers", "1", *options]
    if "--seed" not in options:
        words += ["--seed", "one"]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kvlockstep", *words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "GITHUB_STEP_SUMMARY"} | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return process.returncode, out, err


def gate(folder, target, *options, **others):
    """Run a gate to its end; return exit code and what was printed."""
    units = () if "--seconds" in options or "--units" in options else ("--units", "1")
    return finish(start(folder, target, *units, *options, **others))


def until(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def annotations_in(out):
    return [line for line in out.splitlines() if line.startswith(("::error ", "::warning ", "::notice "))]


def endings_in(path):
    """Return what came of each test of a JUnit file: failure, error, skipped, or passed."""
    tests = ElementTree.parse(path).iter("testcase")
    return {
        f"{test.get('classname')} {test.get('name')}": next(
            (part.tag for part in test if part.tag in ("failure", "error", "skipped")), "passed"
        )
        for test in tests
    }


def statistics_by_shard(out):
    found = {}
    for party in sorted((out / "parties").iterdir())[:3]:
        shard = json.loads((party / "party.json").read_text())["shard"]["index"]
        lanes = json.loads((party / "progress.json").read_text())["lanes"]
        found.setdefault(shard, []).append([lane["statistics"] for lane in lanes])
    return found


def write_failure(path, *ops, signature=LEAK):
    config = CacheConfig(page_size=1, n_pages=2, n_rows=1, max_context_len=2, prefix_sharing=False)
    header = Header(config, "Why.", signature.partition(".")[0], signature, "mine:Leaks", None, None)
    write_trace(path, Trace(header, list(ops)))
    return path


PLAIN = (None, None, ())
RETRACTED = (Submit("r0", (1,), PLAIN, 0, False), Match("r0"), Retract("r0", False))


# What shuts it


def test_honest_target_is_clean(folder):
    options = "--units", "1", "--seed", "two", "--junit", "gate.xml", "--summary", "gate.md", "--github"
    code, out, err = gate(folder, "mine:Honest", *options)

    assert code == CLEAN, err
    assert "clean: no law was broken" in out
    assert "regressions: none\n" in out
    assert annotations_in(out) == []
    assert set(endings_in(folder / "gate.xml").values()) == {"passed"}
    assert (folder / "gate.md").read_text().startswith("## kvlockstep gate: clean\n")


def test_new_failure_shuts_the_gate_and_each_shard_draws_cases_of_its_own(folder):
    """Three gates work in one folder at the same time, and another comes after the repair."""
    shards = "1/2", "2/2", "1/2"
    runs = [start(folder, "mine:Leaks", "--units", "1", "--shard", shard, "--github") for shard in shards]
    ended = [finish(process) for process in runs]
    repaired = gate(folder, "mine:Honest", "--junit", "gate.xml", "--seconds", "0.2")

    for code, out, _ in ended:
        assert code == VIOLATION
        assert [line.split("::")[1] for line in annotations_in(out)] == [f"error title=kvlockstep%3A {LEAK}"]
        assert f"replay    kvlockstep replay --target mine:Leaks out/failures/{LEAK}/trace.jsonl" in out
    drawn = statistics_by_shard(folder / "out")
    assert drawn[1][0] == drawn[1][1]
    assert drawn[1][0] != drawn[2][0]
    assert repaired[0] == UNKNOWN
    assert LEAK not in repaired[1]
    assert not any("causes" in name for name in endings_in(folder / "gate.xml"))


def test_failure_in_an_edited_checkout_shuts_the_gate(folder):
    """The edit is a real one, of the source of the shipped implementation."""
    for name in ("src", "reference", "gpu_impl", "invariants", "fuzz"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    source = (folder / "gpu_impl" / "cache.py").read_text()
    line = "            self.free_pages.give_back(own_pages[: len(canonical)])"
    assert line in source
    (folder / "gpu_impl" / "cache.py").write_text(
        source.replace(line, line.replace("own_pages[: len(canonical)]", "canonical"))
    )
    where = {"PYTHONPATH": str(folder / "src")}
    options = "--lanes", "torch", "--seconds", "0", "--regressions", str(ROOT / "regressions"), "--junit", "gate.xml"
    code, out, _ = gate(folder, "gpu_impl", *options, variables=where)

    assert code == VIOLATION, out
    assert "regression 0006-checkpoint-frees-page-of-tree.jsonl on gpu_impl torch: violates: PageOwnedTwice." in out
    endings = endings_in(folder / "gate.xml")
    assert endings["kvlockstep.regressions 0006-checkpoint-frees-page-of-tree.jsonl on gpu_impl torch"] == "failure"
    assert endings["kvlockstep.regressions 0001-match-locks-only-last-node.jsonl on gpu_impl torch"] == "passed"


def test_worker_that_segfaults_is_a_failure_and_the_other_regressions_are_run(folder):
    """The first regression kills its worker; even where that is known, the second one is run."""
    (folder / "traces").mkdir()
    write_failure(folder / "traces" / "0001-kills.jsonl", *RETRACTED)
    write_failure(folder / "traces" / "0002-holds.jsonl", *RETRACTED[:2], Abort("r0"))
    (folder / "known.txt").write_text(f"{SEGFAULT}  # of the driver\nPageLeaked.abort\n")
    new = gate(
        folder, "mine:Segfaults", "--seconds", "0.2", "--regressions", "traces", "--junit", "new.xml", "--github"
    )
    options = "--regressions", "traces", "--known", "known.txt", "--junit", "known.xml"
    known = gate(folder, "mine:Segfaults", "--seconds", "0.2", *options)

    assert new[0] == VIOLATION
    assert annotations_in(new[1])[0].startswith(f"::error title=kvlockstep%3A {SEGFAULT}::Died: ")
    assert endings_in(folder / "new.xml")["kvlockstep.regressions 0001-kills.jsonl on mine:Segfaults"] == "error"
    assert known[0] == UNKNOWN
    assert f"known: {SEGFAULT}, " in known[2]
    assert "known, not met: PageLeaked.abort\n" in known[1]
    assert endings_in(folder / "known.xml")["kvlockstep.regressions 0002-holds.jsonl on mine:Segfaults"] == "passed"
    assert "regressions: 1 clean, 1 died\n" in known[1]


def test_death_that_does_not_come_again_is_no_failure_and_not_clean(folder):
    code, out, err = gate(folder, "mine:DiesOnce", "--seconds", "2", "--github")

    assert code == CRASHED, out
    assert "kvlockstep: worker mine died: it left with status 3" in err
    assert annotations_in(out)[0].startswith("::error title=kvlockstep%3A a worker crashed or hung::worker mine died: ")


def test_failure_that_does_not_replay_does_not_shut_the_gate(folder):
    code, out, err = gate(folder, "mine:Repeats", "--junit", "gate.xml")

    assert code == UNKNOWN, out
    assert "1 cause of failure did not replay in a fresh process" in err
    assert endings_in(folder / "gate.xml")[f"kvlockstep.causes {LEAK} on mine:Repeats"] == "skipped"


def test_known_failure_does_not_shut_the_gate(folder):
    """Nor do the states that are never reached behind it."""
    (folder / "known.txt").write_text(f"# of our fork\n\n{LEAK}  # until the rewrite\n")
    code, out, _ = gate(folder, "mine:Leaks", "--known", "known.txt", "--github", "--junit", "gate.xml")

    assert code == CLEAN, out
    assert "clean but for what is known: no other law was broken\n" in out
    assert "not asked for, because cases end at what is known: never reached: " in out
    assert [line.split("::")[1] for line in annotations_in(out)] == [f"notice title=kvlockstep%3A {LEAK} (known)"]
    assert endings_in(folder / "gate.xml")[f"kvlockstep.causes {LEAK} on mine:Leaks"] == "skipped"


def test_report_only_tells_the_code_and_ends_well(folder):
    """The code is that of the failure, though the summary could not be written."""
    code, out, err = gate(folder, "mine:Leaks", "--summary", "nowhere/gate.md", "--report-only")

    assert code == CLEAN
    assert "--report-only: exit code 0 instead of 1\n" in out
    assert "kvlockstep: --summary nowhere/gate.md: No such file or directory\n" in err


def test_no_time_for_cases_is_unknown_and_says_so_first(folder):
    """The stored traces are run all the same; one that the target cannot take is skipped."""
    (folder / "traces").mkdir()
    write_failure(folder / "traces" / "0001-holds.jsonl", *RETRACTED)
    shared = write_failure(folder / "traces" / "0002-other.jsonl", *RETRACTED)
    shared.write_text(shared.read_text().replace('"policy":"lru"', '"policy":"mru"'))
    code, out, _ = gate(folder, "mine:Honest", "--seconds", "0", "--regressions", "traces", "--github")

    assert code == UNKNOWN
    assert "regression 0002-other.jsonl on mine:Honest: skipped: needs policy:mru\n" in out
    assert "regressions: 1 clean, 1 skipped\n" in out
    (line,) = annotations_in(out)
    assert line.startswith("::warning title=kvlockstep%3A unknown::fresh cases had 0 s: --seconds 120 reaches more%0A")


def test_factory_that_raises_is_wrong_usage_and_its_words_are_no_commands(folder):
    code, out, err = gate(folder, "mine:factory_that_raises", "--github", "--junit", "gate.xml")

    assert code == USAGE
    assert err.count("\n") == 1
    (line,) = annotations_in(out)
    assert line.startswith("::error title=kvlockstep%3A wrong usage::target 'mine:factory_that_raises'")
    assert "RuntimeError: 100%25 of 2, no: :: more" in line
    assert endings_in(folder / "gate.xml")["kvlockstep.verdict verdict"] == "error"


def test_target_that_cannot_be_had_leaves_the_other_one_unknown(folder):
    code, _, err = gate(folder, "mine:Honest,mine:factory_that_raises", "--seconds", "0", "--workers", "2")

    assert code == UNKNOWN
    assert "kvlockstep: target 'mine:factory_that_raises': its factory raised RuntimeError" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "gpu_imp"], "unknown target 'gpu_imp': expected gpu_impl"),
        (["--fault", "abort-keeps-loc"], "unknown fault 'abort-keeps-loc': did you mean abort-keeps-lock"),
        (["--base", "HEAD"], "--base HEAD: this folder is in no git checkout"),
        (["--known", "nowhere.txt"], "--known nowhere.txt: No such file or directory: name a file of cause signatures"),
        (["--known", "known.txt"], "--known known.txt:2: '../leak/at' is no signature: write it as"),
        (["--regressions", "nowhere"], "--regressions nowhere: No such file or directory: name a folder of traces"),
        (["--regressions", "bad"], "bad/0001-cut.jsonl:3: the last line is cut off"),
        (["--workers", "1"], "--workers 1: expected at least one for each target and lane, 2"),
    ],
)
def test_wrong_usage_is_one_line_everywhere(tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    Path("known.txt").write_text(f"{LEAK}\n../leak/at\n")
    Path("bad").mkdir()
    write_failure(Path("bad/0001-cut.jsonl"), *RETRACTED).open("r+").truncate(450)
    words = [*options, "--github", "--junit", "gate.xml", "--summary", "gate.md", "--report-only"]
    done = CliRunner().invoke(command, words)

    assert done.exit_code == USAGE
    assert done.stderr.startswith(f"kvlockstep: {said}")
    assert done.stderr.count("\n") == 1
    (line,) = annotations_in(done.stdout)
    assert line.startswith("::error title=kvlockstep%3A wrong usage::")
    assert endings_in("gate.xml") == {"kvlockstep.verdict verdict": "error"}
    assert Path("gate.md").read_text().startswith("## kvlockstep gate: wrong usage\n")
    assert not Path("out").exists()


def test_full_disk_is_told_and_what_was_found_is_kept(folder):
    """A file-size limit stands for the disk."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); "
    script = f"{limit}from kvlockstep.fuzz import cli; cli.main()"
    words = ["gate", "--target", "mine:Honest", "--workers", "1", "--units", "1", "--seed", "one", "--github"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=folder, capture_output=True, text=True, check=False
    )

    assert done.returncode == BROKEN, done.stdout
    assert "File too large" in done.stderr
    assert annotations_in(done.stdout)[0].startswith("::error title=kvlockstep%3A the harness failed::")


# Signals


def test_interrupt_keeps_and_tells_what_was_found(folder):
    process = start(folder, "mine:Leaks", "--seconds", "60", "--junit", "gate.xml", "--github")
    trace = folder / "out" / "failures" / LEAK / "trace.jsonl"
    until(trace.exists, process)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)

    assert code == INTERRUPTED
    assert err.startswith("kvlockstep: interrupted\n")
    assert f"replay    kvlockstep replay --target mine:Leaks out/failures/{LEAK}/trace.jsonl" in out
    assert trace.exists()
    assert annotations_in(out)[0].startswith("::error title=kvlockstep%3A interrupted::")
    assert endings_in(folder / "gate.xml")["kvlockstep.verdict verdict"] == "error"


# The base


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder, text):
    (folder / "engine").mkdir(exist_ok=True)
    (folder / "engine" / "mine.py").write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "More")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of an adopter, with the cache in a subfolder, that leaks at its first commit."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text("out\n")
    commit(folder, f"{TARGETS}\nmake = Leaks\n")
    monkeypatch.chdir(folder / "engine")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def assert_nothing_is_left_of_the_base(repository):
    assert git(repository, "worktree", "list").count("\n") == 0
    assert list(repository.parent.glob("kvlockstep-base-*")) == []


def test_failure_of_the_base_is_old_and_a_new_one_shuts_the_gate(repository):
    """The change is not even committed, and the command is given in a subfolder."""
    (repository / "engine" / "mine.py").write_text(f"{TARGETS}\nmake = LeaksAndRaises\n")
    code, out, _ = gate(repository / "engine", "mine:make", "--base", "HEAD", "--github", "--junit", "gate.xml")

    assert code == VIOLATION
    assert [line.split("::")[1] for line in annotations_in(out)] == [
        f"error title=kvlockstep%3A {RAISED}",
        f"notice title=kvlockstep%3A {LEAK} (old%2C fails on HEAD too)",
    ]
    endings = endings_in(repository / "engine" / "gate.xml")
    assert endings[f"kvlockstep.causes {LEAK} on mine:make"] == "skipped"
    assert endings[f"kvlockstep.causes {RAISED} on mine:make"] == "failure"
    assert_nothing_is_left_of_the_base(repository)


def test_failure_counts_as_new_where_the_base_has_no_such_target(repository):
    commit(repository, "this is no Python\n")
    (repository / "engine" / "mine.py").write_text(f"{TARGETS}\nmake = Leaks\n")
    code, out, _ = gate(repository / "engine", "mine:make", "--base", "HEAD")

    assert code == VIOLATION
    assert f"{LEAK} could not be run on HEAD, so it counts as new: SyntaxError: invalid syntax\n" in out
    assert_nothing_is_left_of_the_base(repository)


def test_cancelled_job_leaves_no_checkout_of_the_base(repository):
    """The base takes for ever to be imported."""
    commit(repository, "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n")
    (repository / "engine" / "mine.py").write_text(f"{TARGETS}\nmake = Leaks\n")
    process = start(repository / "engine", "mine:make", "--base", "HEAD", "--units", "1")
    until(lambda: list(repository.parent.glob("kvlockstep-base-*/base/engine/begun")), process)
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)

    assert code == INTERRUPTED
    assert f"out/failures/{LEAK}/trace.jsonl" in out
    assert_nothing_is_left_of_the_base(repository)


def test_unknown_revision_is_named(repository):
    with pytest.raises(
        NoBase, match=r"^--base origin/nowhere: no such commit here; a shallow clone has the last one only$"
    ):
        find_revision("origin/nowhere")


@pytest.fixture
def trace(tmp_path):
    return write_failure(tmp_path / "trace.jsonl", *RETRACTED, signature=RAISED)


def test_base_is_run_from_its_own_files_where_a_path_names_those_of_here(repository, trace, monkeypatch):
    """An absolute path in PYTHONPATH leads to the checkout at hand, as an editable install does."""
    source = repository / "source"
    source.mkdir()
    (source / "ours.py").write_text(f"{TARGETS}\nmake = ReferenceTarget\n")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "Moved")
    (source / "ours.py").write_text(f"{TARGETS}\nmake = Raises\n")
    monkeypatch.setenv("PYTHONPATH", str(source))
    monkeypatch.syspath_prepend(str(source))
    with checked_out(find_revision("HEAD")) as base:
        assert base.has_failure(trace, "ours:make", LIMITS) is False


def test_base_that_imports_an_installed_copy_of_this_checkout_says_nothing(repository, trace, tmp_path, monkeypatch):
    """It would fail as this checkout does, whatever the base holds."""
    site = tmp_path / "site"
    info = site / "ours-1.dist-info"
    info.mkdir(parents=True)
    (site / "ours.py").write_text(f"{TARGETS}\nmake = Raises\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1\n")
    (info / "RECORD").write_text("ours.py,,\n")
    (info / "direct_url.json").write_text(json.dumps({"url": repository.as_uri(), "dir_info": {}}))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    with (
        checked_out(find_revision("HEAD")) as base,
        pytest.raises(NoBase, match=r"ours\.py is imported, which is not of HEAD"),
    ):
        base.has_failure(trace, "ours:make", LIMITS)
