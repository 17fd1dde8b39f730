"""What a campaign or a gate comes to: exit codes and sentences, from counts alone."""

from dataclasses import replace

import pytest

from kvlockstep.fuzz.campaign.ending import Outcome, blocking, grouped, number_of_causes, states_of, verdict_of_party
from kvlockstep.fuzz.campaign.folder import Cause, Lane, Progress
from kvlockstep.fuzz.exits import BROKEN, CLEAN, CRASHED, UNKNOWN, USAGE, VIOLATION
from kvlockstep.fuzz.labels import LABELS, name_of
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.target_check import CAPABILITIES
from kvlockstep.fuzz.verdict import Verdict

CAUSE = Cause(
    "PageLeaked.abort.nobody", "gpu_impl", None, "PageLeaked.abort.nobody", "PageLeaked", "torch", "w", 1.0, 9, 8, 7
)
REPLAYS = replace(CAUSE, replays=True, times=3)
CANARY = {"law": "WriteSlotRepeated", "operations": 13, "seconds": 0.1}


def progress(*causes, canary=CANARY, done=20_000, reached=True, **changes):
    statistics = Statistics(cases=100, cases_under_pressure=90)
    statistics.outcomes["alloc", "done"] = done
    if reached:
        statistics.labels.update({name_of(label): done for label in LABELS})
    lane = Lane(
        "gpu_impl", "torch", statistics.to_json(), 60.0, sorted(CAPABILITIES), canaries=[canary] if canary else []
    )
    return Progress(lanes=[lane], causes={cause.key: cause for cause in causes}, **changes)


def verdict(state, **outcome):
    return verdict_of_party(state, 60.0, Outcome(**outcome))


def test_run_that_reached_all_and_found_nothing_is_clean():
    assert verdict(progress()).code == CLEAN


def test_cause_that_replays_blocks_and_nothing_hides_it():
    found = verdict(progress(REPLAYS), full="could not write x: No space left on device", given_up=["w"])

    assert found.code == VIOLATION
    assert found.lines[0] == "1 cause of failure, met 3 times"
    assert any("could not write x" in line for line in found.lines)


@pytest.mark.parametrize("change", [{"known": True}, {"old": True}])
def test_cause_that_is_known_or_old_does_not_block_and_is_said(change):
    found = verdict(progress(replace(REPLAYS, **change)))

    assert found.code == CLEAN
    assert any(REPLAYS.signature in line for line in found.lines)


@pytest.mark.parametrize("replays", [None, False])
def test_cause_that_does_not_replay_does_not_block_but_is_not_called_clean(replays):
    state = progress(replace(CAUSE, replays=replays))

    assert blocking(state) == []
    assert verdict(state).code == UNKNOWN
    assert "did not replay" in verdict(state).lines[0]


@pytest.mark.parametrize(
    ("outcome", "code", "line"),
    [
        ({"full": "could not write x: No space left on device"}, BROKEN, "could not write x"),
        ({"given_up": ["w"]}, CRASHED, "worker w is given up"),
        ({"unexplained": ["worker w died"]}, CRASHED, "worker w died"),
        ({"not_run": ["sglang:radix"]}, UNKNOWN, "not run: sglang:radix"),
    ],
)
def test_trouble_has_its_code_and_its_line(outcome, code, line):
    found = verdict(progress(), **outcome)

    assert found.code == code
    assert any(line in said for said in found.lines)


def test_target_that_cannot_be_had_is_wrong_usage():
    nothing = Progress(lanes=[Lane("a:b", None, Statistics().to_json())])

    assert verdict(nothing, unusable=["target 'a:b': no"]) == verdict(nothing, unusable=["target 'a:b': no"] * 2)
    assert verdict(nothing, unusable=["target 'a:b': no"]).code == USAGE


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (progress(canary=None), "the canary"),
        (progress(canary={"law": None, "operations": 400, "seconds": 1.0}), "the canary"),
        (progress(reached=False), "never reached"),
        (progress(done=10), "operations done, expected"),
        (progress(twins_compared=9, twins_differed=2), "2 of 9 cases that were run twice did not give the same"),
    ],
)
def test_what_leaves_open_whether_there_is_more_is_unknown(state, line):
    found = verdict(state)

    assert found.code == UNKNOWN
    assert any(line in said for said in found.lines)


def test_campaign_of_which_no_case_was_run_twice_is_not_clean():
    assert verdict(progress(twins_compared=1), twins=True).code == CLEAN
    assert verdict(progress(), twins=True) == Verdict(
        UNKNOWN, ["no case was run a second time: the run was too short, or its witness too slow"]
    )


def test_one_missed_canary_among_many_is_the_one_that_counts():
    state = progress()
    state.lanes[0].canaries = [CANARY, {"law": None, "operations": 400, "seconds": 1.0}, CANARY]
    (shown,) = states_of(state)

    assert shown.canary is not None
    assert not shown.canary.caught


def test_forms_with_one_root_are_one_cause_unless_target_or_fault_differ():
    root = CAUSE.signature
    forms = [
        replace(CAUSE, root=root, minimized_len=9),
        replace(CAUSE, signature="PageLeaked.release.nobody", root=root, minimized_len=5),
        replace(CAUSE, signature="PageLeaked.release.nobody", root=root, fault="another"),
        replace(CAUSE, signature="PageOwnedTwice.release"),
    ]

    assert [[form.minimized_len for form in group] for group in grouped(forms)] == [[5, 9], [7], [7]]
    assert number_of_causes(forms) == "3 causes of failure in 4 forms"
    assert number_of_causes(forms[:1]) == "1 cause of failure"
