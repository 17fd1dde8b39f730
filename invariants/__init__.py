"""The laws of a KV cache as checks over plain snapshots. Knows nothing of how a snapshot was made.

Start in `snapshot.py` (what is seen) and `checks.py` (all checks, in the order they run).
"""

from kvlockstep.invariants.snapshot import (
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
    Unit,
)
from kvlockstep.invariants.violation import Divergence, Violation

__all__ = [
    "FULL",
    "ROOT",
    "Divergence",
    "Hold",
    "Namespace",
    "NodeView",
    "Observation",
    "PoolView",
    "Read",
    "RequestView",
    "RowView",
    "Snapshot",
    "Unit",
    "Violation",
]
