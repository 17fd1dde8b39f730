"""The prefix tree alone, interpreted and compiled: pages of 2, letters for tokens."""

import importlib
import itertools
from array import array

import pytest

from kvlockstep.gpu_impl.tree import ROOT

SPACE = (None, None, ())
P = 2
HOW = ["interpreted", pytest.param("compiled", marks=pytest.mark.needs("compiled"))]


def key_of(letters):
    return array("i", [ord(letter) for letter in letters]).tobytes()


def publish(tree, letters, first_page, namespace=SPACE, priority=0):
    """Publish from the root and unlock; return the canonical pages of what was there already."""
    n_pages = (len(letters) - bool(tree.overlap_bytes)) // P
    pages = array("i", range(first_page, first_page + n_pages))
    node, canonical = tree.publish(ROOT, namespace, key_of(letters), pages, 0, priority)
    tree.unlock(node)
    return canonical.tolist()


def find(tree, letters, namespace=SPACE, lock=False):
    n_pages = (len(letters) - bool(tree.overlap_bytes)) // P
    node, pages = tree.match(namespace, key_of(letters), n_pages, lock)
    return node, pages.tolist()


def paths(tree):
    """Spell every node from the root: {path: (edge length in pages, lock_ref, stamp, created, hits, priority)}."""
    found, todo = {}, [(ROOT, "")]
    while todo:
        parent, prefix = todo.pop()
        for node in (tree.children[parent] or {}).values():
            n_pages = len(tree.pages[node]) // 4
            path = prefix + "".join(chr(token) for token in array("i", tree.edge[node])[: n_pages * P])
            fields = (tree.lock_ref, tree.stamp, tree.created, tree.hits, tree.priority)
            found[path] = (n_pages, *(column[node] for column in fields))
            todo.append((node, path))
            assert tree.parent[node] == parent
            assert tree.end[node] == tree.end[parent] + n_pages
    return found


@pytest.fixture(params=HOW)
def tree_type(request):
    home = "kvlockstep.gpu_impl" + (".compiled" if request.param == "compiled" else "")
    return importlib.import_module(f"{home}.tree").PrefixTree


@pytest.fixture
def tree(tree_type):
    return tree_type(page_size=P, bigram=False, policy="lru")


def test_match_finds_longest_published_prefix(tree):
    publish(tree, "abcdef", 1)

    assert find(tree, "abcdxx")[1] == [1, 2]
    assert find(tree, "abcdefgh")[1] == [1, 2, 3]
    assert find(tree, "axcdef")[1] == []


def test_match_splits_edge_where_it_ends(tree):
    publish(tree, "abcdef", 1)
    before = paths(tree)
    find(tree, "abcd")

    assert list(before) == ["abcdef"]
    assert {path: fields[0] for path, fields in paths(tree).items()} == {"abcd": 2, "abcdef": 1}


def test_split_keeps_counts_and_the_lower_stamp(tree):
    publish(tree, "abcdef", 1, priority=4)
    node, _ = find(tree, "abcdef", lock=True)
    find(tree, "ab")

    upper, lower = paths(tree)["ab"], paths(tree)["abcdef"]
    assert upper == (1, 1, 3, 1, 1, 4)  # pages, lock_ref, stamp, created, hits, priority
    assert lower == (2, 1, 2, 1, 1, 4)
    assert tree.protected == 3
    tree.unlock(node)
    assert (tree.protected, tree.evictable) == (0, 3)


@pytest.mark.parametrize(("n_pages", "n_shared"), list(itertools.combinations(range(9, 0, -1), 2)))
def test_match_stops_at_page_boundary_inside_long_edge(tree, n_pages, n_shared):
    letters = "".join(chr(ord("A") + i) for i in range(2 * n_pages))
    publish(tree, letters, 1)
    shared = letters[: 2 * n_shared + 1] + "!" + letters[2 * n_shared + 2 :]

    assert find(tree, shared)[1] == list(range(1, n_shared + 1))


def test_publish_returns_canonical_pages_for_duplicates(tree):
    publish(tree, "abcd", 1)

    assert publish(tree, "abxy", 5) == [1]
    assert find(tree, "abxy")[1] == [1, 6]


def test_publish_counts_hits_beyond_inserted_only(tree):
    pages = array("i", [1, 2])
    node, _ = tree.publish(ROOT, SPACE, key_of("abcd"), pages, 0, 0)
    tree.publish(node, SPACE, key_of("ef"), array("i", [3]), 2, 0)
    publish(tree, "abcd", 7)

    assert {path: fields[4] for path, fields in paths(tree).items()} == {"abcd": 2, "abcdef": 1}


def test_publish_keeps_a_copy_of_the_pages(tree):
    pages = array("i", [1, 2])
    tree.publish(ROOT, SPACE, key_of("abcd"), pages, 0, 0)
    pages[0] = 9

    assert find(tree, "abcd")[1] == [1, 2]


def test_namespaces_are_compared_part_by_part(tree):
    spaces = [SPACE, ("", None, ()), (None, "", ()), ("a", "bc", ()), ("ab", "c", ()), ("a", None, ("b",))]
    for n, space in enumerate(spaces):
        publish(tree, "abcd", 10 * n + 1, space)

    for n, space in enumerate(spaces):
        assert find(tree, "abcd", space)[1] == [10 * n + 1, 10 * n + 2]
    assert find(tree, "abcd", ("abc", None, ()))[1] == []


def test_namespaces_leave_no_residue_after_their_nodes_are_gone(tree):
    for n in range(50):
        find(tree, "ab", (f"adapter-{n}", None, ()))
        publish(tree, "abcdef", 1, (f"adapter-{n}", None, ()))
        find(tree, "ab", (f"adapter-{n}", None, ()))
        while tree.evict_one() is not None:
            pass

    assert tree.children[ROOT] is None
    assert set(tree.namespace) == {None}
    assert set(tree.edge) == set(tree.pages) == {b""}
    assert len(tree.edge) <= 3  # numbers of removed nodes are used again


def test_evict_makes_parent_a_victim(tree):
    publish(tree, "abcdef", 1)
    find(tree, "abcd")

    assert [tree.evict_one().tolist() for _ in range(2)] == [[3], [1, 2]]
    assert tree.evict_one() is None


def test_evict_skips_locked_path(tree):
    publish(tree, "abcd", 1)
    publish(tree, "abxy", 5)
    node, _ = find(tree, "abcd", lock=True)

    assert tree.evict_one().tolist() == [6]
    assert tree.evict_one() is None
    tree.unlock(node)
    assert tree.evict_one().tolist() == [2]


def test_lock_covers_the_whole_path_and_spares_the_root(tree):
    publish(tree, "abcdef", 1)
    find(tree, "ab")
    first, _ = find(tree, "abcdef", lock=True)
    second, _ = find(tree, "ab", lock=True)

    assert {path: fields[1] for path, fields in paths(tree).items()} == {"ab": 2, "abcdef": 1}
    assert tree.lock_ref[ROOT] == 0
    tree.unlock(first)
    assert (tree.protected, tree.evictable) == (1, 2)
    tree.unlock(second)
    assert (tree.protected, tree.evictable) == (0, 3)


def test_bigram_edge_overlaps_the_next_one_by_a_token(tree_type):
    tree = tree_type(page_size=P, bigram=True, policy="lru")
    publish(tree, "abcde", 1)  # pairs ab bc | cd de

    assert find(tree, "abcxy")[1] == [1]
    assert sorted(map(len, filter(None, tree.edge))) == [12, 12]
    assert find(tree, "abcde")[1] == [1, 2]
    assert find(tree, "abxde")[1] == []


def test_chain_of_100000_nodes_is_matched_locked_and_evicted(tree_type):
    depth = 100_000
    tree = tree_type(page_size=1, bigram=False, policy="lru")
    tokens = array("i", range(depth))
    node = ROOT
    for token in range(depth):
        node = tree._add_child(node, SPACE, array("i", [token]).tobytes(), array("i", [token + 1]).tobytes(), 0)
    tree._requeue(node)

    end, pages = tree.match(SPACE, tokens.tobytes(), depth, lock=True)
    assert (end, len(pages)) == (node, depth)
    assert (tree.evictable, tree.protected) == (0, depth)
    assert tree.evict_one() is None
    deeper, _ = tree.publish(end, SPACE, array("i", [depth]).tobytes(), array("i", [depth + 1]), 0, 0)
    tree.unlock(deeper)
    assert [tree.evict_one()[0] for _ in range(depth + 1)] == list(range(depth + 1, 0, -1))
    assert tree.evictable == 0


def test_queue_of_victims_is_bounded_when_one_leaf_is_used_often(tree):
    publish(tree, "abcd", 1)
    publish(tree, "abxy", 5)
    for _ in range(20_000):
        node, _ = find(tree, "abcd", lock=True)
        tree.unlock(node)

        assert len(tree.victims) <= 2

    assert tree.evict_one().tolist() == [6]


@pytest.mark.needs("compiled")
def test_queue_of_victims_is_bounded_after_a_million_locks():
    tree = importlib.import_module("kvlockstep.gpu_impl.compiled.tree").PrefixTree(1, False, "lru")
    key = key_of("a")
    tree.publish(ROOT, SPACE, key, array("i", [1]), 0, 0)
    tree.unlock(1)
    for _ in range(1_000_000):
        node, _ = tree.match(SPACE, key, 1, True)
        tree.unlock(node)

    assert len(tree.victims) == 1
    assert tree.tick == 1_000_001
