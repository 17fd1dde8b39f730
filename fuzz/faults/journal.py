"""Hunts that are done, kept in a file so that an interrupted command goes on where it was.

JSON Lines: each hunt as soon as it ended, with what it was asked to do and the fingerprint of its fault. A fault
that was changed since is looked for again, and so is one whose hunt gave no verdict.
"""

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvlockstep.fuzz.faults.hunt import Hunt, Task
from kvlockstep.fuzz.faults.zoo import fingerprint

Key = tuple[str, str, int, float, int | None]


class JournalUnusable(Exception):
    """The file is no journal, or somebody else writes it; the text is one line that says so."""


class Journal:
    """The file of one command. Before it is opened nobody else has it open, or JournalUnusable is raised."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        self._done: dict[Key, Hunt] = {}
        self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fresh:
                self._file.truncate(0)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise JournalUnusable(f"{path}: another command writes it") from None
        except JournalUnusable:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # cut by the death of its writer
            lines.pop()
            self._file.truncate(sum(len(line.encode()) for line in lines))
        for number, line in enumerate(lines, 1):
            try:
                of_fault, seconds, hunt = _decode(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise JournalUnusable(f"{self.path}:{number}: no hunt of this version; --fresh begins anew") from error
            self._done[of_fault, hunt.fault, hunt.seed, seconds, hunt.without] = hunt
        self._file.seek(0, os.SEEK_END)

    def done(self, task: Task) -> Hunt | None:
        """Return what came of a hunt that was done earlier, if it gave a verdict and the fault is still the same."""
        hunt = self._done.get(_key(task))
        return hunt if hunt is not None and hunt.trouble is None else None

    def add(self, task: Task, hunt: Hunt) -> None:
        """Keep a hunt; it is with the kernel when this returns."""
        of_fault, _, _, seconds, _ = _key(task)
        line = {"fingerprint": of_fault, "allowed_seconds": seconds, **asdict(hunt)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _key(task: Task) -> Key:
    return fingerprint(task.fault), task.fault.name, task.seed, task.seconds, task.without


def _decode(line: dict[str, Any]) -> tuple[str, float, Hunt]:
    of_fault, seconds = line.pop("fingerprint"), float(line.pop("allowed_seconds"))
    hunt = Hunt(**line | {"laws": tuple(line["laws"]), "did_not_run": tuple(line["did_not_run"])})
    return str(of_fault), seconds, hunt
