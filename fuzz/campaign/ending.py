"""The end of a campaign or a gate: exit code, and the sentences that say what it rests on.

What blocks is a cause that replays in a fresh process, that is not named as known, and that does not fail on the base
too. All else is said, and makes of "clean" an "unknown" where it leaves open whether there is more.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvlockstep.fuzz.campaign.folder import Cause, Lane, Progress
from kvlockstep.fuzz.canary import Canary
from kvlockstep.fuzz.crew import WorkerState
from kvlockstep.fuzz.exits import BROKEN, CLEAN, CRASHED, UNKNOWN, USAGE, VIOLATION
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.verdict import Verdict, too_seldom, verdict_of
from kvlockstep.fuzz.worker import Order
from kvlockstep.invariants.writes import WriteSlotRepeated


@dataclass(slots=True)
class Outcome:
    """What a run came to, beside the counts in its progress."""

    full: str | None = None  # what could not be written
    unusable: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)  # workers
    unexplained: list[str] = field(default_factory=list)  # how workers died that did not die so again
    not_run: Sequence[str] = ()  # targets that were asked for
    accepted: Collection[int] = ()  # laws of the charter that need not have been observed
    twins: bool = False  # cases were to be run a second time


def blocking(progress: Progress) -> list[Cause]:
    """List the causes that count: they replay, nobody knew them, and the base does not have them."""
    return [cause for cause in progress.causes.values() if cause.replays and not cause.known and not cause.old]


def grouped(causes: Iterable[Cause]) -> list[list[Cause]]:
    """Put the forms of one cause together, the shortest first; the causes as they were found."""
    groups: dict[tuple[str, str, str | None], list[Cause]] = {}
    for cause in causes:
        groups.setdefault(cause.root_key, []).append(cause)
    return [sorted(group, key=lambda cause: (cause.minimized_len, cause.signature)) for group in groups.values()]


def number_of_causes(causes: Collection[Cause]) -> str:
    """Say how many causes there are, and in how many forms they were met if that is another number."""
    n = len(grouped(causes))
    forms = f" in {len(causes)} forms" if len(causes) != n else ""
    return f"{'1 cause' if n == 1 else f'{n} causes'} of failure{forms}"


def states_of(progress: Progress) -> list[WorkerState]:
    """Give the sum of all workers of each lane the form of one worker that has ended."""
    return [_state_of(lane) for lane in progress.lanes]


def _state_of(lane: Lane) -> WorkerState:
    name = lane.target if lane.lane is None else f"{lane.target} {lane.lane}"
    state = WorkerState(Order(lane.target, lane.lane, 0.0, 0, "", name), lane.lane, list(lane.capabilities))
    state.statistics = Statistics.from_json(lane.statistics)
    state.seconds, state.ended, state.stage = lane.seconds, True, "ended"
    state.hidden, state.unobserved = list(lane.hidden), list(lane.unobserved)
    missed = [one for one in lane.canaries if one["law"] != WriteSlotRepeated.__name__]
    shown = (missed or lane.canaries)[:1]
    state.canary = Canary(shown[0]["law"], shown[0]["operations"], shown[0]["seconds"]) if shown else None
    return state


def verdict_of_party(progress: Progress, seconds: float, outcome: Outcome) -> Verdict:
    """Draw the exit code of a party, and say why. ``seconds`` are those that each worker was to work."""
    remarks = _remarks(progress, outcome)
    if new := blocking(progress):
        times = sum(cause.times for cause in new)
        met = "once" if times == 1 else f"{times} times"
        return Verdict(VIOLATION, [f"{number_of_causes(new)}, met {met}", *sorted(set(outcome.unusable)), *remarks])
    if outcome.full is not None:
        return Verdict(BROKEN, remarks)
    states = states_of(progress)
    shown = [state for state in states if state.statistics.done or state.canary is not None]
    if not shown and outcome.unusable:
        return Verdict(USAGE, sorted(set(outcome.unusable)))
    stopped = [f"worker {name} is given up" for name in outcome.given_up]
    if stopped or outcome.unexplained:
        return Verdict(CRASHED, stopped + outcome.unexplained + remarks)
    # a lane on which nothing was done is blind, unless its target is why
    inner = verdict_of(shown if outcome.unusable else states, seconds, outcome.accepted, outcome.not_run)
    open_questions = sorted(set(outcome.unusable))
    if doubtful := sum(not cause.replays for cause in progress.causes.values()):
        causes = "1 cause" if doubtful == 1 else f"{doubtful} causes"
        open_questions.append(f"{causes} of failure did not replay in a fresh process")
    if progress.twins_differed:
        open_questions.append(
            f"{progress.twins_differed} of {progress.twins_compared} cases that were run twice did not give the same"
        )
    if outcome.twins and not progress.twins_compared:
        open_questions.append("no case was run a second time: the run was too short, or its witness too slow")
    if inner.code == UNKNOWN and any(cause.replays for cause in progress.causes.values()):
        inner = _without_what_is_known(inner, too_seldom(states))
    if inner.code == CLEAN and open_questions:
        return Verdict(UNKNOWN, open_questions + remarks)
    more = open_questions if inner.code != CLEAN else []
    return Verdict(inner.code, inner.lines + more + remarks)


def _without_what_is_known(verdict: Verdict, labels: Collection[str]) -> Verdict:
    """Do not ask for states behind known failures, at which cases end: or none of them would ever pass for known."""
    if any(line not in labels for line in verdict.lines):
        return verdict
    lines = [f"not asked for, because cases end at what is known: {line}" for line in verdict.lines]
    return Verdict(CLEAN, ["clean but for what is known: no other law was broken", *lines])


def _remarks(progress: Progress, outcome: Outcome) -> list[str]:
    lines = [f"{outcome.full}; what was found before is kept"] if outcome.full is not None else []
    for cause in progress.causes.values():
        if cause.replays and (cause.known or cause.old):
            why = "known" if cause.known else "fails on the base too"
            lines.append(f"{why}: {cause.signature}, {cause.times} times")
    return lines
