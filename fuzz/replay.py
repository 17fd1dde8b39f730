"""Runs a stored trace from a fresh state, and says whether its failure is still there."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import signature_of
from kvlockstep.fuzz.labels import Memory
from kvlockstep.fuzz.lockstep import Lockstep, OpLog, Watcher
from kvlockstep.fuzz.ops import Match, Op, kind_of
from kvlockstep.fuzz.registry import Factory, TargetUnusable
from kvlockstep.fuzz.requirements import lacking
from kvlockstep.fuzz.sparse import Found, Looks, SparseLockstep, automatic_every, narrow
from kvlockstep.fuzz.statistics import CaseWatcher, Statistics
from kvlockstep.fuzz.trace import Header
from kvlockstep.invariants import Observation, Violation


@dataclass(slots=True)
class Tally:
    """What a run did with the cache, as far as that can be told from results: a ``watch`` of a Lockstep."""

    prompt_tokens: int = 0  # of the requests that were matched, at each match
    matched_tokens: int = 0
    evicted_slots: int = 0

    def __call__(self, op: Op, seen: Observation) -> None:
        if isinstance(op, Match) and seen.refused is None:
            self.prompt_tokens += len(seen.fingerprints[op.request])
            self.matched_tokens += seen.matched_len or 0
        self.evicted_slots += sum([len(slots) for slots in seen.evicted])


@dataclass(slots=True)
class Run:
    """One run of a list of operations on a fresh target. ``every`` is the k of `SparseLockstep`, 1 for `Lockstep`."""

    violation: Violation | None
    signature: str | None
    steps: int  # operations run, the failing one included
    statistics: Statistics
    digest: str | None
    every: int = 1
    tally: Tally = field(default_factory=Tally)


def run_ops(
    config: CacheConfig,
    ops: Sequence[Op],
    factory: Factory,
    *,
    log: OpLog | None = None,
    watch: Watcher | None = None,
    digest: bool = False,
    check_every: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Run:
    """Run ``ops`` in order on a fresh model and a fresh target until the first violation.

    ``watch`` is called with each operation and what was seen of it, after all laws held. The whole cache is checked
    after each operation, or every ``check_every``-th, by default as the size of the cache asks; what is found then
    is looked for again, from fresh states, until the operation is known; ``say`` is told so. In such a run no state
    labels are counted.
    """
    every = check_every or automatic_every(config)
    statistics, tally = Statistics(), Tally()
    count = CaseWatcher(statistics, Memory(config)) if every == 1 else _OutcomeWatcher(statistics)
    watchers: list[Watcher] = [count, tally]
    watchers += [watch] if watch is not None else []

    def watch_all(op: Op, seen: Observation) -> None:
        for one in watchers:
            one(op, seen)

    lockstep = _lockstep(config, factory, len(ops), every, log=log, watch=watch_all, digest=digest)
    found = _first_violation(lockstep, ops)
    if found is not None and every > 1:
        found = _narrowed(found, config, ops, factory, every, say)
    text = lockstep.digest() if digest else None
    if found is None:
        return Run(None, None, len(ops), statistics, text, every, tally)
    violation, step = found
    return Run(violation, signature_of(violation, kind_of(ops[step])), step + 1, statistics, text, every, tally)


class _OutcomeWatcher:
    """Counts one case, in which most snapshots are of an earlier moment, by the outcomes of operations alone."""

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self._under_pressure = False
        statistics.cases += 1

    def __call__(self, op: Op, seen: Observation) -> None:
        self.statistics.outcomes[seen.kind, seen.refused or "done"] += 1
        self.statistics.allowances.update(seen.allowed)
        if not self._under_pressure and (seen.evicted or seen.refused in ("OutOfPages", "OutOfRows")):
            self._under_pressure = True
            self.statistics.cases_under_pressure += 1


def _lockstep(config: CacheConfig, factory: Factory, n_ops: int, every: int, **options: Any) -> Lockstep:
    if every == 1:
        return Lockstep(config, factory(config), **options)
    return SparseLockstep(config, factory(config), looks=Looks(every, n_ops), **options)


def _first_violation(lockstep: Lockstep, ops: Sequence[Op]) -> Found | None:
    for step, op in enumerate(ops):
        try:
            lockstep.run(op)
        except Violation as violation:
            return violation, step
    return None


def _narrowed(
    found: Found,
    config: CacheConfig,
    ops: Sequence[Op],
    factory: Factory,
    every: int,
    say: Callable[[str], None] | None = None,
) -> Found:
    """Look again, from fresh states, for the operation behind what a sparse run found."""

    def again(looks: Looks) -> Found | None:
        if say is not None:
            say(f"looking closer at operations {looks.stretch.start} to {looks.stretch.stop - 1}, from the start")
        return _first_violation(SparseLockstep(config, factory(config), looks=looks), ops[: looks.stretch.stop])

    looks = Looks(every, len(ops))
    stretch = looks.stretch_to(found[1])
    closer = narrow(found, looks, again)
    first_seen = f"by a check every {every} operations at step {found[1]}, as {type(found[0]).__name__}"
    exact = "narrowed down to this step" if closer is not found or len(stretch) == 1 else "no closer look found it"
    closer[0].facts.append(("first seen", f"{first_seen}; {exact}"))
    return closer


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


def failing_signature(
    config: CacheConfig, ops: Sequence[Op], factory: Factory, check_every: int | None = None
) -> tuple[str | None, int]:
    """Return the signature of the first violation and the number of operations run; nothing is counted."""
    every = check_every or automatic_every(config)
    found = _first_violation(_lockstep(config, factory, len(ops), every), ops)
    if found is not None and every > 1:
        found = _narrowed(found, config, ops, factory, every)
    if found is None:
        return None, len(ops)
    return signature_of(found[0], kind_of(ops[found[1]])), found[1] + 1


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
