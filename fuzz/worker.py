"""One fuzzing process: one target on one lane, from one seed, until the budget is spent or a law is broken.

Started by ``crew.py`` with its order as one JSON argument; reports as JSON lines on what was standard
output when it started, so that a parent needs nothing but a pipe. What a target prints goes to standard
error. Operations are on disk before they run. A failure is stored as it was found before it is minimized, so
that an interrupted minimizer loses nothing. A worker ends when its parent does.
"""

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from errno import ENOSPC
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple, cast

from hypothesis.errors import FlakyStrategyDefinition
from psutil import Process

from kvlockstep.fuzz.campaign.corpus import Notes
from kvlockstep.fuzz.campaign.seeds import seed_of
from kvlockstep.fuzz.canary import RepeatsWriteSlot, look_for_canary
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import as_sentence, signature_of
from kvlockstep.fuzz.failures import PAGE, TRACE, add_picture, current_path, give_up_reserve, store_failure, traces_in
from kvlockstep.fuzz.label_needs import LARGER_PAGES, hidden_from_labels
from kvlockstep.fuzz.labels import Memory
from kvlockstep.fuzz.lockstep import Lockstep, TargetRaised, Watcher
from kvlockstep.fuzz.minimize import Minimizer
from kvlockstep.fuzz.ops import Op, kind_of
from kvlockstep.fuzz.registry import Factory, TargetUnusable, cannot_be_seen, choose_lane, factory_for
from kvlockstep.fuzz.replay import failing_signature, what_it_lacks
from kvlockstep.fuzz.root import RootSearch
from kvlockstep.fuzz.search import Search
from kvlockstep.fuzz.statistics import CaseWatcher, Statistics
from kvlockstep.fuzz.targets.base import Target, allowances_of, options_of, page_sizes_of
from kvlockstep.fuzz.trace import Header, Trace, TraceError, TraceWriter, encode_header, encode_op, read_trace
from kvlockstep.invariants import Snapshot, Violation
from kvlockstep.invariants.checks import HARNESS_PARTS, Check, Findings, unobserved

Report = Callable[..., None]

N_LOOKS = 200
"""Snapshots with requests and nodes, or with these hidden, after which it is known what a target shows."""

ENDING_S = 5.0
"""A worker whose parent is gone has this long to store what it has."""

FACTS_S = 5.0
"""Seconds between the counts that a worker of a campaign reports."""

ROOT_S = 20.0
"""So long is the root of a failure looked for, at most; mostly it takes less than one."""

MOST_DRAWN = 100_000
"""Operations times slots of a trace that is drawn where it is stored: half a second at most."""

CASES_IN_BATCH = 20
"""Hypothesis draws so many cases from a seed."""

BATCHES_IN_UNIT = 5
"""A unit is what is done again if a worker is lost in it: some seconds."""

TWIN_EVERY = 20
"""Of so many cases one is run again elsewhere, in a campaign."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which units a worker of a campaign or a gate runs: those of its shard and slot from ``unit`` on.

    The cases of a unit depend on these four and on nothing that was run before, so that it can be done again anywhere.
    """

    base: str
    shard: int
    slot: int
    unit: int = 0
    units: int | None = None  # how many; None: until the time is over
    known: tuple[str, ...] = ()  # signatures that are counted and not minimized again
    notes: bool = False  # report what a corpus is made of
    twins: bool = False  # report cases that are to be run again elsewhere


class Stored(NamedTuple):
    """A folder of stored traces, of which one worker takes every ``step``-th from the ``first`` on."""

    folder: str
    first: int = 0
    step: int = 1
    largest: int | None = None  # bytes of a file; a larger one is passed over


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is told. ``seconds`` count from the first operation that is drawn.

    Without a ``plan`` the cases are those of ``seed``, each batch after the ones before, and the first violation ends
    the run. With one a worker goes on behind a violation, except on a GPU, whose context may be lost.
    """

    target: str
    lane: str | None
    seconds: float
    seed: int
    out: str
    name: str
    fault: str | None = None
    minimize_seconds: float = 30.0
    steps: int = 90  # operations in a case, at most
    canary: bool = True  # look for it first
    learn: bool = True  # let what was tried decide what is tried next
    without: int | None = None  # the law that is left out; see Lockstep
    plan: Plan | None = None
    stored: tuple["Stored", ...] = ()  # run before anything is drawn, outside of ``seconds``
    logs: str | None = None  # where the trace at hand is written; None: in ``out``
    sanitize: int | None = None  # seed of the sanitizer that kernels run under

    @classmethod
    def from_json(cls, text: str) -> "Order":
        data = json.loads(text)
        if data.get("plan") is not None:
            data["plan"] = Plan(**data["plan"] | {"known": tuple(data["plan"]["known"])})
        data["stored"] = tuple(Stored(*one) for one in data.get("stored", ()))
        return cls(**data)


class ContextInDoubt(Exception):
    """The target raised something on a GPU, after which nothing that runs in this process can be trusted."""


class CaseStopped(BaseException):
    """Ends the running case and the batch; not an Exception, so that Hypothesis neither replays nor shrinks it."""


class Worker:
    """Runs cases and reports. Implements `machine.Case`."""

    config: CacheConfig | None = None

    def __init__(self, order: Order, factory: Factory, report: Report) -> None:
        self.order = order
        self.factory = factory
        self.report = report
        probe = factory(CacheConfig())
        self.capabilities = probe.capabilities
        self.options = options_of(probe)
        self.page_sizes = page_sizes_of(probe)
        self.lane = getattr(probe, "lane", None)
        self.statistics = Statistics()
        self.search = Search() if order.learn else None
        self._target = probe
        self.ops: list[Op] = []
        self.header = self._header(CacheConfig())
        self.log = TraceWriter(current_path(Path(order.logs or order.out), order.name), self.header)
        self.notes = Notes(self.header) if order.plan is not None and order.plan.notes else None
        self._started: float | None = None
        self._draws = False  # what is run now is drawn, not stored
        self._draws_since: float | None = None
        self._next_report = 0.0
        self._next_facts = 0.0
        self._distinct: set[int] = set()
        self._violation: Violation | None = None
        self._trouble: Exception | None = None
        self._minimizer: Minimizer | None = None
        self._interrupted = False
        self._unobserved: dict[str, Check] = {}
        self._hidden: set[str] = set()
        self._looks = 0
        self._parts_missing = [] if "kv" in self.capabilities else ["reads", "pool"]
        if not hasattr(probe, "read_slots"):
            self._parts_missing.append("pool")
        if max(self.page_sizes) == 1:
            self._hidden.add(LARGER_PAGES)
        self._spent = False
        self._unit: int | None = None
        self._known = set(order.plan.known if order.plan is not None else ())
        self._twin: Lockstep | None = None  # of the case at hand, if it is to be run again elsewhere
        self._cases_of_unit = 0

    def _header(self, config: CacheConfig) -> Header:
        order = self.order
        return Header(config, "", None, None, order.target, self.lane, order.fault, order.sanitize)

    @property
    def elapsed(self) -> float:
        return monotonic() - self._started if self._started is not None else 0.0

    def start(self, config: CacheConfig) -> Lockstep:
        with self._stopping_at_trouble():
            self._end_case()
        self.ops = []
        self.header = self._header(config)
        note = self.notes
        if note is not None:
            note.begin(config, self.ops)
        watch = CaseWatcher(self.statistics, Memory(config), self.search, note.note if note is not None else None)
        with self._stopping_at_trouble():
            target = self._target = self._begin(config)
            self.statistics.allowances.update(dict.fromkeys(allowances_of(target), 0))
            plan = self.order.plan
            again = plan is not None and plan.twins and self._cases_of_unit % TWIN_EVERY == 1
            self._cases_of_unit += 1
            lockstep = self._lockstep(config, target, watch, digest=again)
        self._twin = lockstep if again else None
        return lockstep

    def _begin(self, config: CacheConfig) -> Target:
        """Make a target for a case, whose trace begins."""
        self.log.restart(self._header(config))
        return self.factory(config)

    def _lockstep(
        self, config: CacheConfig, target: Target, watch: Watcher | None = None, *, digest: bool = False
    ) -> Lockstep:
        try:
            return Lockstep(config, target, log=self.log, watch=watch, digest=digest, without=self.order.without)
        except Exception as error:  # so far it has only looked at the target
            raise cannot_be_seen(self.order.target, config, error) from error

    @contextmanager
    def _stopping_at_trouble(self) -> Iterator[None]:
        """End the run at whatever is no violation; Hypothesis would run the case again and find something else."""
        try:
            yield
        except Exception as error:
            self._trouble = error
            raise CaseStopped from error

    def _end_case(self) -> None:
        """Count the case that was at hand, and report it if it is to be run again elsewhere."""
        if self.ops:
            self._distinct.add(hash((self.header.config, tuple(self.ops))))
            self.statistics.distinct_cases = len(self._distinct)
        twin, self._twin = self._twin, None
        if twin is not None and self.ops and self._violation is None and self._trouble is None:
            lines = [encode_header(self.header), *map(encode_op, self.ops[: twin.step + 1])]
            self.report("twin", lines=lines, digest=twin.digest())

    def run(self, lockstep: Lockstep, op: Op) -> None:
        if self._started is None:
            self._started = monotonic()
        elapsed = self.elapsed
        if self._draws and self._draws_since is None:
            self._draws_since = monotonic()
        if self._interrupted or self._is_late():
            self._spent = True
            raise CaseStopped
        with self._stopping_at_trouble():
            if elapsed > self._next_report:
                self._next_report = elapsed + 1.0
                self._report_progress(elapsed)
            self.ops.append(op)
            try:
                lockstep.run(op)
            except Violation as violation:
                self._violation = violation
                raise CaseStopped from violation
            if self._looks < N_LOOKS:
                self._look(lockstep.now)

    def _is_late(self) -> bool:
        return self._draws_since is not None and monotonic() - self._draws_since > self.order.seconds

    def _report_progress(self, elapsed: float) -> None:
        """Say that this worker is alive; in a campaign the counts, which are long, come along only now and then."""
        if self.order.plan is not None and elapsed < self._next_facts:
            self.report("alive")
            return
        self._next_facts = elapsed + FACTS_S
        self.report("progress", **self.facts())

    def _look(self, snapshot: Snapshot) -> None:
        """Note the parts that the target does not show, and the checks that cannot run without them."""
        self._looks += snapshot.requests != [] and snapshot.nodes != []
        parts = [part for part in HARNESS_PARTS if part not in self._parts_missing]
        self._unobserved.update((check.name, check) for check in unobserved(snapshot, parts))
        self._hidden |= hidden_from_labels(snapshot)

    def interrupt(self) -> None:
        """Come to an end after the operation at hand. May be called from a signal handler.

        An exception would be swallowed where Hypothesis is called back by the garbage collector.
        """
        self._interrupted = True
        if self._minimizer is not None:
            self._minimizer.deadline = 0.0

    def facts(self) -> dict[str, Any]:
        """What a report says of the run so far."""
        reached = {"reached": getattr(self._target, "reached", None)} if self.order.fault else {}
        return reached | {
            "seconds": self.elapsed,
            "memory": Process().memory_info().rss,
            "statistics": self.statistics.to_json(),
            "unobserved": [[check.law, name, check.needs] for name, check in self._unobserved.items()],
            "hidden": sorted(self._hidden),
        }

    def fuzz(self) -> None:
        """Run stored traces, the canary, and cases until the budget is spent or one fails; store and minimize that.

        Raises what the target's factory raises.
        """
        from kvlockstep.fuzz.machine import run_cases

        self._run_stored()
        if self.order.canary:
            self._release_canary()
        self._draws = True
        for seed in self._seeds():
            try:
                run_cases(self, seed, n_cases=CASES_IN_BATCH, steps=self.order.steps)
            except (CaseStopped, FlakyStrategyDefinition):
                # a case that stops where an earlier one went on looks to Hypothesis like a test that draws at random
                if not (self._spent or self._violation or self._trouble):
                    raise
            self._end_case()
            self._settle_what_was_found()
        self.report("end", **self.facts())

    def _seeds(self) -> Iterator[int]:
        """Yield a seed for each batch, as long as there is reason to go on; report each unit that is done."""
        plan = self.order.plan
        if plan is None:
            for batch in count():
                if self._is_over():
                    return
                yield (self.order.seed << 20) + batch
            return
        for unit in count(plan.unit):
            if self._is_over() or (plan.units is not None and unit >= plan.unit + plan.units):
                return
            self._unit, self._cases_of_unit = unit, 0
            self.search = Search() if self.order.learn else None
            seed = seed_of(plan.base, plan.shard, plan.slot, unit)
            for batch in range(BATCHES_IN_UNIT):
                if self._is_over():
                    return
                yield (seed << 20) + batch
            if not self._is_over():
                self._report_notes()
                self.report("unit", unit=unit, **self.facts())

    def _is_over(self) -> bool:
        return self._spent or self._interrupted or self._violation is not None

    def _report_notes(self) -> None:
        entries = self.notes.take() if self.notes is not None else []
        if entries:
            self.report("notes", entries=[entry.to_json() for entry in entries])

    def _settle_what_was_found(self) -> None:
        """Raise what stopped the run, or store the violation that did; go on behind it, where that is asked for."""
        if self._trouble is not None:
            raise self._trouble
        if (violation := self._violation) is None:
            return
        if self.order.plan is not None and self.lane == "cuda" and isinstance(violation, TargetRaised):
            # the post-mortem runs the trace in a process with a context of its own, and minimizes it there
            raise ContextInDoubt(violation.headline)
        goes_on = self.order.plan is not None and self.lane != "cuda"
        signature = signature_of(violation, kind_of(self.ops[-1]))
        if signature in self._known:
            self.report("again", signature=signature, unit=self._unit, length=len(self.ops))
        else:
            self._settle(violation)
            self._known.add(signature)
        if goes_on:
            self._violation = self._minimizer = None
            self.ops = []

    def _run_stored(self) -> None:
        """Run the stored traces, this worker's share of them, in the order of their names; report each."""
        for folder, first, step, largest in self.order.stored:
            for path in traces_in(Path(folder))[first::step]:
                if self._is_over():
                    return
                if largest is not None and (size := path.stat().st_size) > largest:
                    verdict = {"verdict": "unreadable", "text": f"{path}: {size} bytes, at most {largest}: remove it"}
                else:
                    verdict = self._verdict_of_stored(path)
                self.report("stored", folder=folder, file=path.name, **verdict)
                self._settle_what_was_found()
        self._report_notes()

    def _verdict_of_stored(self, path: Path) -> dict[str, Any]:
        """Run one stored trace as a case. A target that does not promise all that it needs is not shown by it."""
        try:
            trace = read_trace(path)
        except TraceError as error:
            return {"verdict": "unreadable", "text": str(error)}
        try:
            lacks = what_it_lacks(self.factory, trace.header.config, trace.ops)
        except TargetUnusable as error:
            return {"verdict": "skipped", "text": str(error)}
        if lacks:
            return {"verdict": "skipped", "text": f"needs {', '.join(lacks)}"}
        with suppress(CaseStopped):
            lockstep = self.start(trace.header.config)
            for op in trace.ops:
                self.run(lockstep, op)
        self._end_case()
        if self._violation is not None:
            return {"verdict": "violates", "text": signature_of(self._violation, kind_of(self.ops[-1]))}
        return {"verdict": "not finished" if self._spent or self._trouble else "clean"}

    def _release_canary(self) -> None:
        """Look for the canary on targets of this factory, and report what came of it."""

        def start(config: CacheConfig) -> Lockstep:
            return self._lockstep(config, cast(Target, RepeatsWriteSlot(self._begin(config))))

        promised = self.capabilities, self.page_sizes, self.options
        self.report("canary", **asdict(look_for_canary(promised, start, self.order.seed)))

    def _settle(self, violation: Violation) -> None:
        found_after, n_done = self.elapsed, self.statistics.done
        ops, config = tuple(self.ops), self.header.config
        signature = signature_of(violation, kind_of(ops[-1]))
        law = type(violation).__name__
        header = replace(self._header(config), why=as_sentence(violation.headline), violates=law, signature=signature)
        found = Trace(header, list(ops))
        self.report("violates", signature=signature)
        folder = self._store(found, found, str(violation))
        facts = {"signature": signature, "seconds": found_after, "operations": n_done, "found_len": len(ops)}
        facts |= {} if self._unit is None else {"unit": self._unit}
        self.report("found", folder=str(folder), text=str(violation), **facts)
        findings = self._findings_of(config, ops)
        facts["laws"] = list(dict.fromkeys(type(one).__name__ for one in findings.violations))
        facts["did_not_run"] = findings.did_not_run

        seconds = self.order.minimize_seconds
        minimizer = self._minimizer = Minimizer(config, ops, self.factory, signature, seconds=seconds)
        if self._interrupted:
            minimizer.deadline = 0.0
        ending = "minimized" if minimizer.run() else "interrupted" if self._interrupted else "time ran out"
        again = self._violation_of(minimizer.config, minimizer.ops)
        if again is None or signature_of(again, kind_of(minimizer.ops[-1])) != signature:
            ending, again = "did not fail again", violation
        shortest = Trace(replace(header, config=minimizer.config, why=as_sentence(again.headline)), list(minimizer.ops))
        text = str(again)
        folder = self._store(shortest, found, text)
        if not self._interrupted:
            self._draw(folder)
        facts |= {"text": text, "law": law, "minimized_len": len(minimizer.ops), "ending": ending}
        if self.order.plan is not None:
            facts["root"] = self._root_of(minimizer, signature)
        self.report("failure", folder=str(folder), **facts)

    def _root_of(self, minimized: Minimizer, signature: str) -> str:
        """Return the signature of the simplest trace that breaks the same law; see ``root.py``."""
        config, ops = minimized.config, minimized.ops
        seconds = min(ROOT_S, self.order.minimize_seconds)
        search = self._minimizer = RootSearch(config, ops, self.factory, signature, seconds=seconds)
        if self._interrupted:
            search.deadline = 0.0
        search.run()
        return search.signature

    def _store(self, shortest: Trace, found: Trace, text: str) -> Path:
        """Store a failure, on a full disk in the room that was kept for it."""
        out = Path(self.order.out)
        try:
            return store_failure(out, shortest, found, text, self._still_fails)
        except OSError as error:
            if error.errno != ENOSPC or not give_up_reserve(out):
                raise
            self.report("full", text=f"could not write {error.filename or out}: {error.strerror}")
            return store_failure(out, shortest, found, text, self._still_fails)

    def _draw(self, folder: Path) -> None:
        """Put the picture of a stored failure into its folder, if it has none and that takes no time to speak of.

        Nothing that goes wrong in it is worth a failure, or the run: ``show`` makes the picture as well.
        """
        if (folder / PAGE).exists():
            return
        try:
            from kvlockstep.fuzz.describe import printable
            from kvlockstep.fuzz.show.page import page_of, verdict_of  # asks for Jinja, which a small set-up may lack
            from kvlockstep.fuzz.story import follow

            trace = read_trace(folder / TRACE)
            header = trace.header
            if len(trace.ops) * header.config.n_slots > MOST_DRAWN:
                return
            story = follow(Lockstep(header.config, self.factory(header.config), without=self.order.without), trace.ops)
            verdict = verdict_of(story)
            if verdict is not None and story.signature == header.signature:
                page = page_of(story, lane=header.lane, fault=header.fault, why=header.why)
                add_picture(folder, trace, page, printable(verdict.sentence))
        except Exception as error:
            sys.stderr.write(f"{folder}: has no {PAGE}: {type(error).__name__}: {error}\n")

    def _still_fails(self, stored: Trace) -> bool:
        """Run a trace of an earlier run or of another worker on this target, as it is now."""
        try:
            signature, _ = failing_signature(stored.header.config, stored.ops, self.factory)
        except TargetUnusable:  # it cannot be built in this size any more
            return False
        return signature == stored.header.signature

    def _violation_of(self, config: CacheConfig, ops: Sequence[Op]) -> Violation | None:
        """Run the minimized trace once more, for a text with its own numbers."""
        lockstep = Lockstep(config, self.factory(config), without=self.order.without)
        try:
            for op in ops:
                lockstep.run(op)
        except Violation as violation:
            return violation
        return None

    def _findings_of(self, config: CacheConfig, ops: Sequence[Op]) -> Findings:
        """Run the trace once more, and learn all that its last operation shows; nothing, if it does not come so far."""
        lockstep = Lockstep(config, self.factory(config), without=self.order.without)
        try:
            for op in ops[:-1]:
                lockstep.run(op)
        except Violation:  # otherwise than it was found, so it is no state to learn from
            return Findings()
        return lockstep.run_every_law(ops[-1])


def take_over_stdout() -> Report:
    """Keep standard output for reports, and let all else that is printed in this process go to standard error."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(event: str, **facts: Any) -> None:
        stream.write(json.dumps({"event": event, **facts}) + "\n")
        stream.flush()

    return report


def end_with(parent: int, patience: float = ENDING_S) -> None:
    """Interrupt this process once its parent is gone, so that it stores what it has; then end it, heeded or not."""
    while os.getppid() == parent:
        sleep(0.5)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)
    sleep(patience)
    os._exit(1)


def main(argument: str) -> int:
    """Follow one order. Return 0 however the run ended, if it could say so; what was found is in the reports."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    report = take_over_stdout()
    try:
        _follow(Order.from_json(argument), report)
    except (BrokenPipeError, KeyboardInterrupt):
        return 1  # nobody listens any more, or it was ended before it began
    return 0


def _follow(order: Order, report: Report) -> None:
    try:
        choose_lane(order.lane)
        worker = Worker(order, factory_for(order.target, order.fault, order.sanitize), report)
        signal.signal(signal.SIGINT, lambda number, frame: worker.interrupt())
        report("ready", lane=worker.lane, capabilities=sorted(worker.capabilities))
        worker.fuzz()
    except TargetUnusable as error:
        report("unusable", text=str(error))
    except ContextInDoubt as error:
        report("broken", text=f"its CUDA context may be lost: {error}")
    except BrokenPipeError:
        raise
    except OSError as error:
        full = error.errno == ENOSPC
        report("broken", text=f"could not write {error.filename or order.out}: {error.strerror or error}", full=full)
    except Exception as error:
        traceback.print_exc()
        report("broken", text=f"the harness failed in worker {order.name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
