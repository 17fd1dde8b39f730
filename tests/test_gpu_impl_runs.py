"""Runs of integers, interpreted and compiled: nothing is cut to size, nothing is read beyond the end."""

import importlib
import random
from array import array

import pytest

HOW = ["interpreted", pytest.param("compiled", marks=pytest.mark.needs("compiled"))]


@pytest.fixture(params=HOW)
def runs(request):
    home = "kvlockstep.gpu_impl" + (".compiled" if request.param == "compiled" else "")
    return importlib.import_module(f"{home}.runs")


def test_tokens_are_the_bytes_of_int32(runs):
    draw = random.Random(1)
    tokens = array("q", [-(1 << 31), (1 << 31) - 1, *(draw.randrange(-(1 << 31), 1 << 31) for _ in range(200))])
    for _ in range(300):
        start, end = sorted(draw.randrange(len(tokens) + 1) for _ in range(2))

        assert runs.int32_bytes(tokens, start, end - start) == array("i", tokens[start:end]).tobytes()


@pytest.mark.parametrize("token", [1 << 31, -(1 << 31) - 1, 1 << 32, (1 << 32) + 7, (1 << 63) - 1, -(1 << 63)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_token_that_int32_cannot_hold_is_refused_and_not_cut(runs, token, place):
    tokens = array("q", [7, 7, 7])
    tokens[place] = token
    with pytest.raises(OverflowError):
        runs.int32_bytes(tokens, 0, 3)

    others = [i for i in range(3) if i != place]
    assert runs.int32_bytes(tokens, others[0], 1) == array("i", [7]).tobytes()


@pytest.mark.parametrize(("start", "n"), [(0, 4), (3, 1), (4, 0), (-1, 1), (-1, 2), (1, -1), (2, 2)])
def test_range_beyond_the_tokens_is_refused(runs, start, n):
    with pytest.raises(IndexError):
        runs.int32_bytes(array("q", [7, 8, 9]), start, n)


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_slots_are_those_of_the_pages_in_order(runs, page_size):
    pages = array("i", [3, 0, 9, 3])
    slots = runs.slots_of(pages, page_size)

    assert slots.tolist() == [page * page_size + offset for page in pages for offset in range(page_size)]
    assert slots.dtype.str == "<i4"
    assert runs.slots_of(array("i"), page_size).tolist() == []
