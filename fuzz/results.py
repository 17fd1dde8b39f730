"""What an operation of a target returned: whether it has the type that the contract gives it, and as words.

Only lists, ints and plain dataclasses cross the line between harness and target (DESIGN section 3). A tuple, a
tensor or a number of another library would make every comparison fail for a reason nobody looks for.
"""

from kvlockstep.fuzz.ops import Alloc, Evict, Match, Op, Peek
from kvlockstep.fuzz.targets.base import AllocResult


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
