"""Runs one operation at a time on the model and on a target, and checks every law after each.

The order of a step is fixed: the operation is written to the trace, then it runs on the target; the laws
are checked on what can be seen of the target, the charter's three first; the comparison with the model
comes last. So a fault that breaks a law is named by that law, and "differs from the model" is what remains.

An operation that names a NEW request, or a name that is not live in ``peek`` and ``match``, is settled by
the model alone: the cache has never heard of it (SPEC section 2).

The model takes the target's choices (which free page and row; for a target of conformance ``legal`` also
which leaves it evicted) after proving them legal. Where a ``legal`` target promises ``victim_order``, its
victims must be those that the policy names, and what it evicts beyond that or ahead of a refusal must be an
allowance that it declares. The model has the target's allowances. No Hypothesis in here.

Seeing all of a cache takes as long as it is large: for long traces on large pools see ``sparse.py``.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any, Protocol, cast

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import describe_config, describe_op
from kvlockstep.fuzz.dispatch import call_target, model_arguments
from kvlockstep.fuzz.model_runner import ModelRunner
from kvlockstep.fuzz.ops import (
    Abort,
    Alloc,
    Commit,
    Evict,
    Match,
    Op,
    Peek,
    Release,
    Retract,
    Submit,
    kind_of,
    named_requests,
)
from kvlockstep.fuzz.results import defect_of_views, is_result_of, result_words, shown
from kvlockstep.fuzz.sanitizer import KernelViolation
from kvlockstep.fuzz.targets.base import AllocResult, KvTarget, Refused, RememberingTarget, Target, allowances_of
from kvlockstep.fuzz.targets.reference import new_cache, snapshot_of
from kvlockstep.invariants import Divergence, Hold, Observation, Snapshot, Violation
from kvlockstep.invariants.agreement import ChoiceIllegal, OutcomeDiffers, compare
from kvlockstep.invariants.checks import Findings, run_checks, run_every_check
from kvlockstep.invariants.index import Index
from kvlockstep.reference.cache import Choice, IllegalChoice

_NOT_THE_TARGETS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What is let through when a target raises it; a panic in a Rust extension is no Exception either, but is caught."""

COMPARISON = 0
"""Stands among the numbers of the laws for the comparison with the model, which is no law."""


class TargetRaised(Violation):
    """The target raised something that is not a refusal."""


class OpLog(Protocol):
    """Where operations go before they run."""

    def write(self, op: Op) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one operation gave: a value or a refusal."""

    refused: str | None
    value: object = None


Watcher = Callable[[Op, Observation], None]


class Lockstep:
    """One model and one target, advanced together.

    ``log`` receives each operation before it runs; ``watch`` is called with each operation and what was
    seen of it, after all checks held; with ``digest`` the whole visible history is hashed, so that two
    runs of a trace can be compared byte for byte.

    ``without`` leaves out the checks of one law, 1 to 12, or the COMPARISON with the model, to learn what else
    would catch a bug. A check that then crashes is passed over. Without the comparison the model still has to
    follow the target; at the first operation where it cannot, the lockstep ends, and runs nothing any more.
    """

    def __init__(
        self,
        config: CacheConfig,
        target: Target,
        *,
        log: OpLog | None = None,
        watch: Watcher | None = None,
        digest: bool = False,
        without: int | None = None,
    ) -> None:
        self.config = config
        self.target = target
        self.model = new_cache(config, allowances_of(target))
        with_kv = "kv" in target.capabilities
        self.runner = ModelRunner(cast(KvTarget, target) if with_kv else None, config.n_slots)
        self.log = log
        self.watch = watch
        self.step = -1
        self.now = target.snapshot()
        self.seen: Observation | None = None  # of the operation that was run last, as far as it came
        self.holds: dict[str, Hold] = {}
        self._orders_victims = target.conformance == "legal" and "victim_order" in target.capabilities
        self._waiting: set[str] = set()  # NEW requests that the target has seen
        self._index: Index | None = None  # of self.now, handed on by each step to the next
        self._expected = "done"  # what the model says of the operation at hand
        self._digest = hashlib.blake2b(digest_size=16) if digest else None
        self._without = without
        self.stopped: str | None = None  # why nothing is run any more
        self._findings: Findings | None = None  # of the step at which everything is to be found

    def digest(self) -> str:
        """Return the hash of everything seen so far: refusals, results, rows, pool."""
        assert self._digest is not None, "this lockstep was built without digest=True"
        return self._digest.hexdigest()

    def run(self, op: Op) -> Outcome:
        """Run one operation on both sides. Raises the Violation that it uncovers, with the step in its facts."""
        self.step += 1
        if self.log is not None:
            self.log.write(op)
        try:
            return self._run_well_formed(op)
        except Violation as violation:
            violation.facts += [
                ("step", f"{self.step}: {describe_op(op)}"),
                ("config", f"{describe_config(self.config)} target={self.target.name}{self._lane()}"),
            ]
            raise

    def run_every_law(self, op: Op) -> Findings:
        """Run one operation as `run` does, but look on behind the first violation: all laws, then the model.

        After: this lockstep is of no further use if anything was found.
        """
        self._findings = findings = Findings()
        try:
            self.run(op)
        except Violation as violation:
            findings.violations.append(violation)
        except Exception as error:  # what the model is compared with may be broken in any way
            if not findings.violations:
                raise
            findings.did_not_run.append(f"comparison with the model: {type(error).__name__}: {error}")
        self._findings = None
        return findings

    def _run_well_formed(self, op: Op) -> Outcome:
        """Run one operation; where anything goes wrong, look first whether the snapshot is one at all."""
        try:
            return self._run(op)
        except Exception as error:
            if isinstance(error, TargetRaised) or (defect := defect_of_views(self.now)) is None:
                raise
            raise OutcomeDiffers(f"snapshot is malformed: {defect}", roles=("type",)) from error

    def _lane(self) -> str:
        lane = getattr(self.target, "lane", None)
        return f" lane={lane}" if lane else ""

    def _run(self, op: Op) -> Outcome:
        if self.stopped is not None:
            return Outcome(None)
        kind = kind_of(op)
        arguments = model_arguments(op)
        refusal = self.model.refusal(kind, *arguments)
        expected = type(refusal).__name__ if refusal is not None else None
        self._expected = f"refused with {expected}" if expected else "done"
        before = self.now
        if self._is_settled_by_model(op):
            outcome = Outcome(expected, None if expected else getattr(self.model, kind)(*arguments))
            if isinstance(op, Abort) and not expected:
                self.runner.forget(op.request)
                self._let_forget(op.request)
            self.seen = Observation(self.step, kind, named_requests(op), 0, expected, before, before)
            self._finish(op, self.seen, outcome)
            return outcome

        seen = Observation(self.step, kind, named_requests(op), 0, None, before, before, written=self.runner.written)
        seen.key_units = self.config.key_units
        self.seen = seen
        for name in seen.requests:
            if name in self.model.requests:
                seen.fingerprints[name] = self.runner.fingerprints(name, self.model.requests[name])
        if isinstance(op, Evict):
            seen.n = op.n
        elif isinstance(op, Commit):
            seen.n = op.kept
        elif isinstance(op, Alloc):
            seen.n = self.model.pages_needed(arguments[0]) if expected in (None, "OutOfPages") else -1

        allowed_before = Counter(self.model.allowed)
        lands = isinstance(op, Commit) and expected is None
        if isinstance(op, Commit) and lands:
            self._guarded(self.runner.land, op.request)
        model_value = None
        if expected is None and not isinstance(op, Alloc | Evict):
            model_value = getattr(self.model, kind)(*arguments)

        value = self._call_target(op, seen)
        self._look(op, seen, value, done=expected is None and seen.refused is None)
        self._check(seen)
        try:
            if expected != seen.refused:
                raise OutcomeDiffers(
                    f"{kind} gave different outcomes",
                    [("reference", expected or "done"), (self.target.name, seen.refused or "done")],
                    roles=(expected or "done", seen.refused or "done"),
                )
            if expected is None and isinstance(op, Alloc | Evict):
                model_value = self._model_with_choices(op, seen)
            elif seen.evicted:
                self._adopt(op, seen)
        except Divergence:
            if self._without != COMPARISON:
                raise
            self.stopped = "the model is lost"
            return Outcome(seen.refused, value)
        if self._without != COMPARISON:
            self._compare_values(kind, model_value, value)
            self._compare_states(seen)

        seen.allowed = dict(self.model.allowed - allowed_before)
        if expected is None:
            self._follow(op, seen)
        outcome = Outcome(seen.refused, value)
        self._finish(op, seen, outcome)
        return outcome

    def _look(self, op: Op, seen: Observation, value: object, *, done: bool) -> None:
        """See what the cache is after an operation, and where a pass landed, what is in rows and pool.

        ``done`` says that model and target both did it.
        """
        seen.now = self.now = self._snapshot()
        self._update_holds(op, seen, value)
        if done and isinstance(op, Commit):
            self._read(seen)

    def _read(self, seen: Observation) -> None:
        """Read every live row, and the whole pool."""
        if _rows_shown(seen.now) is not None:
            seen.reads = cast(list[Any], self._guarded(self.runner.read_rows, self.model.requests))
        seen.pool_expected = self.runner.pool_expected
        seen.pool_got = cast(list[int] | None, self._guarded(self.runner.read_pool))

    def _compare_states(self, seen: Observation) -> None:
        """Compare what was seen of the target with the model."""
        compare(snapshot_of(self.model), seen.now)

    def _check(self, seen: Observation) -> None:
        """Hold what was seen to the laws; raise the first violation, or keep all of them where all are wanted."""
        if self._findings is None and self._without is None:
            self._index = run_checks(seen, self._index)
            return
        findings = run_every_check(seen, self._without)
        self._index = None
        if self._findings is not None:
            self._findings.violations += findings.violations
            self._findings.did_not_run += findings.did_not_run
        elif findings.violations:
            raise findings.violations[0]

    def _is_settled_by_model(self, op: Op) -> bool:
        if isinstance(op, Submit):
            return True
        names = named_requests(op)
        states = [self.model.requests[name].state if name in self.model.requests else None for name in names]
        if isinstance(op, Peek | Match):
            return states == [None]
        return "NEW" in states

    def _let_forget(self, name: str) -> None:
        """Tell the target that a request ended while it waited, if it can know the name and wants to hear of it."""
        if name in self._waiting and hasattr(self.target, "forget"):
            self._guarded(cast(RememberingTarget, self.target).forget, name)
        self._waiting.discard(name)

    def _call_target(self, op: Op, seen: Observation) -> object:
        try:
            value = call_target(self.target, op, self.model.requests)
        except Refused as refused:
            seen.refused = type(refused).__name__
            seen.evicted = refused.evicted
            return None
        except (*_NOT_THE_TARGETS, KernelViolation):
            raise
        except BaseException as error:
            raise self._target_raised(error) from error
        if not is_result_of(op, value):
            raise OutcomeDiffers(
                f"{seen.kind} returned no {result_words(op)}", [(self.target.name, repr(value)[:200])], ("type",)
            )
        if isinstance(value, AllocResult):
            seen.write_sets = value.write_sets
            seen.evicted = value.evicted
        elif isinstance(op, Evict):
            seen.evicted = cast(list[list[int]], value)
        elif isinstance(op, Peek | Match):
            seen.matched_len = cast(int, value)
        return value

    def _snapshot(self) -> Snapshot:
        snapshot = self._guarded(self.target.snapshot)
        if not isinstance(snapshot, Snapshot):
            raise OutcomeDiffers("snapshot returned no Snapshot", [(self.target.name, repr(snapshot)[:200])], ("type",))
        return snapshot

    def _guarded(self, call: Callable[..., object], *arguments: object) -> object:
        try:
            return call(*arguments)
        except (*_NOT_THE_TARGETS, KernelViolation):
            raise
        except BaseException as error:
            raise self._target_raised(error) from error

    def _target_raised(self, error: BaseException) -> TargetRaised:
        name = type(error).__name__
        last = extract_tb(error.__traceback__)[-1]
        facts = [
            ("raised at", f"{Path(last.filename).name}:{last.lineno} in {last.name}"),
            ("expected", self._expected),
        ]
        return TargetRaised(f"{self.target.name} raised {name}: {error}", facts, (name,))

    def _model_with_choices(self, op: Alloc | Evict, seen: Observation) -> object:
        """Prove the target's choices legal, then let the model make the same ones."""
        victims = seen.evicted if self.target.conformance == "legal" else None
        try:
            if self._orders_victims:
                self._prove_order(op, seen.evicted)
            if isinstance(op, Evict):
                return self.model.evict(op.n, victims)
            done = self.model.alloc(model_arguments(op)[0], self._choice_of(op, seen, victims))
        except IllegalChoice as illegal:
            if isinstance(op, Alloc) and victims is None:
                # other victims than the policy names leave other pages free: then the victims are what differs
                self._compare_victims(self.model.alloc(model_arguments(op)[0]).evicted, seen.evicted)
            raise ChoiceIllegal(str(illegal)) from illegal
        return AllocResult(done.write_sets, done.evicted)

    def _choice_of(self, op: Alloc, seen: Observation, victims: list[list[int]] | None) -> Choice:
        """Read off the write sets which pages, and off the rows which rows, the target took."""
        write_sets = seen.write_sets or []
        lengths = [len(write_set) for write_set in write_sets]
        self._compare_values("alloc", [item.n for item in op.batch], lengths, "positions to write")
        page_size = self.config.page_size
        rows, lowest = self._rows_of(seen), iter(self.model.rows.free())
        newly, pages = {}, {}
        for item, write_set in zip(op.batch, write_sets, strict=True):
            request = self.model.requests[item.request]
            first = -(-request.allocated_len // page_size) * page_size
            positions = range(first, request.committed_len + item.n, page_size)
            pages[item.request] = [write_set[pos - request.committed_len] // page_size for pos in positions]
            if request.row is None and rows is None:
                newly[item.request] = next(lowest)  # some row, as nobody can see which
            elif request.row is None and rows is not None and item.request in rows:
                newly[item.request] = rows[item.request]
        return Choice(newly, pages, victims)

    def _rows_of(self, seen: Observation) -> dict[str, int] | None:
        """Give the rows of requests after an operation, at least of those that it names; None where nobody can see."""
        return _rows_shown(seen.now)

    def _compare_victims(self, expected: list[list[int]], got: list[list[int]], kind: str = "alloc") -> None:
        if expected != got:
            sides = [("reference", str(expected)), (self.target.name, str(got))]
            raise OutcomeDiffers(f"{kind} evicted other nodes", sides, ("victims",))

    def _prove_order(self, op: Alloc | Evict, evicted: list[list[int]]) -> None:
        """Hold a target that may choose its victims, and promises the policy's order, to that order.

        ``pages_overestimated`` allows an alloc more of them than it needs, each only while too few slots are free.
        """
        free, page_size = self.model.available, self.config.page_size
        if isinstance(op, Evict):
            self.model.prove_evictable(evicted)
            self._compare_victims(self.model.victims_in_order(-(-op.n // page_size)), evicted, "evict")
            return
        batch = model_arguments(op)[0]
        missing = self.model.pages_needed(batch) - free // page_size
        if not evicted and missing <= 0:
            return
        self.model.prove_evictable(evicted)
        n_evicted = sum([len(slots) for slots in evicted]) // page_size
        order = self.model.victims_in_order(max(missing, n_evicted))
        needed = n_victims = len(self.model.victims_in_order(max(0, missing)))
        while n_victims < min(len(evicted), len(order)):
            if free + sum([len(slots) for slots in order[:n_victims]]) >= self.model.generous_need(batch):
                break
            n_victims += 1
        self._compare_victims(order[:n_victims], evicted)
        if n_victims > needed:
            self.model.allowed["pages_overestimated"] += 1

    def _adopt(self, op: Op, seen: Observation) -> None:
        """Follow a target that evicted ahead of a refusal, where its conformance or an allowance lets it."""
        evicted, allowed = seen.evicted, "evicts_before_refusal" in self.model.allowances
        of_room = isinstance(op, Alloc) and seen.refused == "OutOfPages"
        if self.target.conformance == "exact" or (self._orders_victims and not (allowed and of_room)):
            raise OutcomeDiffers(
                "a refused operation evicted",
                [("reference", "evicted nothing"), (self.target.name, f"evicted {evicted}")],
                ("refused",),
            )
        try:
            if self._orders_victims:
                self.model.prove_evictable(evicted)
                self._compare_victims(self.model.victims_in_order()[: len(evicted)], evicted)
                self.model.allowed["evicts_before_refusal"] += 1
            self.model.adopt_eviction(evicted)
        except IllegalChoice as illegal:
            raise ChoiceIllegal(str(illegal)) from illegal

    def _compare_values(self, kind: str, expected: object, got: object, what: str = "results") -> None:
        if expected != got:
            raise OutcomeDiffers(
                f"{kind} gave different {what}",
                [("reference", shown(expected)), (self.target.name, shown(got))],
                roles=("value",),
            )

    def _update_holds(self, op: Op, seen: Observation, value: object) -> None:
        """Remember what a request in flight holds, from the moment its pages were handed out."""
        if isinstance(op, Commit) and seen.refused is None:
            self.holds.pop(op.request, None)
        if isinstance(op, Alloc) and isinstance(value, AllocResult):
            rows = {view.request: view for view in seen.now.rows or []}
            generations = seen.now.pools["full"].page_generations or []
            row_generations = seen.now.row_generations or []
            for item, write_set in zip(op.batch, value.write_sets, strict=False):
                view = rows.get(item.request)
                if view is not None:
                    pages = {slot // self.config.page_size for slot in view.slots}
                    held = {p: generations[p] if 0 <= p < len(generations) else 0 for p in sorted(pages)}
                    row_generation = row_generations[view.row] if 0 <= view.row < len(row_generations) else 0
                    self.holds[item.request] = Hold(view.row, row_generation, held, list(write_set))
        seen.holds = dict(self.holds)

    def _follow(self, op: Op, seen: Observation) -> None:
        """Keep the runner in step with what was accepted."""
        if isinstance(op, Alloc):
            for item, write_set in zip(op.batch, seen.write_sets or [], strict=True):
                self.runner.launch(item.request, self.model.requests[item.request], write_set, item.drafts)
        elif isinstance(op, Abort | Release | Commit) and op.request not in self.model.requests:
            self.runner.forget(op.request)
        if isinstance(op, Peek | Retract):
            self._waiting.add(op.request)
        elif isinstance(op, Match):
            self._waiting.discard(op.request)

    def _finish(self, op: Op, seen: Observation, outcome: Outcome) -> None:
        if self._digest is not None:
            value = outcome.value
            given = (value.write_sets, value.evicted) if isinstance(value, AllocResult) else value
            self._digest.update(repr((seen.kind, outcome.refused, given, *self._shown_after(seen))).encode())
        if self.watch is not None:
            self.watch(op, seen)

    def _shown_after(self, seen: Observation) -> tuple[object, ...]:
        """Give what the digest takes in of an operation beyond its outcome: rows and pool."""
        return [(view.row, view.request, view.slots) for view in seen.now.rows or []], seen.pool_got


def _rows_shown(snapshot: Snapshot) -> dict[str, int] | None:
    """Row of each request that has one; None where a target shows neither rows nor requests."""
    if snapshot.rows is not None:
        return {view.request: view.row for view in snapshot.rows}
    if snapshot.requests is not None:
        return {view.request: view.row for view in snapshot.requests if view.row is not None}
    return None
