"""JSON from strangers: a field that stands twice is an error and not the last one, and so is a number with a fraction.

What is too deep or too long for Python's own reader is an error like any other.
"""

import json
from typing import Any

from kvlockstep.fuzz.trace_bounds import SCHEMA_REMEDY, BadLine, shown


def decode(text: str, *, fractions: bool = False, remedy: str = SCHEMA_REMEDY) -> Any:
    """Read one value. ``fractions``, numbers may be any. Raises BadLine, and JSONDecodeError for what is no JSON."""
    try:
        return (_WITH_FRACTIONS if fractions else _WHOLE).decode(text)
    except (BadLine, json.JSONDecodeError):
        raise
    except RecursionError:
        raise BadLine("nested too deep", remedy) from None
    except ValueError:  # the interpreter's own limit on the digits of an integer
        raise BadLine("a number with thousands of digits", remedy) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        unseen = set(body)
        for name, _ in pairs:
            if name not in unseen:
                raise BadLine(f"field {shown(name)} stands twice", "keep one")
            unseen.remove(name)
    return body


def _no_fraction(number: str) -> int:
    raise BadLine(f"{shown(number)} is not a whole number", "write integers without fraction or exponent")


_WHOLE = json.JSONDecoder(object_pairs_hook=_once, parse_float=_no_fraction, parse_constant=_no_fraction)
_WITH_FRACTIONS = json.JSONDecoder(object_pairs_hook=_once)
