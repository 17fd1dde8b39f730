"""Dumps of live SGLang caches: what ``kvlockstep check`` reads, written by one call inside a running engine.

    from kvlockstep.fuzz.targets.sglang_dump import dump, requests_of
    dump("dump.json.gz", scheduler.tree_cache, requests_of(scheduler), write_sets={})

Call it in the thread of the scheduler, between two of its steps: a cache that changes meanwhile is shown torn. It only
reads, except that the Rust core computes hashes that are missing, and that while its tree is printed the standard
output of the process is turned to a file of ours. Tensors are copied to the host, which waits for the GPU.

The targets see their caches by the same functions. Importing this imports parts of SGLang, and prepares nothing.

Left out: requests that hold neither row nor lock; rows and pages that the engine holds for something else than a
request, as streaming sessions and transfers between nodes do, which `check` therefore calls lost.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvlockstep.fuzz.snapshot_file import LABEL, write
from kvlockstep.fuzz.targets.sglang_trees import NOWHERE, TreeView, view_of
from kvlockstep.invariants import FULL, PoolView, RequestView, RowView, Snapshot

MAX_LABEL = 200

_UNFIT = re.compile(r"[\x00-\x20\x7f-\xa0\u2028\u2029\ud800-\udfff]")


def dump(
    path: str | os.PathLike[str],
    cache: Any,
    requests: Iterable[Any],
    *,
    write_sets: Mapping[str, Sequence[int]] | None = None,
    counted: bool = True,
    source: str = "sglang",
) -> Snapshot:
    """Write what can be seen of a live cache to a file, and return it.

    ``cache`` is a `RadixCache` or a `UnifiedRadixCache`, from which rows and slots are reached. ``requests`` are the
    `Req`s that may hold a row or a lock, each once or more often. ``write_sets`` has, by ``rid``, the slots that a pass
    in flight writes: empty where none is in flight, None where that is not known; then `check` cannot check law 3.
    ``counted`` says that SGLang counts the positions of those passes as committed, as it does without speculation.

    Raises TypeError, with nothing written, for a cache of another kind, one with a second pool or a host tier among
    them; ValueError for the ``rid`` of a write set that no request has; OSError where the file cannot be written.
    """
    view = view_of(cache, tree_of(cache))
    slots_of = dict(write_sets or {})
    views: list[RequestView] = []
    in_flight: dict[str, Sequence[int]] = {}
    taken: set[str] = set()
    for req in {id(req): req for req in requests}.values():
        has_row = req.kv.req_pool_idx is not None
        if not has_row and req.lock is None:
            continue
        name = _label(req.rid, taken)
        slots = slots_of.pop(req.rid, None)
        state = "IN_FLIGHT" if slots is not None else "RUNNING" if has_row else "MATCHED"
        views.append(request_view(name, state, req, view, len(slots) if slots is not None and counted else 0))
        if slots is not None:
            in_flight[name] = slots
    if slots_of:
        raise ValueError(f"write_sets: no request {next(iter(slots_of))!r} with a row or a lock among the requests")
    snapshot = snapshot_of(cache, view, views)
    write(path, snapshot, source=source, write_sets=None if write_sets is None else in_flight)
    return snapshot


def tree_of(cache: Any) -> str:
    """Return the name of the tree that a cache has. Raises TypeError for one whose nodes cannot be seen whole."""
    if type(cache) is RadixCache:
        return "radix"
    if type(cache) is not UnifiedRadixCache:
        raise TypeError(f"a {type(cache).__name__} cannot be dumped, expected a RadixCache or a UnifiedRadixCache")
    others = [str(component) for component in cache.tree_components if component != ComponentType.FULL]
    others += ["a host tier"] if cache.cache_controller is not None else []
    if others:
        raise TypeError(f"a UnifiedRadixCache with {', '.join(others)} cannot be dumped, expected full attention only")
    return "unified-python" if isinstance(cache.tree_core, UnifiedTreeCore) else "unified-rust"


def requests_of(scheduler: Any) -> list[Any]:
    """List the `Req`s that a scheduler knows, wherever it keeps them: batches, results to come, the queue."""
    batches = [getattr(scheduler, name, None) for name in ("running_batch", "last_batch", "cur_batch_for_debug")]
    batches += [batch for batch, _ in getattr(scheduler, "result_queue", ())]
    found = [req for batch in batches if batch is not None for req in batch.reqs]
    found += [getattr(scheduler, "chunked_req", None), *getattr(scheduler, "waiting_queue", ())]
    return list({id(req): req for req in found if req is not None}.values())


def _label(rid: str, taken: set[str]) -> str:
    """Return a name that fits a snapshot and no request has yet: a ``rid`` is whatever a client sent."""
    label = _UNFIT.sub("?", str(rid))[: MAX_LABEL - 10] or "?"
    name, n = label, 1
    while name in taken:
        n += 1
        name = f"{label}~{n}"
    assert re.fullmatch(LABEL, name), f"{name!r} is no name of a request"
    taken.add(name)
    return name


def request_view(name: str, state: str, req: Any, view: TreeView, ahead: int) -> RequestView:
    """Show a `Req` that holds a row or a lock; ``ahead`` positions count as committed and have not landed."""
    kv, lock = req.kv, req.lock
    if kv.req_pool_idx is None:  # until it holds a row, SGLang knows how far the match went
        committed_len = allocated_len = req.prefix_len
    else:
        committed_len, allocated_len = kv.kv_committed_len - ahead, kv.kv_allocated_len
    return RequestView(
        name,
        state,
        kv.cache_protected_len,
        committed_len,
        allocated_len,
        NOWHERE if lock is None else view.anchor(lock.node),
        kv.req_pool_idx,
    )


def snapshot_of(cache: Any, view: TreeView, requests: list[RequestView]) -> Snapshot:
    """Show tree, rows and slots of a cache, with the requests that hold them."""
    rows, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    nodes = view.nodes()
    generations: list[int] = rows.req_generation.tolist()
    held = [(request.row, request) for request in requests if request.row is not None]
    for row in {row for row, _ in held}:
        generations[row] -= 1
    return Snapshot(
        page_size=cache.page_size,
        n_rows=rows.size,
        pools={
            FULL: PoolView(
                allocator.size // cache.page_size,
                allocator.get_all_free_pages().tolist(),
                None,
                allocator.available_size(),
                cache.evictable_size(),
                cache.protected_size(),
            )
        },
        rows=[
            RowView(row, request.request, rows.req_to_token[row, : request.allocated_len].tolist())
            for row, request in held
        ],
        free_rows=list(rows.free_slots),
        row_generations=generations,
        requests=requests,
        nodes=nodes,
        evictable_nodes=view.evictable_nodes(),
        root_lock_ref=view.root_lock_ref(),
        max_context_len=rows.max_context_len,
    )
