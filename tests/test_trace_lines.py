"""Lines of a trace: to text and back without loss, always canonical, always within the published schema."""

import json
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvlockstep.fuzz import trace_bounds as bounds
from kvlockstep.fuzz.config import DTYPES, KEY_UNITS, OPTION, POLICIES, CacheConfig
from kvlockstep.fuzz.ops import (
    OPS,
    Abort,
    Alloc,
    AllocItem,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Peek,
    Release,
    Reset,
    Retract,
    Submit,
)
from kvlockstep.fuzz.trace import Header, decode_header, decode_op, encode_header, encode_op
from kvlockstep.fuzz.trace_bounds import block_tokens

SCHEMA = json.loads((files("kvlockstep.fuzz") / "trace.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)

names = st.from_regex(bounds.NAME, fullmatch=True)
numbers = st.integers(-bounds.MAX_NUMBER - 1, bounds.MAX_NUMBER)
tokens = st.integers(0, bounds.MAX_TOKEN)
parts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
maybe_parts = st.none() | parts


def tuples(elements, max_size=5):
    return st.lists(elements, max_size=max_size).map(tuple)


ops = st.one_of(
    st.builds(
        Submit, names, tuples(tokens), st.tuples(maybe_parts, maybe_parts, tuples(parts)), numbers, st.booleans()
    ),
    st.builds(Alloc, tuples(st.builds(AllocItem, names, numbers, tuples(tokens)))),
    st.builds(Commit, names, numbers, tuples(tokens)),
    st.builds(Retract, names, st.booleans()),
    st.builds(Evict, numbers),
    st.just(Reset()),
    *(st.builds(kind, names) for kind in (Peek, Match, Checkpoint, Release, Abort)),
)
configs = st.builds(
    CacheConfig,
    page_size=st.integers(1, 1024),
    n_pages=st.integers(1, 1 << 20),
    policy=st.sampled_from(POLICIES),
    key_units=st.sampled_from(KEY_UNITS),
    prefix_sharing=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    options=st.sets(st.from_regex(OPTION, fullmatch=True), max_size=3).map(sorted).map(tuple),
)
headers = st.builds(
    Header,
    configs,
    why=st.from_regex(bounds.SENTENCE, fullmatch=True),
    violates=st.none() | names,
    signature=st.none() | st.from_regex(bounds.SIGNATURE, fullmatch=True),
    target=st.from_regex(bounds.TARGET, fullmatch=True),
    lane=st.sampled_from((*bounds.LANES, None)),
    fault=st.none() | names,
    sanitize=st.none() | st.integers(0, bounds.MAX_NUMBER),
)


def assert_canonical(line):
    assert line.isascii()
    assert "\n" not in line
    assert line == json.dumps(json.loads(line), separators=(",", ":"))


@given(ops)
def test_operation_survives_its_line(op):
    line = encode_op(op)

    assert_canonical(line)
    VALIDATOR.validate(json.loads(line))
    assert decode_op(line, "t:2") == op
    assert encode_op(decode_op(line, "t:2")) == line


@given(headers)
def test_header_survives_its_line(header):
    line = encode_header(header)

    assert_canonical(line)
    VALIDATOR.validate(json.loads(line))
    assert decode_header(line, "t:1") == header


def test_line_is_the_published_text():
    """Each kind once, as in the design: the contract that other tools read."""
    expected = {
        Submit("r0", (1, 2, 3), ("lora-a", None, ("\u00fc",))): '{"op":"submit","request":"r0","tokens":[1,2,3],'
        '"namespace":["lora-a",null,["\\u00fc"]],"priority":0,"private":false}',
        Peek("r0"): '{"op":"peek","request":"r0"}',
        Match("r0"): '{"op":"match","request":"r0"}',
        Alloc((AllocItem("r0", 3), AllocItem("r1", 2, (7,)))): '{"op":"alloc","batch":[["r0",3,[]],["r1",2,[7]]]}',
        Commit("r0", 3, (5,)): '{"op":"commit","request":"r0","kept":3,"sampled":[5]}',
        Checkpoint("r0"): '{"op":"checkpoint","request":"r0"}',
        Release("r0"): '{"op":"release","request":"r0"}',
        Abort("r0"): '{"op":"abort","request":"r0"}',
        Retract("r0"): '{"op":"retract","request":"r0","publish":false}',
        Evict(4): '{"op":"evict","n":4}',
        Reset(): '{"op":"reset"}',
    }

    assert {op: encode_op(op) for op in expected} == expected
    assert {type(op) for op in expected} == set(OPS)


def test_text_that_is_not_canonical_decodes_to_the_same_operation():
    loose = ' {"request" : "r\\u0030", "op":"commit", "sampled":[], "kept": -0}\r\n'

    assert decode_op(loose, "t:2") == Commit("r0", 0)


def test_largest_operations_fit_in_a_line():
    part = "\U0001f600" * 256  # twelve characters each, once escaped
    namespace = (part, part, (part,) * bounds.MAX_CONTENT_IDS)
    name = "r" * 64
    item = AllocItem(name, -bounds.MAX_NUMBER - 1, (bounds.MAX_TOKEN,) * bounds.MAX_DRAFTS)
    largest = [
        Submit(name, (bounds.MAX_TOKEN,) * bounds.MAX_TOKENS, namespace, bounds.MAX_NUMBER, False),
        Alloc((item,) * bounds.MAX_BATCH),
    ]

    for op in largest:
        line = encode_op(op)
        assert len(line) < bounds.MAX_LINE
        assert decode_op(line, "t:2") == op


@pytest.mark.parametrize(
    "op",
    [
        Match("../r0"),
        Match(""),
        Match("r" * 65),
        Match("r0\n"),
        Submit("r0", (-1,)),
        Submit("r0", (1 << 31,)),
        Submit("r0", (1,) * (bounds.MAX_TOKENS + 1)),
        Submit("r0", (1,), ("x" * 257, None, ())),
        Submit("r0", (1,), ("\ud800", None, ())),
        Submit("r0", (1,), (None, None, ("x",) * 1025)),
        Submit("r0", (1,), priority=1 << 31),
        Submit("r0", (1,), private=1),
        Alloc((AllocItem("r0", 1),) * 4097),
        Alloc((AllocItem("r0", 1, (1,) * 257),)),
        Alloc((AllocItem("r0", True),)),
        Commit("r0", 1, (1,) * 17),
        Retract("r0", 0),
        Evict(1 << 31),
        Evict(-(1 << 31) - 1),
    ],
    ids=lambda op: repr(op)[:40],
)
def test_encoder_refuses_what_could_not_be_read_back(op):
    with pytest.raises(ValueError, match="expected"):
        encode_op(op)


@pytest.mark.parametrize(
    "fields",
    [
        {"why": "two\nlines"},
        {"why": "\x1b[2J"},
        {"why": "x" * 501},
        {"violates": ""},
        {"signature": "../../etc"},
        {"signature": ".hidden"},
        {"signature": "a\\b"},
        {"target": "os system"},
        {"lane": "gpu"},
        {"fault": "a/b"},
        {"config": CacheConfig(page_size=0)},
    ],
    ids=str,
)
def test_encoder_refuses_header_that_could_not_be_read_back(fields):
    with pytest.raises(ValueError, match="expected"):
        encode_header(Header(**{"config": CacheConfig(), **fields}))


@given(st.integers(0, bounds.MAX_TOKEN), st.integers(1, 40))
def test_block_tokens_follow_the_published_formula(block, length):
    def mix(x):
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    expected = tuple(mix(mix(block) ^ mix(j + 2**31)) & 0x7FFFFFFF for j in range(length))

    assert block_tokens(block, length) == expected


def test_pieces_are_read_as_their_tokens():
    line = (
        '{"op":"submit","request":"r0","tokens":[[7,3],[9,1]],"namespace":[null,null,[]],"priority":0,"private":false}'
    )

    op = decode_op(line, "t:2")

    assert op == Submit("r0", block_tokens(7, 3) + block_tokens(9, 1))
    assert op.tokens == (1707401417, 1587770896, 475632927, 1574205349)
    assert decode_op(encode_op(op), "t:2") == op
