"""What the operations of the reference model do to lengths, rows, pages and locks."""

from kvlockstep.reference import Cache
from kvlockstep.reference.intervals import OwnershipInterval
from kvlockstep.reference.pages import TREE

NS = (None, None, ())


def new_cache(**changes):
    shape = {"page_size": 2, "n_pages": 8, "n_rows": 3, "max_context_len": 12} | changes
    return Cache(**shape)


def run(cache, name, tokens, n=None, namespace=NS, sampled="", **facts):
    """Submit, match and compute ``n`` tokens (all by default) in one pass; return the request."""
    cache.submit(name, tokens, namespace, **facts)
    cache.match(name)
    cache.alloc([(name, n or cache.requests[name].uncomputed, "")])
    cache.commit(name, cache.requests[name].in_flight_n, sampled)
    return cache.requests[name]


def publish(cache, tokens, namespace=NS):
    """Leave ``tokens`` in the tree, with no request on them."""
    run(cache, "publisher", tokens, namespace=namespace)
    cache.release("publisher")


def row_of(cache, name):
    r = cache.requests[name]
    return cache.rows.slots(r.row, 0, r.allocated_len)


def lengths(r):
    return r.protected_len, r.committed_len, r.allocated_len


def test_match_leaves_one_token_to_compute():
    cache = new_cache()
    publish(cache, "abcd")
    cache.submit("r0", "abcd", NS)
    cache.submit("r1", "abcdx", NS)

    assert cache.match("r0") == 2
    assert cache.match("r1") == 4


def test_match_of_nothing_anchors_at_root():
    cache = new_cache()
    cache.submit("r0", "a", NS)

    assert cache.match("r0") == 0
    assert cache.requests["r0"].state == "MATCHED"
    assert cache.requests["r0"].anchor is cache.tree.root
    assert cache.lock_counts() == {}


def test_match_keeps_namespaces_apart():
    cache = new_cache()
    publish(cache, "abcd", ("a", "bc", ()))
    others = [("ab", "c", ()), ("a", None, ()), ("a", "", ()), ("a", "bc", ("img",)), (None, "bc", ()), NS]
    for i, namespace in enumerate(others):
        cache.submit(f"r{i}", "abcde", namespace)

        assert cache.match(f"r{i}") == 0
    cache.submit("same", "abcde", ("a", "bc", ()))
    assert cache.match("same") == 4


def test_private_request_neither_matches_nor_publishes():
    cache = new_cache()
    publish(cache, "abcd")
    tick = cache.tree.nodes()[0].end.mark.stamp

    r = run(cache, "r0", "abcde", private=True)
    cache.checkpoint("r0")

    assert lengths(r) == (0, 5, 5)
    cache.release("r0")
    assert [node.end.pages() for node in cache.tree.nodes()] == [[1, 2]]
    assert cache.tree.nodes()[0].end.mark.stamp == tick
    assert cache.pages.n_free == 6


def test_peek_splits_and_stamps_but_locks_nothing():
    cache = new_cache()
    publish(cache, "abcd")
    cache.submit("r0", "abxy", NS)

    assert cache.peek("r0") == 2
    assert cache.requests["r0"].state == "NEW"
    assert cache.evictable == 4
    upper, lower = cache.tree.nodes()
    assert (upper.end.pages(), lower.end.pages()) == ([1], [1, 2])
    assert upper.end.mark.stamp > lower.end.mark.stamp


def test_match_may_find_less_than_peek_did():
    cache = new_cache()
    publish(cache, "abcd")
    cache.submit("r0", "abcde", NS)

    assert cache.peek("r0") == 4
    cache.evict(1)
    assert cache.match("r0") == 0


def test_alloc_writes_prefix_then_new_slots():
    cache = new_cache()
    publish(cache, "abcd")
    cache.submit("r0", "abcdefg", NS)
    cache.match("r0")

    done = cache.alloc([("r0", 2, "")])

    assert done.write_sets == [[6, 7]]
    assert done.rows == {"r0": 1}
    assert row_of(cache, "r0") == [2, 3, 4, 5, 6, 7]


def test_alloc_uses_slack_of_own_last_page_first():
    cache = new_cache()
    run(cache, "r0", "abcdef", n=3)
    run(cache, "r1", "xyz")

    done = cache.alloc([("r0", 2, "")])

    assert done.write_sets == [[5, 10]]
    assert cache.requests["r0"].row == 1


def test_alloc_takes_no_page_when_over_allocated_tail_suffices():
    cache = new_cache()
    cache.submit("r0", "abc", NS)
    cache.match("r0")
    cache.alloc([("r0", 6, "xyz")])
    cache.commit("r0", 4, "d")
    r = cache.requests["r0"]
    assert lengths(r) == (0, 4, 6)
    assert "".join(r.tokens) == "abcxd"
    n_free = cache.pages.n_free

    done = cache.alloc([("r0", 1, "")])

    assert done.write_sets == [[6]]
    assert cache.pages.n_free == n_free
    assert r.allocated_len == 6


def test_alloc_gives_batch_disjoint_write_sets():
    cache = new_cache()
    for name in ("r0", "r1"):
        cache.submit(name, "abcde", NS)
        cache.match(name)

    done = cache.alloc([("r1", 3, ""), ("r0", 5, "")])

    assert done.write_sets == [[2, 3, 4], [6, 7, 8, 9, 10]]
    assert done.rows == {"r1": 1, "r0": 2}


def test_alloc_evicts_only_what_is_missing():
    cache = new_cache(n_pages=3)
    publish(cache, "abx")
    publish(cache, "cdx")
    cache.submit("r0", "efgh", NS)
    cache.match("r0")

    done = cache.alloc([("r0", 3, "")])

    assert done.evicted == [[2, 3]]
    assert done.write_sets == [[2, 3, 6]]
    assert [node.end.pages() for node in cache.tree.nodes()] == [[2]]


def test_pages_needed_counts_pages_of_whole_batch():
    cache = new_cache()
    run(cache, "r0", "abcdefgh", n=3)
    cache.submit("r1", "xyz", NS)
    cache.match("r1")

    assert cache.pages_needed([("r0", 1, ""), ("r1", 3, "")]) == 2
    assert cache.pages_needed([("r0", 2, ""), ("r1", 3, "")]) == 3


def test_over_allocated_tail_of_one_request_lowers_no_need_of_another():
    cache = new_cache()
    for name in ("r0", "r1"):
        cache.submit(name, "abc", NS)
        cache.match(name)
    cache.alloc([("r0", 9, "uvwxyz")])
    cache.commit("r0", 3, "s")

    assert cache.pages_needed([("r0", 1, ""), ("r1", 3, "")]) == 2


def test_alloc_succeeds_when_free_and_evictable_pages_just_suffice():
    cache = new_cache(n_pages=3)
    publish(cache, "abx")
    publish(cache, "cdx")
    cache.submit("r0", "uvwxyz", NS)
    cache.match("r0")

    done = cache.alloc([("r0", 6, "")])

    assert done.evicted == [[2, 3], [4, 5]]
    assert cache.pages.n_free == 0


def test_commit_keeps_accepted_drafts_and_the_sample():
    cache = new_cache()
    cache.submit("r0", "ab", NS)
    cache.match("r0")
    cache.alloc([("r0", 5, "xyz")])

    cache.commit("r0", 3, "s")

    r = cache.requests["r0"]
    assert "".join(r.tokens) == "abxs"
    assert lengths(r) == (0, 3, 5)
    assert r.drafts == []


def test_commit_of_discarded_pass_moves_nothing_but_state():
    cache = new_cache()
    cache.submit("r0", "ab", NS)
    cache.match("r0")
    cache.alloc([("r0", 3, "x")])

    cache.commit("r0", 0, "")

    r = cache.requests["r0"]
    assert ("".join(r.tokens), r.state, lengths(r)) == ("ab", "RUNNING", (0, 0, 3))
    assert cache.alloc([("r0", 2, "")]).write_sets == [[2, 3]]


def test_checkpoint_keeps_tail_when_page_is_partial():
    cache = new_cache()
    r = run(cache, "r0", "abcde", sampled="f")

    cache.checkpoint("r0")

    assert lengths(r) == (4, 5, 5)
    assert r.intervals() == [OwnershipInterval(0, 4, "tree"), OwnershipInterval(4, 5, "request")]
    assert cache.pages.owners == {1: TREE, 2: TREE, 3: "r0"}
    assert row_of(cache, "r0") == [2, 3, 4, 5, 6]


def test_checkpoint_frees_duplicates_and_rewrites_row():
    cache = new_cache()
    for name in ("r0", "r1"):
        cache.submit(name, "abcde", NS)
        cache.match(name)
    cache.alloc([("r0", 5, ""), ("r1", 5, "")])
    cache.commit("r0", 5, "")
    cache.commit("r1", 5, "")
    cache.checkpoint("r0")
    assert row_of(cache, "r1") == [8, 9, 10, 11, 12]

    cache.checkpoint("r1")

    assert row_of(cache, "r1") == [2, 3, 4, 5, 12]
    assert cache.pages.free() == [4, 5, 7, 8]
    assert cache.pages.generations == [0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert cache.lock_counts()[cache.requests["r1"].anchor] == 2


def test_checkpoint_publishes_rest_behind_duplicates_as_one_child():
    cache = new_cache()
    cache.submit("r1", "abcdef", NS)
    cache.match("r1")
    publish(cache, "abx")
    cache.alloc([("r1", 6, "")])
    cache.commit("r1", 6, "")

    cache.checkpoint("r1")

    assert row_of(cache, "r1") == [2, 3, 6, 7, 8, 9]
    assert [[v.page for v in node.edge] for node in cache.tree.nodes()] == [[1], [3, 4]]
    assert cache.pages.free() == [2, 5, 6, 7, 8]


def test_checkpoint_splits_edge_where_publication_ends():
    cache = new_cache()
    cache.submit("r0", "abcd", NS)
    cache.match("r0")
    publish(cache, "abcd")
    cache.alloc([("r0", 3, "")])
    cache.commit("r0", 3, "")

    cache.checkpoint("r0")

    assert [[v.page for v in node.edge] for node in cache.tree.nodes()] == [[1], [2]]
    assert [cache.lock_counts().get(node.end, 0) for node in cache.tree.nodes()] == [1, 0]


def test_checkpoint_never_extends_a_leaf():
    cache = new_cache()
    run(cache, "r0", "abcdef", n=2)
    cache.checkpoint("r0")
    cache.alloc([("r0", 4, "")])
    cache.commit("r0", 4, "")

    cache.checkpoint("r0")

    assert [[v.page for v in node.edge] for node in cache.tree.nodes()] == [[1], [2, 3]]


def test_release_keeps_published_pages_and_frees_the_rest():
    cache = new_cache()
    run(cache, "r0", "abcde")

    cache.release("r0")

    assert cache.requests == {}
    assert cache.pages.owners == {1: TREE, 2: TREE}
    assert cache.rows.free() == [1, 2, 3]
    assert (cache.available, cache.evictable, cache.protected) == (12, 4, 0)


def test_release_frees_over_allocated_tail():
    cache = new_cache()
    cache.submit("r0", "ab", NS)
    cache.match("r0")
    cache.alloc([("r0", 7, "vwxyz")])
    cache.commit("r0", 2, "s")

    cache.release("r0")

    assert cache.pages.owners == {1: TREE}
    assert cache.pages.generations == [0, 0, 1, 1, 1, 0, 0, 0, 0]


def test_abort_publishes_nothing():
    cache = new_cache()
    publish(cache, "abx")
    run(cache, "r0", "abcdef")

    cache.abort("r0")

    assert [node.end.pages() for node in cache.tree.nodes()] == [[1]]
    assert (cache.available, cache.evictable, cache.protected) == (14, 2, 0)


def test_abort_in_flight_waits_for_the_pass():
    cache = new_cache()
    publish(cache, "abx")
    cache.submit("r0", "abcd", NS)
    cache.match("r0")
    cache.alloc([("r0", 2, "")])

    cache.abort("r0")
    cache.abort("r0")

    assert cache.requests["r0"].state == "IN_FLIGHT"
    assert (cache.available, cache.protected, cache.rows.free()) == (12, 2, [2, 3])
    cache.commit("r0", 2, "z")
    assert cache.requests == {}
    assert (cache.available, cache.evictable, cache.protected) == (14, 2, 0)
    assert cache.rows.free() == [1, 2, 3]


def test_retract_keeps_tokens_and_forgets_the_rest():
    cache = new_cache()
    run(cache, "r0", "ab", sampled="s", priority=3)

    cache.retract("r0")

    r = cache.requests["r0"]
    assert ("".join(r.tokens), r.state, lengths(r), r.row, r.priority) == ("abs", "NEW", (0, 0, 0), None, 3)
    assert cache.tree.nodes() == []
    assert cache.pages.n_free == 8


def test_retract_with_publish_lets_request_find_its_own_pages():
    cache = new_cache()
    run(cache, "r0", "abcd", sampled="e")

    cache.retract("r0", publish=True)

    assert cache.evictable == 4
    assert cache.match("r0") == 4


def test_retract_of_matched_request_publishes_nothing():
    cache = new_cache()
    publish(cache, "abcd")
    cache.submit("r0", "abcde", NS)
    cache.match("r0")
    stamp, hits = cache.tree.nodes()[0].end.mark.stamp, cache.tree.nodes()[0].end.mark.hits

    cache.retract("r0", publish=True)

    mark = cache.tree.nodes()[0].end.mark
    assert (mark.stamp, mark.hits) == (stamp, hits)
    assert cache.protected == 0


def test_retracted_request_matches_again_when_context_is_overfull():
    cache = new_cache(max_context_len=4)
    run(cache, "r0", "abcd", sampled="e")
    assert len(cache.requests["r0"].tokens) == 5

    cache.retract("r0", publish=True)

    assert cache.match("r0") == 4


def test_reset_empties_tree_and_keeps_waiting_requests():
    cache = new_cache()
    publish(cache, "abcd")
    cache.submit("r0", "abcd", NS)

    cache.reset()

    assert cache.pages.free() == list(range(1, 9))
    assert cache.match("r0") == 0


def test_bigram_match_uses_pairs_of_all_tokens_but_the_last():
    cache = new_cache(key_units="bigram")
    publish(cache, "abcdef")
    assert [node.end.pages() for node in cache.tree.nodes()] == [[1, 2]]
    for name, tokens, found in [("r0", "abcde", 2), ("r1", "abcdef", 4), ("r2", "abx", 0), ("r3", "ab", 0)]:
        cache.submit(name, tokens, NS)

        assert cache.match(name) == found


def test_bigram_publication_leaves_last_whole_page_unpublished():
    cache = new_cache(key_units="bigram")
    r = run(cache, "r0", "abcd", sampled="e")

    cache.checkpoint("r0")
    assert lengths(r) == (2, 4, 4)

    cache.release("r0")
    assert cache.pages.owners == {1: TREE}


def test_bigram_checkpoint_keeps_protected_length_when_nothing_was_computed():
    cache = new_cache(key_units="bigram")
    publish(cache, "abcdef")
    cache.submit("r0", "abcdef", NS)
    cache.match("r0")
    cache.alloc([("r0", 2, "")])
    cache.commit("r0", 0, "")
    stamp = cache.requests["r0"].anchor.mark.stamp

    cache.checkpoint("r0")

    assert lengths(cache.requests["r0"]) == (4, 4, 6)
    assert cache.requests["r0"].anchor.mark.stamp == stamp + 1
    assert cache.requests["r0"].anchor.mark.hits == 2


def test_cache_without_sharing_prefills_in_chunks_and_frees_everything():
    cache = new_cache(prefix_sharing=False)
    run(cache, "r0", "abcdef", n=3)
    cache.checkpoint("r0")
    assert cache.alloc([("r0", 3, "")]).write_sets == [[5, 6, 7]]
    cache.commit("r0", 3, "")
    cache.submit("r1", "abcdef", NS)

    cache.release("r0")

    assert cache.tree.nodes() == []
    assert cache.pages.n_free == 8
    assert cache.match("r1") == 0
