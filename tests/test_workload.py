"""A request log becomes a trace: same prefixes, same order, any cache can run it, and nothing depends on luck."""

import gzip
import json
from dataclasses import replace

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Alloc, Commit, Match, Release, Retract, Submit
from kvlockstep.fuzz.pieces import Pieces
from kvlockstep.fuzz.replay import run_ops
from kvlockstep.fuzz.sparse import Looks, SparseLockstep
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.trace import decode_op, encode_op, read_trace
from kvlockstep.fuzz.trace_bounds import block_tokens
from kvlockstep.fuzz.workload import BLOCK, OUTPUTS, LogError, Logged, Room, Schedule, read_log

ROOM = Room(page_size=16, n_pages=512, n_rows=4, max_context_len=4096, chunk=256)


def config_of(room):
    return CacheConfig(room.page_size, room.n_pages, room.n_rows, room.max_context_len)


def logged(at, n_input, n_output, *ids):
    return Logged(at, n_input, n_output, ids)


CHAT = [
    logged(0, 700, 5, 0, 1),
    logged(0, 1024, 3, 0, 2),
    logged(10, 1025, 1, 0, 2, 3),
    logged(900, 700, 4, 0, 1),
    logged(5000, 513, 0, 9, 8),
    logged(5000, 1, 2, 9),
    logged(5001, 512, 2, 9),
    logged(5002, 1040, 2, 0, 2, 3),
]


def ops_of(log, room=ROOM):
    schedule = Schedule(room)
    return list(schedule.ops(iter(log))), schedule


def outcomes(ops, room=ROOM):
    """Run in lockstep; return what each match found and how many outputs each request gave."""
    found, given, config = {}, {}, config_of(room)
    lockstep = SparseLockstep(config, ReferenceTarget(config), looks=Looks(100, len(ops)))
    for op in ops:
        outcome = lockstep.run(op)
        if isinstance(op, Match):
            found.setdefault(op.request, []).append(outcome.value)
        if isinstance(op, Commit) and outcome.refused is None:
            given[op.request] = given.get(op.request, ()) + op.sampled
        if isinstance(op, Release | Match | Submit):
            assert outcome.refused is None, f"{op} was refused"
    return found, given, lockstep


def expected_hits(log, page_size):
    """Whole pages that each request shares with an earlier one, one after the other, in an ample pool."""
    spelled, hits = [], []
    for number, one in enumerate(log):
        lengths = [min(BLOCK, one.input_length - BLOCK * i) for i in range(len(one.hash_ids))]
        tokens = [(i, j) for i, n in zip(one.hash_ids, lengths, strict=True) for j in range(n)]
        best = 0
        for other in spelled:
            same = next((k for k, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None)
            same = min(len(tokens), len(other)) if same is None else same
            best = max(best, min(same, len(tokens) - 1) // page_size * page_size)
        hits.append(best)
        spelled.append(tokens + [(-1 - number, 0)])
    return hits


@pytest.mark.parametrize(("page_size", "chunk"), [(2, 512), (16, 16), (16, 256), (16, 2048)])
def test_matches_find_what_block_ids_share_in_ample_pool(page_size, chunk):
    apart = [logged(100_000 * i, one.input_length, one.output_length, *one.hash_ids) for i, one in enumerate(CHAT)]
    room = Room(page_size, 8192 // page_size, 4, 4096, chunk)
    ops, _ = ops_of(apart, room)

    found, given, _ = outcomes(ops, room)

    assert [found[f"r{i}"] for i in range(len(apart))] == [[hit] for hit in expected_hits(apart, page_size)]
    assert [len(given.get(f"r{i}", ())) for i in range(len(apart))] == [one.output_length for one in apart]


def test_all_requests_end_and_outputs_follow_the_published_formula():
    ops, schedule = ops_of(CHAT)

    _, given, lockstep = outcomes(ops)

    assert given["r3"] == block_tokens(OUTPUTS + 3, 4)
    assert given["r3"][:2] == (444957381, 71019541)
    assert lockstep.model.requests == {}
    assert (schedule.requests, schedule.too_long, schedule.retractions) == (8, 0, 0)


def test_requests_arrive_and_are_admitted_in_order_of_the_log():
    ops, _ = ops_of(CHAT)

    for kind in (Submit, Match):
        assert [op.request for op in ops if isinstance(op, kind)] == [f"r{i}" for i in range(len(CHAT))]


def test_prompt_is_pieces_with_blocks_numbered_as_they_appear():
    ops, _ = ops_of([logged(0, 600, 1, 77, -5), logged(0, 520, 1, 77, 1 << 60)])

    prompts = [op.tokens for op in ops if isinstance(op, Submit)]
    assert prompts == [Pieces(((0, 512), (1, 88))), Pieces(((0, 512), (2, 8)))]
    text = encode_op(Submit("r0", prompts[0]))
    assert text.startswith('{"op":"submit","request":"r0","tokens":[[0,512],[1,88]],"namespace":')
    assert encode_op(decode_op(text, "t:1")) == text


def test_decode_is_one_batch_a_step():
    ops, _ = ops_of([logged(0, 20, 30, 0), logged(0, 20, 30, 1), logged(0, 20, 30, 2)])

    assert max(len(op.batch) for op in ops if isinstance(op, Alloc)) == 3


def test_youngest_is_retracted_when_outputs_outgrow_the_pool():
    room = Room(page_size=16, n_pages=100, n_rows=4, max_context_len=2048, chunk=256)
    log = [logged(0, 500, 700, 0), logged(0, 100, 600, 1), logged(0, 40, 3, 2)]
    ops, schedule = ops_of(log, room)

    found, given, lockstep = outcomes(ops, room)

    assert schedule.retractions == 1
    assert [op for op in ops if isinstance(op, Retract)] == [Retract("r1")]
    assert len(found["r1"]) == 2
    assert {name: len(tokens) for name, tokens in given.items()} == {"r0": 700, "r1": 600, "r2": 3}
    assert given["r1"] == block_tokens(OUTPUTS + 1, 600)
    assert lockstep.model.requests == {}


def test_nothing_is_refused_for_want_of_room():
    room = Room(page_size=16, n_pages=110, n_rows=3, max_context_len=2048, chunk=64)
    log = [logged(i * 50, 200 + 97 * i, 40 + 31 * i, *range(i, i + -(-(200 + 97 * i) // 512))) for i in range(8)]
    ops, _ = ops_of(log, room)

    run = run_ops(config_of(room), ops, ReferenceTarget, check_every=100)

    assert {outcome for _, outcome in run.statistics.outcomes} == {"done", "BadArgument", "WrongState"}


def test_requests_that_no_empty_cache_holds_are_left_out_and_counted():
    room = Room(page_size=16, n_pages=40, n_rows=4, max_context_len=1000, chunk=256)
    ops, schedule = ops_of([logged(0, 900, 101, 0, 1), logged(0, 700, 1, 2, 3), logged(0, 10, 1, 4)], room)

    assert schedule.too_long == 2
    assert {op.request for op in ops if isinstance(op, Submit)} == {"r2"}


def line(**changes):
    body = {"timestamp": 5, "input_length": 513, "output_length": 2, "hash_ids": [1, 2]} | changes
    return json.dumps({name: value for name, value in body.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "1: an empty file: "),
        ("nonsense", "1: not JSON: "),
        ("[1]", "1: expected a JSON object, got a list of 1: "),
        (line() + "\n\n", "2: not JSON: "),
        (line(timestamp=None), "1: missing field 'timestamp': "),
        (line(input_length=-1), "1: input_length: expected an integer in 1.."),
        (line(input_length=2.5), "1: input_length: expected an integer in 1.."),
        (line(output_length=True), "1: output_length: expected an integer in 0.."),
        ('{"timestamp":0,"timestamp":1}', '1: field "timestamp" stands twice: keep one'),
        ("[" * 100_000, "1: nested too deep: a request log has one JSON object a line"),
        (line(hash_ids=[1]), "1: 1 hash_ids for 513 tokens: expected 2, one for 512 tokens each"),
        (line(hash_ids=[1, "2"]), "1: hash_ids: expected a list of integers of 64 bits, got a list of 2"),
        (line() + "\n" + line(timestamp=4), "2: timestamp 4 after 5: sort the log by timestamp"),
        (
            line() + "\n" + line(timestamp=10**18),
            "2: timestamp 1000000000000000000 is 999,",
        ),
    ],
)
def test_bad_line_is_named_with_a_remedy(text, complaint, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(text)

    with pytest.raises(LogError) as caught:
        list(read_log(path))

    assert str(caught.value).startswith(f"{path}:{complaint}")


def test_fields_of_others_may_say_what_they_like(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(line(temperature=0.5) + "\n")

    assert [one.output_length for one in read_log(path)] == [2]


def test_time_begins_with_the_first_request_however_late_that_is():
    """At 2**60 a step of 20 ms is lost in a float, and the schedule would wait for ever."""
    early = [Logged(at, 40, 3, (at,)) for at in (0, 35, 1000)]
    late = [replace(one, timestamp=one.timestamp + (1 << 60) + 1) for one in early]

    assert list(Schedule(ROOM).ops(iter(late))) == list(Schedule(ROOM).ops(iter(early)))


def test_log_of_which_no_request_fits_makes_no_trace(tmp_path, command):
    (tmp_path / "log.jsonl").write_text(line())
    out = tmp_path / "out.jsonl"
    code, _, err = command("trace", "from-workload", tmp_path / "log.jsonl", "--context", 100, "--out", out)

    assert code == 2
    assert err.endswith(": no request fits a row and the pool: see --context and --slots\n")
    assert not out.exists()


@pytest.mark.parametrize("cut", [10, -4])
@pytest.mark.parametrize("damage", ["cut off", "changed"])
def test_packed_log_that_is_damaged_is_named_with_a_remedy(damage, cut, tmp_path):
    path = tmp_path / "log.jsonl.gz"
    packed = bytearray(gzip.compress((line() + "\n").encode() * 40))
    if damage == "cut off":
        packed = packed[:cut]
    else:
        packed[cut] ^= 0xFF
    path.write_bytes(packed)

    with pytest.raises(LogError, match=rf"^{path}:\d+: .*: fetch the file again$"):
        list(read_log(path))


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl.gz"
    lines = [
        json.dumps(dict(zip(("timestamp", "input_length", "output_length", "hash_ids"), values, strict=True)))
        for values in ((one.timestamp, one.input_length, one.output_length, one.hash_ids) for one in CHAT)
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_command_writes_a_trace_that_replays_and_stays_small(log, tmp_path, command):
    out, figures = tmp_path / "t.jsonl.gz", tmp_path / "cost.json"
    sizes = ["--slots", "8192", "--context", "4096", "--chunk", "256", "--max-running", "4"]
    code, said, _ = command("trace", "from-workload", log, *sizes, "--out", out)
    assert (code, f"{out}: " in said, "8 requests with 5,515 tokens of prompts and 19 of outputs" in said) == (
        0,
        True,
        True,
    )

    code, said, _ = command("replay", "--target", "reference", "--check-every", "50", "--json", figures, out)

    assert code == 0
    assert "  checked   every operation; the whole cache every 50 operations, and at the end\n" in said
    record = json.loads(figures.read_text())
    assert f"  hits      {record['matched_tokens']:,} of 5,515 prompt tokens (" in said
    assert (record["verdict"], record["check_every"], record["prompt_tokens"]) == ("CLEAN", 50, 5515)
    assert record["matched_tokens"] > 2000
    trace = read_trace(out)
    assert out.stat().st_size < 6000
    assert all(isinstance(op.tokens, Pieces) for op in trace.ops if isinstance(op, Submit))
    first = out.read_bytes()
    command("trace", "from-workload", log, *sizes, "--out", out)
    assert out.read_bytes() == first


def test_command_takes_the_first_requests_only(log, tmp_path, command):
    out = tmp_path / "t.jsonl"
    code, said, _ = command("trace", "from-workload", log, "--requests", "2", "--out", out)

    assert (code, "2 requests" in said) == (0, True)
    assert {op.request for op in read_trace(out).ops if isinstance(op, Submit)} == {"r0", "r1"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--chunk", "100"], "--chunk 100: expected 16 (the page size) times a power of two"),
        (["--chunk", "48"], "--chunk 48: expected 16 (the page size) times a power of two"),
        (["--slots", "100"], "--slots 100: expected whole pages of 16"),
        (["--max-running", "16000"], "the cache is too large for this harness: "),
        (["--option", "Loud"], "the cache cannot be: config.options: "),
    ],
)
def test_command_refuses_sizes_that_do_not_fit(log, tmp_path, command, options, complaint):
    code, _, err = command("trace", "from-workload", log, *options, "--out", tmp_path / "t.jsonl")

    assert (code, err.startswith(f"kvlockstep: {complaint}"), err.count("\n")) == (2, True, 1)
    assert not (tmp_path / "t.jsonl").exists()


def test_bad_log_leaves_an_older_trace_untouched(tmp_path, command):
    path, out = tmp_path / "log.jsonl", tmp_path / "t.jsonl"
    path.write_text(line() + "\n" + line(timestamp=1))
    out.write_text("older")

    code, _, err = command("trace", "from-workload", path, "--out", out)

    assert (code, err) == (2, f"kvlockstep: {path}:2: timestamp 1 after 5: sort the log by timestamp\n")
    assert out.read_text() == "older"
    code, _, err = command("trace", "from-workload", tmp_path / "none", "--out", out)
    assert (code, err) == (2, f"kvlockstep: {tmp_path / 'none'}: No such file or directory\n")
