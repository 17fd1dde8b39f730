"""Target names on the command line, turned into factories.

Built-in names are looked up first; anything of the form ``package.module:factory`` is imported, also from
the current folder.
"""

import importlib
import os
import sys
from collections.abc import Callable

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.targets.base import Target

Factory = Callable[[CacheConfig], Target]

BUILT_IN = {
    "gpu_impl": "kvlockstep.fuzz.targets.gpu_impl:make",
    "reference": "kvlockstep.fuzz.targets.reference:make",
}
LANES = ("cuda", "interpret", "torch")
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
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        raise TargetUnusable(f"unknown target {name!r}: expected {', '.join(BUILT_IN)}, or package.module:factory")
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise TargetUnusable(f"target {name!r}: importing {module_name} failed: {_one_line(error)}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise TargetUnusable(f"target {name!r}: {module_name} has no factory {attribute!r}")
    return _checked(name, factory)


def _faulty_factory(name: str, fault: str) -> Factory:
    from kvlockstep.fuzz.faults import FAULTS
    from kvlockstep.fuzz.faults.patching import FaultDoesNotApply, faulty_factory

    if fault not in FAULTS:
        raise TargetUnusable(f"unknown fault {fault!r}: expected one of {', '.join(FAULTS)}")
    if FAULTS[fault].target != name:
        raise TargetUnusable(f"fault {fault!r} is one of target {FAULTS[fault].target!r}, not of {name!r}")
    try:
        return _checked(name, faulty_factory(FAULTS[fault]))
    except FaultDoesNotApply as error:
        raise TargetUnusable(f"fault {fault!r} does not apply: {error}") from error


def _checked(name: str, factory: Factory) -> Factory:
    def make(config: CacheConfig) -> Target:
        try:
            target = factory(config)
        except Exception as error:
            raise TargetUnusable(f"target {name!r}: its factory raised {_one_line(error)}") from error
        if not isinstance(target, Target):
            missing = [m for m in _methods() if not hasattr(target, m)]
            raise TargetUnusable(f"target {name!r}: its factory returned an object without {', '.join(missing)}")
        if target.conformance not in ("exact", "legal"):
            raise TargetUnusable(f"target {name!r}: conformance {target.conformance!r}, expected 'exact' or 'legal'")
        unkept = [m for m in _KV_METHODS if not hasattr(target, m)] if "kv" in target.capabilities else []
        if unkept:
            raise TargetUnusable(f"target {name!r}: promises the capability 'kv' without {', '.join(unkept)}")
        return target

    return make


_KV_METHODS = ("write_kv", "read_kv", "read_slots")


def _methods() -> list[str]:
    return [member for member in [*vars(Target), *Target.__annotations__] if not member.startswith("_")]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
