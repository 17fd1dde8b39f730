"""Which causes of failure do not block: those that somebody named, and those that the base of a change has too."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvlockstep.fuzz.environments import PACKAGE, python_for
from kvlockstep.fuzz.trace_bounds import SIGNATURE

REPLAY_S = 120.0


class KnownUnreadable(Exception):
    """The file of known causes is none; the text is one line: ``FILE:LINE: what: remedy``."""


class NoBase(Exception):
    """The base cannot be had; the text is one line that says why."""


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
class Base:
    """A checkout of the revision that a change is compared with."""

    revision: str
    commit: str
    root: Path  # of the checkout
    here: Path  # the folder in it that is the current one of this process
    python_path: str | None  # where its own kvlockstep is, if this one is from the same repository

    def has_failure(self, trace: Path, target: str) -> bool | None:
        """Tell whether a trace fails there as it does here; None if it cannot be run there."""
        command = [python_for(target), "-P", "-m", "kvlockstep", "replay", "--quiet", "--target", target, str(trace)]
        variables = os.environ | ({"PYTHONPATH": self.python_path} if self.python_path else {})
        try:
            done = subprocess.run(
                command, cwd=self.here, env=variables, capture_output=True, text=True, timeout=REPLAY_S
            )
        except (subprocess.TimeoutExpired, OSError):
            return None
        lines = done.stdout.splitlines()
        if any(line.startswith("FAILED:") for line in lines):
            return True
        return False if any(line.startswith(("FIXED:", "DIFFERENT:", "CLEAN:")) for line in lines) else None


@contextmanager
def checked_out(revision: str) -> Iterator[Base]:
    """Check a revision of the current repository out into a folder of its own. Raises NoBase."""
    commit = _git(
        "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", why=f"--base {revision}: no such commit"
    )
    top = Path(_git("rev-parse", "--show-toplevel", why=f"--base {revision}: this folder is in no git checkout"))
    with tempfile.TemporaryDirectory(prefix="kvlockstep-base-") as folder:
        root = Path(folder) / "base"
        _git(
            "worktree", "add", "--detach", "--quiet", str(root), commit, why=f"--base {revision}: cannot be checked out"
        )
        try:
            ours = PACKAGE.is_relative_to(top.resolve())
            here = root / Path.cwd().resolve().relative_to(top.resolve())
            yield Base(revision, commit, root, here if here.is_dir() else root, str(root / "src") if ours else None)
        finally:
            _git("worktree", "remove", "--force", str(root), why=f"{root}: cannot be removed")


def _git(*words: str, why: str) -> str:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True)
    except OSError as error:
        raise NoBase(f"{why}: git cannot be run: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise NoBase(f"{why}: {said[-1]}" if said else why)
    return done.stdout.strip()
