"""Whether what a factory returned can be a target: its members, how its methods are called, what a fresh one shows.

The first mistakes of someone who writes a target end here, each as one sentence that says what is expected,
instead of in the middle of a run. Once per factory, so it may take its time.

Not verified here: that the cache behind the target is right; that is what the fuzzing is for.
"""

import inspect
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from kvlockstep.fuzz.config import POLICIES, CacheConfig, defect_of_options
from kvlockstep.fuzz.targets.base import KvTarget, RememberingTarget, Target
from kvlockstep.fuzz.trace_bounds import LANES
from kvlockstep.invariants import FULL, PoolView, Snapshot
from kvlockstep.reference.allowances import ALLOWANCES

CAPABILITIES = (
    "kv",
    "sharing",  # it runs with prefix_sharing=True
    "no_sharing",  # it runs with prefix_sharing=False
    "namespaces",
    "content_ids",  # it tells the third part of a namespace apart too
    "private",
    "priority",
    "bigram",
    "drafts",
    "discards",  # a pass may be thrown away
    "victim_order",  # of conformance "legal", and its victims come in policy order all the same
    *(f"policy:{policy}" for policy in POLICIES),
)
"""All that a target can promise."""

OF_ORDERED_VICTIMS = ("pages_overestimated", "evicts_before_refusal")
"""Allowances about when to evict, which mean something only where the order of victims is held to."""

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
    if hasattr(target, "forget") and (defect := _uncallable("forget", target.forget)) is not None:
        return defect
    if (defect := _defect_of_choices(target) or _defect_of_allowances(target)) is not None:
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
    if "content_ids" in capabilities and "namespaces" not in capabilities:
        return "capabilities names 'content_ids' without 'namespaces', of which they are the third part"
    if not {"sharing", "no_sharing"}.intersection(capabilities):
        return "capabilities names neither 'sharing' (it runs with prefix_sharing=True) nor 'no_sharing' (with False)"
    return None


def _defect_of_choices(target: Any) -> str | None:
    """Look at what a target lets be drawn for it beyond its capabilities."""
    options = getattr(target, "options", ())
    if not isinstance(options, tuple | list):
        return f"options is {_kind(options)}, expected a tuple of names"
    if (defect := defect_of_options(tuple(options))) is not None:
        return f"options: {defect}"
    page_sizes = getattr(target, "page_sizes", (1,))
    if not isinstance(page_sizes, tuple | list) or not page_sizes:
        return f"page_sizes is {_kind(page_sizes)}, expected a tuple of one or more ints"
    for size in page_sizes:
        if type(size) is not int or not CacheConfig(page_size=size).is_valid():
            return f"page_sizes names {size!r}, which is no page size"
    return None


def _defect_of_allowances(target: Any) -> str | None:
    """An allowance that is none would allow nothing, and every use of it would be found a bug."""
    allowances = getattr(target, "allowances", ())
    if not isinstance(allowances, frozenset | set | tuple | list) or not all(isinstance(a, str) for a in allowances):
        return f"allowances is {_kind(allowances)}, expected a frozenset of str"
    for name in sorted(allowances):
        if name not in ALLOWANCES:
            near = get_close_matches(name.lower(), ALLOWANCES, 1)
            expected = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(ALLOWANCES)}"
            return f"allowances names {name!r}, which is none: {expected}"
        ordered = target.conformance == "legal" and "victim_order" in target.capabilities
        if name in OF_ORDERED_VICTIMS and not ordered:
            return f"allowances names {name!r}, which needs conformance 'legal' and the capability 'victim_order'"
    return None


def _uncallable(name: str, method: Any) -> str | None:
    """Compare how a method can be called with how the lockstep calls it: by position."""
    if not callable(method):
        return f"{name} is {_kind(method)}, expected a method"
    contract = RememberingTarget if name == "forget" else KvTarget
    expected = list(inspect.signature(getattr(contract, name)).parameters)[1:]
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
