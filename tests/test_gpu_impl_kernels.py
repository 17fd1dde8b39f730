"""Kernels and twins against plain Python, and against each other where the lane of the session runs kernels.

The lane comes from KVLOCKSTEP_LANE and is ``torch`` by default, where only the twins run;
`test_gpu_impl_lanes.py` runs this file again on ``interpret``.
"""

import os
import random
from array import array
from importlib import import_module

import pytest
import torch

from kvlockstep.gpu_impl.lane import choose_lane
from kvlockstep.gpu_impl.plan import BatchPlan

LANE = choose_lane(os.environ.get("KVLOCKSTEP_LANE", "torch"))
DEVICE = "cuda" if LANE == "cuda" else "cpu"
kernels = import_module("kvlockstep.gpu_impl.kernels")
SIDES = {"torch": kernels.TORCH} | ({} if LANE == "torch" else {LANE: kernels.TRITON})

side = pytest.mark.parametrize("run", SIDES.values(), ids=SIDES.keys())


def on_device(numbers):
    return torch.tensor(list(numbers), dtype=torch.int32, device=DEVICE)


def assert_equal(expected, got):
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def plan_of(page_size, requests):
    """Plan requests given as (row, row_start, write_start, end, pages); return it with what it must do."""
    plan = BatchPlan(page_size)
    cells, write_set = {}, []
    for row, row_start, write_start, end, pages in requests:
        plan.add(row, row_start, write_start, end, array("i", pages))
        slots = [pages[pos // page_size] * page_size + pos % page_size for pos in range(end)]
        cells |= {(row, pos): slots[pos] for pos in range(row_start, end)}
        write_set += slots[write_start:]
    return plan, cells, write_set


PLANS = {
    "one position, page size 1": (1, [(1, 0, 0, 1, [1])]),
    "prefix and new positions": (2, [(1, 0, 2, 5, [7, 3, 4])]),
    "tail suffices": (4, [(2, 8, 3, 6, [5, 6])]),
    "tail suffices for one of two": (4, [(2, 8, 3, 6, [5, 6]), (3, 4, 4, 6, [1, 2])]),
    "rest of the last page": (16, [(1, 17, 17, 18, [3, 9])]),
    "last row, last position, last page": (3, [(4, 46, 46, 47, list(range(15, -1, -1))[:-1] + [15])]),
    "seven requests, uneven": (
        2,
        [(n % 5, n, n, 3 * n + 1, list(range(20 * n, 20 * n + 12))) for n in range(7)],
    ),
    "longer than a block of few elements": (16, [(1, 0, 16, 47, [3, 1, 2]), (2, 0, 0, 33, [4, 6, 5])]),
}


@side
@pytest.mark.parametrize("name", PLANS)
def test_apply_plan_writes_rows_and_returns_write_set(name, run):
    page_size, requests = PLANS[name]
    plan, cells, write_set = plan_of(page_size, requests)
    rows = torch.full((5, 47), -7, dtype=torch.int32, device=DEVICE)
    expected = rows.clone()
    for (row, pos), slot in cells.items():
        expected[row, pos] = slot

    buffer = on_device(plan.buffer())
    got = run.apply_plan(rows, buffer, plan.n_runs, plan.n_row_positions, plan.n_positions, page_size)

    assert_equal(expected, rows)
    assert_equal(on_device(write_set), got)
    assert [write_set[start : start + n] for start, n in zip(plan.offsets, plan.lengths, strict=True)] == [
        [pages[pos // page_size] * page_size + pos % page_size for pos in range(write_start, end)]
        for _, _, write_start, end, pages in requests
    ]


@side
def test_apply_plan_agrees_with_python_on_random_batches(run):
    draw = random.Random(3)
    for _ in range(30):
        page_size = draw.choice([1, 2, 3, 16])
        requests = []
        for row in draw.sample(range(1, 9), draw.randrange(1, 9)):
            write_start = draw.randrange(30)
            end = write_start + draw.randrange(1, 30)
            row_start = draw.choice([0, write_start, draw.randrange(write_start, end + 5)])
            requests.append((row, row_start, write_start, end, draw.sample(range(1, 1000), 64)))
        plan, cells, write_set = plan_of(page_size, requests)
        rows = torch.zeros((9, 64), dtype=torch.int32, device=DEVICE)
        expected = rows.clone()
        for (row, pos), slot in cells.items():
            expected[row, pos] = slot

        buffer = on_device(plan.buffer())
        got = run.apply_plan(rows, buffer, plan.n_runs, plan.n_row_positions, plan.n_positions, page_size)

        assert_equal(expected, rows)
        assert_equal(on_device(write_set), got)


@side
@pytest.mark.parametrize(
    ("page_size", "row", "start", "pages"),
    [(1, 3, 0, [9]), (1, 3, 46, [9]), (2, 1, 4, [8, 3, 5]), (16, 0, 16, [1, 30]), (3, 2, 45 - 9, [2, 1, 4])],
)
def test_rewrite_row_names_canonical_slots_only_in_its_range(page_size, row, start, pages, run):
    rows = torch.arange(4 * 48, dtype=torch.int32, device=DEVICE).view(4, 48)
    expected = rows.clone()
    for n, page in enumerate(pages):
        for offset in range(page_size):
            expected[row, start + n * page_size + offset] = page * page_size + offset

    run.rewrite_row(rows, row, start, on_device(pages), page_size)

    assert_equal(expected, rows)


def random_words(shape, dtype):
    """Random bits; as floats they hold NaNs of every payload."""
    generator = torch.Generator().manual_seed(4)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype, generator=generator).to(DEVICE)


@side
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("layers", "words"), [(1, 1), (2, 1), (3, 5), (2, 64)])
@pytest.mark.parametrize("slots", [[0], [31], [5, 31, 0, 17], list(range(31, -1, -1))])
def test_scatter_kv_writes_exactly_its_slots(slots, layers, words, dtype, run):
    pool = random_words((layers, 2, 32, words), dtype)
    k, v = random_words((2, layers, len(slots), words), dtype).neg().unbind()
    expected = pool.clone()
    for n, slot in enumerate(slots):
        expected[:, 0, slot], expected[:, 1, slot] = k[:, n], v[:, n]

    run.scatter_kv(pool, on_device(slots), k, v)

    assert_equal(expected, pool)


@side
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("layers", "words"), [(1, 1), (2, 1), (3, 5), (2, 64)])
@pytest.mark.parametrize(("row", "length"), [(1, 1), (3, 20), (2, 7)])
def test_gather_kv_reads_through_the_row(row, length, layers, words, dtype, run):
    pool = random_words((layers, 2, 32, words), dtype)
    rows = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(n))[:20] for n in range(4)])
    rows = rows.to(DEVICE, torch.int32)
    untouched = pool.clone(), rows.clone()

    k, v = run.gather_kv(pool, rows, row, length)

    assert_equal(torch.stack([pool[:, 0, slot] for slot in rows[row, :length].tolist()], dim=1), k.contiguous())
    assert_equal(torch.stack([pool[:, 1, slot] for slot in rows[row, :length].tolist()], dim=1), v.contiguous())
    assert_equal(untouched[0], pool)
    assert_equal(untouched[1], rows)


@side
def test_kernels_reach_elements_beyond_one_block(run):
    """20,000 elements are more than one program takes on any lane."""
    pool = torch.zeros((1, 2, 20_000, 1), dtype=torch.int32, device=DEVICE)
    slots = torch.randperm(20_000, generator=torch.Generator().manual_seed(5)).to(DEVICE, torch.int32)
    values = random_words((1, 20_000, 1), torch.int32)
    rows = torch.zeros((2, 20_000), dtype=torch.int32, device=DEVICE)
    plan = BatchPlan(1)
    plan.add(row=1, row_start=0, write_start=0, end=20_000, pages=array("i", slots.tolist()))

    write_set = run.apply_plan(rows, on_device(plan.buffer()), 2, 20_000, 40_000, 1)
    run.scatter_kv(pool, write_set, values, ~values)
    k, v = run.gather_kv(pool, rows, 1, 20_000)

    assert_equal(slots, write_set)
    assert_equal(values, k.contiguous())
    assert_equal(~values, v.contiguous())
    run.rewrite_row(rows, 1, 0, slots.flip(0).contiguous(), 1)
    assert_equal(slots.flip(0), rows[1])
