"""Runs a stored trace from a fresh state, and says whether its failure is still there."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import signature_of
from kvlockstep.fuzz.labels import Memory
from kvlockstep.fuzz.lockstep import Lockstep, OpLog, Watcher
from kvlockstep.fuzz.ops import Op, kind_of
from kvlockstep.fuzz.registry import Factory, TargetUnusable
from kvlockstep.fuzz.requirements import lacking
from kvlockstep.fuzz.statistics import CaseWatcher, Statistics
from kvlockstep.fuzz.trace import Header
from kvlockstep.invariants import Observation, Violation


@dataclass(slots=True)
class Run:
    """One run of a list of operations on a fresh target."""

    violation: Violation | None
    signature: str | None
    steps: int  # operations run, the failing one included
    statistics: Statistics
    digest: str | None


def run_ops(
    config: CacheConfig,
    ops: Sequence[Op],
    factory: Factory,
    *,
    log: OpLog | None = None,
    watch: Watcher | None = None,
    digest: bool = False,
) -> Run:
    """Run ``ops`` in order on a fresh model and a fresh target until the first violation.

    ``watch`` is called with each operation and what was seen of it, after all laws held.
    """
    statistics = Statistics()
    watchers: list[Watcher] = [CaseWatcher(statistics, Memory(config))]
    watchers += [watch] if watch is not None else []

    def watch_all(op: Op, seen: Observation) -> None:
        for one in watchers:
            one(op, seen)

    lockstep = Lockstep(config, factory(config), log=log, watch=watch_all, digest=digest)
    for step, op in enumerate(ops):
        try:
            lockstep.run(op)
        except Violation as violation:
            signature = signature_of(violation, kind_of(op))
            return Run(violation, signature, step + 1, statistics, lockstep.digest() if digest else None)
    return Run(None, None, len(ops), statistics, lockstep.digest() if digest else None)


def what_it_lacks(factory: Factory, config: CacheConfig, ops: Sequence[Op]) -> list[str]:
    """List what a trace needs and the target does not promise. Raises TargetUnusable.

    A target that cannot be built as the trace says, for an option or a page size that it does not know, is asked in
    the default config what it knows.
    """
    try:
        return lacking(factory(config), config, ops)
    except TargetUnusable:
        with suppress(TargetUnusable):
            if lacks := lacking(factory(CacheConfig()), config, ops):
                return lacks
        raise


def failing_signature(config: CacheConfig, ops: Sequence[Op], factory: Factory) -> tuple[str | None, int]:
    """Return the signature of the first violation and the number of operations run; nothing is counted."""
    lockstep = Lockstep(config, factory(config))
    for step, op in enumerate(ops):
        try:
            lockstep.run(op)
        except Violation as violation:
            return signature_of(violation, kind_of(op)), step + 1
    return None, len(ops)


class Outcome(Protocol):
    """What a verdict needs of a run, wherever that was."""

    @property
    def signature(self) -> str | None: ...

    @property
    def statistics(self) -> Statistics: ...


def verdict_of(header: Header, run: Outcome) -> str:
    """Compare a run with what the header says of the trace.

    ``FAILED``: it violates, as stored or with nothing stored. ``DIFFERENT``: it violates with another
    signature than the stored one. ``FIXED``: a stored violation did not come. ``REFUSED-ALL``: nothing was
    done, so nothing was shown. ``CLEAN``: no violation, and none was stored.
    """
    if run.signature is not None:
        return "FAILED" if header.signature in (None, run.signature) else "DIFFERENT"
    if run.statistics.done == 0:
        return "REFUSED-ALL"
    return "FIXED" if header.violates is not None else "CLEAN"


def refusals_of(statistics: Statistics) -> Counter[str]:
    """Count the refusals of a run by their reason."""
    reasons: Counter[str] = Counter()
    for (_, outcome), count in statistics.outcomes.items():
        if outcome != "done":
            reasons[outcome] += count
    return reasons
