"""Which cases a worker draws: seeds from the base of a run, the shard, the worker and the number of the unit.

The base is a text that everybody who takes part is told: the commit for the gate, the date at which it began for a
campaign. So shards on different machines draw different cases without talking to one another, and a shard that is run
again draws its own once more.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

SEED_BITS = 43
"""Of a seed; a worker shifts it by 20 bits, and Hypothesis takes what 63 bits hold."""

MAX_SHARDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``total`` parts of a run; ``index`` counts from 1."""

    index: int = 1
    total: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.total}"


class NoShard(ValueError):
    """The text, or the environment, names no shard; the message is one line that says why and what to do."""


def seed_of(base: str, shard: int, worker: int, unit: int) -> int:
    """Mix base, shard, worker and unit to an integer of SEED_BITS.

    Of a shard it is the index, from 1, and not their number: shard 3 draws the same cases of 4 and of 8.

    >>> seed_of("2026-01-01T00:00:00Z", 1, 0, 0) == seed_of("2026-01-01T00:00:00Z", 2, 0, 0)
    False
    """
    text = f"{base}\n{shard}\n{worker}\n{unit}"
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big") >> (64 - SEED_BITS)


def parse_shard(text: str, environment: Mapping[str, str] = os.environ) -> Shard:
    """Read ``I/N`` with I from 1 to N, or ``auto``: the index that Slurm or Kubernetes gave this process.

    ``auto`` reads ``SLURM_ARRAY_TASK_ID``, ``_MIN`` and ``_COUNT`` of a Slurm array whose step is 1, or
    ``JOB_COMPLETION_INDEX``, which counts from 0, and ``KVLOCKSTEP_SHARDS`` of a Kubernetes Indexed Job, which gives a
    process no count of its own. Raises NoShard.

    >>> parse_shard("2/8")
    Shard(index=2, total=8)
    >>> parse_shard("auto", {"JOB_COMPLETION_INDEX": "0", "KVLOCKSTEP_SHARDS": "8"})
    Shard(index=1, total=8)
    """
    if text == "auto":
        return _shard_of_cluster(environment)
    found = re.fullmatch(r"([0-9]{1,7})/([0-9]{1,7})", text)
    if found is None:
        raise NoShard(f"{text!r}: expected I/N, as 1/4, or auto")
    return _checked(int(found[1]), int(found[2]), text)


def _shard_of_cluster(environment: Mapping[str, str]) -> Shard:
    slurm = "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT"
    kubernetes = "JOB_COMPLETION_INDEX", "KVLOCKSTEP_SHARDS"
    if slurm[0] in environment:
        index, first, total = (_number(environment, name) for name in slurm)
        return _checked(index - first + 1, total, f"{slurm[0]}={index}, {slurm[1]}={first}, {slurm[2]}={total}")
    if kubernetes[0] in environment:
        index, total = (_number(environment, name) for name in kubernetes)
        return _checked(index + 1, total, f"{kubernetes[0]}={index}, {kubernetes[1]}={total}")
    raise NoShard(f"'auto': neither {slurm[0]} nor {kubernetes[0]} is set: say --shard I/N")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isascii() or not text.isdigit():
        raise NoShard(f"'auto': {name} is {text!r}, expected a number" if text else f"'auto': {name} is not set")
    return int(text)


def _checked(index: int, total: int, said: str) -> Shard:
    if not 1 <= index <= total <= MAX_SHARDS:
        raise NoShard(f"{said}: expected an index from 1 to the number of shards, at most {MAX_SHARDS}")
    return Shard(index, total)
