"""The verdict of a run, from what its workers reported, and the tables it is printed in: no process is started."""

import io

import pytest
from rich.console import Console

from kvlockstep.fuzz.cli import console as console_of_commands
from kvlockstep.fuzz.config import POLICIES
from kvlockstep.fuzz.crew import WorkerState, follow
from kvlockstep.fuzz.labels import LABELS, name_of
from kvlockstep.fuzz.report import print_failure, print_run, unobserved_lines
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.verdict import remarks, verdict_of
from kvlockstep.fuzz.worker import Order

CLEAN, VIOLATION, USAGE, UNKNOWN, CRASHED, BROKEN = 0, 1, 2, 10, 11, 12
ALL = ["discards", "drafts", "namespaces", "sharing"]


def worker(name="torch", done=20_000, missed=(), capabilities=ALL, unobserved=(), hidden=()):
    """Make the state of a worker that ran for a minute and reached all labels but those missed."""
    state = WorkerState(Order("gpu_impl", "torch", 60.0, 0, "out", name))
    statistics = Statistics(cases=10, cases_under_pressure=5, distinct_cases=9)
    statistics.outcomes.update({("alloc", "done"): done, ("alloc", "OutOfPages"): 1234, ("peek", "UnknownRequest"): 7})
    statistics.labels.update({name_of(label): done for label in LABELS if name_of(label) not in missed})
    follow(state, {"event": "ready", "lane": "torch", "capabilities": list(capabilities)})
    follow(state, {"event": "canary", "law": "WriteSlotRepeated", "operations": 13, "seconds": 0.1})
    facts = {
        "seconds": 60.0,
        "statistics": statistics.to_json(),
        "unobserved": list(unobserved),
        "hidden": list(hidden),
    }
    follow(state, {"event": "end", **facts})
    return state


def failing(replays, **changes):
    state = worker("interpret")
    state.failure = {
        "signature": "PageLeaked.abort",
        "folder": "out/PageLeaked.abort",
        "text": "PageLeaked: page 1 is lost",
        "seconds": 1.0,
        "operations": 1000,
        "found_len": 30,
        **changes,
    }
    state.replays = replays
    return state


def test_run_that_reached_everything_is_clean():
    verdict = verdict_of([worker(), worker("interpret")], 60.0)

    assert (verdict.code, verdict.lines) == (CLEAN, ["clean: no law was broken, and every required state was reached"])


def test_label_reached_less_often_than_declared_is_not_enough():
    few = worker()
    few.statistics.labels["locked edge split"] = 5  # 3 in 10,000 are declared, and 20,000 operations were done

    verdict = verdict_of([few], 60.0)

    assert (verdict.code, verdict.lines) == (
        UNKNOWN,
        ["reached too seldom: locked edge split, 5 times, expected 6 in 20,000 operations done"],
    )


def test_label_counts_of_all_lanes_of_a_target_add_up():
    few, many = worker(), worker("interpret")
    few.statistics.labels["locked edge split"] = 5

    assert verdict_of([few, many], 60.0).code == CLEAN


def test_run_too_short_for_a_label_must_still_have_reached_it_once():
    once, never = worker(done=100), worker(done=100, missed=["locked edge split"])
    once.statistics.labels["locked edge split"] = 1

    assert verdict_of([once], 0.1).code == CLEAN
    assert verdict_of([never], 0.1).lines == ["never reached: locked edge split"]


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (worker(done=9_999), "worker torch: 9999 operations done, expected 10000 in 60 s"),
        (worker(missed=["out of rows"]), "never reached: out of rows"),
        (worker(missed=["draft rejected across page boundary"]), "never reached: draft rejected across page boundary"),
    ],
)
def test_run_that_reached_too_little_is_unknown(state, line):
    verdict = verdict_of([state], 60.0)

    assert (verdict.code, verdict.lines) == (UNKNOWN, [line])


def test_label_that_takes_a_capability_is_required_of_targets_that_have_it():
    missed = ["draft rejected across page boundary", "same tokens in two namespaces"]

    assert verdict_of([worker(missed=missed, capabilities=["policy:lru"])], 60.0).code == CLEAN
    assert verdict_of([worker(missed=missed, capabilities=["namespaces"])], 60.0).code == CLEAN
    assert verdict_of([worker(missed=missed, capabilities=["drafts"])], 60.0).lines == [f"never reached: {missed[0]}"]


def test_label_that_is_told_from_a_hidden_part_is_not_required_and_said_to_be_unobservable():
    missed = ["row reused", "page reused while old row names it"]
    blind = worker(missed=missed, hidden=["rows", "evictable_nodes"])
    seeing = worker("interpret", missed=missed)

    assert verdict_of([blind], 60.0).code == CLEAN
    assert remarks([blind])[:-1] == [f"label not observable: {name} (needs rows)" for name in missed]
    assert verdict_of([blind, seeing], 60.0).lines == [f"never reached: {name}" for name in missed]
    assert remarks([blind, seeing]) == remarks([seeing])


def test_hidden_part_excuses_no_label_that_is_told_without_it():
    verdict = verdict_of([worker(missed=["out of rows"], hidden=["rows"])], 60.0)

    assert (verdict.code, verdict.lines) == (UNKNOWN, ["never reached: out of rows"])


def test_label_that_the_target_does_not_promise_is_not_called_unobservable():
    state = worker(missed=["edge split", "row reused"], hidden=["nodes", "rows"], capabilities=["no_sharing"])

    assert remarks([state])[:-1] == ["label not observable: row reused (needs rows)"]


def test_run_says_what_was_drawn_and_what_was_not():
    policies = [f"policy:{name}" for name in POLICIES]
    rest = ["namespaces", "content_ids", "private", "priority", "bigram", "drafts", "discards"]
    some = worker(capabilities=["kv", "no_sharing", *policies])
    everything = worker(capabilities=["kv", "sharing", "no_sharing", *rest, *policies])

    assert remarks([some]) == [
        f"drawn: no_sharing, {', '.join(policies)}; "
        f"not drawn, because the target does not promise them: sharing, {', '.join(rest)}"
    ]
    assert remarks([everything]) == [f"drawn: {', '.join(['sharing', 'no_sharing', *rest, *policies])}"]
    assert remarks([WorkerState(some.order)]) == [], "a worker that never began drew nothing"


BLIND = [(2, "every_anchor_hangs_on_the_root", ["requests", "anchors"]), (8, "reads_return", ["reads"])]


def test_charter_law_that_was_not_observed_is_never_clean():
    verdict = verdict_of([worker(), worker("interpret", unobserved=BLIND)], 60.0)

    assert verdict.code == UNKNOWN
    assert verdict.lines == ["law 2 was not observed on this target: --accept-unobserved 2 calls it clean all the same"]


def test_accepted_law_is_repeated_by_the_verdict():
    verdict = verdict_of([worker(unobserved=BLIND)], 60.0, accepted=[2])

    assert verdict.code == CLEAN
    assert verdict.lines[1:] == ["clean but for law 2: not observed, accepted by --accept-unobserved 2"]
    assert verdict_of([worker(unobserved=BLIND)], 60.0, accepted=[1, 3]).code == UNKNOWN


def test_skipped_checks_are_listed_once_whatever_law_they_are_of():
    lines = unobserved_lines([worker(unobserved=BLIND), worker(unobserved=BLIND)])

    assert lines == [
        "not observed: law 2, every anchor hangs on the root (needs requests, anchors)",
        "not observed: law 8, reads return (needs reads)",
    ]


def test_violation_that_replays_wins_over_every_trouble_and_hides_none():
    hung, full = worker("a"), worker("b")
    hung.trouble, full.broken = "said nothing for 60 s", "could not write out: No space left on device"
    verdict = verdict_of([failing(True), hung, full], 60.0)

    assert verdict.code == VIOLATION
    assert verdict.lines == [
        "1 of 3 workers found a violation",
        "could not write out: No space left on device",
        "worker a said nothing for 60 s",
    ]
    assert verdict_of([failing(False), hung, full], 60.0).code == BROKEN
    assert verdict_of([failing(False), hung], 60.0).code == CRASHED
    assert verdict_of([failing(False)], 60.0).code == UNKNOWN


def test_target_that_cannot_be_had_is_said_once():
    states = [worker(), worker("interpret")]
    for state in states:
        state.unusable = "target 'x:y': importing x failed"
    verdict = verdict_of(states, 60.0)

    assert (verdict.code, verdict.lines) == (USAGE, ["target 'x:y': importing x failed"])


def printed(print_it, width, **options):
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    print_it(console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_tables_stay_readable_on_any_terminal(width):
    states = [worker(), worker("interpret")]
    text = printed(lambda console: print_run(console, states), width)
    words = " ".join(text.split())

    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "20,000" in text
    assert "2,468 OutOfPages" in words
    assert "14 UnknownRequest" in words
    for word in {word for label in LABELS for word in name_of(label).split()}:
        assert word in text.replace("\n", " ").split()


def test_label_at_zero_is_red_where_there_are_colours(monkeypatch):
    states = [worker(missed=["out of rows"])]
    red = "\x1b[1;31m"
    monkeypatch.delenv("NO_COLOR", raising=False)
    in_colour = printed(lambda console: print_run(console, states), 80, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = printed(lambda console: print_run(console, states), 80, force_terminal=True, color_system="standard")

    (line,) = [line for line in in_colour.splitlines() if "out of rows" in line]
    assert red in line
    assert in_colour.count(red) == line.count(red)
    assert "\x1b[31m" not in plain
    assert "\x1b[1;31m" not in plain


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"minimized_len": 4, "ending": "minimized"}, "by worker interpret; 4 operations, minimized from 30\n"),
        (
            {"minimized_len": 9, "ending": "time ran out"},
            "9 operations, minimized from 30 (time ran out; ",
        ),
        (
            {"minimized_len": 9, "ending": "interrupted"},
            "9 operations, minimized from 30 (interrupted; ",
        ),
        ({}, "by worker interpret; 30 operations (interrupted; kvlockstep minimize goes on)\n"),
    ],
)
def test_failure_says_how_far_it_was_minimized(changes, said):
    text = printed(lambda console: print_failure(console, failing(True, **changes)), 40)

    assert "found     after 1,000 operations and 1.0 s" in text
    assert said in text
    assert "did not replay" not in text


def test_names_with_brackets_and_colons_are_printed_as_they_are(capsys):
    console_of_commands.print("kvlockstep replay --target a:bug:b out/[red]x[/]/t.jsonl")

    assert capsys.readouterr().out == "kvlockstep replay --target a:bug:b out/[red]x[/]/t.jsonl\n"
