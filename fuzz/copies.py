"""Model and `gpu_impl` in lockstep, with a state that can be saved, restored, and told from others.

Reaching a state again from the start takes as many steps as it is deep. So model, harness and host state of the cache
are copied, row table and KV pool cloned. The host side is the interpreted text of `gpu_impl`; of its machine code,
which is compiled from the same text, nothing can be copied.

`key_of` says when two states are the same to a search (``exhaustive.py``).
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import permutations
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults.patching import copy_of_package
from kvlockstep.fuzz.labels import Memory
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget
from kvlockstep.gpu_impl.victims import WIDTH
from kvlockstep.invariants import ROOT
from kvlockstep.invariants.index import Index
from kvlockstep.reference.requests import Request

Key = tuple[object, ...]


@cache
def interpreted() -> ModuleType:
    """Import a copy of `gpu_impl` of its own, the same text, without its machine code."""
    return copy_of_package("as_it_stands", {})


@dataclass(slots=True)
class Saved:
    """One state of a `Bench`: everything on the host, and the two tensors on the device."""

    host: bytes
    row_table: Tensor
    kv_pool: Tensor


class Bench:
    """A lockstep of model and `gpu_impl` whose state can be saved and restored any number of times.

    What never changes stays where it is and is named in the copy (`_fixed`): the harness around the cache, its device
    with the two tensors, which are written over, and code.
    """

    def __init__(self, config: CacheConfig, package: ModuleType | None = None) -> None:
        self.target = GpuImplTarget(config, package or interpreted())
        self.lockstep = Lockstep(config, self.target)
        self.memory = Memory(config)
        core = self.core
        objects = (self.target, config, core.config, core.device, core.tree._policy)
        self._fixed = dict(enumerate(objects))
        self._names = {id(thing): name for name, thing in self._fixed.items()}

    @property
    def core(self) -> Any:
        """The cache itself."""
        return self.target._cache

    def save(self) -> Saved:
        """Copy the present state."""
        lockstep, device = self.lockstep, self.core.device
        parts = (
            lockstep.model,
            lockstep.runner,
            lockstep.holds,
            lockstep._waiting,
            lockstep.step,
            self.memory,
            self.core,
            self.target._retracted,
        )
        file = BytesIO()
        pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.names = self._names
        pickler.dump(parts)
        return Saved(file.getvalue(), device.row_table.clone(), device.kv_pool.clone())

    def restore(self, saved: Saved, seen: Index | None = None) -> None:
        """Go back to a saved state. ``seen`` is what `look` gave of it, if that is known."""
        unpickler = _Unpickler(BytesIO(saved.host))
        unpickler.things = self._fixed
        lockstep, target = self.lockstep, self.target
        (
            lockstep.model,
            lockstep.runner,
            lockstep.holds,
            lockstep._waiting,
            lockstep.step,
            self.memory,
            target._cache,
            target._retracted,
        ) = unpickler.load()
        self.core.device.row_table.copy_(saved.row_table)
        self.core.device.kv_pool.copy_(saved.kv_pool)
        lockstep._index = seen or self.look()
        lockstep.now = lockstep._index.snapshot

    def holds_tensors_of(self, saved: Saved) -> bool:
        """Tell whether row table and KV pool are, bit for bit, as they were saved."""
        device = self.core.device
        return torch.equal(device.row_table, saved.row_table) and torch.equal(
            device.kv_pool.view(torch.uint8), saved.kv_pool.view(torch.uint8)
        )

    def look(self) -> Index:
        """See all of the cache."""
        return Index(self.target.snapshot())


class _Pickler(pickle.Pickler):
    names: dict[int, int]

    def persistent_id(self, thing: Any) -> int | None:
        return self.names.get(id(thing))


class _Unpickler(pickle.Unpickler):
    things: dict[int, Any]

    def persistent_load(self, name: Any) -> Any:
        return self.things[name]


# When two states are the same


def key_of(bench: Bench, tokens: Sequence[int]) -> Key:
    """Give what is equal for two states exactly if they are merged: the same up to names of requests and ``tokens``.

    In it is all that the model knows and all that the cache keeps on the host, also what no snapshot shows (its own
    tokens, drafts and pages of a request, the queue of victims place by place), but for this:

    * Numbers of pages, rows and nodes. Which page a request names follows from its lengths and laws 1 and 2, which
      are checked on every transition. The cache's own list of them counts as the same list or another.
    * Generations, hits, creation ticks, how far an admission has published: nothing that ``lru`` decides reads them.
      Stamps and the ranks in the queue count by their order.
    * Lengths, locks, links and counters of the cache, which a law or the comparison has just found right.
    * What free pages and free rows still hold. That nobody reads it is law 8 and law 2, on every transition.
    * Numbers that are free for reuse, in their order: they are only handed out, and are renamed as the ones in use.

    What an altered copy of the package keeps beyond that is in it as it stands.
    """
    core, model, snapshot = bench.core, bench.lockstep.model, bench.lockstep.now
    paths: dict[int, tuple[Any, ...]] = {ROOT: ()}
    nodes = snapshot.nodes or []
    for view in nodes:  # parents come before their children
        paths[view.node] = paths[view.parent] + tuple(view.units)
    queue = _queue(core)
    stamps = {view.node: view.stamp or 0 for view in nodes}
    order = {tick: rank for rank, tick in enumerate(sorted({*stamps.values(), *(rank for _, rank in queue)}))}
    keys = []
    for new in permutations(tokens):
        name = dict(zip(tokens, new, strict=True))
        named = {node: tuple([name[token] for token in path]) for node, path in paths.items()}
        tree = sorted([(named[node], order[stamp], core.tree.end[node]) for node, stamp in stamps.items()])
        waiting = [(named.get(node, ()), order[rank]) for node, rank in queue]
        live = sorted([_request_key(bench, r, name) for r in model.requests.values()])
        keys.append((live, tree, waiting))
    return (*min(keys), _kept_beyond(core))


@cache
def _known_fields() -> tuple[frozenset[str], ...]:
    core = GpuImplTarget(CacheConfig(), interpreted())._cache
    return tuple([frozenset(vars(part)) for part in _parts(core)])


def _parts(core: Any) -> tuple[Any, ...]:
    return core, core.tree, core.tree.victims, core.free_pages, core.free_rows


def _kept_beyond(core: Any) -> list[str]:
    """Spell the fields that the parts of a cache have and those of `gpu_impl` have not."""
    return [
        f"{name}={vars(part)[name]!r}"
        for part, known in zip(_parts(core), _known_fields(), strict=True)
        for name in vars(part)
        if name not in known
    ]


def _queue(core: Any) -> list[tuple[int, int]]:
    """List the nodes that wait for eviction, place by place, with what each was ranked by."""
    victims = core.tree.victims
    heap = victims._heap
    return [(node, heap[place * WIDTH]) for place, node in enumerate(victims.nodes())]


def _request_key(bench: Bench, r: Request, name: dict[int, int]) -> tuple[Any, ...]:
    core = bench.core
    known = (
        r.state,
        [name[token] for token in r.tokens],
        [name[token] for token in r.drafts],
        (r.protected_len, r.committed_len, r.allocated_len, r.in_flight_n, r.abort_pending),
        [name[token] for token in bench.target._retracted.get(r.request, ())],
    )
    live = core.requests.get(r.request)
    if live is None:
        return (*known, ())
    row = [] if r.row is None else bench.lockstep.model.rows.pages_of[r.row]
    own = (
        [name.get(token, token) for token in live.tokens],
        [name.get(token, token) for token in live.drafts],
        (live.in_flight_n, live.abort_pending, live.row is None or live.pages.tolist() == row),
    )
    return (*known, own)
