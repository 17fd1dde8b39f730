"""When the generation of a page or row is raised, and when not."""

from kvlockstep.reference import Cache

NS = (None, None, ())


def new_cache():
    return Cache(page_size=2, n_pages=3, n_rows=2, max_context_len=6)


def run(cache, name, tokens):
    cache.submit(name, tokens, NS)
    cache.match(name)
    cache.alloc([(name, cache.requests[name].uncomputed, "")])
    cache.commit(name, cache.requests[name].in_flight_n, "")


def generations(cache):
    return cache.pages.generations[1:], cache.rows.generations[1:]


def test_publishing_raises_no_generation():
    cache = new_cache()
    run(cache, "r0", "abc")

    cache.checkpoint("r0")

    assert generations(cache) == ([0, 0, 0], [0, 0])


def test_release_raises_row_and_unpublished_pages():
    cache = new_cache()
    run(cache, "r0", "abc")

    cache.release("r0")

    assert generations(cache) == ([0, 1, 0], [1, 0])


def test_abort_raises_row_and_pages_once_it_takes_effect():
    cache = new_cache()
    cache.submit("r0", "abc", NS)
    cache.match("r0")
    cache.alloc([("r0", 3, "")])

    cache.abort("r0")
    assert generations(cache) == ([0, 0, 0], [0, 0])

    cache.commit("r0", 3, "")
    assert generations(cache) == ([1, 1, 0], [1, 0])


def test_retract_raises_row_and_pages():
    cache = new_cache()
    run(cache, "r0", "abc")

    cache.retract("r0")

    assert generations(cache) == ([1, 1, 0], [1, 0])


def test_retract_of_request_without_row_raises_none():
    cache = new_cache()
    cache.submit("r0", "abc", NS)
    cache.match("r0")

    cache.retract("r0")

    assert generations(cache) == ([0, 0, 0], [0, 0])


def test_eviction_raises_pages_of_victims():
    cache = new_cache()
    run(cache, "r0", "ab")
    cache.release("r0")

    cache.evict(1)

    assert generations(cache) == ([1, 0, 0], [1, 0])


def test_reset_raises_pages_that_the_tree_held_only():
    cache = new_cache()
    run(cache, "r0", "abc")
    cache.release("r0")

    cache.reset()

    assert generations(cache) == ([1, 1, 0], [1, 0])


def test_refused_alloc_raises_no_generation():
    cache = new_cache()
    run(cache, "r0", "ab")
    cache.release("r0")
    for name in ("r1", "r2"):
        cache.submit(name, "xyxyxy", NS)
        cache.match(name)

    assert cache.refusal("alloc", [("r1", 6, ""), ("r2", 6, "")]).kind == "OutOfPages"
    assert generations(cache) == ([0, 0, 0], [1, 0])
