"""Which causes of failure do not block: those that somebody named, and those that the base of a change has too.

A base is judged by running a trace on it, in a checkout of its own. That says something only if the target there is
made of its files: so the paths that this process imports from are turned to that checkout, and what was imported there
is looked at. A base whose target cannot be imported so is no reason to let a failure pass.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.registry import check_name
from kvlockstep.fuzz.replay_files import VERDICTS
from kvlockstep.fuzz.trace_bounds import SIGNATURE
from kvlockstep.fuzz.ward import Limits

REPLAY_S = 120.0
"""So long may a trace take on the base, beside the time in which an operation counts as hung."""

IMPORT_S = 120.0

BUILD_S = 3600.0
"""So long may a command take that builds what it replays on."""


class KnownUnreadable(Exception):
    """The file of known causes is none; the text is one line: ``FILE:LINE: what: remedy``."""


class NoBase(Exception):
    """The base cannot be had, or says nothing; the text is one line that says why."""


def read_known(path: Path) -> frozenset[str]:
    """Read signatures, one a line; what follows ``#`` is a remark. Raises KnownUnreadable."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KnownUnreadable(f"{path}: {error.strerror}: name a file of cause signatures") from error
    except UnicodeDecodeError as error:
        raise KnownUnreadable(f"{path}: not UTF-8: name a file of cause signatures") from error
    known = set()
    for number, line in enumerate(text.splitlines(), 1):
        signature = line.partition("#")[0].strip()
        if signature and re.fullmatch(SIGNATURE, signature) is None:
            shown = signature if len(signature) < 60 else f"{signature[:57]}..."
            raise KnownUnreadable(f"{path}:{number}: {shown!r} is no signature: write it as failure folders are named")
        if signature:
            known.add(signature)
    return frozenset(known)


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit of the repository that the current folder is in."""

    name: str  # as it was given
    commit: str
    top: Path  # of the checkout that this process works in
    here: Path  # the current folder, seen from there


def find_revision(name: str) -> Revision:
    """Find a commit by its name. Raises NoBase."""
    top = Path(_git("rev-parse", "--show-toplevel", why=f"--base {name}: this folder is in no git checkout")).resolve()
    why = f"--base {name}: no such commit here; a shallow clone has the last one only"
    commit = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", why=why)
    return Revision(name, commit, top, Path.cwd().resolve().relative_to(top))


@dataclass(slots=True)
class Base:
    """A checkout of the revision that a change is compared with."""

    revision: Revision
    root: Path
    variables: Mapping[str, str]  # environment in which Python imports from it
    not_its_own: frozenset[str]  # files that were installed from the checkout of this process
    _usable: dict[str, str | None] = field(default_factory=dict)  # by target: why it says nothing there

    def has_failure(self, trace: Path, target: str, limits: Limits) -> bool:
        """Tell whether a trace fails there as it does here, without a planted fault. Raises NoBase."""
        line = self.verdict(trace, target, limits)
        if line.startswith("FAILED:"):
            return True
        if line.startswith(("FIXED:", "DIFFERENT:", "CLEAN:")):
            return False
        raise NoBase(line)

    def verdict(self, trace: Path, target: str, limits: Limits) -> str:
        """Replay a trace there, without a planted fault; return the line of its verdict. Raises NoBase without one."""
        if target not in self._usable:
            self._usable[target] = self._defect_of(target)
        if (defect := self._usable[target]) is not None:
            raise NoBase(defect)
        words = ["replay", "--quiet", "--fault", "none", "--target", target, *limits.options(), "--", str(trace)]
        command = [python_for(target), "-P", "-m", "kvlockstep", *words]
        return _verdict_in(self._run(command, REPLAY_S + limits.hang_seconds))

    def verdict_of_command(self, command: str) -> str:
        """Let the shell build and replay there; return the line of the verdict. Raises NoBase without one."""
        return _verdict_in(self._run(["sh", "-c", command], BUILD_S))

    def _defect_of(self, target: str) -> str | None:
        """Import a target there, and say why that says nothing; None if it does."""
        module, _ = check_name(target)
        try:
            done = self._run([python_for(target), "-P", "-c", _IMPORT, module], IMPORT_S)
        except NoBase as error:
            return str(error)
        if done.returncode:
            return _last_line(done) or f"importing {module} ended with status {done.returncode}"
        top, root = self.revision.top, self.root
        for name in json.loads(done.stdout):
            file = Path(name)
            of_here = file.is_relative_to(top) and not file.is_relative_to(root)
            if name in self.not_its_own or (of_here and (root / file.relative_to(top)).exists()):
                return f"there {name} is imported, which is not of {self.revision.name}: install it with pip install -e"
        return None

    def _run(self, command: list[str], seconds: float) -> "subprocess.CompletedProcess[str]":
        here = self.root / self.revision.here
        try:
            process = subprocess.Popen(
                command,
                cwd=here if here.is_dir() else self.root,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="backslashreplace",
                start_new_session=True,
            )
        except OSError as error:
            raise NoBase(f"{command[0]}: {error.strerror}") from error
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started: they keep its pipes open
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise NoBase(f"it took longer than {seconds:.0f} s") from error
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


_IMPORT = """
import importlib, json, os, sys
said = os.dup(1)
os.dup2(2, 1)
sys.path.insert(0, os.getcwd())
importlib.import_module(sys.argv[1])
names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
files = sorted({os.path.realpath(name) for name in names if isinstance(name, str)})
os.write(said, json.dumps(files).encode())
"""


@contextmanager
def checked_out(revision: Revision) -> Iterator[Base]:
    """Check a revision out into a folder of its own, which is gone afterwards. Raises NoBase."""
    with tempfile.TemporaryDirectory(prefix="kvlockstep-base-", ignore_cleanup_errors=True) as folder:
        root = Path(folder).resolve() / "base"
        words = ["-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet", str(root), revision.commit]
        try:
            _git(*words, why=f"{revision.name}: cannot be checked out")
            mine = [one for one in distributions() if _source_of(one, revision.top) is not None]
            copies = [one for one in mine if not _is_editable(one)]
            files = {os.path.realpath(str(one.locate_file(file))) for one in copies for file in one.files or ()}
            variables = os.environ | {"PYTHONPATH": _python_path(revision.top, root, mine)}
            yield Base(revision, root, variables, frozenset(files))
        finally:
            with suppress(NoBase):  # twice: also one whose making was cut short
                _git("worktree", "remove", "--force", "--force", str(root), why="")


def _python_path(top: Path, root: Path, installed: list[Distribution]) -> str:
    """Return what this process imports from, turned to the checkout of the base where that has it."""
    sources = [source for one in installed if (source := _source_of(one, top)) is not None]
    folders = [Path(entry).resolve() for entry in sys.path] + [
        top / s for source in sources for s in (source, source / "src")
    ]
    turned = [root / folder.relative_to(top) for folder in folders if folder.is_relative_to(top)]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in given if not Path(entry).resolve().is_relative_to(top)]
    return os.pathsep.join(dict.fromkeys([str(folder) for folder in turned if folder.is_dir()] + others))


def _source_of(one: Distribution, top: Path) -> Path | None:
    """Return the folder in a checkout that something was installed from (PEP 610); None if it was from elsewhere."""
    text = one.read_text("direct_url.json")
    with suppress(ValueError, TypeError, KeyError):
        url = urlsplit(json.loads(text or "")["url"])
        folder = Path(unquote(url.path)).resolve()
        if url.scheme == "file" and folder.is_relative_to(top):
            return folder.relative_to(top)
    return None


def _is_editable(one: Distribution) -> bool:
    """Tell whether what was installed is a link to its source, and no copy of it."""
    return bool(json.loads(one.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"))


def _verdict_in(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the line of the verdict in what a replay printed. Raises NoBase where there is none."""
    lines = done.stdout.splitlines()
    line = next((line for line in reversed(lines) if line.startswith(VERDICTS)), None)
    if line is None:
        raise NoBase(_last_line(done) or " ".join(lines[-1:]) or f"it ended with status {done.returncode}")
    return line


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("kvlockstep: ") if lines else ""


def _git(*words: str, why: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True
        )
    except OSError as error:
        raise NoBase(f"{why}: git cannot be run: {error.strerror}") from error
    if done.returncode:
        said = _last_line(done)
        raise NoBase(f"{why}: {said}" if said else why)
    return done.stdout.strip()
