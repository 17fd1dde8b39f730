"""Padded plans do what the plans do, and touch nothing else but row 0, position 0, and slot 0.

On the lanes of the CPU the launches are replayed without a graph; the test of what a capture needs runs on ``cuda``.
"""

import os
import random
import subprocess
import sys
from array import array
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget
from kvlockstep.gpu_impl import CacheConfig, Extend, KvCache, choose_lane
from kvlockstep.gpu_impl.device import DeviceState
from kvlockstep.gpu_impl.graphs import GraphedDevice, n_padded_numbers, padded
from kvlockstep.gpu_impl.plan import BatchPlan

LANE = choose_lane(os.environ["KVLOCKSTEP_LANE"])
DEVICE = "cuda" if LANE == "cuda" else "cpu"
kernels = import_module("kvlockstep.gpu_impl.kernels")
SIDES = {"torch": kernels.TORCH} | ({} if LANE == "torch" else {LANE: kernels.TRITON})

side = pytest.mark.parametrize("run", SIDES.values(), ids=SIDES.keys())


def on_device(numbers):
    return torch.tensor(list(numbers), dtype=torch.int32, device=DEVICE)


def random_plan(draw, page_size, n_requests):
    plan = BatchPlan(page_size)
    for row in draw.sample(range(1, 9), n_requests):
        write_start = draw.randrange(30)
        end = write_start + draw.randrange(1, 5)
        row_start = draw.choice([write_start, draw.randrange(max(0, write_start - 3), end + 5)])
        plan.add(row, row_start, write_start, end, array("i", draw.sample(range(1, 1000), 64)))
    return plan


@side
@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_padded_plan_equals_plan_but_for_row_0_and_slot_0(page_size, run):
    draw = random.Random(page_size)
    for n_requests in (1, 2, 5, 8):
        plan = random_plan(draw, page_size, n_requests)
        n_writes = plan.n_positions - plan.n_row_positions
        for n in (max(plan.n_row_positions, n_writes), 64):
            rows = torch.full((9, 64), -7, dtype=torch.int32, device=DEVICE)
            expected = rows.clone()
            buffer = on_device(plan.buffer())
            expected_set = run.apply_plan(
                expected, buffer, plan.n_runs, plan.n_row_positions, plan.n_positions, page_size
            )
            if n > plan.n_row_positions:
                expected[0, 0] = 0

            laid_out = padded(plan, n)
            write_set = run.apply_plan(rows, on_device(laid_out), 2 * n, n, 2 * n, page_size)

            assert len(laid_out) == n_padded_numbers(n)
            assert torch.equal(expected, rows)
            assert torch.equal(expected_set, write_set[:n_writes])
            assert write_set[n_writes:].tolist() == [0] * (n - n_writes)


@side
def test_scatter_through_padded_write_set_changes_only_slot_0_beyond_it(run):
    pool = torch.arange(2 * 2 * 8 * 3, dtype=torch.int32, device=DEVICE).view(2, 2, 8, 3)
    expected = pool.clone()
    k, v = torch.full((2, 2, 4, 3), -1, dtype=torch.int32, device=DEVICE).unbind()
    expected[:, :, [5, 2, 0]] = -1

    run.scatter_kv(pool, on_device([5, 2, 0, 0]), k, v)

    assert torch.equal(expected, pool)


def graphed_cache():
    config = CacheConfig(page_size=2, n_pages=40, n_rows=4, max_context_len=32, head_dim=4)
    return KvCache(config, LANE, partial(GraphedDevice, buckets=[4]))


def decoding_cache(buckets):
    config = CacheConfig(page_size=2, n_pages=40, n_rows=4, max_context_len=32, head_dim=4)
    cache = KvCache(config, LANE, DeviceState if buckets is None else partial(GraphedDevice, buckets=buckets))
    write_sets = []
    for name, length in (("r0", 5), ("r1", 9)):
        cache.match(name, array("q", range(length)))
        write_sets.append(cache.alloc([Extend(name, length)]).write_set)
        cache.commit(name, length, array("q", [3]))
    for _ in range(6):
        write_sets.append(cache.alloc([Extend("r0", 1), Extend("r1", 1)]).write_set)
        for name in ("r0", "r1"):
            cache.commit(name, 1, array("q", [3]))
    return cache, [write_set.tolist() for write_set in write_sets]


@pytest.mark.parametrize("buckets", [(), (1,), (2, 8), (16,), (4, 16, 4)])
def test_rows_and_write_sets_are_those_of_a_cache_without_buckets(buckets):
    """A write set that was handed out stays as it is while later plans fill the same bucket."""
    plain, expected = decoding_cache(None)
    graphed, got = decoding_cache(buckets)

    assert got == expected
    assert torch.equal(plain.device.row_table[1:], graphed.device.row_table[1:])
    assert graphed.device.row_table[0].tolist() == [0] * 32


def test_padded_write_set_stays_at_its_address():
    cache = graphed_cache()
    device = cache.device
    address = device.write_set_of(4).data_ptr()
    cache.match("r0", array("q", range(5)))

    written = cache.alloc([Extend("r0", 3)]).write_set

    assert device.write_set_of(4).tolist() == [*written.tolist(), 0]
    assert device.write_set_of(4).data_ptr() == address


def test_bucket_below_one_is_refused():
    with pytest.raises(ValueError, match="buckets: expected at least 1, got 0"):
        KvCache(CacheConfig(), LANE, partial(GraphedDevice, buckets=[4, 0]))


class GraphedTarget(GpuImplTarget):
    """The target whose plans all fit a bucket but the largest ones."""

    buckets = (1, 2, 8)

    def __init__(self, config):
        super().__init__(config)
        device = GraphedDevice(self._cache.config, self._cache.lane, self.buckets)
        self.n_padded = 0
        apply = device.apply

        def counting(plan):
            self.n_padded += device.bucket_of(plan) is not None
            return apply(plan)

        device.apply = counting
        self._cache.device = device


class Agreeing:
    """A case that holds each drawn operation against the model on both targets, and compares what they showed."""

    config = None
    capabilities = GpuImplTarget.capabilities
    n_padded = n_ops = 0

    def start(self, config):
        self.beside = Lockstep(config, GpuImplTarget(config), digest=True)
        return Lockstep(config, GraphedTarget(config), digest=True)

    def run(self, lockstep, op):
        before = lockstep.target.n_padded
        assert lockstep.run(op) == self.beside.run(op)
        assert lockstep.digest() == self.beside.digest()
        self.n_padded += lockstep.target.n_padded - before
        self.n_ops += 1


def test_lockstep_holds_with_padded_plans_and_shows_the_same():
    case = Agreeing()

    run_cases(case, 0, n_cases=15 if LANE != "interpret" else 5, steps=40)

    assert case.n_padded > case.n_ops / 20


@pytest.mark.needs("cuda")
def test_alloc_does_not_wait_once_the_buckets_are_captured():
    """What would wait for the device raises; the capture itself may."""
    cache = graphed_cache()
    cache.match("r0", array("q", range(5)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.alloc([Extend("r0", 3)])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(LANE == "interpret", reason="the session runs on this lane already")
def test_padded_plans_hold_on_the_interpret_lane():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(Path(__file__))],
        env=os.environ | {"KVLOCKSTEP_LANE": "interpret"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
