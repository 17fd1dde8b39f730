"""The same seed draws the same traces, and the same trace gives the same digest, in any process.

Tests come in pairs: what is under control repeats, and what is not is caught by the same comparison. This
file is also the script that the other processes run: it prints each case's config, operations and digest.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlockstep.fuzz import machine
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.draws import Draws
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.targets.wrong import HandsOutRandomPages
from kvlockstep.fuzz.trace import encode_op

CASES = 12


class DrawsByHash(Draws):
    """Picks a request by the hash of its name: another one in each process."""

    def _pick(self, names, who):
        return super()._pick(sorted(names, key=hash), who)


class Recorder:
    """Runs cases and keeps every line of them; after the last line of a case comes its digest."""

    config = None

    def __init__(self, factory):
        self.factory = factory
        self.capabilities = factory(CacheConfig()).capabilities
        self.lines = []
        self.lockstep = None

    def start(self, config):
        self.end_case()
        self.lines.append(repr(config))
        self.lockstep = Lockstep(config, self.factory(config), digest=True)
        return self.lockstep

    def run(self, lockstep, op):
        self.lines.append(encode_op(op))
        lockstep.run(op)

    def end_case(self):
        if self.lockstep is not None:
            self.lines.append(f"digest {self.lockstep.digest()}")


def lines_here(seed, factory=ReferenceTarget):
    recorder = Recorder(factory)
    run_cases(recorder, seed, CASES, 40)
    recorder.end_case()
    return recorder.lines


def lines_elsewhere(seed, hash_seed, variant="", folder=None):
    """Run this file in a fresh process with its own string hashes."""
    command = [sys.executable, __file__, str(seed), variant]
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def first_difference(left, right):
    """Name the first line that differs, or None: what a reader needs of two long lists."""
    for number, pair in enumerate(zip(left, right, strict=False)):
        if pair[0] != pair[1]:
            return number, *pair
    return None if len(left) == len(right) else (min(len(left), len(right)), "one ends here")


def digests(lines):
    return [line for line in lines if line.startswith("digest ")]


def without_digests(lines):
    return [line for line in lines if not line.startswith("digest ")]


@pytest.fixture(scope="module")
def honest():
    return lines_elsewhere(1, hash_seed=1)


def test_same_seed_gives_the_same_traces_and_digests_in_another_process(honest):
    assert len(digests(honest)) >= CASES
    assert len(honest) > 200

    assert first_difference(honest, lines_elsewhere(1, hash_seed=2)) is None
    assert first_difference(honest, lines_here(1)) is None


def test_draw_by_hash_is_caught_by_the_comparison():
    one, other = (lines_elsewhere(1, hash_seed, "draws-by-hash") for hash_seed in (1, 2))

    assert first_difference(without_digests(one), without_digests(other)) is not None


def test_random_choice_of_a_target_is_caught_by_the_digest(honest):
    """What a target hands out is seen by no draw: the traces are the same and the digests are not."""
    one, other = (lines_elsewhere(1, 1, "random-pages") for _ in range(2))

    assert without_digests(one) == without_digests(other)
    assert digests(one) != digests(other)


def test_other_seed_gives_other_traces(honest):
    assert first_difference(without_digests(honest), without_digests(lines_here(2))) is not None


def test_modules_around_change_no_draw(honest, tmp_path):
    """Hypothesis draws now and then a number that it read in the source of a module nearby."""
    (tmp_path / "nearby.py").write_text(f"NUMBERS = {list(range(300))}\n")

    assert first_difference(honest, lines_elsewhere(1, 1, "nearby", folder=tmp_path)) is None


def test_no_drawn_number_is_large_enough_to_be_taken_from_source():
    """It takes numbers from 100 on; so all draws stay below, whatever modules there are."""
    drawn = [high for row in machine._RULES.values() for _, high in row.values()]

    assert max(*drawn, machine.LARGEST_NUMBER) < 100


if __name__ == "__main__":
    variant = sys.argv[2]
    if variant == "draws-by-hash":
        machine.Draws = DrawsByHash
    if variant == "nearby":
        sys.path.insert(0, str(Path.cwd()))
        import nearby  # noqa: F401
    found = lines_here(int(sys.argv[1]), HandsOutRandomPages if variant == "random-pages" else ReferenceTarget)
    print("\n".join(found))
