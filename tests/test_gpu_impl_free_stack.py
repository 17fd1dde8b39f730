"""The stack of free pages or rows."""

import random
from array import array

import pytest

from kvlockstep.gpu_impl.free_stack import FreeStack


def test_free_stack_takes_what_was_given_back_last():
    pages = FreeStack(5)
    first = pages.take(3)
    pages.give_back(first[1:2])

    assert first.tolist() == [1, 2, 3]
    assert pages.take(1).tolist() == [2]


def test_free_stack_never_holds_the_padding_number():
    assert 0 not in FreeStack(4).take(4)


def test_free_stack_raises_generation_once_per_return():
    pages = FreeStack(3)
    for _ in range(2):
        pages.give_back(pages.take(2))

    assert pages.generations.tolist() == [0, 2, 2, 0]


def test_free_stack_take_fails_loudly_when_too_few_are_free():
    pages = FreeStack(2)

    with pytest.raises(AssertionError, match="3 taken, 2 free"):
        pages.take(3)
    assert len(pages) == 2


def test_free_stack_loses_and_repeats_nothing_in_random_use():
    draw = random.Random(1)
    pages, held = FreeStack(20), array("i")
    for _ in range(500):
        if draw.random() < 0.5:
            held.extend(pages.take(draw.randrange(len(pages) + 1)))
        else:
            cut = draw.randrange(len(held) + 1)
            pages.give_back(held[cut:])
            held = held[:cut]

        assert sorted(pages.free.tolist() + held.tolist()) == list(range(1, 21))
