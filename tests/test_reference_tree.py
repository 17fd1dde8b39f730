"""What the model's tree remembers of its nodes, and the order in which it gives them up."""

import pytest

from kvlockstep.reference import Cache

NS = (None, None, ())


def new_cache(**changes):
    shape = {"page_size": 2, "n_pages": 12, "n_rows": 4, "max_context_len": 12} | changes
    return Cache(**shape)


def run(cache, name, tokens, priority=0):
    cache.submit(name, tokens, NS, priority)
    cache.match(name)
    cache.alloc([(name, cache.requests[name].uncomputed, "")])
    cache.commit(name, cache.requests[name].in_flight_n, "")


def publish(cache, tokens, priority=0):
    run(cache, "publisher", tokens, priority)
    cache.release("publisher")


def marks(cache):
    """Marks of all nodes by the letters of their edges."""
    return {
        "".join(letter for vertex in node.edge for letter in vertex.key): node.end.mark for node in cache.tree.nodes()
    }


def hits(cache):
    return {edge: mark.hits for edge, mark in marks(cache).items()}


def look_up(cache, tokens):
    """Stamp a path without publishing anything."""
    cache.submit("looker", tokens, NS)
    cache.peek("looker")
    cache.abort("looker")


def test_split_keeps_everything_but_the_stamp_of_the_upper_part():
    cache = new_cache()
    publish(cache, "abcdx", priority=3)
    old = marks(cache)["abcd"]

    look_up(cache, "abx")

    upper, lower = marks(cache)["ab"], marks(cache)["cd"]
    assert (upper.created, upper.hits, upper.priority) == (old.created, 1, 3)
    assert (lower.created, lower.hits, lower.priority) == (old.created, 1, 3)
    assert lower.stamp == old.stamp < upper.stamp


def test_split_of_locked_edge_counts_the_lock_on_both_parts():
    cache = new_cache()
    run(cache, "r0", "abcdx")
    cache.checkpoint("r0")

    look_up(cache, "abx")

    assert [cache.lock_counts()[node.end] for node in cache.tree.nodes()] == [1, 1]
    assert cache.protected == 4


def test_lock_counts_are_locks_at_or_below_a_node():
    cache = new_cache()
    publish(cache, "abcdx")
    for name, tokens in [("r0", "abx"), ("r1", "abcdx"), ("r2", "abcdx")]:
        cache.submit(name, tokens, NS)
        cache.match(name)

    assert [cache.lock_counts()[node.end] for node in cache.tree.nodes()] == [3, 2]
    cache.abort("r1")
    assert [cache.lock_counts()[node.end] for node in cache.tree.nodes()] == [2, 1]


def test_matching_does_not_count_as_hit():
    cache = new_cache()
    publish(cache, "abx")

    look_up(cache, "abx")
    cache.submit("r0", "abx", NS)
    cache.match("r0")

    assert hits(cache) == {"ab": 1}


def test_first_publication_counts_matched_nodes_and_later_ones_do_not():
    cache = new_cache()
    publish(cache, "abx")
    cache.submit("r0", "abcdefx", NS)
    cache.match("r0")
    cache.alloc([("r0", 2, "")])
    cache.commit("r0", 2, "")

    cache.checkpoint("r0")
    assert hits(cache) == {"ab": 2, "cd": 1}
    cache.checkpoint("r0")
    assert hits(cache) == {"ab": 2, "cd": 1}

    cache.alloc([("r0", 3, "")])
    cache.commit("r0", 3, "")
    cache.release("r0")
    assert hits(cache) == {"ab": 2, "cd": 1, "ef": 1}


def test_request_that_is_admitted_again_counts_again():
    cache = new_cache()
    run(cache, "r0", "abx")
    cache.retract("r0", publish=True)
    assert hits(cache) == {"ab": 1}

    cache.match("r0")
    cache.alloc([("r0", 1, "")])
    cache.commit("r0", 1, "")
    cache.checkpoint("r0")

    assert hits(cache) == {"ab": 2}


def test_publication_that_ends_inside_an_edge_counts_for_the_upper_part_only():
    cache = new_cache()
    publish(cache, "abcdx")

    publish(cache, "abx")

    assert hits(cache) == {"ab": 2, "cd": 1}


def test_publication_without_pages_is_no_hit_but_stamps_nothing_else():
    cache = new_cache()
    publish(cache, "abx")
    before = marks(cache)["ab"].stamp

    publish(cache, "z")

    assert (marks(cache)["ab"].stamp, hits(cache)) == (before, {"ab": 1})


def test_publication_that_adds_no_page_stamps_its_path():
    cache = new_cache()
    run(cache, "r0", "abx")
    cache.checkpoint("r0")
    publish(cache, "cdx")
    assert marks(cache)["cd"].stamp > marks(cache)["ab"].stamp

    cache.checkpoint("r0")

    assert marks(cache)["ab"].stamp > marks(cache)["cd"].stamp


def test_priority_is_the_highest_of_those_that_published_through():
    cache = new_cache()
    publish(cache, "abcdx", priority=1)
    publish(cache, "abx", priority=5)
    publish(cache, "abcdx", priority=0)
    publish(cache, "abefx", priority=2)

    assert {edge: mark.priority for edge, mark in marks(cache).items()} == {"ab": 5, "cd": 1, "ef": 2}


def test_matching_leaves_priority_alone():
    cache = new_cache()
    publish(cache, "abx", priority=1)
    cache.submit("r0", "abx", NS, 7)
    cache.match("r0")
    cache.abort("r0")

    assert marks(cache)["ab"].priority == 1


def test_evict_takes_parent_once_its_children_are_gone():
    cache = new_cache()
    publish(cache, "abcdx")
    look_up(cache, "abx")

    assert cache.evict(4) == [[4, 5], [2, 3]]


def test_evict_skips_locked_leaf():
    cache = new_cache()
    publish(cache, "abx")
    publish(cache, "cdx")
    cache.submit("r0", "abx", NS)
    cache.match("r0")
    look_up(cache, "cdx")

    assert cache.evict(9) == [[4, 5]]
    assert cache.evict(9) == []


def test_evict_removes_whole_nodes():
    cache = new_cache()
    publish(cache, "abcdx")

    assert cache.evict(1) == [[2, 3, 4, 5]]


def prepare_four_leaves(policy):
    """Publish a, b, c, d; then stamp a; then count a hit on a and b; c has the highest priority, d the lowest.

    Order of creation a b c d, of stamps c d a b; hits a 2, b 2, c 1, d 1.
    """
    cache = new_cache(page_size=1, policy=policy)
    for token, priority in [("a", 1), ("b", 1), ("c", 2), ("d", 0)]:
        publish(cache, token, priority)
    publish(cache, "a", 1)
    publish(cache, "b", 1)
    return cache


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "cdab"),
        ("mru", "badc"),
        ("fifo", "abcd"),
        ("filo", "dcba"),
        ("lfu", "cdab"),
        ("slru", "cdab"),
        ("priority", "dabc"),
    ],
)
def test_policy_decides_order_of_victims(policy, order):
    cache = prepare_four_leaves(policy)
    letters = {node.edge[0].page: node.edge[0].key[0] for node in cache.tree.nodes()}

    assert "".join(letters[slots[0]] for slots in cache.evict(4)) == order


@pytest.mark.parametrize(("policy", "first_victim"), [("lfu", "b"), ("slru", "a")])
def test_slru_stops_counting_at_two_hits_and_lfu_does_not(policy, first_victim):
    """a has three hits, b has two, and a is the older one."""
    cache = new_cache(page_size=1, policy=policy)
    for token in "bbaaa":
        publish(cache, token)
    look_up(cache, "bx")
    letters = {node.edge[0].page: node.edge[0].key[0] for node in cache.tree.nodes()}

    assert letters[cache.evict(1)[0][0]] == first_victim


def test_deep_chain_overflows_no_stack():
    cache = new_cache(page_size=1, n_pages=3000, max_context_len=3000)
    run(cache, "r0", [i % 7 for i in range(3000)])

    cache.checkpoint("r0")

    assert cache.protected == 3000
    cache.release("r0")
    assert len(cache.evict(1)[0]) == 3000
