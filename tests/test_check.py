"""``check``: a snapshot is written and read back as it was, and what it breaks is named as a run would name it.

The defects are those of the tests of the laws, put into a file: all that one snapshot can show must come out of it.
"""

import copy
import gc
import gzip
import importlib.util
import json
import textwrap
import time
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from kvlockstep.fuzz import snapshot_file
from kvlockstep.fuzz.commands.check import NEEDS, check, check_dump
from kvlockstep.fuzz.snapshot_file import Dump, SnapshotError, read, write
from kvlockstep.invariants import FULL, ROOT, NodeView, PoolView, RequestView, RowView, Snapshot, Violation
from kvlockstep.invariants.checks import CHECKS, run_checks

CLEAN, VIOLATION, USAGE, UNKNOWN = 0, 1, 2, 10
ROOT_FOLDER = Path(__file__).resolve().parents[1]
SCHEMA = json.loads((ROOT_FOLDER / "fuzz" / "snapshot.schema.json").read_text())
SIDES = ("hand-built", "reference", "gpu_impl")


def defects():
    """Load the table of defects of the tests of the laws."""
    spec = importlib.util.spec_from_file_location(
        "defects_of_laws", Path(__file__).with_name("test_invariants_fire.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # a file has its write sets by request, so one that is missing is no defect of the cache but of the file
    return [defect for defect in module.DEFECTS if defect.name != "write_set_of_one_request_is_missing"]


OF_ONE_SNAPSHOT = {
    violation for check in CHECKS if check.name not in NEEDS for violation in check.violations
}  # some also come from checks that need more


def write_sets_of(seen):
    """Write slots of the requests that are in flight now, which `alloc` gave them."""
    in_flight = [view.request for view in seen.now.requests if view.state == "IN_FLIGHT"]
    if seen.kind == "alloc" and seen.write_sets is not None:
        return dict(zip(seen.requests, seen.write_sets, strict=True))
    return {name: seen.holds[name].write_slots for name in in_flight}


def run(*words, stdin=None):
    done = CliRunner().invoke(check, list(map(str, words)), input=stdin)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def flying(told):
    """The cache of the story with two requests in flight, and what they write."""
    seen = told("hand-built")["alloc"]
    return seen.now, write_sets_of(seen)


@pytest.fixture
def file(flying, tmp_path):
    snapshot, write_sets = flying
    write(tmp_path / "dump.json", snapshot, source="a test", write_sets=write_sets)
    return tmp_path / "dump.json"


# The file


@pytest.mark.parametrize("name", ["dump.json", "dump.json.gz"])
@pytest.mark.parametrize("side", SIDES)
def test_snapshot_reads_back_as_it_was_and_is_clean(told, tmp_path, side, name):
    for seen in told(side).values():
        path, write_sets = tmp_path / name, write_sets_of(seen)
        write(path, seen.now, source="é, a test", write_sets=write_sets)
        dump = read(path)

        # some sides have units in lists, which is no difference
        assert snapshot_file.encode(dump.snapshot, source="") == snapshot_file.encode(seen.now, source="")
        assert (dump.source, dump.write_sets) == ("é, a test", write_sets)
        assert check_dump(dump).code(()) == CLEAN
        assert list(tmp_path.iterdir()) == [path]


def test_same_snapshot_gives_the_same_bytes_and_fits_the_schema(told, tmp_path):
    for seen in told("reference").values():
        for name in ("a.json", "b.json", "a.json.gz", "b.json.gz"):
            write(tmp_path / name, copy.deepcopy(seen.now), source="a test", write_sets=None)

        assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
        assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads((tmp_path / "a.json").read_text()))


def test_parts_that_are_not_seen_and_pairs_read_back(tmp_path):
    pools = {FULL: PoolView(4, None, None, None, None, None), "swa": PoolView(0, [], [0], 0, 0, 0)}
    node = NodeView(7, -2, ("é", None, ("x", "y")), ((1, 2), (2, 3)), {"swa": []}, -1, None, None, None, None)
    request = RequestView("r/1", "MATCHED", 0, 0, 0, None, None)
    snapshot = Snapshot(2, 1, pools, None, None, None, [request], [node])
    write(tmp_path / "dump.json", snapshot, source="")

    assert read(tmp_path / "dump.json") == Dump(snapshot, "", None)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads((tmp_path / "dump.json").read_text()))


def edit(body, place, value):
    """Put ``value`` at a dotted place; ``del`` takes the place away."""
    *above, last = [int(word) if word.isdigit() else word for word in place.split("/")]
    for word in above:
        body = body[word]
    if value is del_it:
        del body[last]
    else:
        body[last] = value


del_it = object()
IN_FLIGHT_WITHOUT = "write_sets: request r2 is IN_FLIGHT and has none: write one for each request in flight, or null"


@pytest.mark.parametrize(
    ("place", "value", "said", "in_schema"),
    [
        ("kvlockstep_snapshot", 2, "kvlockstep_snapshot: version 2, this reads 1: update kvlockstep", True),
        ("kvlockstep_snapshot", del_it, "no field kvlockstep_snapshot: a trace is for kvlockstep replay", True),
        ("more", 1, 'snapshot: unknown field "more": compare with kvlockstep/fuzz/snapshot.schema.json', True),
        ("rows", del_it, 'snapshot: missing field "rows"', True),
        ("nodes/0/more", 1, 'nodes[0]: unknown field "more"', True),
        ("pools/full/free", [], 'pools.full: unknown field "free"', True),
        ("pools", {}, "pools: expected an object of at most 16 pools, 'full' among them", True),
        ("page_size", 0, "page_size: expected an integer in 1..65536, got 0", True),
        ("page_size", True, "page_size: expected an integer in 1..65536, got true", True),
        ("pools/full/n_pages", 1 << 40, "pools.full.n_pages: expected an integer in 0..8388608", True),
        ("pools/full/free_pages/1", "2", "pools.full.free_pages[1]: expected an integer in", True),
        ("nodes/1/slots/full/0", 1.5, '"1.5" is not a whole number', True),
        ("nodes/1/slots/full/0", 1 << 60, "nodes[1].slots.full[0]: expected an integer in", True),
        ("nodes/1/slots/other", [], "nodes[1].slots: expected an object with pools of this snapshot", False),
        ("nodes/0/node", ROOT, "nodes[0].node: expected an integer in 0..9007199254740991, got -1", True),
        ("nodes/0/units/0", [1, 2, 3], "nodes[0].units[0]: expected a pair of tokens, got a list of 3", True),
        ("nodes/0/namespace", [None, None], "nodes[0].namespace: expected [extra_key, cache_salt, content_ids]", True),
        ("nodes/0/namespace/0", "\ud800", "nodes[0].namespace: expected at most 65536 characters", False),
        ("requests/0/state", "DONE", "requests[0].state: expected one of MATCHED, RUNNING, IN_FLIGHT", True),
        ("requests/0/request", "a\x1b[2J", "requests[0].request: expected 1..200 printable characters", True),
        ("requests/0/request", "r2", 'requests[1].request: "r2" stands twice: give each request its own name', False),
        ("requests/0/state", "IN_FLIGHT", IN_FLIGHT_WITHOUT.replace("r2", "r1"), False),
        ("write_sets", [], IN_FLIGHT_WITHOUT, False),
        ("source", "a\nb", "source: expected at most 500 printable characters", True),
    ],
)
def test_file_of_a_stranger_is_refused_with_the_place(file, place, value, said, in_schema):
    body = json.loads(file.read_text())
    edit(body, place, value)
    file.write_text(json.dumps(body))
    code, out, err = run(file)

    assert (code, out) == (USAGE, "")
    assert err.startswith(f"kvlockstep: {file}: {said}"), err
    assert err.count("\n") == 1
    if in_schema:
        assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(body)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON (Expecting value, line 1 column 1): name a snapshot that was written whole"),
        (b'{"op":"reset"}', "no field kvlockstep_snapshot: a trace is for kvlockstep replay; this reads snapshots"),
        (b'{"a":1,"a":2}', 'field "a" stands twice: keep one'),
        (b"[" * 100_000, "nested too deep: compare with kvlockstep/fuzz/snapshot.schema.json"),
        (b"\xff\xfe", "byte 0 is not UTF-8: save as UTF-8"),
        (b"9" * 5000, "a number with thousands of digits: compare with kvlockstep/fuzz/snapshot.schema.json"),
        (gzip.compress(b'{"kvlockstep_snapshot":1}')[:-12], "the gzip data is cut off: fetch the file again"),
        (gzip.compress(bytes(1 << 24)), "gzip data that expands over 200-fold: is this a snapshot?"),
        (None, "cannot be read (No such file or directory): name a readable, undamaged snapshot"),
    ],
    ids=["empty", "trace", "twice", "deep", "bytes", "digits", "cut", "bomb", "missing"],
)
def test_file_that_is_no_snapshot_is_one_line(tmp_path, data, said):
    path = tmp_path / "dump.json"
    if data is not None:
        path.write_bytes(data)

    assert run(path) == (USAGE, "", f"kvlockstep: {path}: {said}\n")


def test_name_that_could_move_a_cursor_is_not_written(flying, tmp_path):
    snapshot, _ = flying
    snapshot.requests[0].request = "\x1b[2J"

    with pytest.raises(ValueError, match=r"expected 1\.\.200 printable characters without spaces"):
        write(tmp_path / "dump.json", snapshot, source="")
    assert list(tmp_path.iterdir()) == []


def test_name_that_could_turn_a_line_around_is_written_out(flying, tmp_path):
    snapshot, write_sets = flying
    snapshot.rows[0].request = "r1\u202elive"
    write(tmp_path / "dump.json", snapshot, source="", write_sets=write_sets)
    code, out, _ = run(tmp_path / "dump.json")

    assert code == VIOLATION
    assert "r1\\u202elive" in out
    assert "\u202e" not in out


def test_text_has_a_bound(file, monkeypatch):
    monkeypatch.setattr(snapshot_file, "MAX_TEXT", 100)

    with pytest.raises(SnapshotError, match=r"more than 100 bytes of text: is this a snapshot\?$"):
        read(file)


def test_example_of_the_guide_is_clean():
    guide = (ROOT_FOLDER / "docs" / "check.md").read_text()
    start = guide.index('    {\n    "kvlockstep_snapshot":1')
    example = textwrap.dedent(guide[start : guide.index("    }\n", start) + 6])

    assert run("-", stdin=example.encode())[0] == CLEAN


# The laws


@pytest.mark.parametrize(
    "defect",
    [defect for defect in defects() if defect.violation in OF_ONE_SNAPSHOT],
    ids=lambda defect: f"{defect.violation.__name__}_{defect.name}",
)
def test_defect_is_named_as_in_a_run(told, recount, tmp_path, defect):
    seen = told("hand-built")[defect.on]
    defect.edit(seen, recount)
    with pytest.raises(Violation) as caught:
        run_checks(seen)
    write(tmp_path / "dump.json", seen.now, source="a test", write_sets=None)
    dump = Dump(read(tmp_path / "dump.json").snapshot, "a test", write_sets_of(seen))
    result = check_dump(dump)

    # what a run names by a law of steps may show here in the law of what is
    assert result.violations, "one snapshot shows it"
    names = [type(violation) for _, violation in result.violations]
    assert defect.violation in names
    named = next(violation for _, violation in result.violations if type(violation) is defect.violation)
    assert named.headline == caught.value.headline.replace("alloc r2 r3", "pass r2 r3")
    assert named.facts == [fact for fact in caught.value.facts if fact[0] not in ("was", "after")]
    assert all(check.law in (1, 2, 3) for check, _ in result.violations[:1]) or not {
        check.law for check, _ in result.violations
    }.intersection((1, 2, 3))


def test_every_check_has_its_place(flying):
    """One that nobody sorted is said to be checked; here it must show that one snapshot is enough for it."""
    result = check_dump(Dump(*(flying[0], "", flying[1])))
    fires = {check.name for check in result.checked}

    assert {check.name for check in result.not_checked} == NEEDS.keys()
    assert len(fires) + len(NEEDS) == len(CHECKS)
    assert result.skipped == []


def test_all_violations_are_printed_charter_first(flying, tmp_path):
    snapshot, write_sets = flying
    snapshot.nodes[0].lock_ref += 1
    snapshot.pools[FULL].free_pages.append(snapshot.nodes[2].slots[FULL][0] // 2)
    write(tmp_path / "dump.json", snapshot, source="a test", write_sets=write_sets)
    code, out, err = run(tmp_path / "dump.json")

    assert (code, err) == (VIOLATION, "")
    assert out.splitlines()[1:4] == [
        "PageOwnedTwice: page 4 has 2 owners, expected 1",
        "  owner     free list",
        "  owner     node 3 (tokens 7 8), positions [4, 6)",
    ]
    assert out.index("PageOwnedTwice") < out.index("LockCountWrong: node 1 (tokens 1 2 3 4) has lock_ref 4, expected 3")
    assert out.splitlines()[-1] == "violation: 3 checks of laws 1 5 6 failed"


def test_what_one_snapshot_cannot_show_is_listed_and_not_passed(file):
    code, out, err = run(file)

    assert (code, err) == (CLEAN, "")
    assert (
        out.splitlines()[0] == f"{file}: 24 slots in pages of 2, 4 nodes, 3 requests, 3 held rows, dumped from a test"
    )
    assert out.splitlines()[1] == "checked: 34 of 50 checks, of laws 1 2 3 4 5 6 7 9 12"
    assert "  not checked: needs a run: law 8, reads_return_what_was_computed\n" in out
    assert "  not checked: needs two snapshots: law 11, page_generations_never_fall, " in out
    assert "skipped" not in out
    assert out.splitlines()[-1] == "clean: no law that one snapshot shows is broken"


@pytest.mark.parametrize(
    ("part", "law", "lacks"), [("free_rows", 1, "free_rows"), ("nodes", 2, "nodes"), ("write_sets", 3, "write_sets")]
)
def test_charter_law_that_cannot_be_checked_is_unknown_unless_accepted(file, part, law, lacks):
    body = json.loads(file.read_text())
    body[part] = None
    file.write_text(json.dumps(body))
    code, out, err = run(file)

    assert code == UNKNOWN
    assert f"kvlockstep: law {law} could not be checked, the snapshot has no {lacks}" in err
    assert f": --accept-unobserved {law} calls it clean all the same\n" in err
    assert f"  skipped: not in the dump ({lacks}): law {law}, " in out
    accepted = [word for line in err.splitlines() for word in ("--accept-unobserved", line.split()[2])]
    code, out, err = run(file, *accepted)
    assert (code, err) == (CLEAN, "")
    assert f"clean but for law {law}: not observed, accepted by --accept-unobserved {law}\n" in out


def test_standard_input_and_several_files_give_the_worst_code(file, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text(file.read_text().replace('"lock_ref":0', '"lock_ref":9'))
    packed = gzip.compress(file.read_bytes())
    code, out, err = run("-", broken, tmp_path / "none.json", stdin=packed)

    assert code == VIOLATION
    assert out.startswith("standard input: 24 slots in pages of 2")
    assert "standard input: clean: no law that one snapshot shows is broken\n" in out
    assert f"{broken}: violation: " in out
    assert err.startswith(f"kvlockstep: {tmp_path / 'none.json'}: cannot be read")


def test_json_for_machines_says_the_same(file, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text(file.read_text().replace('"free_rows":[4]', '"free_rows":[4,4]'))
    code, out, _ = run("--json", file, broken, tmp_path / "none.json")
    good, bad, none = map(json.loads, out.splitlines())

    assert code == VIOLATION
    assert (good["verdict"], good["exit_code"], good["violations"], good["skipped"]) == ("clean", 0, [], [])
    assert {"law": 11, "check": "row_generations_never_fall", "needs": "two snapshots"} in good["not_checked"]
    assert bad["violations"] == [
        {
            "law": 1,
            "check": "no_row_has_two_owners",
            "violation": "RowOwnedTwice",
            "headline": "row 4 has 2 owners, expected 1",
            "facts": [["owner", "free list"], ["owner", "free list"]],
        }
    ]
    assert (none["verdict"], none["exit_code"]) == ("unreadable", 2)


def test_snapshot_too_broken_for_a_check_says_which_did_not_run(file):
    """An edge without units is law 7's; the check of first pages, which looks at them, cannot run."""
    body = json.loads(file.read_text())
    body["nodes"][3]["units"] = []
    body["nodes"][3]["slots"]["full"] = []
    file.write_text(json.dumps(body))
    code, out, _ = run(file)

    assert code == VIOLATION
    assert "EdgeMalformed: the edge of node 4 (tokens ) has 0 units and 0 slots" in out
    assert "did not run on a snapshot so broken (IndexError: tuple index out of range): law 7, siblings_start" in out


def test_time_grows_with_the_size_of_the_dump():
    """Of a clean one: four times as large is far from sixteen times as long. The garbage collector is not asked: when
    it goes through everything that the other tests left, and for how long, has nothing to do with the dump."""

    def seconds(n_nodes):
        dump = Dump(wide_snapshot(n_nodes), "", {})
        begun = time.process_time()
        assert check_dump(dump).code(()) == CLEAN
        return time.process_time() - begun

    gc.disable()
    try:
        few, many = (min(seconds(n_nodes) for _ in range(3)) for n_nodes in (4000, 16_000))
    finally:
        gc.enable()
    assert many < 10 * few


def wide_snapshot(n_nodes):
    """Make a cache with one page a node, eight children each, and one request on every hundredth node."""
    nodes = []
    for i in range(n_nodes):
        nodes.append(
            NodeView(
                i, (i - 1) // 8 if i else ROOT, (None, None, ()), (i, 0), {FULL: [2 * i + 2, 2 * i + 3]}, 0, *[None] * 4
            )
        )
        nodes[i].children = [child for child in range(8 * i + 1, 8 * i + 9) if child < n_nodes]
    rows, requests = [], []
    for i in range(0, n_nodes, 100):
        path = [i]
        while path[-1]:
            path.append((path[-1] - 1) // 8)
        for at in path:
            nodes[at].lock_ref += 1
        slots = [slot for at in reversed(path) for slot in nodes[at].slots[FULL]]
        row = len(rows) + 1
        rows.append(RowView(row, f"r{i}", slots))
        requests.append(RequestView(f"r{i}", "RUNNING", len(slots), len(slots), len(slots), i, row))
    free = list(range(n_nodes + 1, n_nodes + 101))
    unlocked = [node for node in nodes if not node.lock_ref]
    sizes = 200, 2 * len(unlocked), 2 * (n_nodes - len(unlocked))
    return Snapshot(
        2,
        len(rows),
        {FULL: PoolView(n_nodes + 100, free, None, *sizes)},
        rows,
        [],
        None,
        requests,
        nodes,
        [node.node for node in unlocked if not node.children],
        0,
        128,
    )


def test_standard_input_can_be_named_once(command):
    assert command("check", "-", "-") == (USAGE, "", "kvlockstep: -: standard input can be read once\n")
