"""Snapshot files: one moment of a live cache in JSON, written where it runs, read where the laws are held to it.

A file is one JSON object whose first field is ``"kvlockstep_snapshot": 1``; the others are those of
`invariants.Snapshot`, name by name, with ``source`` (who wrote it) and ``write_sets`` (the slots that passes in flight
write, which no snapshot shows). ``snapshot.schema.json`` has them all (docs/check.md). A part that the writer could
not see is null. A gzipped file is known by its first bytes when it is read, and is made when the name ends in ``.gz``.

Files are data from strangers: text, lists and numbers are bounded, an unknown field is an error that names its place,
names cannot move a terminal's cursor, and nothing is evaluated. What is read may break every law: only what no
`Snapshot` could hold is refused.

Imports no torch, so that a live process can write one.
"""

import gc
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from kvlockstep.fuzz import strict_json
from kvlockstep.fuzz.files import replace_file
from kvlockstep.fuzz.trace import BOMB_RATIO, BOMB_TEXT
from kvlockstep.fuzz.trace_bounds import (
    MAX_CONTENT_IDS,
    SCHEMA_REMEDY,
    SENTENCE,
    BadLine,
    check_fields,
    check_integer,
    check_list,
    check_text,
    shown,
)
from kvlockstep.invariants import FULL, Namespace, NodeView, PoolView, RequestView, RowView, Snapshot, Unit

VERSION = 1
MAX_TEXT = 1 << 29  # bytes, after decompression
MAX_ITEMS = 1 << 24  # of one list
MAX_PAGES = 1 << 23
MAX_PAGE_SIZE = 1 << 16
MAX_ROWS = 1 << 20
MAX_POOLS = 16
MAX_PART = 1 << 16  # characters of one part of a namespace
MAX_NUMBER = (1 << 53) - 1  # and as much below 0: what every reader of JSON keeps whole
STATES = ("MATCHED", "RUNNING", "IN_FLIGHT")
LABEL = r"[^\x00-\x20\x7f-\xa0\u2028\u2029\ud800-\udfff]{1,200}"
"""Name of a request or a pool: printable, and no spaces."""

_SURROGATE = re.compile(r"[\ud800-\udfff]")

STDIN = "-"

REMEDY = "compare with kvlockstep/fuzz/snapshot.schema.json"

_FIELDS = (
    "kvlockstep_snapshot",
    "source",
    "page_size",
    "n_rows",
    "max_context_len",
    "pools",
    "rows",
    "free_rows",
    "row_generations",
    "requests",
    "nodes",
    "evictable_nodes",
    "root_lock_ref",
    "write_sets",
)
_POOL = ("n_pages", "free_pages", "page_generations", "available", "evictable", "protected")
_ROW = ("row", "request", "slots")
_REQUEST = ("request", "state", "protected_len", "committed_len", "allocated_len", "anchor", "row")
_NODE = (
    *("node", "parent", "namespace", "units", "slots"),
    *("lock_ref", "stamp", "created", "hits", "priority", "children"),
)
_WRITE_SET = ("request", "slots")

_Item = TypeVar("_Item")


class SnapshotError(ValueError):
    """A snapshot that cannot be read, in one line: ``FILE: place: what is wrong: remedy``."""


@dataclass(frozen=True, slots=True)
class Dump:
    """What a file holds. ``write_sets``: by request in flight, the slots that its pass writes; None: not seen."""

    snapshot: Snapshot
    source: str
    write_sets: dict[str, list[int]] | None


# Writing


def write(
    path: str | os.PathLike[str],
    snapshot: Snapshot,
    *,
    source: str,
    write_sets: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Write a snapshot and replace the file at once: a reader sees the old one or the new one.

    ``write_sets`` has one entry for each request in flight, so it is empty where none is; None says that they are not
    known, and then law 3 cannot be checked. Raises OSError, and ValueError, with nothing written, for a name or a
    ``source`` that `read` would refuse.
    """
    data = encode(snapshot, source=source, write_sets=write_sets).encode("ascii")
    if os.fspath(path).endswith(".gz"):  # packed so that neither name nor time goes into the file
        packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
        data = packer.compress(data) + packer.flush()
    replace_file(Path(path), data)


def encode(snapshot: Snapshot, *, source: str, write_sets: Mapping[str, Sequence[int]] | None = None) -> str:
    """Write a snapshot as its canonical text: ASCII, one field a line, one row, request or node a line.

    Raises ValueError for a name or a ``source`` that `read` would refuse.
    """
    check_text(source, "source", SENTENCE)
    for name in [*snapshot.pools, *(view.request for view in [*(snapshot.rows or ()), *(snapshot.requests or ())])]:
        _label(name, "a name")
    values: dict[str, Any] = {name: getattr(snapshot, name) for name in _FIELDS[2:-1]}
    values["pools"] = {name: _as_object(view, _POOL) for name, view in snapshot.pools.items()}
    for name, fields in (("rows", _ROW), ("requests", _REQUEST), ("nodes", _NODE)):
        if values[name] is not None:
            values[name] = [_as_object(view, fields) for view in values[name]]
    sets = None if write_sets is None else [{"request": r, "slots": list(s)} for r, s in write_sets.items()]
    whole = {"kvlockstep_snapshot": VERSION, "source": source, **values, "write_sets": sets}
    return "{\n" + ",\n".join(f'"{name}":{_field_text(value)}' for name, value in whole.items()) + "\n}\n"


def _as_object(view: object, fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(view, name) for name in fields}


def _field_text(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        start = f'{{"{next(iter(value[0]))}":'  # in no string: a quote within one has a backslash before it
        lines = text[1:-1].replace(f"}},{start}", f"}},\n{start}")
        return f"[\n{lines}\n]"
    return text


# Reading


def read(path: str | os.PathLike[str]) -> Dump:
    """Read a snapshot; the path ``-`` is standard input. Raises SnapshotError."""
    name = os.fspath(path)
    collects = gc.isenabled()
    gc.disable()  # of a million fresh lists none is garbage, and to look for it takes half the time
    try:
        return _decode(_text(name))
    except BadLine as error:
        remark = str(error)
        if remark.endswith(SCHEMA_REMEDY):
            remark = remark.removesuffix(SCHEMA_REMEDY) + REMEDY
        raise SnapshotError(f"{'standard input' if name == STDIN else name}: {remark}") from None
    finally:
        if collects:
            gc.enable()


def _text(name: str) -> str:
    try:
        if name == STDIN:
            return _unpacked(sys.stdin.buffer)
        with open(name, "rb") as file:
            return _unpacked(file)
    except UnicodeDecodeError as error:
        raise BadLine(f"byte {error.start} is not UTF-8", "save as UTF-8") from None
    except EOFError:
        raise BadLine("the gzip data is cut off", "fetch the file again") from None
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadLine(f"cannot be read ({reason})", "name a readable, undamaged snapshot") from None


def _unpacked(file: IO[bytes]) -> str:
    """Read all text of a file, gzipped or not, up to the bound; a gzip bomb stops after a few MiB."""
    buffered = io.BufferedReader(file)  # type: ignore[type-var] # whatever reads bytes will do
    packed = buffered.peek(2)[:2] == b"\x1f\x8b"
    source = gzip.GzipFile(fileobj=buffered) if packed else buffered
    parts: list[bytes] = []
    n_bytes = 0
    while part := source.read(BOMB_TEXT):
        parts.append(part)
        n_bytes += len(part)
        if n_bytes > MAX_TEXT:
            raise BadLine(f"more than {MAX_TEXT} bytes of text", "is this a snapshot?")
        if packed and n_bytes > BOMB_TEXT and file.seekable() and n_bytes > BOMB_RATIO * file.tell():
            raise BadLine(f"gzip data that expands over {BOMB_RATIO}-fold", "is this a snapshot?")
    return b"".join(parts).decode()


def _decode(text: str) -> Dump:
    """Turn text into a dump. Raises BadLine, whose text names the place within the file."""
    try:
        body = strict_json.decode(text)
    except json.JSONDecodeError as error:
        what = f"not JSON ({error.msg}, line {error.lineno} column {error.colno})"
        raise BadLine(what, "name a snapshot that was written whole") from None
    if type(body) is not dict or "kvlockstep_snapshot" not in body:
        raise BadLine("no field kvlockstep_snapshot", "a trace is for kvlockstep replay; this reads snapshots")
    version = body["kvlockstep_snapshot"]
    if type(version) is not int or version != VERSION:
        raise BadLine(f"kvlockstep_snapshot: version {shown(version)}, this reads {VERSION}", "update kvlockstep")
    check_fields(body, _FIELDS, "snapshot")
    pools = _pools(body["pools"])
    snapshot = Snapshot(
        page_size=check_integer(body["page_size"], "page_size", 1, MAX_PAGE_SIZE),
        n_rows=check_integer(body["n_rows"], "n_rows", 0, MAX_ROWS),
        pools=pools,
        rows=_optional(_list_of(_row), body["rows"], "rows"),
        free_rows=_optional(_integers, body["free_rows"], "free_rows"),
        row_generations=_optional(_integers, body["row_generations"], "row_generations"),
        requests=_optional(_requests, body["requests"], "requests"),
        nodes=_optional(_list_of(lambda value, place: _node(value, place, pools)), body["nodes"], "nodes"),
        evictable_nodes=_optional(_integers, body["evictable_nodes"], "evictable_nodes"),
        root_lock_ref=_optional(_number, body["root_lock_ref"], "root_lock_ref"),
        max_context_len=_optional(_count, body["max_context_len"], "max_context_len"),
    )
    write_sets = _optional(_write_sets, body["write_sets"], "write_sets")
    if write_sets is not None and snapshot.requests is not None:
        in_flight = {view.request for view in snapshot.requests if view.state == "IN_FLIGHT"}
        for name in sorted(in_flight ^ write_sets.keys()):
            state = "is IN_FLIGHT and has none" if name in in_flight else "has one and is not IN_FLIGHT"
            raise BadLine(f"write_sets: request {name} {state}", "write one for each request in flight, or null")
    return Dump(snapshot, check_text(body["source"], "source", SENTENCE), write_sets)


def _optional(decode: Callable[[Any, str], _Item], value: Any, place: str) -> _Item | None:
    return None if value is None else decode(value, place)


def _list_of(decode: Callable[[Any, str], _Item]) -> Callable[[Any, str], list[_Item]]:
    def decode_all(value: Any, place: str) -> list[_Item]:
        return [decode(item, f"{place}[{at}]") for at, item in enumerate(check_list(value, place, MAX_ITEMS))]

    return decode_all


def _object(value: Any, place: str, fields: tuple[str, ...]) -> dict[str, Any]:
    if type(value) is not dict:
        raise BadLine(f"{place}: expected an object, got {shown(value)}")
    check_fields(value, fields, place)
    return value


def _number(value: Any, place: str) -> int:
    return check_integer(value, place, -MAX_NUMBER, MAX_NUMBER)


def _count(value: Any, place: str) -> int:
    return check_integer(value, place, 0, MAX_NUMBER)


def _integers(value: Any, place: str) -> list[int]:
    numbers = check_list(value, place, MAX_ITEMS)
    if numbers and not (
        set(map(type, numbers)) == {int} and min(numbers) >= -MAX_NUMBER and max(numbers) <= MAX_NUMBER
    ):
        for at, number in enumerate(numbers):
            _number(number, f"{place}[{at}]")
    return numbers


def _label(value: Any, place: str) -> str:
    if not isinstance(value, str) or re.fullmatch(LABEL, value) is None:
        raise BadLine(f"{place}: expected 1..200 printable characters without spaces, got {shown(value)}")
    return sys.intern(value)


def _pools(value: Any) -> dict[str, PoolView]:
    if type(value) is not dict or FULL not in value or len(value) > MAX_POOLS:
        raise BadLine(f"pools: expected an object of at most {MAX_POOLS} pools, {FULL!r} among them")
    return {_label(name, "pools"): _pool(view, f"pools.{name}") for name, view in value.items()}


def _pool(value: Any, place: str) -> PoolView:
    body = _object(value, place, _POOL)
    return PoolView(
        check_integer(body["n_pages"], f"{place}.n_pages", 0, MAX_PAGES),
        _optional(_integers, body["free_pages"], f"{place}.free_pages"),
        _optional(_integers, body["page_generations"], f"{place}.page_generations"),
        *[_optional(_number, body[name], f"{place}.{name}") for name in _POOL[3:]],
    )


def _row(value: Any, place: str) -> RowView:
    body = _object(value, place, _ROW)
    return RowView(
        _number(body["row"], f"{place}.row"),
        _label(body["request"], f"{place}.request"),
        _integers(body["slots"], f"{place}.slots"),
    )


def _requests(value: Any, place: str) -> list[RequestView]:
    views = _list_of(_request)(value, place)
    _refuse_twice([view.request for view in views], place)
    return views


def _request(value: Any, place: str) -> RequestView:
    body = _object(value, place, _REQUEST)
    if body["state"] not in STATES:
        raise BadLine(f"{place}.state: expected one of {', '.join(STATES)}, got {shown(body['state'])}")
    return RequestView(
        _label(body["request"], f"{place}.request"),
        body["state"],
        *[_number(body[name], f"{place}.{name}") for name in _REQUEST[2:5]],
        *[_optional(_number, body[name], f"{place}.{name}") for name in _REQUEST[5:]],
    )


def _refuse_twice(names: list[str], place: str) -> None:
    seen: set[str] = set()
    for at, name in enumerate(names):
        if name in seen:
            raise BadLine(f"{place}[{at}].request: {shown(name)} stands twice", "give each request its own name")
        seen.add(name)


def _node(value: Any, place: str, pools: Mapping[str, PoolView]) -> NodeView:
    body = _object(value, place, _NODE)
    slots = body["slots"]
    if type(slots) is not dict or not slots.keys() <= pools.keys():
        raise BadLine(f"{place}.slots: expected an object with pools of this snapshot, got {shown(slots)}")
    return NodeView(
        check_integer(body["node"], f"{place}.node", 0, MAX_NUMBER),
        _number(body["parent"], f"{place}.parent"),
        _namespace(body["namespace"], f"{place}.namespace"),
        _units(body["units"], f"{place}.units"),
        {name: _integers(of_pool, f"{place}.slots.{name}") for name, of_pool in slots.items()},
        _number(body["lock_ref"], f"{place}.lock_ref"),
        stamp=_optional(_number, body["stamp"], f"{place}.stamp"),
        created=_optional(_number, body["created"], f"{place}.created"),
        hits=_optional(_number, body["hits"], f"{place}.hits"),
        priority=_optional(_number, body["priority"], f"{place}.priority"),
        children=_optional(_integers, body["children"], f"{place}.children"),
    )


def _namespace(value: Any, place: str) -> Namespace:
    if type(value) is not list or len(value) != 3:
        raise BadLine(f"{place}: expected [extra_key, cache_salt, content_ids], got {shown(value)}")
    extra_key, cache_salt, ids = value
    return (
        _optional(_part, extra_key, place),
        _optional(_part, cache_salt, place),
        tuple([_part(part, place) for part in check_list(ids, place, MAX_CONTENT_IDS)]),
    )


def _part(value: Any, place: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_PART or (not value.isascii() and _SURROGATE.search(value)):
        raise BadLine(f"{place}: expected at most {MAX_PART} characters, got {shown(value)}")
    return value


def _units(value: Any, place: str) -> tuple[Unit, ...]:
    """Read tokens, or pairs of them."""
    units = check_list(value, place, MAX_ITEMS)
    if not units or type(units[0]) is not list:
        return tuple(_integers(units, place))
    for at, pair in enumerate(units):
        if type(pair) is not list or len(pair) != 2:
            raise BadLine(f"{place}[{at}]: expected a pair of tokens, got {shown(pair)}")
        _integers(pair, f"{place}[{at}]")
    return tuple([(first, second) for first, second in units])


def _write_sets(value: Any, place: str) -> dict[str, list[int]]:
    found = []
    for at, item in enumerate(check_list(value, place, MAX_ITEMS)):
        body = _object(item, f"{place}[{at}]", _WRITE_SET)
        name = _label(body["request"], f"{place}[{at}].request")
        found.append((name, _integers(body["slots"], f"{place}[{at}].slots")))
    _refuse_twice([name for name, _ in found], place)
    return dict(found)
