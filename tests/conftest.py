"""What several files of tests share: honest observations, a command run in this process, a target that slips.

There is an observation of each kind, for the tests of the laws: built by hand, and seen on real caches.

Hand-built and driven observations tell the same story with pages of 2: a tree of four edges, ``r1``
running, ``r2`` in flight, ``r3`` just admitted, two of them sharing a prefix, one edge of another
namespace. A test edits a copy and names the violation that must follow.
"""

import copy
import importlib
import pickle
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import (
    Abort,
    Alloc,
    AllocItem,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Op,
    Peek,
    Release,
    Reset,
    Submit,
)
from kvlockstep.invariants import (
    FULL,
    ROOT,
    Hold,
    Namespace,
    NodeView,
    Observation,
    PoolView,
    Read,
    RequestView,
    RowView,
    Snapshot,
)

CONFIG = CacheConfig(page_size=2, n_pages=12, n_rows=4, max_context_len=16)
PLAIN: Namespace = (None, None, ())
LORA: Namespace = ("lora-a", None, ())
SIDES = ("hand-built", "reference", "gpu_impl")

Observations = dict[str, Observation]


def slots_of(pages: Sequence[int]) -> list[int]:
    return [slot for page in pages for slot in (2 * page, 2 * page + 1)]


def recount(snapshot: Snapshot) -> None:
    """Make every claim of a snapshot agree with its free list, edges and anchors."""
    nodes = {node.node: node for node in snapshot.nodes or ()}
    for node in nodes.values():
        node.lock_ref = 0
        node.children = [child.node for child in nodes.values() if child.parent == node.node]
    for request in snapshot.requests or ():
        at = request.anchor
        while at != ROOT and at in nodes:
            nodes[at].lock_ref += 1
            at = nodes[at].parent
    pool = snapshot.pools[FULL]
    pool.available = len(pool.free_pages or ()) * snapshot.page_size
    pool.evictable = sum(len(node.slots[FULL]) for node in nodes.values() if not node.lock_ref)
    pool.protected = sum(len(node.slots[FULL]) for node in nodes.values() if node.lock_ref)
    snapshot.evictable_nodes = [node.node for node in nodes.values() if not node.lock_ref and not node.children]


class Story:
    """Snapshots of the story's cache, from the nodes and requests that stand in it at one moment."""

    tokens: ClassVar = {
        "r1": (1, 2, 3, 4, 5, 6, 9, 10, 11, 12),
        "r2": (1, 2, 3, 4, 20, 21, 22),
        "r3": (1, 2, 3, 4, 30, 31),
    }
    # id: parent, namespace, units, pages, stamp, created, hits
    nodes: ClassVar = {
        1: (ROOT, PLAIN, (1, 2, 3, 4), (1, 2), 9, 1, 2),
        2: (1, PLAIN, (5, 6), (3,), 7, 1, 1),
        3: (1, PLAIN, (7, 8), (4,), 3, 3, 1),
        4: (ROOT, LORA, (1, 2), (5,), 5, 5, 1),
        5: (2, PLAIN, (9, 10), (6,), 10, 10, 1),
    }
    # name: anchor, row, pages of the whole row
    requests: ClassVar = {
        "r1": (2, 1, (1, 2, 3, 6, 7)),
        "r2": (1, 2, (1, 2, 8, 9)),
        "r3": (1, 3, (1, 2, 10)),
    }

    def snapshot(
        self,
        nodes: Sequence[int],
        requests: dict[str, tuple[str, int, int]],  # state, committed_len, allocated_len
        raised_pages: Sequence[int] = (),
        raised_rows: Sequence[int] = (),
        anchors: dict[str, int] | None = None,
    ) -> Snapshot:
        views = [
            NodeView(node, parent, namespace, units, {FULL: slots_of(pages)}, 0, stamp, created, hits, 0)
            for node, (parent, namespace, units, pages, stamp, created, hits) in self.nodes.items()
            if node in nodes
        ]
        length = {ROOT: 0}
        for view in views:
            length[view.node] = length[view.parent] + len(view.units)
        used = {slot // 2 for view in views for slot in view.slots[FULL]}
        request_views, rows = [], []
        for name, (state, committed, allocated) in requests.items():
            anchor, row, pages = self.requests[name]
            anchor = (anchors or {}).get(name, anchor)
            has_row = state != "MATCHED"
            request_views.append(
                RequestView(name, state, length[anchor], committed, allocated, anchor, row if has_row else None)
            )
            if has_row:
                rows.append(RowView(row, name, slots_of(pages)[:allocated]))
                used.update(slot // 2 for slot in rows[-1].slots)
        snapshot = Snapshot(
            page_size=2,
            n_rows=4,
            pools={
                FULL: PoolView(
                    12,
                    [page for page in range(12, 0, -1) if page not in used],
                    [3 + (page in raised_pages) for page in range(13)],
                    None,
                    None,
                    None,
                )
            },
            rows=rows,
            free_rows=[row for row in range(4, 0, -1) if row not in [view.row for view in rows]],
            row_generations=[1 + (row in raised_rows) for row in range(5)],
            requests=request_views,
            nodes=views,
            root_lock_ref=0,
            max_context_len=16,
        )
        recount(snapshot)
        return snapshot

    def fingerprints(self, name: str, namespace: Namespace = PLAIN) -> list[int]:
        return fingerprints(namespace, self.tokens[name])

    def written(self) -> dict[int, int]:
        """What passes have written, but for that of ``r2``, which is in flight."""
        written = dict(zip(slots_of([1, 2, 4]), fingerprints(PLAIN, (1, 2, 3, 4, 7, 8)), strict=True))
        written.update(zip(slots_of([5]), fingerprints(LORA, (1, 2)), strict=True))
        for name, committed in (("r1", 9), ("r3", 6)):
            row = slots_of(self.requests[name][2])[:committed]
            written.update(zip(row, self.fingerprints(name), strict=False))
        return written


def fingerprints(namespace: Namespace, tokens: Sequence[int]) -> list[int]:
    return [zlib.crc32(repr((namespace, tuple(tokens[: pos + 1]))).encode()) for pos in range(len(tokens))]


def hand_built_observations() -> Observations:
    story = Story()
    tree = (1, 2, 3, 4)
    r1, r2, r3 = ("RUNNING", 9, 9), ("IN_FLIGHT", 4, 7), ("IN_FLIGHT", 4, 6)
    matched = ("MATCHED", 4, 4)
    alone = story.snapshot(tree, {"r1": r1})
    two = story.snapshot(tree, {"r1": r1, "r2": matched})
    waiting = story.snapshot(tree, {"r1": r1, "r2": matched, "r3": matched})
    flying = story.snapshot(tree, {"r1": r1, "r2": r2, "r3": r3})
    landed = story.snapshot(tree, {"r1": r1, "r2": r2, "r3": ("RUNNING", 6, 6)})
    published = story.snapshot((*tree, 5), {"r1": r1, "r2": r2}, anchors={"r1": 5})
    evicted = story.snapshot((1, 2, 4, 5), {"r1": r1, "r2": r2}, raised_pages=[4], anchors={"r1": 5})
    released = story.snapshot((1, 2, 4, 5), {"r2": r2}, raised_pages=[4, 7], raised_rows=[1])
    drained = story.snapshot((1, 2, 4, 5), {}, raised_pages=[4, 7, 8, 9], raised_rows=[1, 2])
    empty = story.snapshot((), {}, raised_pages=[1, 2, 3, 5, 6, 7, 8, 9, 4], raised_rows=[1, 2])

    def hold(name: str, pages: Sequence[int], write_slots: list[int]) -> Hold:
        return Hold(story.requests[name][1], 1, dict.fromkeys(pages, 3), write_slots)

    flies = {"r2": hold("r2", (1, 2, 8, 9), [16, 17, 18])}
    both = {**flies, "r3": hold("r3", (1, 2, 10), [20, 21])}

    def seen(kind: str, before: Snapshot, now: Snapshot, requests: Sequence[str] = (), n: int = 0) -> Observation:
        known = {name: story.fingerprints(name) for name in requests if name in story.tokens}
        return Observation(0, kind, list(requests), n, None, before, now, written=story.written(), fingerprints=known)

    match = seen("match", alone, two, ["r2"])
    match.matched_len = 4
    peek = seen("peek", two, two, ["r3"])
    peek.matched_len = 4
    alloc = seen("alloc", waiting, flying, ["r2", "r3"], n=3)
    alloc.write_sets, alloc.holds = [[16, 17, 18], [20, 21]], both
    commit = seen("commit", flying, landed, ["r3"], n=2)
    commit.holds = flies
    commit.pool_expected = [commit.written.get(slot, 0) for slot in range(26)]
    commit.pool_got = list(commit.pool_expected)
    commit.reads = [
        Read(name, story.requests[name][1], story.fingerprints(name)[:committed], story.fingerprints(name)[:committed])
        for name, committed in (("r1", 9), ("r3", 6))
    ]
    refused = seen("alloc", landed, copy.deepcopy(landed), ["r3"], n=8)
    refused.refused, refused.holds = "OutOfPages", flies
    checkpoint = seen("checkpoint", story.snapshot(tree, {"r1": r1, "r2": r2}), published, ["r1"])
    evict = seen("evict", published, evicted, n=2)
    evict.evicted = [[8, 9]]
    release = seen("release", evicted, released, ["r1"])
    checkpoint.holds = evict.holds = release.holds = flies
    reset = seen("reset", drained, empty)
    told = {
        "match": match,
        "peek": peek,
        "alloc": alloc,
        "commit": commit,
        "refused": refused,
        "checkpoint": checkpoint,
        "evict": evict,
        "release": release,
        "reset": reset,
    }
    return copy.deepcopy(told)


STORY_OPS: tuple[tuple[str | None, Op], ...] = (
    (None, Submit("a", (1, 2, 3, 4, 5, 6, 40))),
    (None, Match("a")),
    (None, Alloc((AllocItem("a", 7),))),
    (None, Commit("a", 7)),
    (None, Release("a")),
    (None, Submit("b", (1, 2, 3, 4, 7, 8, 41))),
    (None, Match("b")),
    (None, Alloc((AllocItem("b", 3),))),
    (None, Commit("b", 3)),
    (None, Release("b")),
    (None, Submit("c", (1, 2, 42), LORA)),
    (None, Match("c")),
    (None, Alloc((AllocItem("c", 3),))),
    (None, Commit("c", 3)),
    (None, Release("c")),
    (None, Submit("r1", (1, 2, 3, 4, 5, 6, 9, 10, 11))),
    (None, Match("r1")),
    (None, Alloc((AllocItem("r1", 3),))),
    (None, Commit("r1", 3, (12,))),
    (None, Submit("r2", (1, 2, 3, 4, 20, 21, 22))),
    ("match", Match("r2")),
    (None, Submit("r3", (1, 2, 3, 4, 30, 31))),
    ("peek", Peek("r3")),
    (None, Match("r3")),
    ("alloc", Alloc((AllocItem("r2", 3), AllocItem("r3", 2)))),
    ("commit", Commit("r3", 2)),
    (None, Submit("r4", tuple(range(50, 65)))),
    (None, Match("r4")),
    ("refused", Alloc((AllocItem("r4", 15),))),
    (None, Abort("r4")),
    ("checkpoint", Checkpoint("r1")),
    ("evict", Evict(2)),
    ("release", Release("r1")),
    (None, Commit("r2", 3)),
    (None, Release("r2")),
    (None, Release("r3")),
    ("reset", Reset()),
)


def driven_observations(side: str) -> Observations:
    """Run the story on a real cache and keep what the lockstep saw at the named operations."""
    target = importlib.import_module(f"kvlockstep.fuzz.targets.{side}").make(CONFIG)
    last: list[Observation] = []
    lockstep = Lockstep(CONFIG, target, watch=lambda op, seen: last.append(seen))
    told = {}
    for name, op in STORY_OPS:
        lockstep.run(op)
        if name is not None:
            told[name] = copy.deepcopy(last[-1])
    return told


@pytest.fixture(scope="session")
def told() -> Callable[[str], Observations]:
    """Give fresh copies of the observations of one side, by the name of their operation."""
    kept: dict[str, bytes] = {}

    def tell(side: str) -> Observations:
        if side not in kept:
            kept[side] = pickle.dumps(hand_built_observations() if side == "hand-built" else driven_observations(side))
        return pickle.loads(kept[side])

    return tell


@pytest.fixture(params=SIDES)
def observations(request: pytest.FixtureRequest, told: Callable[[str], Observations]) -> Observations:
    """Observations of each side in turn."""
    return told(request.param)


@pytest.fixture
def hand_built(told: Callable[[str], Observations]) -> Observations:
    """The hand-built observations."""
    return told("hand-built")


@pytest.fixture(name="recount")
def recount_fixture() -> Callable[[Snapshot], None]:
    """Make every claim of a snapshot agree with its free list, edges and anchors."""
    return recount


@pytest.fixture
def command(monkeypatch, capfd):
    """Run a command in this process, with an output as wide as a file; return its exit code and what it printed."""
    from kvlockstep.fuzz import cli

    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlockstep", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return stopped.value.code, out, err

    return run


@pytest.fixture
def slips():
    """Source of a module with a target that fails in two ways."""
    return '''import time
from kvlockstep.fuzz.targets.reference import ReferenceTarget

class Slips(ReferenceTarget):
    """Fails in two ways that have a cause each. Takes its time, so that a shard outlasts its first push."""
    evictions = retractions = 0

    def match(self, *arguments):
        time.sleep(0.004)
        return super().match(*arguments)

    def evict(self, *arguments):
        self.evictions += 1
        if self.evictions == 3:
            raise KeyError("third eviction")
        return super().evict(*arguments)

    def retract(self, *arguments):
        self.retractions += 1
        if self.retractions == 2:
            raise IndexError("second retraction")
        return super().retract(*arguments)
'''
