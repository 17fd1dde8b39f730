"""What the decoder refuses: the same lines as the published schema, each with one clear line of text."""

import json
from importlib.resources import files

import pytest
from jsonschema import Draft202012Validator

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.trace import Header, TraceError, decode_header, decode_op, encode_header

VALIDATOR = Draft202012Validator(json.loads((files("kvlockstep.fuzz") / "trace.schema.json").read_text()))
HEADER = json.loads(encode_header(Header(CacheConfig())))


def submit(**fields):
    body = {"op": "submit", "request": "r0", "tokens": [1], "namespace": [None, None, []], "priority": 0}
    return {**body, "private": False, **fields}


def alloc(*batch):
    return {"op": "alloc", "batch": list(batch)}


def commit(**fields):
    return {"op": "commit", "request": "r0", "kept": 1, "sampled": [], **fields}


def match(request):
    return {"op": "match", "request": request}


def evict(n):
    return {"op": "evict", "n": n}


def without(body, field):
    return {name: value for name, value in body.items() if name != field}


def header(**fields):
    return {**HEADER, **fields}


def config(**fields):
    return {**HEADER, "config": {**HEADER["config"], **fields}}


GOOD_OPS = [
    submit(),
    submit(tokens=[]),
    submit(tokens=[0, 2**31 - 1]),
    submit(tokens=[[0, 1], [2**31 - 1, 2]]),
    submit(namespace=["", "\u2028\x1b", ["", "x" * 256]]),
    submit(namespace=[None, None, ["x"] * 1024]),
    submit(priority=-(2**31)),
    alloc(),
    alloc(["r0", 0, []], ["r0", -1, [1] * 256]),
    alloc(*[["r0", 1, []]] * 4096),
    commit(kept=-1, sampled=[1] * 16),
    match("a-Z_0.9:" * 8),
    evict(-(2**31)),
    evict(2**31 - 1),
    {"op": "retract", "request": "r0", "publish": True},
    {"op": "reset"},
]

BAD_OPS = [
    {},
    {"op": "drop"},
    {"op": "Reset"},
    {"op": None},
    {"op": ["reset"]},
    {"op": "reset", "n": 1},
    HEADER,
    match(""),
    match("r" * 65),
    match("r0\n"),
    match("../r0"),
    match("r\u0660"),
    match(0),
    match(None),
    {"op": "match"},
    {"op": "match", "request": "r0", "publish": True},
    evict("1"),
    evict(True),
    evict(None),
    evict(2**31),
    evict(-(2**31) - 1),
    evict([1]),
    without(submit(), "namespace"),
    without(submit(), "private"),
    submit(step=3),
    submit(private=0),
    submit(private=None),
    submit(priority=False),
    submit(priority=2**31),
    submit(tokens=None),
    submit(tokens="abc"),
    submit(tokens={"0": 1}),
    submit(tokens=[-1]),
    submit(tokens=[2**31]),
    submit(tokens=[True]),
    submit(tokens=["1"]),
    submit(tokens=[1, [1, 1]]),
    submit(tokens=[[1, 1], 1]),
    submit(tokens=[[1]]),
    submit(tokens=[[1, 1, 1]]),
    submit(tokens=[[1, 0]]),
    submit(tokens=[[1, 2**20 + 1]]),
    submit(tokens=[[-1, 1]]),
    submit(tokens=[[True, 1]]),
    submit(namespace=None),
    submit(namespace=[None, None]),
    submit(namespace=[None, None, [], []]),
    submit(namespace=[None, None, None]),
    submit(namespace=[1, None, []]),
    submit(namespace=[None, ["x"], []]),
    submit(namespace=[None, None, [None]]),
    submit(namespace=["x" * 257, None, []]),
    submit(namespace=["\ud800", None, []]),
    submit(namespace=[None, None, ["x"] * 1025]),
    {"op": "alloc", "batch": {}},
    alloc([]),
    alloc(["r0", 1]),
    alloc(["r0", 1, [], 0]),
    alloc(["r0", 1, None]),
    alloc(["r0", True, []]),
    alloc(["r0", 1, [-1]]),
    alloc(["r0", 1, [1] * 257]),
    alloc([0, 1, []]),
    alloc({"request": "r0", "n": 1, "drafts": []}),
    alloc(*[["r0", 1, []]] * 4097),
    commit(sampled=5),
    commit(sampled=[1] * 17),
    commit(kept="1"),
    {"op": "retract", "request": "r0", "publish": 1},
    {"op": "retract", "request": "r0"},
]

GOOD_HEADERS = [
    HEADER,
    header(why="\u00fc" * 500, violates="PageOwnedTwice", signature="PageOwnedTwice.release.free+tree", fault="f-1"),
    header(target="package.module:factory", lane="interpret"),
    header(lane="interpret", sanitize=0),
    header(lane="interpret", sanitize=(1 << 31) - 1),
    config(page_size=1024, n_pages=2**20, kv_heads=256, head_dim=1024, layers=256, n_rows=2**14),
    config(kv_heads=1, head_dim=1, dtype="float32"),
    config(policy="tlru"),
    config(options=[]),
    config(options=["a", "a0", "a_"]),
    config(options=sorted(f"{chr(97 + i)}{'x' * 39}" for i in range(16))),
]

BAD_HEADERS = [
    {},
    {"op": "reset"},
    header(kvlockstep=0),
    header(kvlockstep=2),
    header(kvlockstep="1"),
    header(kvlockstep=True),
    header(seed=7),
    without(HEADER, "why"),
    without(HEADER, "fault"),
    header(config=None),
    header(config=[]),
    config(colour="red"),
    header(config=without(HEADER["config"], "dtype")),
    config(page_size=0),
    config(page_size=1025),
    config(page_size=True),
    config(page_size="4"),
    config(n_pages=2**20 + 1),
    config(n_rows=2**14 + 1),
    config(max_context_len=0),
    config(policy="random"),
    config(policy=None),
    config(policy="\u00e9" * 1000),
    config(key_units="char"),
    config(prefix_sharing=1),
    config(dtype="int8"),
    config(kv_heads=1, head_dim=1, dtype="float16"),
    config(options=None),
    config(options="sorted"),
    config(options=[1]),
    config(options=[["a"]]),
    config(options=["A"]),
    config(options=["0a"]),
    config(options=[""]),
    config(options=["a\n"]),
    config(options=["a" * 41]),
    config(options=["a", "a"]),
    config(options=[f"a{i:02}" for i in range(17)]),
    header(why=None),
    header(why="x" * 501),
    header(why="two\nlines"),
    header(why="\x1b]0;"),
    header(why="\u009b2J"),
    header(why="\udfff"),
    header(violates=1),
    header(violates=""),
    header(violates="a b"),
    header(signature=""),
    header(signature="../x"),
    header(signature="a/b"),
    header(signature="a\\b"),
    header(signature="x\n"),
    header(signature="x" * 201),
    header(target=None),
    header(target=""),
    header(target="a;b"),
    header(lane="gpu"),
    header(sanitize=None),
    header(sanitize=-1),
    header(sanitize=1 << 31),
    header(sanitize=True),
    header(sanitize="1"),
    header(lane=["torch"]),
    header(fault="../x"),
]


def assert_one_clear_line(error, where):
    text = str(error)
    assert text.startswith(f"{where}: ")
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 250
    assert text.count(": ") >= 2, "no remedy"


def label(body):
    return json.dumps(body)[:70]


@pytest.mark.parametrize("body", GOOD_OPS, ids=label)
def test_decoder_and_schema_accept_operation(body):
    decode_op(json.dumps(body), "t:2")
    VALIDATOR.validate(body)


@pytest.mark.parametrize("body", BAD_OPS, ids=label)
def test_decoder_and_schema_refuse_operation(body):
    with pytest.raises(TraceError) as caught:
        decode_op(json.dumps(body), "t.jsonl:2")

    assert_one_clear_line(caught.value, "t.jsonl:2")
    assert body is HEADER or not VALIDATOR.is_valid(body)


@pytest.mark.parametrize("body", GOOD_HEADERS, ids=label)
def test_decoder_and_schema_accept_header(body):
    decode_header(json.dumps(body), "t:1")
    VALIDATOR.validate(body)


@pytest.mark.parametrize("body", BAD_HEADERS, ids=label)
def test_decoder_and_schema_refuse_header(body):
    with pytest.raises(TraceError) as caught:
        decode_header(json.dumps(body), "t.jsonl:1")

    assert_one_clear_line(caught.value, "t.jsonl:1")
    assert body == {"op": "reset"} or not VALIDATOR.is_valid(body)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("", "an empty line"),
        (" \n", "an empty line"),
        ("reset", "not JSON"),
        ('{"op":"reset"} {}', "Extra data"),
        ('{"op":"reset"', "not JSON"),
        ("{'op':'reset'}", "not JSON"),
        ("[]", "expected a JSON object, got a list of 0"),
        ("null", "expected a JSON object, got null"),
        ('"reset"', 'expected a JSON object, got "reset"'),
        ('\ufeff{"op":"reset"}', "a byte order mark"),
        ('{"op":"evict","n":1.0}', '"1.0" is not a whole number'),
        ('{"op":"evict","n":1e2}', '"1e2" is not a whole number'),
        ('{"op":"evict","n":NaN}', '"NaN" is not a whole number'),
        ('{"op":"evict","n":-Infinity}', '"-Infinity" is not a whole number'),
        ('{"op":"evict","n":1,"n":1}', 'field "n" stands twice'),
        ('{"op":"evict","n":' + "9" * 5000 + "}", "a number with thousands of digits"),
        ('{"op":"evict","n":' + "9" * 4000 + "}", "n: expected an integer in"),
        ('{"op":"evict","n":' + "[" * 100_000, "nested too deep"),
        ('{"op":' * 100_000, "nested too deep"),
        ('{"op":"match","request":"a\x00"}', "not JSON"),
        (" " * (16 << 20) + '{"op":"reset"}', "a line of more than 16777216 bytes"),
        (
            json.dumps(submit(tokens=[[1, 2**20], [2, 1]])),
            "the pieces make more than 1048576 tokens",
        ),
    ],
    ids=lambda text: text[:40],
)
def test_decoder_refuses_text_that_a_schema_cannot_see(line, wrong):
    with pytest.raises(TraceError) as caught:
        decode_op(line, "t.jsonl:2")

    assert wrong in str(caught.value)
    assert_one_clear_line(caught.value, "t.jsonl:2")


def test_options_out_of_order_are_refused_though_a_schema_cannot_say_so():
    body = config(options=["b", "a"])
    VALIDATOR.validate(body)

    with pytest.raises(TraceError) as caught:
        decode_header(json.dumps(body), "t.jsonl:1")
    assert_one_clear_line(caught.value, "t.jsonl:1")
    assert "config.options: expected each name once, in order, got b, a" in str(caught.value)


def test_future_version_is_named_before_its_unknown_fields():
    with pytest.raises(TraceError) as caught:
        decode_header('{"kvlockstep":2,"pools":[]}', "t.jsonl:1")

    assert str(caught.value) == "t.jsonl:1: trace version 2, this kvlockstep reads 1: upgrade kvlockstep"


def test_missing_header_is_told_from_a_wrong_one():
    with pytest.raises(TraceError, match=r"^t:1: no header: a trace starts with"):
        decode_header('{"op":"reset"}', "t:1")


def test_duplicate_among_many_fields_is_found_quickly():
    line = "{" + ",".join(f'"{n}":0' for n in range(200_000)) + ',"199999":0}'

    with pytest.raises(TraceError, match="stands twice"):
        decode_op(line, "t:2")
