"""Choices of an implementation that the model adopts, and those that it proves illegal."""

import pickle

import pytest

from kvlockstep.reference import Cache, Choice, IllegalChoice

NS = (None, None, ())


def new_cache():
    """A cache with two evictable leaves (slots 2 3 and 4 5) and r0, r1 matched."""
    cache = Cache(page_size=2, n_pages=5, n_rows=3, max_context_len=12)
    for tokens in ("abx", "cdx"):
        cache.submit("publisher", tokens, NS)
        cache.match("publisher")
        cache.alloc([("publisher", 3, "")])
        cache.commit("publisher", 3, "")
        cache.release("publisher")
    for name in ("r0", "r1"):
        cache.submit(name, "uvwxyz", NS)
        cache.match(name)
    return cache


def assert_illegal(cache, words, operation, *arguments):
    before = pickle.dumps(cache)

    with pytest.raises(IllegalChoice, match=words):
        getattr(cache, operation)(*arguments)

    assert pickle.dumps(cache) == before


def test_alloc_adopts_free_rows_and_pages():
    cache = new_cache()

    done = cache.alloc([("r0", 3, ""), ("r1", 1, "")], Choice({"r0": 3, "r1": 1}, {"r0": [5, 3], "r1": [4]}))

    assert done.write_sets == [[10, 11, 6], [8]]
    assert done.rows == {"r0": 3, "r1": 1}


def test_alloc_adopts_page_that_its_own_eviction_freed():
    cache = new_cache()
    batch = [("r0", 6, ""), ("r1", 1, "")]

    done = cache.alloc(batch, Choice({"r0": 1, "r1": 2}, {"r0": [3, 1, 4], "r1": [5]}))

    assert done.evicted == [[2, 3]]
    assert done.write_sets == [[6, 7, 2, 3, 8, 9], [10]]


def test_alloc_adopts_victims_out_of_policy_order():
    cache = new_cache()
    batch = [("r0", 6, ""), ("r1", 1, "")]
    choice = Choice({"r0": 1, "r1": 2}, {"r0": [3, 2, 4], "r1": [5]}, victims=[[4, 5]])

    assert cache.alloc(batch, choice).evicted == [[4, 5]]


def test_alloc_adopts_more_victims_than_needed():
    cache = new_cache()

    done = cache.alloc([("r0", 1, "")], Choice({"r0": 1}, {"r0": [2]}, victims=[[4, 5], [3, 2]]))

    assert done.evicted == [[4, 5], [2, 3]]
    assert cache.pages.free() == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice({"r0": 1}, {"r0": [3, 4], "r1": [5]}), r"rows chosen for \['r0'\], expected for \['r0', 'r1'\]"),
        (Choice({"r0": 1, "r1": 1}, {"r0": [3, 4], "r1": [5]}), "row 1 chosen for r0 and for r1"),
        (Choice({"r0": 0, "r1": 1}, {"r0": [3, 4], "r1": [5]}), "row 0 for r0 is not free"),
        (Choice({"r0": 1, "r1": 2}, {"r0": [3, 4], "r1": [4]}), "page 4 chosen for r0 and for r1"),
        (Choice({"r0": 1, "r1": 2}, {"r0": [3, 0], "r1": [5]}), "page 0 for r0 is not free"),
        (Choice({"r0": 1, "r1": 2}, {"r0": [3, 1], "r1": [5]}), "page 1 for r0 is not free"),
        (Choice({"r0": 1, "r1": 2}, {"r0": [3], "r1": [5]}), "1 new pages chosen for r0, expected 2"),
        (Choice({"r0": 1, "r1": 2}, {"r0": [3, 4, 5], "r1": [5]}), "3 new pages chosen for r0, expected 2"),
        (Choice({"r0": 1, "r1": 2}, {"r0": [3, 4]}), "0 new pages chosen for r1, expected 1"),
        (Choice({"r0": 1, "r1": 2}, {"r0": [3, 4], "r1": [5], "r2": []}), "r2, which is not in the batch"),
        (Choice({"r0": 1, "r1": 2}, {"r0": [3, 4], "r1": [5]}, victims=[[2]]), r"victim 0 has slots \[2\]"),
    ],
)
def test_alloc_proves_choice_illegal(choice, words):
    assert_illegal(new_cache(), words, "alloc", [("r0", 3, ""), ("r1", 1, "")], choice)


def test_alloc_proves_row_of_running_request_illegal():
    cache = new_cache()
    cache.alloc([("r0", 1, "")])

    assert_illegal(cache, "row 1 for r1 is not free", "alloc", [("r1", 1, "")], Choice({"r1": 1}, {"r1": [4]}))


def test_later_chunk_may_not_change_its_row():
    cache = new_cache()
    cache.alloc([("r0", 2, "")])
    cache.commit("r0", 2, "")

    assert_illegal(cache, "rows chosen for", "alloc", [("r0", 1, "")], Choice({"r0": 2}, {"r0": [4]}))
    cache.alloc([("r0", 1, "")], Choice({}, {"r0": [5]}))


def test_alloc_proves_too_few_victims_illegal():
    batch = [("r0", 6, ""), ("r1", 1, "")]
    choice = Choice({"r0": 1, "r1": 2}, {"r0": [3, 1, 4], "r1": [5]}, victims=[])

    assert_illegal(new_cache(), "victims free 0 pages, expected 1 of 2 evictable", "alloc", batch, choice)


def test_refusal_comes_before_choice():
    cache = new_cache()

    assert cache.refusal("alloc", [("r9", 1, "")], Choice()).kind == "UnknownRequest"


def test_evict_adopts_victims():
    cache = new_cache()

    assert cache.evict(2, [[4, 5]]) == [[4, 5]]
    assert cache.evict(9, [[2, 3]]) == [[2, 3]]


def test_evict_proves_victims_illegal():
    cache = new_cache()

    assert_illegal(cache, "victims free 1 pages, expected 2 of 2", "evict", 4, [[2, 3]])
    assert_illegal(cache, r"victim 1 has slots \[2, 3\]", "evict", 4, [[2, 3], [2, 3]])
    assert_illegal(cache, r"victim 0 has slots \[2, 4\]", "evict", 2, [[2, 4]])


def test_victims_are_legal_at_their_turn():
    cache = Cache(page_size=1, n_pages=4, n_rows=2, max_context_len=8)
    for tokens in ("ab", "ac"):
        cache.submit("publisher", tokens, NS)
        cache.match("publisher")
        cache.alloc([("publisher", cache.requests["publisher"].uncomputed, "")])
        cache.commit("publisher", cache.requests["publisher"].in_flight_n, "")
        cache.release("publisher")

    assert_illegal(cache, "victim 1 has slots", "evict", 3, [[2], [1], [3]])
    assert cache.evict(3, [[3], [2], [1]]) == [[3], [2], [1]]


def test_parent_of_a_victim_with_several_pages_is_legal_next():
    cache = Cache(page_size=1, n_pages=4, n_rows=2, max_context_len=8)
    for tokens in ("a", "abc"):
        cache.submit("publisher", tokens, NS)
        cache.match("publisher")
        cache.alloc([("publisher", cache.requests["publisher"].uncomputed, "")])
        cache.commit("publisher", cache.requests["publisher"].in_flight_n, "")
        cache.release("publisher")

    assert cache.evict(3, [[2, 3], [1]]) == [[2, 3], [1]]


def test_locked_node_is_no_legal_victim():
    cache = new_cache()
    cache.submit("r2", "abx", NS)
    cache.match("r2")

    assert_illegal(cache, r"victim 0 has slots \[2, 3\]", "adopt_eviction", [[2, 3]])


def test_adopt_eviction_follows_target_that_evicted_before_refusing():
    cache = new_cache()

    cache.adopt_eviction([[4, 5]])

    assert cache.pages.free() == [2, 3, 4, 5]
    assert cache.pages.generations[2] == 2
