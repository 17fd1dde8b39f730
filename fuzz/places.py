"""Which workers a run has: the targets and lanes that can be run here, and a name for each worker."""

from collections.abc import Sequence

from rich.console import Console

from kvlockstep.fuzz.crew import gpus, n_cores
from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.exits import UNKNOWN, USAGE, Stop, complain
from kvlockstep.fuzz.registry import BUILT_IN, LANED, SGLANG_TARGETS, TargetUnusable, check_lane, check_name
from kvlockstep.fuzz.trace_bounds import LANES

PlaceOf = tuple[str, str | None]
"""A target and the lane that one worker runs it on, if it has lanes."""


def n_workers(places: Sequence[PlaceOf]) -> int:
    """Return how many workers a run has if nobody says: one a GPU where all are on GPUs, else one a core."""
    most = len(gpus()) if all(lane == "cuda" for _, lane in places) else n_cores()
    return max(most, len(places))


def lanes_named(text: str) -> list[str]:
    """Return the lanes that a command line names, with commas between them. Raises Stop."""
    chosen = [lane.strip() for lane in text.split(",") if lane.strip()]
    if not chosen or any(lane not in LANES for lane in chosen):
        raise Stop(f"--lanes {text!r}: expected one or more of {', '.join(LANES)}", USAGE)
    return chosen


def places_for(console: Console, names: Sequence[str], lanes: Sequence[str]) -> tuple[list[PlaceOf], list[str]]:
    """Return the targets and lanes of a run, and the targets that cannot be run here; those are said, a line each.

    Raises Stop if no target can be run, or the only one cannot be run on a lane that it was asked for.
    """
    places: list[PlaceOf] = []
    reasons: dict[str, str] = {}
    for name in names:
        missing = [lane for lane in lanes if lane not in LANED.get(name, LANES)]
        try:
            if len(missing) == len(lanes) or (missing and len(names) == 1):
                check_lane(name, missing[0])
            python_for(name)
        except TargetUnusable as error:
            reasons[name] = str(error)
            continue
        if missing:
            console.print(f"{name} is not run on {', '.join(missing)}, which it does not have", soft_wrap=True)
        places += [(name, lane) for lane in lanes if lane not in missing] if name in LANED else [(name, None)]
    if not places:
        *others, last = reasons.values()
        for reason in others:
            complain(reason, USAGE)
        raise Stop(last, USAGE)
    for reason in reasons.values():
        complain(f"not run: {reason}", UNKNOWN)
    return places, [*reasons]


def names_of(places: Sequence[PlaceOf]) -> list[str]:
    """Name each worker by its lane and target, as far as they tell it from the others; with a number, if they do not.

    A target that is not built in is named by its module; the lanes of `gpu_impl` go without its name, if it is alone.
    """
    alone = len({target for target, _ in places}) == 1
    names = []
    for target, lane in places:
        module = check_name(target)[0] if target not in BUILT_IN else target.partition(":")[2] or target
        name = module.rpartition(".")[2] or "target"
        names.append(name if lane is None else lane if alone and target not in SGLANG_TARGETS else f"{name}-{lane}")
    return [name if names.count(name) == 1 else f"{name}-{names[:i].count(name) + 1}" for i, name in enumerate(names)]
