"""The queue of victims, interpreted and compiled: order, changes of rank, and its bound."""

import importlib
import random

import pytest

from kvlockstep.gpu_impl.victims import NOWHERE, POLICIES

HOW = ["interpreted", pytest.param("compiled", marks=pytest.mark.needs("compiled"))]


@pytest.fixture(params=HOW)
def queue(request):
    home = "kvlockstep.gpu_impl" + (".compiled" if request.param == "compiled" else "")
    return importlib.import_module(f"{home}.victims").VictimQueue()


def drain(queue):
    order = []
    while (node := queue.pop()) != NOWHERE:
        order.append(node)
    return order


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", [1, 2, 3, 4]),
        ("mru", [4, 3, 2, 1]),
        ("fifo", [4, 2, 3, 1]),
        ("filo", [1, 3, 2, 4]),
        ("lfu", [4, 2, 1, 3]),
        ("slru", [2, 4, 1, 3]),
        ("priority", [3, 1, 4, 2]),
    ],
)
def test_victims_leave_in_policy_order(queue, policy, expected):
    fields = {  # node: stamp, created, hits, priority
        1: (10, 9, 2, 0),
        2: (11, 6, 1, 5),
        3: (12, 7, 7, -3),
        4: (13, 2, 0, 1),
    }
    for node, values in fields.items():
        queue.put(node, *POLICIES[policy](*values), 0)

    assert drain(queue) == expected


def test_victims_with_equal_stamps_leave_by_path_then_page(queue):
    for node, guard in ((1, 2 << 32 | 9), (2, 1 << 32 | 9), (3, 2 << 32 | 4)):
        queue.put(node, 5, 0, guard)

    assert drain(queue) == [2, 3, 1]


def test_victims_agree_with_a_sorted_list_in_random_use(queue):
    draw = random.Random(2)
    expected = {}
    for step in range(6000):
        node, action = draw.randrange(60), draw.random()
        if action < 0.6:
            expected[node] = (draw.randrange(-4, 4), draw.randrange(3), step)
            queue.put(node, *expected[node])
        elif action < 0.8:
            expected.pop(node, None)
            queue.discard(node)
        else:
            first = min(expected, key=lambda known: expected[known], default=NOWHERE)
            expected.pop(first, None)
            assert queue.pop() == first
        assert len(queue) == len(expected)
        if step % 100 == 0:
            assert sorted(queue.nodes()) == sorted(expected)


def test_victims_of_a_large_queue_leave_in_order_after_many_changes(queue):
    """Some hundred nodes are a heap of five levels, so that a step from a wrong place to another one shows."""
    draw = random.Random(3)
    for _ in range(40):
        ranks = {node: (draw.randrange(1000), 0, node) for node in draw.sample(range(1000), 400)}
        for node, rank in ranks.items():
            queue.put(node, *rank)
        for node in draw.sample(sorted(ranks), 100):
            ranks[node] = (draw.randrange(1000), 1, node)
            queue.put(node, *ranks[node])
        for node in draw.sample(sorted(ranks), 100):
            del ranks[node]
            queue.discard(node)

        assert drain(queue) == sorted(ranks, key=ranks.get)


def test_victims_are_never_more_than_the_leaves(queue):
    """However often a leaf is used: nothing of its earlier ranks stays behind."""
    for node in range(10):
        queue.put(node, node, 0, 0)
    for tick in range(10, 100_000):
        queue.discard(3)
        queue.put(3, tick, 0, 0)
        queue.put(4, tick, 1, 0)

    assert len(queue) == 10
    assert drain(queue) == [0, 1, 2, 5, 6, 7, 8, 9, 3, 4]


def test_victims_of_a_number_never_seen_are_not_in(queue):
    queue.discard(1000)

    assert (len(queue), queue.pop()) == (0, NOWHERE)
