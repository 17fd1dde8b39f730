"""Plants a fault in SGLang: code of ours around its real methods, in place only while the faulty target works.

A patched method is put into SGLang's own class as each method of the faulty target begins, its construction
included, and taken out as it returns. So a clean target can be driven in the same process, and what is installed
stays as it is. Each call that reaches a patched method is counted: a fault that was never reached was not missed.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults.fault import PatchFault
from kvlockstep.fuzz.faults.patching import FaultDoesNotApply
from kvlockstep.fuzz.registry import Factory
from kvlockstep.fuzz.targets.base import Target

MEM_CACHE = "sglang.srt.mem_cache"
"""Where places are looked for whose module begins with a dot."""

_ABSENT = object()
"""Stands for an attribute that an object does not have itself: it inherits it."""

Wrapper = Callable[..., Any]
"""Called with the original in front of the arguments, the object itself the first of them."""


class Patch:
    """What one fault puts around SGLang's methods.

    ``operation`` names the method of the target that runs, for faults of one way out only; ``reached`` counts the
    calls of patched methods.
    """

    def __init__(self, plant: "Callable[[Patch], None]") -> None:
        self.reached = 0
        self.operation = ""
        self._places: list[tuple[Any, str, object, object]] = []  # owner, attribute, what stands there, what shall
        plant(self)

    def around(self, place: str, wrapper: Wrapper) -> None:
        """Call ``wrapper(original, *arguments)`` where ``place`` is called: ``.radix_cache:RadixCache.evict``.

        Raises FaultDoesNotApply where SGLang has no such function.
        """
        owner, attribute, found = _resolve(place)
        stands = _own(owner, attribute)

        def patched(*arguments: Any, **named: Any) -> Any:
            self.reached += 1
            return wrapper(found, *arguments, **named)

        self._places.append(
            (owner, attribute, stands, staticmethod(patched) if isinstance(stands, staticmethod) else patched)
        )

    @contextmanager
    def in_force(self, operation: str) -> Iterator[None]:
        """Patch SGLang for as long as an operation of the faulty target takes."""
        assert not self.operation, f"{operation} within {self.operation}"
        self.operation = operation
        for owner, attribute, _, patched in self._places:
            setattr(owner, attribute, patched)
        try:
            yield
        finally:
            for owner, attribute, stands, _ in self._places:
                _give_back(owner, attribute, stands)
            self.operation = ""


def around(place: str, wrapper: Wrapper) -> Callable[[Patch], None]:
    """Return the ``plant`` of a fault that is in one place."""
    return lambda patch: patch.around(place, wrapper)


@contextmanager
def instead(owner: Any, **values: Any) -> Iterator[None]:
    """Let attributes of an object have other values while one of SGLang's methods runs."""
    stood = {attribute: _own(owner, attribute) for attribute in values}
    for attribute, value in values.items():
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for attribute, stands in stood.items():
            _give_back(owner, attribute, stands)


def _own(owner: Any, attribute: str) -> object:
    """Return what an object has itself, apart from what it inherits; one with slots has all itself."""
    return vars(owner).get(attribute, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, attribute)


def _give_back(owner: Any, attribute: str, stood: object) -> None:
    if stood is _ABSENT:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, stood)


def _resolve(place: str) -> tuple[Any, str, Callable[..., Any]]:
    """Find the owner, the attribute and the function that a place names."""
    module, _, path = place.partition(":")
    *owners, attribute = path.split(".")
    try:
        owner: Any = importlib.import_module(MEM_CACHE + module if module.startswith(".") else module)
        for name in owners:
            owner = getattr(owner, name)
        return owner, attribute, getattr(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise FaultDoesNotApply(f"SGLang has no {place}: {error}") from error


class FaultyTarget:
    """A target of SGLang whose methods run with a patch in force; all else is the target's own."""

    def __init__(self, make: Factory, config: CacheConfig, patch: Patch) -> None:
        self._patch = patch
        with patch.in_force("construction"):
            self._target = make(config)

    @property
    def reached(self) -> int:
        """Count the calls that reached patched code, in all targets with this patch."""
        return self._patch.reached

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what its own construction has not yet set
            raise AttributeError(name)
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def patched(*arguments: Any, **named: Any) -> Any:
            with self._patch.in_force(name):
                return found(*arguments, **named)

        return patched


def faulty_factory(fault: PatchFault, make: Factory) -> Factory:
    """Return a factory of targets that carry the fault; ``make`` makes clean ones. Raises FaultDoesNotApply."""
    patch = Patch(fault.plant)

    def make_faulty(config: CacheConfig) -> Target:
        return cast(Target, FaultyTarget(make, config, patch))

    return make_faulty
