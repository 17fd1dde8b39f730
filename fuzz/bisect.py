"""Finds the first bad commit of a repository for a trace: each commit in a checkout of its own, replayed from there.

Which commit to try next, how merges are walked and what skipped commits leave open is decided by ``git bisect``. It
runs in a worktree of its own, without files, so that neither the checkout at hand nor a search in it is touched. What
a commit is worth comes from the verdict of ``kvlockstep replay``:

================  ====================================================================================
good              ``FIXED``, ``CLEAN``
bad               ``FAILED``, with the stored signature
skip              no verdict: it cannot be checked out, imported or built, takes too long, refuses everything
skip, and said    ``DIFFERENT``: it fails, in another way
================  ====================================================================================

Not found: a failure that comes and goes between GOOD and BAD has several first bad commits; one of them is named.
"""

import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvlockstep.fuzz.describe import as_sentence
from kvlockstep.fuzz.gate.known import NoBase, Revision, checked_out
from kvlockstep.fuzz.ward import LIMITS

Worth = Literal["good", "bad", "skip"]

_WORTH: dict[str, Worth] = {"FAILED": "bad", "FIXED": "good", "CLEAN": "good", "DIFFERENT": "skip"}

_LEFT = re.compile(r"^Bisecting: (\d+) revisions? left to test after this \(roughly (\d+) steps?\)$", re.MULTILINE)
_FOUND = re.compile(r"^# first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)
_POSSIBLE = re.compile(r"^# possible first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)


class CannotBisect(Exception):
    """The search cannot begin or go on; the text is one line that says why."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit, as people tell them apart."""

    commit: str
    date: str  # of its author, ISO 8601
    subject: str

    @property
    def short(self) -> str:
        return self.commit[:12]


@dataclass(frozen=True, slots=True)
class Tried:
    """What one commit gave: its worth, and the line of the replay or the reason why there is none."""

    worth: Worth
    line: str


@dataclass(frozen=True, slots=True)
class Step:
    """One commit that was tried, and what is left: None while the ends are verified."""

    commit: Commit
    tried: Tried
    left: tuple[int, int] | None  # commits, and about so many steps


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a search: the first bad commit, or those that may be it where skipped ones are in between."""

    candidates: list[Commit]
    bad: tuple[Commit, Tried]  # of the candidates, the one that was tried and is bad, or BAD
    good: tuple[Commit, Tried]  # the last good one before it that was tried


class Checkouts:
    """Tries commits of the repository that the current folder is in, each in a checkout that is gone afterwards.

    ``command`` is run by the shell in place of the replay, in the folder of the checkout that the current one is in the
    repository; ``{file}`` in it stands for the trace, and what it prints is to hold the verdict of a replay.
    """

    def __init__(self, trace: Path, target: str, command: str | None = None) -> None:
        self.trace = trace.resolve()
        self.target = target
        self.command = command
        why = "this folder is in no git checkout"
        self.top = Path(git("rev-parse", "--show-toplevel", why=why)).resolve()
        self.here = Path.cwd().resolve().relative_to(self.top)

    def __call__(self, commit: str) -> Tried:
        """Try one commit. Never raises for what a commit does."""
        try:
            with checked_out(Revision(commit[:12], commit, self.top, self.here)) as base:
                if self.command is None:
                    line = base.verdict(self.trace, self.target, LIMITS)
                else:
                    line = base.verdict_of_command(self.command.replace("{file}", shlex.quote(str(self.trace))))
        except NoBase as error:
            return Tried("skip", str(error))
        return Tried(_WORTH.get(line.partition(":")[0], "skip"), line)


Judge = Callable[[str], Tried]


def find_commit(name: str) -> Commit:
    """Find a commit by its name. Raises CannotBisect."""
    why = f"{name}: no such commit here; a shallow clone has the last ones only"
    commit = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", why=why)
    return _commit(commit)


def bisect(good: str, bad: str, judge: Judge, tell: Callable[[Step], None]) -> Found:
    """Search the first bad commit between two that are named, and tell each step.

    Raises CannotBisect where the ends are not what they are said to be, or git cannot search between them.
    """
    ends = find_commit(good), find_commit(bad)
    if ends[0] == ends[1]:
        raise CannotBisect(f"{good}..{bad}: both are {ends[0].short}, expected two commits")
    tried: dict[str, Tried] = {}

    def try_one(commit: Commit, left: tuple[int, int] | None) -> Tried:
        if commit.commit not in tried:
            tried[commit.commit] = judge(commit.commit)
            tell(Step(commit, tried[commit.commit], left))
        return tried[commit.commit]

    for name, commit, expected in ((bad, ends[1], "bad"), (good, ends[0], "good")):
        got = try_one(commit, None)
        if got.worth != expected:
            raise CannotBisect(f"{name} ({commit.short}) is not {expected}: {got.line}")
    with _search(ends[0], ends[1]) as search:
        while (at := search.next) is not None:
            commit = _commit(at)
            search.answer(try_one(commit, search.left).worth)
    candidates = [_commit(commit) for commit in search.candidates]
    first = next((one for one in candidates if one.commit in tried and tried[one.commit].worth == "bad"), ends[1])
    before = _last_good(first, tried) or ends[0]
    return Found(candidates, (first, tried[first.commit]), (before, tried[before.commit]))


def _commit(commit: str) -> Commit:
    text = git("show", "--no-patch", "--format=%H%n%aI%n%s", commit, why=f"{commit}: cannot be shown")
    name, date, *subject = text.split("\n", 2)
    return Commit(name, date, as_sentence(subject[0] if subject else ""))


def _last_good(bad: Commit, tried: dict[str, Tried]) -> Commit | None:
    """Return the newest commit before a bad one that was tried and is good; None if no good one is before it."""
    before = git("rev-list", "--topo-order", f"{bad.commit}^@", why=f"{bad.short}: its history cannot be read").split()
    good = next((commit for commit in before if commit in tried and tried[commit].worth == "good"), None)
    return None if good is None else _commit(good)


class _Search:
    """A ``git bisect`` under way in a folder of its own."""

    def __init__(self, folder: Path, good: Commit, bad: Commit) -> None:
        self._folder = folder
        self.next: str | None = None
        self.left = (0, 0)
        self.candidates: list[str] = []
        self._read(self._bisect("start", "--no-checkout", bad.commit, good.commit))

    def answer(self, worth: Worth) -> None:
        """Tell git what the commit is worth that was to be tried."""
        self._read(self._bisect(worth))

    def _bisect(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return _run_git("bisect", *words, folder=self._folder)

    def _read(self, done: "subprocess.CompletedProcess[str]") -> None:
        """Find out what git wants to be tried next, or what it found."""
        log = git("bisect", "log", why="git bisect keeps no log", folder=self._folder)
        self.candidates = _FOUND.findall(log) or _POSSIBLE.findall(log)
        if self.candidates:
            self.next = None
            return
        if done.returncode:
            said = " ".join([*done.stderr.split("\n"), *done.stdout.split("\n")])
            raise CannotBisect(f"git bisect cannot go on: {as_sentence(said)}")
        self.next = git("rev-parse", "BISECT_HEAD", why="git bisect names no commit", folder=self._folder)
        left = _LEFT.search(done.stdout)
        self.left = (int(left[1]), int(left[2])) if left else (0, 0)


@contextmanager
def _search(good: Commit, bad: Commit) -> Iterator[_Search]:
    """Begin a search in a worktree of its own, which is gone afterwards and with it all that git noted there."""
    with tempfile.TemporaryDirectory(prefix="kvlockstep-bisect-", ignore_cleanup_errors=True) as folder:
        root = Path(folder).resolve() / "search"
        try:
            add_worktree(root, bad.commit, "--no-checkout")
            yield _Search(root, good, bad)
        finally:
            with suppress(CannotBisect):  # twice: also one whose making was cut short
                git("worktree", "remove", "--force", "--force", str(root), why="")


def add_worktree(root: Path, commit: str, *options: str) -> None:
    """Check a commit out into a new folder, without the hooks of the repository. Raises CannotBisect."""
    hooks, words = ("-c", "core.hooksPath=/dev/null"), ("worktree", "add", "--detach", "--quiet", *options)
    git(*hooks, *words, str(root), commit, why=f"{commit[:12]}: cannot be checked out")


def git(*words: str, why: str, folder: Path | None = None) -> str:
    """Run git, in the current folder or in ``folder``. Raises CannotBisect, which begins with ``why``."""
    done = _run_git(*words, folder=folder)
    if done.returncode:
        said = as_sentence(done.stderr)
        raise CannotBisect(f"{why}: {said}" if said else why)
    return done.stdout.strip()


def _run_git(*words: str, folder: Path | None) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            ["env", "LC_ALL=C", "git", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            start_new_session=True,  # Ctrl-C ends the search, and what it began is cleared away by git
        )
    except OSError as error:
        raise CannotBisect(f"git cannot be run: {error.strerror}") from error
