"""What a target returned: whether it has the types that the contract gives it, and as words.

Only lists, ints and plain dataclasses cross the line between harness and target (docs/targets.md). A tuple, a
tensor or a number of another library would make every comparison fail for a reason nobody looks for.
"""

from kvlockstep.fuzz.ops import Alloc, Evict, Match, Op, Peek
from kvlockstep.fuzz.targets.base import AllocResult
from kvlockstep.invariants import FULL, Snapshot


def is_result_of(op: Op, value: object) -> bool:
    """Tell whether a value is what the contract of a target says this operation returns."""
    match op:
        case Alloc():
            return isinstance(value, AllocResult) and _are_slots(value.write_sets) and _are_slots(value.evicted)
        case Evict():
            return _are_slots(value)
        case Peek() | Match():
            return type(value) is int
        case _:
            return value is None


def _are_slots(value: object) -> bool:
    """Tell whether a value is a list of lists of plain ints: no tuple, no tensor, no number of another library."""
    return isinstance(value, list) and all(
        isinstance(slots, list) and all(type(slot) is int for slot in slots) for slots in value
    )


def result_words(op: Op) -> str:
    if isinstance(op, Alloc):
        return "AllocResult of lists of lists of int"
    return "list of lists of int" if isinstance(op, Evict) else "int"


def shown(value: object) -> str:
    if isinstance(value, AllocResult):
        return f"write sets {value.write_sets}, evicted {value.evicted}"
    return str(value)


_STATES = ("MATCHED", "RUNNING", "IN_FLIGHT")


def defect_of_views(snapshot: Snapshot) -> str | None:
    """Say which part of a snapshot has a type or a length that the contract does not give it; None if all have theirs.

    Slow, so it is asked only once something is wrong already.
    """
    for name, pool in snapshot.pools.items():
        for part in ("free_pages", "page_generations"):
            if (value := getattr(pool, part)) is not None and not _are_ints(value):
                return f"pools[{name!r}].{part}: expected a list of int, got {_kind(value)}"
        if pool.page_generations is not None and len(pool.page_generations) != pool.n_pages + 1:
            n = len(pool.page_generations)
            return f"pools[{name!r}].page_generations: expected n_pages + 1 = {pool.n_pages + 1} entries, got {n}"
    for part in ("free_rows", "row_generations", "evictable_nodes"):
        if (value := getattr(snapshot, part)) is not None and not _are_ints(value):
            return f"{part}: expected a list of int, got {_kind(value)}"
    if snapshot.row_generations is not None and len(snapshot.row_generations) != snapshot.n_rows + 1:
        n = len(snapshot.row_generations)
        return f"row_generations: expected n_rows + 1 = {snapshot.n_rows + 1} entries, got {n}"
    views: list[tuple[str, object, dict[str, str]]] = [
        *((f"rows[{i}]", view, _ROW) for i, view in enumerate(snapshot.rows or [])),
        *((f"requests[{i}]", view, _REQUEST) for i, view in enumerate(snapshot.requests or [])),
        *((f"nodes[{i}]", view, _NODE) for i, view in enumerate(snapshot.nodes or [])),
    ]
    for where, view, parts in views:
        for part, expected in parts.items():
            if not hasattr(view, part):
                return f"{where}: expected a view with {part}, got {_kind(view)}"
            if not _IS[expected](getattr(view, part)):
                return f"{where}.{part}: expected {expected}, got {getattr(view, part)!r}"[:300]
    return None


_ROW = {"row": "an int", "request": "a str", "slots": "a list of int"}
_REQUEST = {
    "request": "a str",
    "state": f"one of {', '.join(_STATES)}",
    **dict.fromkeys(("protected_len", "committed_len", "allocated_len"), "an int"),
    **dict.fromkeys(("anchor", "row"), "an int or None"),
}
_NODE = {
    **dict.fromkeys(("node", "parent", "lock_ref"), "an int"),
    "namespace": "a tuple of three",
    "units": "a list or tuple",
    "slots": "a dict of lists of int by pool",
    **dict.fromkeys(("stamp", "created", "hits", "priority"), "an int or None"),
}
_IS = {
    "an int": lambda value: type(value) is int,
    "a str": lambda value: type(value) is str,
    "an int or None": lambda value: value is None or type(value) is int,
    "a list of int": lambda value: _are_ints(value),
    "a list or tuple": lambda value: isinstance(value, list | tuple),
    "a tuple of three": lambda value: isinstance(value, tuple) and len(value) == 3,
    _REQUEST["state"]: lambda value: value in _STATES,
    _NODE["slots"]: lambda value: isinstance(value, dict) and FULL in value and all(map(_are_ints, value.values())),
}


def _are_ints(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _kind(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:120]
