"""The corpus: what earlier cases reached, kept as short traces that a later run begins with.

A worker notes for each transition (``states.py``) the shortest trace that made it. Of those the least are kept that
make them all, or nearly the least: a trace is worth its transitions, and costs its operations. A run that begins with
the corpus goes in seconds to where the weights alone lead in minutes, and a fault that was brought in since shows
there; ``benchmarks/search_learns.py`` says how much sooner.

The files are all that is kept, named by a digest of what is in them, so that corpora of several machines are united
by copying. What a file covers is learned by running it, so that a corpus outlives a change of what a transition is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.files import replace_file
from kvlockstep.fuzz.ops import Op
from kvlockstep.fuzz.states import StateClass, Transition
from kvlockstep.fuzz.trace import Header, encode_header, encode_op

COST_OF_A_TRACE = 5
"""Operations that the start of a trace costs, beside its own."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A trace, and the transitions that are made in it."""

    lines: tuple[str, ...]  # header and operations, as in a file
    covers: tuple[Transition, ...]

    @property
    def name(self) -> str:
        """The name of its file: digest and suffix."""
        return f"{sha256(self.text.encode()).hexdigest()[:16]}.jsonl"

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def n_ops(self) -> int:
        return len(self.lines) - 1

    def to_json(self) -> dict[str, Any]:
        return {"lines": self.lines, "covers": self.covers}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Entry":
        covers = tuple((kind, StateClass(*before), StateClass(*after)) for kind, before, after in data["covers"])
        return cls(tuple(data["lines"]), covers)


class Notes:
    """What one worker has reached: of each transition the shortest way to it.

    ``begin`` tells of a case; ``note`` is called with each transition, when the operation that made it is the last of
    the case so far.
    """

    def __init__(self, header: Header) -> None:
        self._header = header
        self._shortest: dict[Transition, int] = {}
        self._fresh: dict[Transition, tuple[CacheConfig, tuple[Op, ...], tuple[Transition, ...]]] = {}

    def begin(self, config: CacheConfig, ops: Sequence[Op]) -> None:
        self._config, self._ops, self._covered = config, ops, dict[Transition, None]()

    def note(self, transition: Transition) -> None:
        self._covered[transition] = None
        n = len(self._ops)
        if n < self._shortest.get(transition, n + 1):
            self._shortest[transition] = n
            self._fresh[transition] = self._config, tuple(self._ops), tuple(self._covered)

    def take(self) -> list[Entry]:
        """Return what was reached, or reached sooner, since the last call: the least traces that show it all."""
        entries = [
            Entry((encode_header(_with_config(self._header, config)), *map(encode_op, ops)), covers)
            for config, ops, covers in self._fresh.values()
        ]
        wanted = set(self._fresh)
        self._fresh.clear()
        return distilled(entries, wanted)


def _with_config(header: Header, config: CacheConfig) -> Header:
    return Header(config=config, why="reaches what no shorter trace of the corpus reaches", target=header.target)


def distilled(entries: Iterable[Entry], wanted: Iterable[Transition]) -> list[Entry]:
    """Choose entries that cover all that is ``wanted`` and can be covered, those that cover most for their cost first.

    The same entries in any order give the same choice.
    """
    by_name = {entry.name: entry for entry in entries}
    left = set(wanted)
    gains = {name: left.intersection(entry.covers) for name, entry in sorted(by_name.items())}
    chosen: list[Entry] = []
    while True:
        gains = {name: rest for name, gain in gains.items() if (rest := gain & left)}
        if not gains:
            return chosen
        # sorted by name, so that the first of equals is the same one each time
        best = max(gains, key=lambda name: len(gains[name]) / (by_name[name].n_ops + COST_OF_A_TRACE))
        chosen.append(by_name[best])
        left -= gains[best]


class Corpus:
    """The traces of one folder: those that are known to cover something, and what was added since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, Entry] = {}
        self._shortest: dict[Transition, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def transitions(self) -> int:
        """Number of those that are covered."""
        return len(self._shortest)

    def add(self, entry: Entry) -> None:
        """Take an entry that covers something new, or something in fewer operations; drop any other."""
        name, mine = entry.name, (entry.n_ops, entry.name)
        better = [t for t in entry.covers if t not in self._shortest or mine < self._shortest[t]]
        if better:
            self._entries[name] = entry
            self._shortest.update(dict.fromkeys(better, mine))

    def save(self) -> int:
        """Distil, write what is new, remove what is no longer needed; return the number of traces.

        Files of others, of which it is not known what they cover, stay. Raises OSError.
        """
        kept = {entry.name: entry for entry in distilled(self._entries.values(), self._shortest)}
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, entry in kept.items():
            if not (self.folder / name).exists():
                replace_file(self.folder / name, entry.text)
        for name in self._entries.keys() - kept.keys():
            (self.folder / name).unlink(missing_ok=True)
        self._entries = kept
        self._shortest = {}
        for entry in kept.values():
            for transition in entry.covers:
                mine = entry.n_ops, entry.name
                self._shortest[transition] = min(mine, self._shortest.get(transition, mine))
        return len(kept)
