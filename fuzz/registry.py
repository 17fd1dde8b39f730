"""Target names on the command line, turned into factories.

Built-in names are looked up first; anything of the form ``package.module:factory`` is imported, also from
the current folder. Several targets are named with commas between them, and ``all`` stands for every built-in cache
that is worth fuzzing. In which environment a target runs is settled in ``environments.py``.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from traceback import extract_tb

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import describe_config
from kvlockstep.fuzz.target_check import defect_of
from kvlockstep.fuzz.targets.base import Target
from kvlockstep.fuzz.trace_bounds import LANES, TARGET
from kvlockstep.invariants import FULL, Snapshot

Factory = Callable[[CacheConfig], Target]

BUILT_IN = {
    "gpu_impl": "kvlockstep.fuzz.targets.gpu_impl:make",
    "reference": "kvlockstep.fuzz.targets.reference:make",
    "sglang:radix": "kvlockstep.fuzz.targets.sglang:radix",
    "sglang:unified-python": "kvlockstep.fuzz.targets.sglang:unified_python",
    "sglang:unified-rust": "kvlockstep.fuzz.targets.sglang:unified_rust",
}
SGLANG_TARGETS = tuple(name for name in BUILT_IN if name.startswith("sglang:"))
"""The trees of SGLang, which need SGLang installed."""

ALL = ("gpu_impl", *SGLANG_TARGETS)
"""What ``all`` stands for; the model as a target of its own law shows nothing."""

LANED: dict[str, tuple[str, ...]] = {"gpu_impl": LANES, **dict.fromkeys(SGLANG_TARGETS, ("interpret", "torch"))}
"""Built-in targets that run kernels, and the lanes that each has. SGLang's kernels run on the CPU only."""

SANITIZED = ("gpu_impl", "interpret")
"""The target and the lane that ``--sanitize`` is for."""


class TargetUnusable(Exception):
    """The target cannot be had here; the text is one line that says why and what to do."""


def choose_lane(lane: str | None) -> None:
    """Fix the lane of this process. Before: no kernel module has been imported."""
    if lane is not None:
        if lane not in LANES:
            raise TargetUnusable(f"lane {lane!r}: expected one of {', '.join(LANES)}")
        os.environ["KVLOCKSTEP_LANE"] = lane


def check_lane(name: str, lane: str) -> None:
    """Raise TargetUnusable for a lane that a target does not have. Of those that are not built in nobody knows."""
    if lane not in LANED.get(name, LANES):
        raise TargetUnusable(f"target {name!r} has no lane {lane}, expected one of {', '.join(LANED[name])}")


def check_sanitizer(name: str, lane: str | None) -> None:
    """Raise TargetUnusable where the sanitizer cannot watch: it knows one target, whose kernels must be interpreted."""
    if (name, lane) != SANITIZED:
        got = name if lane is None else f"{name} on lane {lane}"
        raise TargetUnusable(f"--sanitize: expected target {SANITIZED[0]} on lane {SANITIZED[1]}, got {got}")


def check_sanitizers(names: Sequence[str], lanes: Sequence[str]) -> None:
    """Raise TargetUnusable where the sanitizer cannot watch each target on each lane."""
    for name in names:
        for lane in lanes:
            check_sanitizer(name, lane)


def targets_named(text: str) -> list[str]:
    """Return the targets that the command line names: one, several with commas between them, or ``all``.

    Raises TargetUnusable for a name that cannot be one, and where none is named; imports nothing.
    """
    words = [word.strip() for word in text.split(",") if word.strip()] or [text]
    names = dict.fromkeys(name for word in words for name in (ALL if word == "all" else (word,)))
    for name in names:
        check_name(name)
    return list(names)


def factory_for(name: str, fault: str | None = None, sanitize: int | None = None) -> Factory:
    """Return the factory of a target, with a planted fault if one is named. Raises TargetUnusable.

    ``sanitize`` is a seed: its kernels run under the sanitizer then.
    """
    if sanitize is not None:
        return _sanitized_factory(name, fault, sanitize)
    if fault is not None:
        return _faulty_factory(name, fault)
    module_name, attribute = check_name(name)
    if name not in BUILT_IN and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise TargetUnusable(f"target {name!r}: importing {module_name} failed: {_one_line(error)}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        near = get_close_matches(attribute, [known for known in dir(module) if callable(getattr(module, known))], 1)
        hint = f", did you mean {near[0]}" if near else ""
        raise TargetUnusable(f"target {name!r}: {module_name} has no factory {attribute!r}{hint}")
    return _checked(name, factory)


def check_name(name: str) -> tuple[str, str]:
    """Return the module and the attribute that a target's name stands for. Raises TargetUnusable; imports nothing."""
    module_name, _, attribute = BUILT_IN.get(name, name).partition(":")
    if not (module_name and attribute):
        raise TargetUnusable(f"unknown target {name!r}: expected {', '.join(BUILT_IN)}, all, or package.module:factory")
    if module_name == "sglang":  # nobody's factory lies there: a built-in name that is not quite right
        raise TargetUnusable(f"unknown target {name!r}: expected one of {', '.join(SGLANG_TARGETS)}")
    if re.fullmatch(TARGET, name) is None:
        raise TargetUnusable(f"target {name!r}: expected at most 200 letters, digits and _.:-")
    return module_name, attribute


def check_fault(fault: str) -> None:
    """Raise TargetUnusable for a fault that does not exist."""
    from kvlockstep.fuzz.faults import FAULTS

    if fault not in FAULTS:
        near = get_close_matches(fault, FAULTS, 1)
        expected = (
            f"did you mean {near[0]}" if near else f"expected one of the {len(FAULTS)} that docs/faults.md leads to"
        )
        raise TargetUnusable(f"unknown fault {fault!r}: {expected}")


def _faulty_factory(name: str, fault: str) -> Factory:
    from kvlockstep.fuzz.faults import FAULTS, PatchFault, SourceFault, patching, sglang_patching

    check_fault(fault)
    planted = FAULTS[fault]
    if planted.target != name:
        raise TargetUnusable(f"fault {fault!r} is one of target {planted.target!r}, not of {name!r}")
    try:
        if isinstance(planted, PatchFault):
            return sglang_patching.faulty_factory(planted, factory_for(name))
        assert isinstance(planted, SourceFault), f"a fault is of one of two kinds, not {type(planted).__name__}"
        return _checked(name, patching.faulty_factory(planted))
    except patching.FaultDoesNotApply as error:
        raise TargetUnusable(f"fault {fault!r} does not apply: {error}") from error


def _sanitized_factory(name: str, fault: str | None, seed: int) -> Factory:
    from kvlockstep.fuzz.targets.sanitized import sanitized

    plain = factory_for(name, fault)

    def make(config: CacheConfig) -> Target:
        target = plain(config)
        check_sanitizer(name, getattr(target, "lane", None))
        return sanitized(target, seed)

    return make


def _checked(name: str, factory: Factory) -> Factory:
    """Turn whatever a factory does wrong into one line.

    What its first target shows is looked at closely. Of each later one only the sizes, which a factory that
    ignores its config gets right for one config.
    """
    looked = False

    def make(config: CacheConfig) -> Target:
        nonlocal looked
        if (excess := config.excess()) is not None:
            raise TargetUnusable(f"target {name!r}: too large a cache, {excess} ({describe_config(config)})")
        try:
            target = factory(config)
        except Exception as error:
            made = f"target {name!r}: its factory raised {_one_line(error)}"
            raise TargetUnusable(f"{made} ({describe_config(config)})") from error
        try:
            defect = None if looked and _has_sizes(target.snapshot(), config) else defect_of(target, config)
        except Exception as error:
            raise cannot_be_seen(name, config, error) from error
        if defect is not None:
            raise TargetUnusable(f"target {name!r}: {defect}")
        looked = True
        return target

    return make


def _has_sizes(snapshot: Snapshot, config: CacheConfig) -> bool:
    sizes = (snapshot.page_size, snapshot.n_rows, snapshot.pools[FULL].n_pages)
    return sizes == (config.page_size, config.n_rows, config.n_pages)


def cannot_be_seen(name: str, config: CacheConfig, error: Exception) -> TargetUnusable:
    """Say that a fresh target raised something when it was looked at."""
    last = extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
    return TargetUnusable(
        f"target {name!r}: a fresh one raised {_one_line(error)} at {place} ({describe_config(config)})"
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
