"""Which faults a command is about, and when a hunt done earlier still counts.

Besides the planted faults there is the null fault, which plants nothing: one for each target and each lane that
faults of it are looked for on.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from itertools import groupby
from types import CodeType, FunctionType
from typing import Any

from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults.fault import Fault
from kvlockstep.fuzz.faults.hunt import NullFault, Task
from kvlockstep.fuzz.registry import TargetUnusable, targets_named

NULL = "null"
"""What the command line calls all null faults."""

_OURS = "kvlockstep.fuzz.faults"


def null_faults(targets: Sequence[str]) -> list[NullFault]:
    """Return the null faults of these targets."""
    lanes = dict.fromkeys((fault.target, fault.lane) for fault in FAULTS.values() if fault.target in targets)
    return [
        NullFault(name=f"{NULL}, {target} {lane}", story="Nothing.", kind=NULL, laws=(), lane=lane, target=target)
        for target, lane in lanes
    ]


def choose(target: str | None, only: Sequence[str], sample: int | None = None) -> list[Fault]:
    """Return the faults that the command line names, the null faults first, for they take longest.

    Raises TargetUnusable for a name that stands for none.
    """
    planted_in = list(dict.fromkeys(fault.target for fault in FAULTS.values()))
    targets = targets_named(target) if target is not None else planted_in
    for name in targets:
        if name not in planted_in:
            raise TargetUnusable(f"--target {name}: no fault is planted there, expected {', '.join(planted_in)}")
    for name in only:
        if name != NULL and name not in FAULTS:
            near = get_close_matches(name, [NULL, *FAULTS], 1)
            named = f"expected {NULL} or one of the {len(FAULTS)} that docs/faults.md leads to"
            expected = f"did you mean {near[0]}" if near else named
            raise TargetUnusable(f"unknown fault {name!r}: {expected}")
        if name != NULL and FAULTS[name].target not in targets:
            raise TargetUnusable(
                f"fault {name!r} is one of target {FAULTS[name].target!r}, not of {' or '.join(targets)}"
            )
    nulls = null_faults(targets) if NULL in only or not only else []
    planted = [fault for fault in FAULTS.values() if fault.target in targets and (fault.name in only or not only)]
    return [*nulls, *(planted if sample is None else sample_of(planted, sample))]


def sample_of(faults: Sequence[Fault], n: int) -> list[Fault]:
    """Return ``n`` faults of each kind and target, or all where there are no more; always the same ones."""

    def stratum(fault: Fault) -> tuple[str, str]:
        return (fault.target, fault.kind)

    drawn = set()
    for _, group in groupby(sorted(faults, key=stratum), key=stratum):
        drawn.update(sorted((fault.name for fault in group), key=_digest)[:n])
    return [fault for fault in faults if fault.name in drawn]


def tasks_for(faults: Sequence[Fault], seeds: int, seconds: float, null_seconds: float) -> list[Task]:
    """Return a hunt for each fault and seed, the first seed of all faults first."""
    lasts = {fault.name: null_seconds if isinstance(fault, NullFault) else seconds for fault in faults}
    return [Task(fault, seed, lasts[fault.name]) for seed in range(seeds) for fault in faults]


def fingerprint(fault: Fault) -> str:
    """Identify the definition of a fault: all its fields, the code of its functions, and the version of kvlockstep.

    The code of a function is its own and that of the functions of the catalogue that it names or closes over.
    """
    parts = [f"{field.name}={_spelled(getattr(fault, field.name), set())}" for field in fields(fault)]
    return _digest("\n".join([version("kvlockstep"), type(fault).__name__, *parts]))[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _spelled(value: Any, known: set[CodeType]) -> str:
    """Spell a value so that equal definitions give equal text in every process: no address, no order of a set."""
    if isinstance(value, FunctionType):
        if value.__code__ in known:
            return value.__qualname__
        known.add(value.__code__)
        named = [value.__globals__.get(name) for name in _names_in(value.__code__)]
        helpers = [one for one in named if isinstance(one, FunctionType) and one.__module__.startswith(_OURS)]
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [*inside, value.__defaults__, value.__kwdefaults__, *helpers]
        return "\n".join([_spelled_code(value.__code__), *(_spelled(part, known) for part in parts)])
    if isinstance(value, partial):
        return _spelled((value.func, value.args, value.keywords), known)
    if isinstance(value, tuple | list):
        return f"({', '.join(_spelled(part, known) for part in value)})"
    if isinstance(value, dict):
        return _spelled(sorted(value.items()), known)
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_spelled(part, known) for part in value))}}}"
    if isinstance(value, str | int | float | bytes | None):
        return repr(value)
    return f"{type(value).__qualname__} {getattr(value, '__qualname__', '')}"


def _spelled_code(code: CodeType) -> str:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    plain = [_spelled(const, set()) for const in code.co_consts if not isinstance(const, CodeType)]
    own = [code.co_code.hex(), *code.co_names, *code.co_varnames, *code.co_freevars, *plain]
    return "\n".join([*own, *map(_spelled_code, inner)])


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in(const)
