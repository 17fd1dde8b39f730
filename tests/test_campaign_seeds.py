"""Shards, and the seeds that they give."""

import pytest

from kvlockstep.fuzz.campaign.seeds import SEED_BITS, NoShard, Shard, parse_shard, seed_of

SLURM = {"SLURM_ARRAY_TASK_ID": "12", "SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_COUNT": "4"}


def test_seeds_differ_in_base_shard_worker_and_unit_and_are_the_same_in_any_process():
    seeds = [
        seed_of(base, shard, worker, unit)
        for base in ("a", "b")
        for shard in (1, 2)
        for worker in (0, 1)
        for unit in (0, 1)
    ]

    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 1 << SEED_BITS
    assert seed_of("a", 1, 0, 0) == 3631516506449


@pytest.mark.parametrize(
    ("text", "environment", "shard"),
    [
        ("1/1", {}, Shard(1, 1)),
        ("3/8", {}, Shard(3, 8)),
        ("auto", SLURM, Shard(3, 4)),
        ("auto", {"JOB_COMPLETION_INDEX": "7", "KVLOCKSTEP_SHARDS": "8"}, Shard(8, 8)),
    ],
)
def test_shard_is_read(text, environment, shard):
    assert parse_shard(text, environment) == shard


@pytest.mark.parametrize(
    ("text", "environment", "why"),
    [
        ("0/4", {}, "expected an index from 1"),
        ("5/4", {}, "expected an index from 1"),
        ("1", {}, "expected I/N"),
        ("1/4/2", {}, "expected I/N"),
        ("-1/4", {}, "expected I/N"),
        ("auto", {}, "neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX is set"),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}, "KVLOCKSTEP_SHARDS is not set"),
        ("auto", {"JOB_COMPLETION_INDEX": "x", "KVLOCKSTEP_SHARDS": "8"}, "JOB_COMPLETION_INDEX is 'x'"),
        ("auto", SLURM | {"SLURM_ARRAY_TASK_ID": "14"}, "expected an index from 1"),
    ],
)
def test_what_is_no_shard_is_said(text, environment, why):
    with pytest.raises(NoShard, match=why):
        parse_shard(text, environment)
