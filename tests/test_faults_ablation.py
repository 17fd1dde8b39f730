"""All laws that a step breaks are found, not the first alone; and a law that is left out is not heard of."""

from pathlib import Path

import pytest

from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults.ablation import (
    COMPARISON,
    GROUPS,
    RAISED,
    group_of,
    groups_of,
    second_tasks,
    worth_of_each,
)
from kvlockstep.fuzz.faults.hunt import Hunt, Task, order_for
from kvlockstep.fuzz.faults.zoo import null_faults
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.trace import read_trace
from kvlockstep.fuzz.worker import Worker
from kvlockstep.invariants import Violation, checks
from kvlockstep.invariants.checks import CHECKS, Check, Findings, run_checks, run_every_check

REGRESSIONS = sorted((Path(__file__).resolve().parents[1] / "regressions").glob("*.jsonl"))
ON_TORCH = [trace for path in REGRESSIONS if (trace := read_trace(path)).header.lane == "torch"]


def names_of(findings):
    return [type(violation).__name__ for violation in findings.violations]


def broken(told):
    """A page that is free and on an edge, and a lock count that is wrong: laws 1 and 5, and sizes along with them."""
    seen = told("hand-built")["match"]
    seen.now.pools["full"].free_pages.append(1)
    seen.now.nodes[0].lock_ref += 7
    return seen


def test_every_check_is_asked_also_behind_the_first_violation(told):
    seen = broken(told)
    with pytest.raises(Violation) as first:
        run_checks(seen)
    findings = run_every_check(seen)

    assert names_of(findings)[0] == type(first.value).__name__ == "PageOwnedTwice"
    assert "LockCountWrong" in names_of(findings)
    assert findings.did_not_run == []


def test_honest_observations_break_no_law(observations):
    assert {name: run_every_check(seen) for name, seen in observations.items()} == dict.fromkeys(
        observations, Findings()
    )


@pytest.mark.parametrize("law", [1, 5])
def test_checks_of_a_law_that_is_left_out_are_not_asked(told, law):
    seen = broken(told)
    names = names_of(run_every_check(seen, law))

    assert set(names) == {name for name in names_of(run_every_check(seen)) if group_of(name) != law}


def test_check_that_crashes_did_not_run_and_is_listed(told, monkeypatch):
    def relies_on_another_law(seen):
        raise KeyError(3)

    checked = (Check(7, (), relies_on_another_law, ()), *CHECKS)
    monkeypatch.setattr(checks, "_that_need_none_of", lambda missing: checked)

    findings = run_every_check(broken(told))

    assert findings.did_not_run == ["relies_on_another_law: KeyError: 3"]
    assert names_of(findings)[0] == "PageOwnedTwice"


def run_all_but_last(trace, without=None):
    header = trace.header
    lockstep = Lockstep(header.config, factory_for(header.target, header.fault)(header.config), without=without)
    for op in trace.ops[:-1]:
        lockstep.run(op)
    return lockstep


@pytest.mark.parametrize("trace", ON_TORCH, ids=lambda trace: trace.header.signature)
def test_step_that_fails_names_the_law_first_that_it_was_found_by(trace):
    names = names_of(run_all_but_last(trace).run_every_law(trace.ops[-1]))

    assert names[0] == trace.header.violates
    assert sum(group_of(name) == COMPARISON for name in names) <= 1


@pytest.mark.parametrize("trace", ON_TORCH, ids=lambda trace: trace.header.signature)
def test_law_that_is_left_out_does_not_name_the_fault(trace):
    """What else is broken at that step then names it; where nothing is, the step passes."""
    group = group_of(trace.header.violates)
    others = [
        name
        for name in names_of(run_all_but_last(trace).run_every_law(trace.ops[-1]))
        if group_of(name) != group or group == RAISED
    ]
    lockstep = run_all_but_last(trace, without=group)
    got = None
    try:
        lockstep.run(trace.ops[-1])
    except Violation as violation:
        got = type(violation).__name__

    assert got == (others[0] if others else None)


def test_lockstep_without_the_comparison_ends_where_the_model_cannot_follow():
    trace = next(trace for trace in ON_TORCH if trace.header.violates == "OutcomeDiffers")
    lockstep = run_all_but_last(trace, without=COMPARISON)
    lockstep.run(trace.ops[-1])
    before = lockstep.now

    assert lockstep.run(trace.ops[0]).value is None
    assert lockstep.now is before


@pytest.mark.parametrize(
    ("without", "law"), [(None, "LockCountWrong"), (5, "TreeDiffers"), (COMPARISON, "LockCountWrong")]
)
def test_worker_reports_all_laws_and_leaves_out_what_its_order_says(tmp_path, without, law):
    events = {}
    order = order_for(Task(FAULTS["abort-keeps-lock"], 0, 60.0, without), str(tmp_path), 0.0)
    Worker(order, factory_for(order.target, order.fault), lambda event, **facts: events.update({event: facts})).fuzz()
    failure = events["failure"]

    assert failure["law"] == failure["laws"][0] == law
    assert without not in groups_of(Hunt("", 0, True, law, laws=tuple(failure["laws"])))
    assert failure["did_not_run"] == []


def test_every_class_of_violation_belongs_to_one_group():
    for check in CHECKS:
        assert {group_of(violation.__name__) for violation in check.violations} == {check.law}
    assert [group_of(name) for name in ("TreeDiffers", "OutcomeDiffers", "TargetRaised")] == [0, 0, RAISED]
    assert list(GROUPS) == [*range(1, 13), COMPARISON, RAISED]


def found(fault, seed, *laws, **facts):
    return Hunt(fault, seed, True, laws[0], laws=laws, **facts)


def test_hunts_are_done_again_without_the_law_that_alone_found_a_planted_fault():
    fault, null = FAULTS["abort-keeps-lock"], null_faults(["gpu_impl"])[0]
    hunts = [
        found(fault.name, 2, "LockCountWrong"),
        found(fault.name, 1, "LockCountWrong", "RootLocked"),
        found(fault.name, 0, "LockCountWrong", "TreeDiffers"),
        found(fault.name, 3, "TargetRaised"),
        Hunt(fault.name, 4, False),
        found(null.name, 0, "PageLeaked"),
    ]

    assert second_tasks([fault, null], hunts, 7.0) == [Task(fault, 1, 7.0, 5), Task(fault, 2, 7.0, 5)]


def test_fault_counts_for_the_law_that_alone_finds_it_and_is_missed_without():
    first = [
        found("a", 0, "PageLeaked"),
        found("a", 1, "PageLeaked", "SizesDoNotAddUp"),
        found("b", 0, "PageLeaked"),
        found("c", 0, "PageLeaked"),
        found("d", 0, "LockCountWrong", "TreeDiffers"),
        found("e", 0, "TargetRaised"),
        found("f", 0, "OutcomeDiffers"),
    ]
    second = [
        Hunt("a", 0, False, without=1),
        found("b", 0, "SizesDoNotAddUp", without=1),
        Hunt("c", 0, False, trouble="the process hung", without=1),
        Hunt("f", 0, False, without=COMPARISON),
    ]
    of = {worth.group: worth for worth in worth_of_each(first, second)}

    assert of["law 1"].breaks == of["law 1"].only_one == ["a", "b", "c"]
    assert (of["law 1"].missed, of["law 1"].unknown) == (["a"], ["c"])
    assert (of["law 5"].only_law, of["law 5"].only_one) == (["d"], [])
    assert of["the model"].breaks == ["d", "f"]
    assert of["the model"].only_law == of["the model"].only_one == of["the model"].missed == ["f"]
    assert (of["TargetRaised"].only_one, of["TargetRaised"].unknown) == (["e"], [])
