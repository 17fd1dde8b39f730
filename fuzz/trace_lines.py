"""One line of a trace, to text and back: the header, and the operations of SPEC section 5 (docs/traces.md).

The text is canonical: compact JSON, fields in the order of the classes in ``ops.py``, ASCII, every
field written but for ``config.options`` where none is on, and ``sanitize`` where no sanitizer watched. Whatever
``encode_op`` accepts is a line that ``decode_op`` turns into an equal operation; a canonical line comes back as
the same bytes. Four rules are not in the published schema, because a schema cannot say them: a field stands
once, numbers have no fraction or exponent (``NaN`` neither), all tokens of an operation, expanded, are at most
``MAX_TOKENS``, and options are sorted.

Nothing is ever evaluated, and ``target`` is only a name: importing what it names is the decision of
the person who replays.

Encoding runs before every operation of the fuzzer, hence text by hand instead of ``json.dumps``.
Files are in ``trace.py``.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from sys import intern
from typing import Any

from kvlockstep.fuzz import strict_json
from kvlockstep.fuzz.config import MAX_OPTIONS, OPTION, CacheConfig
from kvlockstep.fuzz.ops import (
    OPS,
    Abort,
    Alloc,
    AllocItem,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Namespace,
    Op,
    Peek,
    Release,
    Reset,
    Retract,
    Submit,
)
from kvlockstep.fuzz.pieces import Pieces
from kvlockstep.fuzz.trace_bounds import (
    LANES,
    MAX_BATCH,
    MAX_CONTENT_IDS,
    MAX_DRAFTS,
    MAX_LINE,
    MAX_SAMPLED,
    MAX_TOKEN,
    MAX_TOKENS,
    NAME,
    PART,
    SENTENCE,
    SIGNATURE,
    TARGET,
    VERSION,
    BadLine,
    check_fields,
    check_integer,
    check_list,
    check_switch,
    check_text,
    shown,
)


class TraceError(ValueError):
    """A trace that cannot be read, in one line: ``FILE:LINE: what is wrong: remedy``."""


class NotJson(BadLine):
    """Not JSON; as the last line of a file, the mark of a writer that was killed."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a trace is about. Until the verdict is known, ``violates`` and ``signature`` are None."""

    config: CacheConfig
    why: str = ""  # one sentence for a newcomer
    violates: str | None = None  # class name of the violation
    signature: str | None = None
    target: str = "gpu_impl"
    lane: str | None = None  # None: the target has none
    fault: str | None = None  # the planted fault that makes it fail
    sanitize: int | None = None  # the seed of the sanitizer that its kernels ran under


# To text


@lru_cache(4096)
def _name_text(name: str) -> str:
    return encode_basestring_ascii(check_text(name, "request", NAME))


def _tokens_text(tokens: tuple[int, ...], name: str, high: int = MAX_TOKENS) -> str:
    if not tokens:
        return "[]"
    if len(tokens) > high or min(tokens) < 0 or max(tokens) > MAX_TOKEN:
        raise BadLine(f"{name}: expected at most {high} tokens in 0..{MAX_TOKEN}, got {shown(list(tokens))}")
    return f"[{','.join(map(int.__repr__, tokens))}]"


def _prompt_text(tokens: tuple[int, ...] | Pieces) -> str:
    if not isinstance(tokens, Pieces):
        return _tokens_text(tokens, "submit.tokens")
    _check_pieces(list(map(list, tokens.pieces)))
    return f"[{','.join([f'[{block},{length}]' for block, length in tokens.pieces])}]"


@lru_cache(4096)
def _namespace_text(namespace: Namespace) -> str:
    extra_key, cache_salt, content_ids = namespace
    plain = [extra_key, cache_salt, list(content_ids)]
    _namespace(plain)
    return json.dumps(plain, separators=(",", ":"))


def _submit_text(op: Submit) -> str:
    return (
        f'{{"op":"submit","request":{_name_text(op.request)},"tokens":{_prompt_text(op.tokens)},'
        f'"namespace":{_namespace_text(op.namespace)},"priority":{check_integer(op.priority, "submit.priority")},'
        f'"private":{"true" if check_switch(op.private, "submit.private") else "false"}}}'
    )


def _alloc_item_text(item: AllocItem) -> str:
    drafts = _tokens_text(item.drafts, "alloc drafts", MAX_DRAFTS)
    return f"[{_name_text(item.request)},{check_integer(item.n, 'alloc n')},{drafts}]"


def _alloc_text(op: Alloc) -> str:
    check_list(list(op.batch), "alloc.batch", MAX_BATCH)
    return f'{{"op":"alloc","batch":[{",".join(map(_alloc_item_text, op.batch))}]}}'


def _commit_text(op: Commit) -> str:
    return (
        f'{{"op":"commit","request":{_name_text(op.request)},"kept":{check_integer(op.kept, "commit.kept")},'
        f'"sampled":{_tokens_text(op.sampled, "commit.sampled", MAX_SAMPLED)}}}'
    )


def _retract_text(op: Retract) -> str:
    publish = "true" if check_switch(op.publish, "retract.publish") else "false"
    return f'{{"op":"retract","request":{_name_text(op.request)},"publish":{publish}}}'


def _evict_text(op: Evict) -> str:
    return f'{{"op":"evict","n":{check_integer(op.n, "evict.n")}}}'


_TO_TEXT: dict[type[Op], Callable[[Any], str]] = {
    Submit: _submit_text,
    Peek: lambda op: f'{{"op":"peek","request":{_name_text(op.request)}}}',
    Match: lambda op: f'{{"op":"match","request":{_name_text(op.request)}}}',
    Alloc: _alloc_text,
    Commit: _commit_text,
    Checkpoint: lambda op: f'{{"op":"checkpoint","request":{_name_text(op.request)}}}',
    Release: lambda op: f'{{"op":"release","request":{_name_text(op.request)}}}',
    Abort: lambda op: f'{{"op":"abort","request":{_name_text(op.request)}}}',
    Retract: _retract_text,
    Evict: _evict_text,
    Reset: lambda op: '{"op":"reset"}',
}


def encode_op(op: Op) -> str:
    """Write an operation as its canonical line, without the newline.

    Raises ValueError for an operation that the format cannot hold: better before it runs than at replay.
    """
    return _TO_TEXT[type(op)](op)


def encode_header(header: Header) -> str:
    """Write a header as its canonical line, without the newline. Raises ValueError as ``encode_op`` does."""
    body: dict[str, Any] = {"kvlockstep": VERSION, "config": header.config.to_json()}
    body |= {name: getattr(header, name) for name in _HEADER_FIELDS[2:]}
    if header.sanitize is not None:
        body["sanitize"] = header.sanitize
    _header(body)
    return json.dumps(body, separators=(",", ":"))


# From text


def _object(line: str) -> dict[str, Any]:
    if len(line) > MAX_LINE:
        raise BadLine(f"a line of more than {MAX_LINE} bytes", "is this a trace?")
    if line.startswith("\ufeff"):
        raise BadLine("a byte order mark", "save as UTF-8 without one")
    if not line.strip():
        raise NotJson("an empty line", "delete it")
    try:
        body = strict_json.decode(line)
    except json.JSONDecodeError as error:
        raise NotJson(f"not JSON ({error.msg}, column {error.colno})", "write one JSON object a line") from None
    if type(body) is not dict:
        raise BadLine(f"expected a JSON object, got {shown(body)}", "write one JSON object a line")
    return body


def _name(value: Any, name: str) -> str:
    return intern(check_text(value, name, NAME))


def _tokens(value: Any, name: str, high: int = MAX_TOKENS) -> tuple[int, ...]:
    tokens = check_list(value, name, high)
    if tokens and not (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) <= MAX_TOKEN):
        for at, token in enumerate(tokens):
            check_integer(token, f"{name}[{at}]", 0, MAX_TOKEN)
    return tuple(tokens)


def _prompt(value: Any) -> tuple[int, ...] | Pieces:
    """Tokens as integers, or as pieces ``[block, length]``; never a mixture."""
    if type(value) is not list or not value or type(value[0]) is not list:
        return _tokens(value, "submit.tokens")
    _check_pieces(value)
    return Pieces(tuple([(block, length) for block, length in value]))


def _check_pieces(value: Any) -> None:
    total = 0
    for at, piece in enumerate(check_list(value, "submit.tokens", MAX_TOKENS)):
        if type(piece) is not list or len(piece) != 2:
            raise BadLine(f"submit.tokens[{at}]: expected a piece [block, length], got {shown(piece)}")
        check_integer(piece[0], f"submit.tokens[{at}] block", 0, MAX_TOKEN)
        total += check_integer(piece[1], f"submit.tokens[{at}] length", 1, MAX_TOKENS)
        if total > MAX_TOKENS:
            raise BadLine(f"submit.tokens: the pieces make more than {MAX_TOKENS} tokens", "use shorter ones")


def _namespace(value: Any) -> Namespace:
    if type(value) is not list or len(value) != 3:
        raise BadLine(f"submit.namespace: expected [extra_key, cache_salt, content_ids], got {shown(value)}")
    extra_key, cache_salt, content_ids = value
    if extra_key is not None:
        check_text(extra_key, "submit.namespace extra_key", PART)
    if cache_salt is not None:
        check_text(cache_salt, "submit.namespace cache_salt", PART)
    for content_id in check_list(content_ids, "submit.namespace content_ids", MAX_CONTENT_IDS):
        check_text(content_id, "submit.namespace content_ids", PART)
    return (extra_key, cache_salt, tuple(content_ids))


def _alloc_item(value: Any, at: int) -> AllocItem:
    name = f"alloc.batch[{at}]"
    if type(value) is not list or len(value) != 3:
        raise BadLine(f"{name}: expected [request, n, drafts], got {shown(value)}")
    request, n, drafts = value
    return AllocItem(_name(request, name), check_integer(n, f"{name} n"), _tokens(drafts, f"{name} drafts", MAX_DRAFTS))


def _submit(body: dict[str, Any]) -> Submit:
    return Submit(
        _name(body["request"], "submit.request"),
        _prompt(body["tokens"]),
        _namespace(body["namespace"]),
        check_integer(body["priority"], "submit.priority"),
        check_switch(body["private"], "submit.private"),
    )


def _alloc(body: dict[str, Any]) -> Alloc:
    batch = check_list(body["batch"], "alloc.batch", MAX_BATCH)
    return Alloc(tuple([_alloc_item(item, at) for at, item in enumerate(batch)]))


def _commit(body: dict[str, Any]) -> Commit:
    request, kept = _name(body["request"], "commit.request"), check_integer(body["kept"], "commit.kept")
    return Commit(request, kept, _tokens(body["sampled"], "commit.sampled", MAX_SAMPLED))


_RESET = Reset()

_FROM_BODY: dict[str, Callable[[dict[str, Any]], Op]] = {
    "submit": _submit,
    "peek": lambda body: Peek(_name(body["request"], "peek.request")),
    "match": lambda body: Match(_name(body["request"], "match.request")),
    "alloc": _alloc,
    "commit": _commit,
    "checkpoint": lambda body: Checkpoint(_name(body["request"], "checkpoint.request")),
    "release": lambda body: Release(_name(body["request"], "release.request")),
    "abort": lambda body: Abort(_name(body["request"], "abort.request")),
    "retract": lambda body: Retract(
        _name(body["request"], "retract.request"), check_switch(body["publish"], "retract.publish")
    ),
    "evict": lambda body: Evict(check_integer(body["n"], "evict.n")),
    "reset": lambda body: _RESET,
}

_OP_FIELDS = {kind.__name__.lower(): ("op", *(field.name for field in fields(kind))) for kind in OPS}
_HEADER_FIELDS = ("kvlockstep", *(field.name for field in fields(Header) if field.name != "sanitize"))
_CONFIG_FIELDS = tuple(field.name for field in fields(CacheConfig) if field.name != "options")


def _op(body: dict[str, Any]) -> Op:
    if "op" not in body:
        if "kvlockstep" in body:
            raise BadLine("a second header", "one trace a file")
        raise BadLine('missing field "op"')
    kind = body["op"]
    if type(kind) is not str or kind not in _FROM_BODY:
        raise BadLine(f"unknown operation {shown(kind)}", f"one of {', '.join(_FROM_BODY)}")
    check_fields(body, _OP_FIELDS[kind], kind)
    return _FROM_BODY[kind](body)


def _header(body: dict[str, Any]) -> Header:
    if "kvlockstep" not in body:
        raise BadLine("no header", 'a trace starts with a line {"kvlockstep":1,"config":{...},...}')
    version = check_integer(body["kvlockstep"], "version", 1)
    if version != VERSION:
        raise BadLine(f"trace version {version}, this kvlockstep reads {VERSION}", "upgrade kvlockstep")
    check_fields(body, (*_HEADER_FIELDS, "sanitize") if "sanitize" in body else _HEADER_FIELDS, "header")
    if "sanitize" in body:
        check_integer(body["sanitize"], "sanitize", 0)
    config = body["config"]
    if type(config) is not dict:
        raise BadLine(f"config: expected an object, got {shown(config)}")
    check_fields(config, (*_CONFIG_FIELDS, "options") if "options" in config else _CONFIG_FIELDS, "config")
    for at, option in enumerate(check_list(config.get("options", []), "config.options", MAX_OPTIONS)):
        check_text(option, f"config.options[{at}]", OPTION)
    for name, value in config.items():
        if isinstance(value, str):  # before a message repeats it
            check_text(value, f"config.{name}", NAME)
    check_text(body["why"], "why", SENTENCE)
    check_text(body["target"], "target", TARGET)
    for name, pattern in (("violates", NAME), ("signature", SIGNATURE), ("fault", NAME)):
        if body[name] is not None:
            check_text(body[name], name, pattern)
    if body["lane"] is not None and body["lane"] not in LANES:
        raise BadLine(f"lane: expected null or one of {', '.join(LANES)}, got {shown(body['lane'])}")
    try:
        built = CacheConfig.from_json(config)
    except ValueError as error:
        raise BadLine(str(error)) from None
    return Header(built, **{name: body[name] for name in _HEADER_FIELDS[2:]}, sanitize=body.get("sanitize"))


def decode_op(line: str, where: str) -> Op:
    """Read an operation from its line. Raises TraceError, which starts with ``where`` (``FILE:LINE``)."""
    try:
        return _op(_object(line))
    except BadLine as error:
        raise TraceError(f"{where}: {error}") from error


def decode_header(line: str, where: str) -> Header:
    """Read a header from its line. Raises TraceError, which starts with ``where`` (``FILE:LINE``)."""
    try:
        return _header(_object(line))
    except BadLine as error:
        raise TraceError(f"{where}: {error}") from error
