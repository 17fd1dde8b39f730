"""Eviction among a hundred leaves, in lockstep: random caches are small, and their queue of victims is flat."""

import random

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults.mutants import all_mutants, mutated_factory
from kvlockstep.fuzz.ops import Abort, Alloc, AllocItem, Commit, Evict, Match, Release, Submit
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.replay import run_ops

POLICIES = ["fifo", "filo", "lfu", "lru", "mru", "priority", "slru"]
WRONG_STEP = "victims.py | VictimQueue._settle | ReplaceBinaryOperator_{} | above = (place - 1) // ARITY | 0"


def config_of(policy):
    return CacheConfig(page_size=1, n_pages=110, n_rows=1, max_context_len=4, policy=policy)


def churn(seed):
    """Publish and use again prompts of one page, so that every leaf is a sibling of all others, and evict some."""
    draw = random.Random(seed)
    ops = []
    for i in range(400):
        name, word = f"r{i}", draw.randrange(1, 150)
        if draw.random() < 0.6:
            ops += [Submit(name, (word,), priority=draw.randrange(-2, 3)), Match(name), Alloc((AllocItem(name, 1),))]
            ops += [Commit(name, 1), Release(name)]
        else:
            ops += [Submit(name, (word, 0)), Match(name), Abort(name)]
        if draw.random() < 0.1:
            ops.append(Evict(draw.randrange(1, 8)))
    return ops


@pytest.mark.parametrize("policy", POLICIES)
def test_victims_among_many_leaves_are_those_of_the_model(policy):
    assert run_ops(config_of(policy), churn(1), factory_for("gpu_impl")).signature is None


@pytest.mark.parametrize("operator", ["Sub_Add", "FloorDiv_Mod"])
def test_wrong_step_in_the_heap_evicts_another_victim(operator):
    """Ranked by use, whatever is put in is last, and hardly anything moves; priorities come in any order."""
    faulty = mutated_factory(all_mutants()[WRONG_STEP.format(operator)])
    result = run_ops(config_of("priority"), churn(0), faulty)

    assert result.signature == "OutcomeDiffers.evict.value"
