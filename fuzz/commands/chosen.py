"""How a command comes from FILE and options to a trace and what it is run on.

What a file says of its target is a stranger's word: nothing is imported for it that is not built in. A lane and a
planted fault are promised by a trace for the target that it was found on, and for no other.
"""

from dataclasses import dataclass
from pathlib import Path

from kvlockstep.fuzz.environments import go_where_it_runs
from kvlockstep.fuzz.exits import USAGE, Stop, usable
from kvlockstep.fuzz.registry import (
    BUILT_IN,
    LANED,
    SANITIZED,
    Factory,
    TargetUnusable,
    check_fault,
    check_lane,
    check_sanitizer,
    choose_lane,
    factory_for,
    targets_named,
)
from kvlockstep.fuzz.trace import Trace, TraceError, read_trace


@dataclass(frozen=True, slots=True)
class Chosen:
    """A trace, and what it is to be run on."""

    file: Path
    trace: Trace
    target: str
    lane: str | None
    fault: str | None
    sanitize: int | None = None  # seed of the sanitizer that it is to be run under

    def open(self) -> tuple[Factory, list[str]]:
        """Start this process over where the target runs, fix its lane, and return the factory and what it lacks.

        Raises Stop.
        """
        with usable():
            go_where_it_runs(self.target)
            choose_lane(self.lane)
        from kvlockstep.fuzz.replay import what_it_lacks

        with usable():
            factory = factory_for(self.target, self.fault, self.sanitize)
            return factory, what_it_lacks(factory, self.trace.header.config, self.trace.ops)

    def factory(self) -> Factory:
        """Open it, where the target promises all that the trace needs. Raises Stop."""
        factory, lacks = self.open()
        if lacks:
            raise Stop(f"{self.file}: needs {', '.join(lacks)}, which {self.target} does not promise", USAGE)
        return factory


def read(file: Path) -> Trace:
    """Read a trace. Raises Stop."""
    try:
        return read_trace(file)
    except TraceError as error:
        raise Stop(str(error), USAGE) from error
    except OSError as error:
        raise Stop(f"{file}: {error.strerror}", USAGE) from error


def named_by_user(given: str | None, in_header: str, file: Path) -> str:
    """Take the target from the command line, or a built-in one from the file. Raises Stop."""
    if given is None and in_header not in BUILT_IN:
        raise Stop(f"{file}: found on target {in_header!r}; to import that, say --target {in_header}", USAGE)
    return given or in_header


def fault_for(asked: str | None, found: str | None, file: Path) -> str | None:
    """Take the fault from the command line, where ``none`` is none, or from the file. Raises Stop."""
    if asked is not None:
        return None if asked == "none" else asked
    if found is not None:
        try:
            check_fault(found)
        except TargetUnusable as error:
            raise Stop(f"{file}: {error}; --fault none plants nothing", USAGE) from error
    return found


def seed_for(asked: bool | None, found: int | None, name: str, lane: str | None) -> int | None:
    """Settle on the seed of the sanitizer: that of the trace where it can run, or where it must. Raises Stop."""
    if asked:
        with usable():
            check_sanitizer(name, lane)
        return found or 0
    return found if asked is None and (name, lane) == SANITIZED else None


def choose(file: Path, target: str | None, lane: str | None, fault: str | None, sanitize: bool | None = None) -> Chosen:
    """Read a trace, and settle on what it is run: what the options say, else what the trace does. Raises Stop."""
    with usable():
        if target is not None:
            if len(names := targets_named(target)) != 1:
                raise Stop(f"--target {target}: expected one target, got {len(names)}", USAGE)
            go_where_it_runs(target)  # before the file is read, which may be a pipe
    trace = read(file)
    header = trace.header
    name = named_by_user(target, header.target, file)
    found_on = name == header.target
    lane = lane or (header.lane if found_on and name in LANED else None)
    with usable():
        if lane is not None:
            check_lane(name, lane)
    planted = fault_for(fault, header.fault if found_on else None, file)
    return Chosen(file, trace, name, lane, planted, seed_for(sanitize, header.sanitize, name, lane))
