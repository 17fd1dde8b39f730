"""Bounds of the trace format, the checks that hold text and operations to them, and how a breach is said.

These are the bounds of the published ``trace.schema.json``. They serve both directions: what is
written is checked as strictly as what is read, so a trace that was written can be read.

Files are data from strangers. So names and signatures cannot leave a folder, and no text for people
can move a terminal's cursor. Parts of a namespace may hold any character: quote them when printing.
"""

import json
import re
from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np

from kvlockstep.fuzz.config import OPTION

VERSION = 1
MAX_LINE = 16 << 20  # bytes, the newline included
MAX_TOKEN = (1 << 31) - 1
MAX_TOKENS = 1 << 20  # of one operation, expanded
MAX_NUMBER = (1 << 31) - 1  # and -MAX_NUMBER - 1: a wrong n is an operation that must be refused, not a bad file
MAX_BATCH = 4096
MAX_DRAFTS = 256
MAX_SAMPLED = 16
MAX_CONTENT_IDS = 1024

NAME = r"[A-Za-z0-9_.:-]{1,64}"
TARGET = r"[A-Za-z0-9_.:-]{1,200}"
SIGNATURE = r"(?!\.)[ -.0-\[\]-~]{1,200}"
SENTENCE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{0,500}"
PART = r"[^\ud800-\udfff]{0,256}"  # of a namespace
LANES = ("cuda", "interpret", "torch")

_IN_WORDS = {
    NAME: "1..64 letters, digits and _.:-",
    TARGET: "1..200 letters, digits and _.:-",
    SIGNATURE: "1..200 characters fit for the name of a folder",
    SENTENCE: "at most 500 printable characters",
    PART: "at most 256 characters",
    OPTION: "1..40 small letters, digits and _, a letter first",
}

SCHEMA_REMEDY = "compare with kvlockstep/fuzz/trace.schema.json"


class BadLine(ValueError):
    """What is wrong with a line, before it is known in which file it stands."""

    def __init__(self, what: str, remedy: str = SCHEMA_REMEDY) -> None:
        super().__init__(f"{what}: {remedy}")


def shown(value: Any) -> str:
    """Short ASCII for a message, whatever a stranger wrote."""
    if type(value) is list:
        return f"a list of {len(value)}"
    if type(value) is dict:
        return "an object"
    text = encode_basestring_ascii(value[:50]) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 50 else text[:47] + "..."


def check_integer(value: Any, name: str, low: int = -MAX_NUMBER - 1, high: int = MAX_NUMBER) -> int:
    if type(value) is not int or not low <= value <= high:
        raise BadLine(f"{name}: expected an integer in {low}..{high}, got {shown(value)}")
    return value


def check_switch(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise BadLine(f"{name}: expected true or false, got {shown(value)}")
    return value


def check_text(value: Any, name: str, pattern: str) -> str:
    if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
        raise BadLine(f"{name}: expected {_IN_WORDS[pattern]}, got {shown(value)}")
    return value


def check_list(value: Any, name: str, high: int) -> list[Any]:
    if type(value) is not list or len(value) > high:
        raise BadLine(f"{name}: expected a list of at most {high}, got {shown(value)}")
    return value


def check_fields(body: dict[str, Any], expected: tuple[str, ...], name: str) -> None:
    if body.keys() == set(expected):
        return
    for field in body:
        if field not in expected:
            raise BadLine(f"{name}: unknown field {shown(field)}")
    raise BadLine(f"{name}: missing field {shown(next(field for field in expected if field not in body))}")


def block_tokens(block: int, length: int) -> tuple[int, ...]:
    """Expand the piece ``[block, length]``: the first ``length`` tokens of the block, the same everywhere.

    Token ``j`` of block ``b`` is ``mix(mix(b) ^ mix(j + 2**31)) & 0x7fffffff`` in unsigned 32-bit arithmetic, where
    ``mix(x)`` is ``x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16``.
    Block 7 begins 1707401417, 1587770896, 475632927, whatever its length.
    """
    positions = np.arange(length, dtype=np.uint32) + np.uint32(1 << 31)
    seed = _mix(np.array([block], dtype=np.uint32))
    return tuple((_mix(seed ^ _mix(positions)) & np.uint32(MAX_TOKEN)).tolist())


def _mix(x: np.ndarray[Any, np.dtype[np.uint32]]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
