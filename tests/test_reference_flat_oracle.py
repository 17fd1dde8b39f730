"""The model's tree against a second reading of SPEC section 4 that has no tree in it.

The oracle keeps one entry a published page, keyed by (namespace, all units up to there), and a set of
places where a node ends. Hits are counted as SPEC words them: as the set of admissions that published
through a page. Stamps, priorities, creation and victims follow from the entries by brute force.
"""

import random
from itertools import pairwise

import pytest

from kvlockstep.reference import Cache

KINDS = (
    ["submit", "match", "alloc", "commit"] * 3 + ["checkpoint", "release"] * 2 + ["abort", "retract", "peek", "evict"]
)
NAMESPACES = [(None, None, ()), ("", None, ()), (None, "", ())]


class FlatOracle:
    def __init__(self, page_size, key_units, policy):
        self.page_size, self.key_units, self.policy = page_size, key_units, policy
        self.pages = {}  # path -> {page, stamp, created, admissions, priority}
        self.ends = set()  # paths at which a node ends
        self.admission = {}  # request -> number of its current admission
        self.admissions = 0
        self.tick = 0

    def path(self, r, n_tokens, n_pages):
        """Spell the first pages of a request that ``n_tokens`` tokens cover in full."""
        tokens = r.tokens[:n_tokens]
        units = tokens if self.key_units == "token" else list(pairwise(tokens))
        whole = len(units) // self.page_size if n_pages is None else n_pages
        return tuple([r.namespace] + units[: whole * self.page_size])

    def prefixes(self, path):
        return [path[:end] for end in range(1 + self.page_size, len(path) + 1, self.page_size)]

    def touch(self, path):
        self.tick += 1
        if len(path) > 1:
            self.ends.add(path)
        for prefix in self.prefixes(path):
            self.pages[prefix]["stamp"] = self.tick

    def find(self, r):
        path = self.path(r, len(r.tokens) - 1, None)
        while len(path) > 1 and path not in self.pages:
            path = path[: -self.page_size]
        self.touch(path)
        return len(path) - 1

    def match(self, r):
        self.admissions += 1
        self.admission[r.request] = self.admissions
        return self.find(r)

    def publish(self, r, protected_len, row_pages):
        path = self.path(r, r.committed_len, None)
        if len(path) - 1 < protected_len:
            path = self.path(r, len(r.tokens), protected_len // self.page_size)
        diverged = None
        for i, prefix in enumerate(self.prefixes(path)):
            if prefix not in self.pages:
                if diverged is None:
                    diverged = prefix[: -self.page_size]
                self.pages[prefix] = {"page": row_pages[i], "created": self.tick + 1, "priority": -99, "through": set()}
        if diverged is not None and len(diverged) > 1:
            self.ends.add(diverged)
        self.touch(path)
        for prefix in self.prefixes(path):
            self.pages[prefix]["through"].add(self.admission[r.request])
            self.pages[prefix]["priority"] = max(self.pages[prefix]["priority"], r.priority)

    def edge(self, end):
        edge = [end]
        while len(edge[-1]) > 1 + self.page_size and edge[-1][: -self.page_size] not in self.ends:
            edge.append(edge[-1][: -self.page_size])
        return edge[::-1]

    def leaves(self, locked):
        """Ends of nodes that are below nobody's lock and above nothing."""
        return [
            end
            for end in self.ends
            if not any(lock[: len(end)] == end for lock in locked)
            and not any(other != end and other[: len(end)] == end for other in self.pages)
        ]

    def evict(self, n_slots, locked):
        freed = []
        while sum(map(len, freed)) * self.page_size < n_slots and (leaves := self.leaves(locked)):
            end = min(leaves, key=self.rank)
            edge = self.edge(end)
            freed.append([self.pages.pop(path)["page"] for path in edge])
            self.ends.discard(end)
        return freed

    def rank(self, end):
        page = self.pages[end]
        hits, stamp, created = len(page["through"]), page["stamp"], page["created"]
        return {
            "lru": [stamp],
            "mru": [-stamp],
            "fifo": [created],
            "filo": [-created],
            "lfu": [hits, stamp],
            "slru": [hits > 1, stamp],
            "priority": [page["priority"], stamp],
        }[self.policy]


def assert_trees_agree(cache, oracle):
    seen = {}
    for node in cache.tree.nodes():
        path = (node.end.namespace,) + tuple(unit for vertex in node.end.path() for unit in vertex.key)
        mark = node.end.mark
        seen[path] = ([v.page for v in node.edge], mark.hits, mark.priority, mark.created, mark.stamp)
    expected = {}
    for end in oracle.ends:
        page = oracle.pages[end]
        edge = [oracle.pages[path]["page"] for path in oracle.edge(end)]
        expected[end] = (edge, len(page["through"]), page["priority"], page["created"], page["stamp"])
    assert seen == expected


@pytest.mark.parametrize("policy", ["lru", "mru", "fifo", "filo", "lfu", "slru", "priority"])
@pytest.mark.parametrize(("page_size", "key_units"), [(1, "token"), (2, "token"), (3, "bigram"), (1, "bigram")])
def test_tree_agrees_with_flat_oracle_on_random_operations(policy, page_size, key_units):
    rnd = random.Random(f"{policy} {page_size} {key_units}")
    evictions = 0
    for n_pages in (4, 7, 12):
        cache = Cache(
            page_size=page_size,
            n_pages=n_pages,
            n_rows=3,
            max_context_len=8 * page_size,
            policy=policy,
            key_units=key_units,
        )
        oracle = FlatOracle(page_size, key_units, policy)
        done = 0
        while done < 200:
            moved, evicted = step(rnd, cache, oracle)
            if moved:
                done += 1
                evictions += evicted
                assert_trees_agree(cache, oracle)
    assert evictions > 5, "the case never came to the policy"


def step(rnd, cache, oracle):
    """Draw one operation, run it on both; return whether it was done and how many nodes were evicted."""
    size = cache.page_size
    kind = rnd.choice(KINDS)
    name = f"r{rnd.randrange(4)}"
    r = cache.requests.get(name)
    if kind == "submit":
        block = [rnd.randrange(2) for _ in range(3)]
        tokens = [token for token in block for _ in range(size)][: rnd.randrange(1, 3 * size + 1)] + [rnd.randrange(2)]
        arguments = (name, tokens, rnd.choice(NAMESPACES[: rnd.choice([1, 3])]), rnd.randrange(3))
    elif kind == "alloc":
        arguments = ([(name, rnd.randint(1, max(1, r.uncomputed)) if r else 1, [])],)
    elif kind == "commit":
        last = r is not None and r.known_in_flight == r.uncomputed
        arguments = (name, r.in_flight_n if r else 1, [rnd.randrange(2)] if last else [])
    elif kind == "evict":
        arguments = (rnd.randrange(1, 3 * size),)
    elif kind == "retract":
        arguments = (name, rnd.random() < 0.5)
    else:
        arguments = (name,)
    if cache.refusal(kind, *arguments) is not None:
        return False, 0

    locked = [oracle.path(q, len(q.tokens), q.protected_len // size) for q in cache.requests.values() if q.anchor]
    if kind in ("checkpoint", "release") or (kind == "retract" and arguments[1] and r.state == "RUNNING"):
        oracle.publish(r, r.protected_len, list(cache.rows.pages_of[r.row]))
    missing = cache.pages_needed(arguments[0]) - cache.pages.n_free if kind == "alloc" else 0
    value = getattr(cache, kind)(*arguments)
    expected = []
    if kind == "match":
        assert value == oracle.match(r)
    elif kind == "peek":
        assert value == oracle.find(r)
    elif kind == "evict":
        expected = oracle.evict(arguments[0], locked)
        assert [[slots[i] // size for i in range(0, len(slots), size)] for slots in value] == expected
    elif kind == "alloc":
        expected = oracle.evict(missing * size, locked)
        assert [[slots[i] // size for i in range(0, len(slots), size)] for slots in value.evicted] == expected
    return True, len(expected)
