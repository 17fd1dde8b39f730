"""Whether what a factory returned can be a target: its members, how its methods are called, what a fresh one shows.

The first mistakes of someone who writes a target end here, each as one sentence that says what is expected,
instead of in the middle of a run. Once per factory, so it may take its time.

Not verified here: that the cache behind the target is right; that is what the fuzzing is for.
"""

import inspect
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from kvlockstep.fuzz.config import POLICIES, CacheConfig
from kvlockstep.fuzz.targets.base import KvTarget, Target
from kvlockstep.fuzz.trace_bounds import LANES
from kvlockstep.invariants import FULL, PoolView, Snapshot

CAPABILITIES = (
    "kv",
    "sharing",  # it runs with prefix_sharing=True
    "no_sharing",  # it runs with prefix_sharing=False
    "namespaces",
    "private",
    "priority",
    "bigram",
    "drafts",
    *(f"policy:{policy}" for policy in POLICIES),
)
"""All that a target can promise."""

_KV_METHODS = ("write_kv", "read_kv")  # and read_slots, without which law 9 is not observed
_METHODS = tuple(name for name in vars(Target) if not name.startswith("_") and callable(getattr(Target, name)))
_SNAPSHOT_LISTS = ("rows", "free_rows", "row_generations", "requests", "nodes", "evictable_nodes")
_POOL_LISTS = ("free_pages", "page_generations")
_POOL_SIZES = ("available", "evictable", "protected")


def defect_of(target: Any, config: CacheConfig) -> str | None:
    """Say what keeps an object from being a target, in one line; None if nothing does."""
    missing = [name for name in (*Target.__annotations__, *_METHODS) if not hasattr(target, name)]
    if missing:
        return f"its factory returned {_kind(target)} without {', '.join(missing)}"
    if target.conformance not in ("exact", "legal"):
        return f"conformance is {target.conformance!r}, expected 'exact' or 'legal'"
    capabilities = target.capabilities
    if not isinstance(capabilities, frozenset | set) or not all(isinstance(name, str) for name in capabilities):
        return f"capabilities is {_kind(capabilities)}, expected a frozenset of str"
    if (defect := _defect_of_capabilities(capabilities)) is not None:
        return defect
    lane = getattr(target, "lane", None)
    if lane is not None and lane not in LANES:
        return f"lane is {lane!r}, expected None or one of {', '.join(LANES)}"
    with_kv = _KV_METHODS if "kv" in capabilities else ()
    missing = [name for name in with_kv if not hasattr(target, name)]
    if missing:
        return f"it promises the capability 'kv' without {', '.join(missing)}"
    for name in (*_METHODS, *with_kv):
        if (defect := _uncallable(name, getattr(target, name))) is not None:
            return defect
    return _defect_of_snapshot(target.snapshot(), config) or _defect_of_pool(target, config)


def _defect_of_capabilities(capabilities: Collection[str]) -> str | None:
    """A name that is no capability would promise nothing, and nothing would be drawn for it."""
    for name in sorted(capabilities):
        if name not in CAPABILITIES:
            meant = f"policy:{name.lower()}"
            near = [meant] if meant in CAPABILITIES else get_close_matches(name.lower(), CAPABILITIES, 1)
            expected = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(CAPABILITIES)}"
            return f"capabilities names {name!r}, which is none: {expected}"
    if not any(name.startswith("policy:") for name in capabilities):
        return f"capabilities names no policy, expected one or more of {', '.join(CAPABILITIES[-len(POLICIES) :])}"
    if not {"sharing", "no_sharing"}.intersection(capabilities):
        return "capabilities names neither 'sharing' (it runs with prefix_sharing=True) nor 'no_sharing' (with False)"
    return None


def _uncallable(name: str, method: Any) -> str | None:
    """Compare how a method can be called with how the lockstep calls it: by position."""
    if not callable(method):
        return f"{name} is {_kind(method)}, expected a method"
    expected = list(inspect.signature(getattr(KvTarget, name)).parameters)[1:]
    try:
        signature = inspect.signature(method)
    except ValueError:  # written in another language, without a signature
        return None
    try:
        signature.bind(*expected)
    except TypeError:
        return f"{name} takes ({', '.join(signature.parameters)}), expected ({', '.join(expected)})"
    return None


def _defect_of_snapshot(snapshot: object, config: CacheConfig) -> str | None:
    if not isinstance(snapshot, Snapshot):
        return f"snapshot() returned {_kind(snapshot)}, expected a kvlockstep.invariants.Snapshot"
    for name in ("page_size", "n_rows"):
        if getattr(snapshot, name) != getattr(config, name):
            return f"snapshot().{name} is {getattr(snapshot, name)!r}, the config says {getattr(config, name)}"
    pool = snapshot.pools.get(FULL) if isinstance(snapshot.pools, dict) else None
    if not isinstance(pool, PoolView):
        return f"snapshot().pools is {_kind(snapshot.pools)} without a PoolView under {FULL!r}"
    if pool.n_pages != config.n_pages:
        return f"snapshot().pools[{FULL!r}].n_pages is {pool.n_pages!r}, the config says {config.n_pages}"
    for owner, names in ((snapshot, _SNAPSHOT_LISTS), (pool, _POOL_LISTS)):
        for name in names:
            part = getattr(owner, name)
            if not isinstance(part, list | None):
                return f"{name} of snapshot() is {_kind(part)}, expected a list, or None where it cannot be observed"
    for name in _POOL_SIZES:
        size = getattr(pool, name)
        if type(size) is not int and size is not None:
            return f"{name} of snapshot() is {_kind(size)}, expected an int, or None where it cannot be observed"
    return None


def _defect_of_pool(target: Any, config: CacheConfig) -> str | None:
    if "kv" not in target.capabilities or not hasattr(target, "read_slots"):
        return None
    if (defect := _uncallable("read_slots", target.read_slots)) is not None:
        return defect
    values = target.read_slots(list(range(config.n_slots)))
    if not isinstance(values, list) or len(values) != config.n_slots or not all(type(v) is int for v in values):
        return f"read_slots of all {config.n_slots} slots returned {_kind(values)}, expected as many plain ints"
    return None


def _kind(value: object) -> str:
    if value is None:
        return "None"
    length = f" of {len(value)}" if isinstance(value, list | tuple | set | frozenset | dict) else ""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}{length}"
