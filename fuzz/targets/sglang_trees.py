"""What can be seen of SGLang's three trees, as nodes of a snapshot.

`RadixCache` and the Python core are walked node by node. The Rust core has no node objects: its printed tree gives
the nodes and their lock counts, its own queries give keys, parents and slots of each. Hit counts, priorities
and the set of evictable leaves stay inside it, and are not observed.

No tree's ages are shown: within one operation the three trees stamp the nodes of a path in different orders, none of
which shows in a result. The order of victims is checked instead, at each eviction.

Engines number their nodes for the whole process; here they are numbered as they are first seen, so that a trace
shows the same numbers in any process.

Lies outside the package of the targets, whose import prepares SGLang for tests: this one is imported into live engines.
"""

import os
import re
from itertools import pairwise
from typing import Any, Protocol

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvlockstep.invariants import FULL, ROOT, NodeView, Unit

_PRINTED = re.compile(rb"^( *)\[(\d+)\] \d+ full_lock=(-?\d+) ", re.MULTILINE)

NOWHERE = -2
"""Stands for a node that should be there and is not: the parent of a node that names none, a lock that is lost."""


class TreeView(Protocol):
    """Looks at one tree."""

    def nodes(self) -> list[NodeView]: ...

    def evictable_nodes(self) -> list[int] | None: ...

    def root_lock_ref(self) -> int | None: ...

    def anchor(self, handle: Any) -> int: ...

    def check_idle(self) -> None: ...


def view_of(cache: Any, tree: str) -> TreeView:
    """Return the view for a tree's name."""
    if tree == "radix":
        return RadixView(cache)
    return PythonCoreView(cache) if tree == "unified-python" else RustCoreView(cache)


class _Numbers:
    """Small numbers for an engine's node ids, in order of appearance."""

    def __init__(self) -> None:
        self._number_of: dict[int, int] = {}

    def __call__(self, engine_id: int) -> int:
        return self._number_of.setdefault(engine_id, len(self._number_of))


def _units(key: Any) -> tuple[Unit, ...]:
    """Spell a `RadixKey` as units: tokens, or pairs."""
    tokens = key.raw_token_ids().tolist()
    return tuple(pairwise(tokens)) if key.is_bigram else tuple(tokens)


class RadixView:
    """`RadixCache`: nodes are objects, and carry all that a snapshot shows."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._number = _Numbers()

    def nodes(self) -> list[NodeView]:
        found: list[NodeView] = []
        todo = [self._cache.root_node]
        while todo:
            parent = todo.pop()
            for child in parent.children.values():
                found.append(self._node(child))
                todo.append(child)
        return found

    def _node(self, node: Any) -> NodeView:
        return NodeView(
            self._number(node.id),
            NOWHERE if node.parent is None else self.anchor(node.parent),
            (node.key.extra_key, node.key.cache_salt, ()),
            _units(node.key),
            {FULL: self._slots(node).tolist()},
            self._lock_ref(node),
            None,
            None,
            node.hit_count,
            node.priority,
            [self._number(child.id) for child in node.children.values()],
        )

    def _slots(self, node: Any) -> Any:
        return node.value

    def _lock_ref(self, node: Any) -> int:
        lock_ref: int = node.lock_ref
        return lock_ref

    def _leaves(self) -> Any:
        return self._cache.evictable_leaves

    def evictable_nodes(self) -> list[int] | None:
        return sorted(self.anchor(node) for node in self._leaves())

    def root_lock_ref(self) -> int | None:
        # SGLang holds one lock on its root for as long as the tree lives
        return self._lock_ref(self._cache.root_node) - 1

    def anchor(self, handle: Any) -> int:
        return ROOT if handle is self._cache.root_node else self._number(handle.id)

    def check_idle(self) -> None:
        """Let the tree check itself while nothing is live, where it can."""


class PythonCoreView(RadixView):
    """`UnifiedRadixCache` over its Python core: as `RadixCache`, with slots and locks per component."""

    def _slots(self, node: Any) -> Any:
        return node.component_data[ComponentType.FULL].value

    def _lock_ref(self, node: Any) -> int:
        lock_ref: int = node.component_data[ComponentType.FULL].lock_ref
        return lock_ref

    def _leaves(self) -> Any:
        return self._cache.tree_core.evictable_device_leaves

    def anchor(self, handle: Any) -> int:
        node_id = handle if isinstance(handle, int) else handle.id
        return ROOT if node_id == self._cache.root_node_handle() else self._number(node_id)

    def check_idle(self) -> None:
        self._cache.sanity_check()


class RustCoreView:
    """`UnifiedRadixCache` over its Rust core."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._core = cache.tree_core
        self._number = _Numbers()
        self._paper = os.memfd_create("kvlockstep-tree")
        self._root_lock_ref = 0

    def __del__(self) -> None:
        os.close(self._paper)

    def nodes(self) -> list[NodeView]:
        root = self._cache.root_node_handle()
        self._core.backfill_missing_hash_values()  # a node is shown with its key once it has a hash
        found: list[NodeView] = []
        path: list[list[int]] = []  # the children printed so far of each node above, by depth
        for spaces, printed, lock_ref in _PRINTED.findall(self._printed()):
            node, children = int(printed), list[int]()
            del path[len(spaces) // 2 :]
            if node == root:
                self._root_lock_ref = int(lock_ref)
            else:
                path[-1].append(self._number(node))
                found.append(self._node(node, int(lock_ref), root, children))
            path.append(children)
        return found

    def _node(self, node: int, lock_ref: int, root: int, children: list[int]) -> NodeView:
        shown = self._core.snapshot_buffer_backup(node, False)
        assert shown is not None, f"the Rust core prints node {node} and does not know it"
        slots = self._core.get_component_device_value(node, ComponentType.FULL)
        return NodeView(
            self._number(node),
            ROOT if shown.parent_node_id == root else self._number(shown.parent_node_id),
            (shown.key.extra_key, shown.key.cache_salt, ()),
            _units(shown.key),
            {FULL: slots.tolist()},
            lock_ref,
            None,
            None,
            None,
            None,
            children,
        )

    def _printed(self) -> bytes:
        """Return what the core prints on standard output, below Python's own buffers."""
        os.ftruncate(self._paper, 0)
        os.lseek(self._paper, 0, os.SEEK_SET)
        stdout = os.dup(1)
        os.dup2(self._paper, 1)
        try:
            self._cache.pretty_print()
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        return os.pread(self._paper, os.fstat(self._paper).st_size, 0)

    def evictable_nodes(self) -> list[int] | None:
        return None

    def root_lock_ref(self) -> int | None:
        return self._root_lock_ref - 1

    def anchor(self, handle: Any) -> int:
        return ROOT if handle == self._cache.root_node_handle() else self._number(handle)

    def check_idle(self) -> None:
        self._cache.sanity_check()
