"""Target names on the command line, turned into factories.

Built-in names are looked up first; anything of the form ``package.module:factory`` is imported, also from
the current folder.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable
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
}
LANED = ("gpu_impl",)
"""Built-in targets that run kernels, and so have lanes."""


class TargetUnusable(Exception):
    """The target cannot be had here; the text is one line that says why and what to do."""


def choose_lane(lane: str | None) -> None:
    """Fix the lane of this process. Before: no kernel module has been imported."""
    if lane is not None:
        if lane not in LANES:
            raise TargetUnusable(f"lane {lane!r}: expected one of {', '.join(LANES)}")
        os.environ["KVLOCKSTEP_LANE"] = lane


def factory_for(name: str, fault: str | None = None) -> Factory:
    """Return the factory of a target, with a planted fault if one is named. Raises TargetUnusable."""
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
        raise TargetUnusable(f"unknown target {name!r}: expected {', '.join(BUILT_IN)}, or package.module:factory")
    if re.fullmatch(TARGET, name) is None:
        raise TargetUnusable(f"target {name!r}: expected at most 200 letters, digits and _.:-")
    return module_name, attribute


def check_fault(fault: str) -> None:
    """Raise TargetUnusable for a fault that does not exist."""
    from kvlockstep.fuzz.faults import FAULTS

    if fault not in FAULTS:
        near = get_close_matches(fault, FAULTS, 1)
        expected = f"did you mean {near[0]}" if near else f"expected one of {', '.join(FAULTS)}"
        raise TargetUnusable(f"unknown fault {fault!r}: {expected}")


def _faulty_factory(name: str, fault: str) -> Factory:
    from kvlockstep.fuzz.faults import FAULTS
    from kvlockstep.fuzz.faults.patching import FaultDoesNotApply, faulty_factory

    check_fault(fault)
    if FAULTS[fault].target != name:
        raise TargetUnusable(f"fault {fault!r} is one of target {FAULTS[fault].target!r}, not of {name!r}")
    try:
        return _checked(name, faulty_factory(FAULTS[fault]))
    except FaultDoesNotApply as error:
        raise TargetUnusable(f"fault {fault!r} does not apply: {error}") from error


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
