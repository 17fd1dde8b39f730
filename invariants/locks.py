"""Law 5: the lock count of a node is the number of requests that lock it or a node below it.

Counted again from the anchors of the live requests; the root is never counted.

Not verified here: that a request locks the right node (law 2 compares its length and slots), and
locks that something other than a request holds.
"""

from kvlockstep.invariants.index import Seen
from kvlockstep.invariants.owners import listing, node_name
from kvlockstep.invariants.violation import Violation


class LockCountWrong(Violation):
    """A node's lock count differs from the locks that exist."""


class RootLocked(Violation):
    """The root has a lock count."""


def lock_counts_equal_live_locks(seen: Seen) -> None:
    """``lock_ref`` of each node equals the locks anchored at it or below it."""
    counts = dict.fromkeys(seen.now.nodes, 0)
    for path in seen.now.paths.values():
        for node in path or ():
            counts[node.node] += 1
    for node in seen.now.nodes.values():
        if node.lock_ref != counts[node.node]:
            holders = [name for name, path in seen.now.paths.items() if node in (path or ())]
            raise LockCountWrong(
                f"{node_name(node)} has lock_ref {node.lock_ref}, expected {counts[node.node]}",
                [("locked by", listing(holders))],
                ("too many",) if node.lock_ref > counts[node.node] else ("too few",),
            )


def root_is_not_counted(seen: Seen) -> None:
    """The root has no locks, wherever requests are anchored."""
    count = seen.observation.now.root_lock_ref
    if count:
        anchored = [name for name, path in seen.now.paths.items() if path == []]
        raise RootLocked(f"the root has lock_ref {count}, expected 0", [("anchored", listing(anchored))], ("root",))
