"""The queue of victims: order, lazy deletion, and its bound."""

import random

import pytest

from kvlockstep.gpu_impl.victims import POLICIES, SLACK, VictimQueue


def drain(queue):
    order = []
    while (node := queue.pop()) is not None:
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
def test_victims_leave_in_policy_order(policy, expected):
    fields = {  # node: stamp, created, hits, priority
        1: (10, 9, 2, 0),
        2: (11, 6, 1, 5),
        3: (12, 7, 7, -3),
        4: (13, 2, 0, 1),
    }
    queue = VictimQueue()
    for node, values in fields.items():
        queue.put(node, POLICIES[policy](*values))

    assert drain(queue) == expected


def test_victims_with_equal_stamps_leave_by_path_then_page():
    queue = VictimQueue()
    for node, rank in ((1, (5, 2, 9)), (2, (5, 1, 9)), (3, (5, 2, 4))):
        queue.put(node, rank)

    assert drain(queue) == [2, 3, 1]


def test_victims_agree_with_a_sorted_list_in_random_use():
    draw = random.Random(2)
    queue, expected = VictimQueue(), {}
    for step in range(3000):
        node, action = draw.randrange(30), draw.random()
        if action < 0.6:
            expected[node] = (draw.randrange(8), step)
            queue.put(node, expected[node])
        elif action < 0.8:
            expected.pop(node, None)
            queue.discard(node)
        else:
            first = min(expected, key=lambda known: expected[known], default=None)
            expected.pop(first, None)
            assert queue.pop() == first
        assert len(queue) == len(expected)
        assert queue.heap_len <= 2 * len(queue) + SLACK


def test_victims_heap_stays_small_when_one_leaf_is_locked_and_unlocked_often():
    queue = VictimQueue()
    for node in range(10):
        queue.put(node, (node,))
    for tick in range(100_000):
        queue.discard(3)
        queue.put(3, (tick,))

        assert queue.heap_len <= 2 * 10 + SLACK
