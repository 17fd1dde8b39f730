"""The search over all states of a small `gpu_impl` in lockstep: what it covers, finds, copies, and merges."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.copies import Bench, key_of
from kvlockstep.fuzz.exhaustive import SAMPLED, Scope, digest_of, explore, failure_of, search
from kvlockstep.fuzz.exits import Stop
from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults.patching import patched_package
from kvlockstep.fuzz.ops import Abort, Alloc, AllocItem, Commit, Match, Release, Submit
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.replay import run_ops, verdict_of
from kvlockstep.fuzz.targets.reference import snapshot_of
from kvlockstep.fuzz.trace import read_trace

TWO_PAGES = CacheConfig(page_size=1, n_pages=2, n_rows=2, max_context_len=2)
TINY = Scope(TWO_PAGES, lengths=(1,), drafts=False, sampled="none")
WITH_DRAFTS = Scope(TWO_PAGES, lengths=(1,), sampled="none")


@pytest.fixture(scope="module")
def tiny():
    return explore(TINY)


def run_all(bench, ops):
    for op in ops:
        bench.lockstep.run(op)
    return bench


def picture(bench):
    """Everything of a state that a later operation could come upon, numbers and generations included."""
    core, runner = bench.core, bench.lockstep.runner
    tree = {name: value for name, value in vars(core.tree).items() if name not in ("_policy", "victims")}
    harness = {name: value for name, value in vars(runner).items() if name != "target"}
    return repr(
        (
            bench.look().snapshot,
            snapshot_of(bench.lockstep.model),
            (core.requests, tree, vars(core.tree.victims), vars(core.free_pages), vars(core.free_rows)),
            (core.device.row_table.tolist(), runner.read_pool()),
            (harness, bench.lockstep.holds, bench.lockstep._waiting, bench.target._retracted, bench.lockstep.step),
        )
    )


# What is covered


def test_all_states_of_two_pages_hold_the_laws(tiny):
    assert (tiny.found, tiny.how_far()) == (None, "all reachable states")
    assert (tiny.states, tiny.transitions, tiny.depth) == (207, 1993, 12)


def test_all_states_of_two_pages_with_drafts_hold_the_laws(record_property):
    report = explore(WITH_DRAFTS)
    counts = f"{report.states} states, {report.transitions} transitions, depth {report.depth}, {report.how_far()}"
    labels = ", ".join(f"{name} {n}" for name, n in sorted(report.labels.items()))
    record_property("show", f"states of gpu_impl, {report.scope}: {counts}\n  labels: {labels}")

    assert (report.found, report.how_far()) == (None, "all reachable states")
    assert (report.states, report.transitions, report.depth) == (1116, 11046, 22)
    assert set(report.labels) >= {
        "duplicate pages freed at checkpoint",
        "row rewritten to canonical slots",
        "locked edge split",
        "page reused while old row names it",
        "draft rejected across page boundary",
        "pending abort landed",
        "retract then rematch",
        "eviction skipped locked leaf",
    }
    assert "out of rows" in report.never_reached()


def test_all_states_of_four_pages_of_two_with_one_token_hold_the_laws():
    report = explore(Scope(CacheConfig(page_size=2, n_pages=4, n_rows=2, max_context_len=4), (3,), n_tokens=1))

    assert (report.found, report.how_far()) == (None, "all reachable states")
    assert (report.states, report.transitions, report.depth) == (876, 9448, 13)
    assert set(report.labels) >= {
        "partial last page at checkpoint",
        "partial last page at release",
        "partial last page at abort",
        "tail reused without new page",
    }


def test_a_search_that_is_stopped_knows_all_states_to_the_depth_that_it_says():
    scope = Scope(CacheConfig(page_size=2, n_pages=4, n_rows=2, max_context_len=4), (3, 4), sampled="last")
    stopped, longer = explore(scope, max_states=100), explore(scope, max_states=400)

    assert not stopped.closed
    assert stopped.how_far() == f"to depth {stopped.depth}, not closed"
    depths = [len(longer.path_to(state)) for state in range(longer.states)]
    assert depths == sorted(depths)
    assert 0 < stopped.depth < longer.depth
    known = sum(depth <= stopped.depth for depth in depths)
    assert known <= stopped.states
    assert stopped.digests[:known] == longer.digests[:known]


@pytest.mark.parametrize("sampled", SAMPLED)
def test_a_search_is_the_same_every_time(sampled):
    scope = Scope(TWO_PAGES, (1, 2), sampled=sampled)
    one, other = explore(scope, max_states=60), explore(scope, max_states=60)

    assert (one.digests, one.transitions, one.labels) == (other.digests, other.transitions, other.labels)


# What is found


@pytest.mark.parametrize(
    ("fault", "law", "n_ops"),
    [
        ("checkpoint-frees-canonical", "PageOwnedTwice", 9),  # disjoint ownership intervals
        ("checkpoint-keeps-row", "RowOffCanonicalPath", 9),  # canonical path equality
        ("write-set-of-first-request-for-all", "WriteSlotRepeated", 5),  # no duplicate write slots in a batch
    ],
)
def test_a_fault_is_found_by_a_trace_of_which_nothing_can_be_left_out(fault, law, n_ops):
    package = patched_package(FAULTS[fault])
    report = explore(TINY, package)

    assert report.found is not None
    assert (type(report.found.violation).__name__, len(report.found.ops)) == (law, n_ops)
    assert failure_of(TWO_PAGES, report.found.ops, package) == (report.found.signature, n_ops)
    faulty = factory_for("gpu_impl", fault)
    for left_out in range(n_ops):
        ops = [op for step, op in enumerate(report.found.ops) if step != left_out]
        assert run_ops(TWO_PAGES, ops, faulty).signature is None


@pytest.mark.parametrize("other", [{"policy": "lfu"}, {"key_units": "bigram"}])
def test_scope_whose_states_could_not_be_merged_is_refused(other):
    with pytest.raises(AssertionError, match="states are merged as these two allow"):
        Scope(replace(TWO_PAGES, **other), (1,))


def test_what_a_faulty_copy_remembers_tells_states_apart(tiny):
    """Its list of pages that were found earlier is no field of `gpu_impl`, and no snapshot shows it."""
    scope = Scope(TWO_PAGES, (2,), drafts=False, sampled="none")
    honest = explore(scope, max_states=120)
    faulty = explore(scope, patched_package(FAULTS["match-trusts-pages-found-before"]), max_states=120)

    assert honest.found is None
    assert faulty.digests[:120] != honest.digests[:120]


# Copies


def test_a_state_reached_by_copies_is_the_one_reached_from_the_start(tiny):
    copied = Bench(TWO_PAGES)
    start = copied.save()
    for state in range(0, tiny.states, 9):
        copied.restore(start)
        for op in tiny.path_to(state):
            before = copied.save()
            run_all(copied, [Submit("r2", (2,)), Match("r2"), Alloc((AllocItem("r2", 1),)), Abort("r2")])
            copied.restore(before)
            copied.lockstep.run(op)
        replayed = run_all(Bench(TWO_PAGES), tiny.path_to(state))

        assert picture(copied) == picture(replayed)
        assert digest_of(key_of(replayed, TINY.tokens)) == tiny.digests[state]


def test_restoring_brings_back_the_kv_that_was_written_over():
    bench = run_all(Bench(TWO_PAGES), [Submit("r0", (1,)), Match("r0"), Alloc((AllocItem("r0", 1),))])
    before, saved = picture(bench), bench.save()
    run_all(bench, [Commit("r0", 1), Release("r0")])
    changed = picture(bench)
    bench.restore(saved)

    assert (picture(bench) == before, changed == before) == (True, False)


# What is merged


def renamed(op):
    """Name requests and tokens the other way round."""
    names, tokens = {"r0": "r1", "r1": "r0"}, {1: 2, 2: 1}
    changes = {}
    if hasattr(op, "request"):
        changes["request"] = names[op.request]
    if isinstance(op, Submit):
        changes["tokens"] = tuple(tokens[token] for token in op.tokens)
    if isinstance(op, Commit):
        changes["sampled"] = tuple(tokens[token] for token in op.sampled)
    if isinstance(op, Alloc):
        items = [AllocItem(names[i.request], i.n, tuple(tokens[token] for token in i.drafts)) for i in op.batch]
        changes["batch"] = tuple(items)
    return type(op)(**{name: getattr(op, name) for name in op.__slots__} | changes)


def test_renaming_requests_and_tokens_gives_the_same_states():
    scope = Scope(TWO_PAGES, (1, 2), sampled="any")
    report = explore(scope, max_states=200)
    for state in range(0, report.states, 7):
        bench = run_all(Bench(TWO_PAGES), [renamed(op) for op in report.path_to(state)])

        assert digest_of(key_of(bench, scope.tokens)) == report.digests[state]


def test_renaming_everywhere_turns_operations_into_operations():
    scope = Scope(TWO_PAGES, (1, 2), sampled="last")
    bench, other = Bench(TWO_PAGES), Bench(TWO_PAGES)
    ops = [Submit("r0", (1, 2)), Match("r0"), Alloc((AllocItem("r0", 2),)), Submit("r1", (1,)), Match("r1")]
    run_all(bench, ops)
    run_all(other, map(renamed, ops))
    malformed = (Submit("r0", (1,) * 3), Submit("r1", (1,) * 3), Commit("r0", 1, (1, 1)), Commit("r1", 1, (1, 1)))

    tried = {renamed(op) for op in scope.operations(bench.lockstep.model) if op not in malformed}
    assert tried == {op for op in scope.operations(other.lockstep.model) if op not in malformed}


@pytest.mark.parametrize("field", ["tokens", "drafts", "in_flight_n", "abort_pending", "pages", "generation", "queue"])
def test_what_no_snapshot_shows_is_told_apart_and_generations_are_not(field):
    ops = [Submit("r0", (1,)), Match("r0"), Alloc((AllocItem("r0", 1),)), Commit("r0", 1, (2,)), Release("r0")]
    ops += [Submit("r0", (2, 1)), Match("r0"), Alloc((AllocItem("r0", 2),))]
    bench = run_all(Bench(CacheConfig(page_size=1, n_pages=4, n_rows=2, max_context_len=2)), ops)
    before = key_of(bench, (1, 2))
    core = bench.core
    match field:
        case "tokens" | "drafts":
            getattr(core.requests["r0"], field).append(1)
        case "in_flight_n" | "abort_pending":
            setattr(core.requests["r0"], field, getattr(core.requests["r0"], field) + 1)
        case "pages":
            core.requests["r0"].pages.reverse()
        case "generation":
            core.free_pages.generations[1] += 1
        case "queue":
            core.tree.victims.discard(core.tree.victims.nodes()[0])

    assert (key_of(bench, (1, 2)) == before) == (field == "generation")


# The command


def run_command(*arguments):
    return CliRunner().invoke(search, [str(argument) for argument in arguments])


def test_fault_that_the_search_could_not_show_is_refused():
    done = run_command("--fault", "kernel-offset-of-batch-position")

    assert done.exit_code == 1
    assert str(done.exception) == (
        "--fault kernel-offset-of-batch-position: shows on lane interpret, and this search runs on torch"
    )


def test_scope_of_more_prompts_than_can_be_tried_is_refused_at_once():
    done = run_command("--context", 64, "--length", 64)

    assert str(done.exception).startswith("--length, --tokens: 18,446,744,073,709,551,616 prompts, at most 1,024")


def test_the_command_says_how_far_it_came():
    done = run_command("--pages", 2, "--length", 1, "--no-drafts")

    assert done.exit_code == 0
    assert "no law was broken: all reachable states" in done.output
    reached, never = [line for line in done.output.splitlines() if "reached: " in line]
    assert "pending abort landed" in reached
    assert "split at page boundary inside edge" in never
    assert "207" in done.output


def test_the_command_stores_what_it_finds(tmp_path):
    fault = "write-set-of-first-request-for-all"
    done = run_command("--pages", 2, "--length", 1, "--fault", fault, "--out", tmp_path)

    assert done.exit_code == 1
    (path,) = tmp_path.glob("*/trace.jsonl")
    assert f"replay    kvlockstep replay {path}" in done.output
    trace = read_trace(path)
    run = run_ops(trace.header.config, trace.ops, factory_for("gpu_impl", fault))
    assert (verdict_of(trace.header, run), run.steps) == ("FAILED", 5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("--fault", "nope"), "--fault nope: none of gpu_impl"), (("--length", 3), "--length 3: a row has 2 positions")],
)
def test_the_command_refuses_what_it_cannot_search(arguments, text):
    done = run_command(*arguments)

    assert isinstance(done.exception, Stop)
    assert done.exception.code == 2
    assert text in str(done.exception)
