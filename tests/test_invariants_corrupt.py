"""Whatever a snapshot holds, the checks pass or raise a violation that can be printed; they never crash."""

import copy
import dataclasses
import random

import pytest

from kvlockstep.invariants.agreement import compare
from kvlockstep.invariants.checks import run_checks
from kvlockstep.invariants.violation import Violation


def places(value):
    """Find every number and list below ``value``, as (holder, key)."""
    if dataclasses.is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        items = []
    found = [(value, key) for key, item in items if isinstance(item, int | list) and key != "page_size"]
    for _, item in items:
        found += places(item)
    return found


def corrupt(snapshot, rng):
    """Change one number or one list anywhere in a snapshot."""
    holder, key = rng.choice(places(snapshot))
    value = getattr(holder, key) if dataclasses.is_dataclass(holder) else holder[key]
    if isinstance(value, list):
        if value and rng.randrange(2):
            value.append(rng.choice(value))
        if value and rng.randrange(2):
            value.pop(rng.randrange(len(value)))
        rng.shuffle(value)
        return
    wrong = rng.choice([value + 1, value - 1, -1, 0, 999, rng.randrange(30)])
    if dataclasses.is_dataclass(holder):
        setattr(holder, key, wrong)
    else:
        holder[key] = wrong


@pytest.mark.parametrize("seed", range(8))
def test_corrupt_snapshot_gives_a_violation_or_nothing(told, seed):
    rng = random.Random(seed)
    texts = []
    for _ in range(60):
        observations = told("hand-built")
        seen = observations[rng.choice(sorted(observations))]
        honest = copy.deepcopy(seen.now)
        for _ in range(rng.randrange(1, 4)):
            corrupt(seen.now, rng)
        try:
            run_checks(seen)
            compare(honest, seen.now)
        except Violation as violation:
            texts.append(str(violation))

    assert len(texts) > 40
    assert all(text.split(":")[0].isidentifier() for text in texts)
