"""What the model does with each allowance on, and where it counts one; and the policy ``tlru``."""

import pytest

from kvlockstep.reference import Cache
from kvlockstep.reference.allowances import ALLOWANCES, SENTENCES

NS = (None, None, ())


def new_cache(*allowances, **changes):
    shape = {"page_size": 2, "n_pages": 16, "n_rows": 4, "max_context_len": 16} | changes
    return Cache(**shape, allowances=frozenset(allowances))


def run(cache, name, prompt, output="", priority=0):
    """Compute a prompt and an output, token by token."""
    cache.submit(name, prompt, NS, priority)
    cache.match(name)
    cache.alloc([(name, cache.requests[name].uncomputed, "")])
    cache.commit(name, cache.requests[name].in_flight_n, output[:1])
    for i in range(len(output)):
        cache.alloc([(name, 1, "")])
        cache.commit(name, 1, output[i + 1 : i + 2])


def publish(cache, prompt, output="", priority=0):
    run(cache, "publisher", prompt, output, priority)
    cache.release("publisher")


def look_up(cache, tokens):
    """Split and stamp a path without publishing anything."""
    cache.submit("looker", tokens, NS)
    cache.peek("looker")
    cache.abort("looker")


def marks(cache):
    """Marks of all nodes by the letters of their edges."""
    return {
        "".join(letter for vertex in node.edge for letter in vertex.key): node.end.mark for node in cache.tree.nodes()
    }


def ages(cache, what):
    """Edges in order of an age, those of one age together."""
    by_age = {}
    for edge, mark in marks(cache).items():
        by_age.setdefault(getattr(mark, what), set()).add(edge)
    return [by_age[age] for age in sorted(by_age)]


def test_model_has_no_allowance_unless_told():
    cache = new_cache()
    publish(cache, "abcd", "efg")
    publish(cache, "abxy")
    look_up(cache, "abcdz")

    assert cache.allowed == {}
    with pytest.raises(AssertionError):
        new_cache("splits_anything")
    assert set(SENTENCES) == set(ALLOWANCES)
    assert all(sentence.endswith(".") for sentence in SENTENCES.values())


# split_refreshes_tail, split_dates_upper_new


@pytest.mark.parametrize(
    ("allowances", "stamps"),
    [((), [{"cd"}, {"xy"}, {"ab"}]), (("split_refreshes_tail",), [{"xy"}, {"cd"}, {"ab"}])],
    ids=["spec", "allowed"],
)
def test_match_that_splits_refreshes_the_tail_before_the_path(allowances, stamps):
    cache = new_cache(*allowances)
    publish(cache, "abcd")
    publish(cache, "xy")
    look_up(cache, "abz")

    assert ages(cache, "stamp") == stamps
    assert cache.allowed == dict.fromkeys(allowances, 1)


def test_publication_that_splits_refreshes_the_tail_before_the_path():
    cache = new_cache("split_refreshes_tail")
    run(cache, "r0", "abef")
    publish(cache, "abcd")
    publish(cache, "xy")
    cache.checkpoint("r0")

    assert ages(cache, "stamp") == [{"xy"}, {"cd"}, {"ab", "ef"}]
    assert cache.allowed == {"split_refreshes_tail": 1}


def test_allowance_is_not_counted_where_nothing_is_split():
    cache = new_cache("split_refreshes_tail", "split_dates_upper_new", "page_nodes", "prompt_split")
    publish(cache, "ab")
    publish(cache, "ab")
    look_up(cache, "abz")

    assert cache.allowed == {}


@pytest.mark.parametrize(
    ("allowances", "created"),
    [((), [{"ab", "cd"}, {"xy"}]), (("split_dates_upper_new",), [{"cd"}, {"xy"}, {"ab"}])],
    ids=["spec", "allowed"],
)
def test_split_dates_its_upper_part_new(allowances, created):
    cache = new_cache(*allowances)
    publish(cache, "abcd")
    publish(cache, "xy")
    look_up(cache, "abz")

    assert ages(cache, "created") == created
    assert cache.allowed == dict.fromkeys(allowances, 1)


def test_upper_part_is_dated_before_the_new_child_of_the_same_publication():
    cache = new_cache("split_dates_upper_new")
    run(cache, "r0", "abef")
    publish(cache, "abcd")
    cache.checkpoint("r0")

    assert ages(cache, "created") == [{"cd"}, {"ab"}, {"ef"}]


# prompt_split


def test_publication_past_the_prompt_ends_a_node_there_with_priority_and_without_a_hit():
    cache = new_cache("prompt_split")
    run(cache, "r0", "abcdx", "yef", priority=3)
    cache.checkpoint("r0")

    prompt, output = marks(cache)["abcd"], marks(cache)["xyef"]
    assert (prompt.priority, output.priority) == (4, 3)
    assert (prompt.hits, output.hits) == (1, 1)
    assert prompt.stamp > output.stamp
    assert prompt.created == output.created
    assert cache.allowed == {"prompt_split": 1}
    assert cache.requests["r0"].anchor.depth == 4, "the lock is at the end of what was published"


def test_prompt_split_follows_the_other_allowances_of_splits():
    cache = new_cache(*ALLOWANCES[:3])
    publish(cache, "abcdx", "yef")

    assert ages(cache, "created") == [{"xyef"}, {"abcd"}]
    assert ages(cache, "stamp") == [{"xyef"}, {"abcd"}]
    assert cache.allowed == dict.fromkeys(ALLOWANCES[:3], 1)


def test_prompt_split_is_done_again_by_a_later_publication():
    cache = new_cache("prompt_split")
    publish(cache, "abx", "c")
    assert cache.allowed == {"prompt_split": 1}
    publish(cache, "abx", "c", priority=5)

    assert list(marks(cache)) == ["ab", "xc"]
    assert (marks(cache)["ab"].priority, marks(cache)["ab"].hits) == (6, 2)
    assert ages(cache, "stamp") == [{"xc"}, {"ab"}]
    assert cache.allowed == {"prompt_split": 2}


@pytest.mark.parametrize(
    ("prompt", "output", "changes"),
    [
        ("abcd", "", {}),  # nothing beyond it
        ("a", "bcd", {}),  # no whole page in it
        ("abcd", "e", {}),  # no whole page beyond it
        ("ab", "cd", {"key_units": "bigram"}),  # one pair, no whole page of pairs
    ],
)
def test_prompt_without_whole_pages_on_both_sides_splits_nothing(prompt, output, changes):
    cache = new_cache("prompt_split", **changes)
    publish(cache, prompt, output)

    assert len(cache.tree.nodes()) == 1
    assert cache.allowed == {}


def test_prompt_split_counts_pairs_in_bigram_mode():
    cache = new_cache("prompt_split", key_units="bigram")
    publish(cache, "abcde", "fghi")

    assert [len(node.edge) for node in cache.tree.nodes()] == [2, 2]
    cache = new_cache("prompt_split", key_units="bigram")
    publish(cache, "abcd", "efgh")

    assert [len(node.edge) for node in cache.tree.nodes()] == [1, 2]


def test_retraction_does_not_make_the_prompt_longer():
    cache = new_cache("prompt_split")
    run(cache, "r0", "abc", "defg")
    cache.retract("r0")
    cache.match("r0")
    cache.alloc([("r0", 7, "")])
    cache.commit("r0", 7, "")
    cache.release("r0")

    assert list(marks(cache)) == ["ab", "cdef"]


def test_prompt_split_of_a_locked_path_counts_the_lock_on_both_parts():
    cache = new_cache("prompt_split")
    run(cache, "r0", "ab", "cd")
    cache.checkpoint("r0")

    assert [cache.lock_counts()[node.end] for node in cache.tree.nodes()] == [1, 1]
    assert (cache.protected, cache.evictable) == (4, 0)


# page_nodes


def test_every_published_page_is_a_node_dated_from_the_top():
    cache = new_cache("page_nodes")
    publish(cache, "abcdef", priority=2)

    assert ages(cache, "created") == [{"ab"}, {"cd"}, {"ef"}]
    assert ages(cache, "stamp") == [{"ab", "cd", "ef"}]
    assert {(mark.hits, mark.priority) for mark in marks(cache).values()} == {(1, 2)}
    assert cache.allowed == {"page_nodes": 1}


def test_page_nodes_are_evicted_and_locked_one_by_one():
    cache = new_cache("page_nodes")
    publish(cache, "abcdef")
    cache.submit("r0", "abx", NS)
    cache.match("r0")

    assert len(cache.evictable_nodes()) == 1
    assert cache.evict(1) == [[6, 7]]
    assert cache.evict(100) == [[4, 5]]
    assert (cache.protected, cache.evictable) == (2, 0)


def test_page_nodes_are_hit_beyond_the_previous_publication_only():
    cache = new_cache("page_nodes")
    run(cache, "r0", "abcd", "ef")
    cache.checkpoint("r0")
    publish(cache, "abcdef")

    assert {edge: mark.hits for edge, mark in marks(cache).items()} == {"ab": 2, "cd": 2, "ef": 2}
    cache.release("r0")
    assert {mark.hits for mark in marks(cache).values()} == {2}


def test_publication_of_one_more_page_is_as_it_is_without_page_nodes():
    cache = new_cache("page_nodes")
    publish(cache, "ab")
    publish(cache, "abcd")

    assert cache.allowed == {}
    assert list(marks(cache)) == ["ab", "cd"]


# The choices that are left to the target


@pytest.mark.parametrize(
    ("allowances", "page_size", "slots"),
    [((), 2, 0), (("pages_overestimated",), 1, 0), (("pages_overestimated",), 2, 7)],
)
def test_generous_need_is_a_page_more_a_request(allowances, page_size, slots):
    cache = new_cache(*allowances, page_size=page_size)
    for name in ("r0", "r1"):
        cache.submit(name, "abc", NS)
        cache.match(name)

    assert cache.generous_need([("r0", 1, ""), ("r1", 2, "")]) == slots


def test_a_pass_that_takes_no_new_slot_needs_nothing_generously():
    cache = new_cache("pages_overestimated", n_pages=4)
    cache.submit("r0", "abc", NS)
    cache.match("r0")
    cache.alloc([("r0", 5, "xy")])
    cache.commit("r0", 3, "d")

    assert cache.generous_need([("r0", 2, "x")]) == 0
    assert cache.generous_need([("r0", 3, "xy")]) == 1 + cache.page_size


def test_model_itself_evicts_no_more_than_it_needs():
    cache = new_cache("pages_overestimated", "evicts_before_refusal", n_pages=4)
    for tokens in ("ab", "cd", "ef"):
        publish(cache, tokens)
    cache.submit("r0", "gh", NS)
    cache.match("r0")

    assert cache.alloc([("r0", 2, "")]).evicted == []
    assert cache.allowed == {}


def test_victims_are_listed_in_policy_order_without_a_change():
    cache = new_cache()
    for tokens in ("ab", "cd", "efgh"):
        publish(cache, tokens)
    look_up(cache, "abz")

    assert cache.victims_in_order() == [[4, 5], [6, 7, 8, 9], [2, 3]]
    assert cache.victims_in_order(2) == [[4, 5], [6, 7, 8, 9]]
    assert cache.victims_in_order(0) == []
    assert cache.evict(100) == [[4, 5], [6, 7, 8, 9], [2, 3]]


# tlru


def edges_evicted(cache, n=100):
    letters = {vertex.page: "".join(vertex.key) for vertex in cache.tree.vertices()}
    return ["".join(letters[slot // 2] for slot in slots[::2]) for slots in cache.evict(n)]


def test_tlru_evicts_what_begins_within_the_last_two_pages_first():
    """The long prefix is oldest; it begins too far in front of its end."""
    cache = new_cache(policy="tlru")
    publish(cache, "abcdef")
    publish(cache, "ghij")
    publish(cache, "kl")

    assert edges_evicted(cache) == ["ghij", "kl", "abcdef"]


def test_tlru_takes_the_tail_and_spares_what_it_hung_on():
    """Of a prefix of four pages: the tail begins at 3, the middle at 1, and 4 - 2 is 2."""
    cache = new_cache(policy="tlru")
    publish(cache, "abcdefgh")
    look_up(cache, "abz")
    look_up(cache, "abcdefz")
    publish(cache, "xy")
    history = {edge: mark.history for edge, mark in marks(cache).items()}

    assert history == {"ab": 4, "cdef": 4, "gh": 4, "xy": 1}
    assert edges_evicted(cache, 3) == ["gh", "xy"]
    assert marks(cache)["cdef"].history == 4, "it remembers the tail that is gone"
    publish(cache, "xy")
    assert edges_evicted(cache) == ["xy", "cdef", "ab"]


def test_tlru_history_grows_along_the_path_and_not_beside_it():
    cache = new_cache(policy="tlru")
    publish(cache, "abcd")
    publish(cache, "abef")
    publish(cache, "abefghij")

    assert {edge: mark.history for edge, mark in marks(cache).items()} == {"ab": 4, "cd": 2, "ef": 4, "ghij": 4}


def test_tlru_is_lru_within_both_groups():
    cache = new_cache(policy="tlru")
    for tokens in ("ab", "cd", "efghij", "klmnop"):
        publish(cache, tokens)
    look_up(cache, "abz")
    look_up(cache, "efghijz")

    assert edges_evicted(cache) == ["cd", "ab", "klmnop", "efghij"]
