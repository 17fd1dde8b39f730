"""Keeps the workers of a campaign or a gate at work: the job of a crew.

Each place in the crew is a worker that goes through the units of its shard (`worker.Plan`). A process that has ended
is replaced. One that died (killed, hung, grown too large, left without a word) is followed by a post-mortem, which
runs its last trace in processes of their own (``postmortem.py``); if it dies there too, that is a failure like any
other, and the worker goes on behind the unit it happened in; else the unit is done once more.

Of the failures with one signature on one target, a form of their cause, the shortest trace is kept. Whether it replays
in a fresh process is tried while the workers go on.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from kvlockstep.fuzz.campaign.corpus import Corpus, Entry
from kvlockstep.fuzz.campaign.folder import Cause, Lane, Party, adopted, causes_of, corpus_of, ended_well
from kvlockstep.fuzz.campaign.postmortem import PostmortemOrder
from kvlockstep.fuzz.campaign.seeds import seed_of
from kvlockstep.fuzz.campaign.witness import Case, Witnesses
from kvlockstep.fuzz.crew import Command, WorkerState, n_cores
from kvlockstep.fuzz.failures import header_of, keep_last_trace, traces_in
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.trace import TraceError
from kvlockstep.fuzz.trace_bounds import MAX_NUMBER
from kvlockstep.fuzz.verdict import replays
from kvlockstep.fuzz.ward import KINDS, Limits
from kvlockstep.fuzz.ward_keeper import START_S
from kvlockstep.fuzz.worker import Order, Plan, Stored

UNITS_OF_A_START = 30
"""Units after which a worker process is replaced, so that what grows in one does not grow all night."""

UNITS_OF_A_FAULT = 2
"""The same, where each process has one of several planted faults."""

SAVE_EVERY = 10.0
"""Seconds between samples of the curves, and between savings of the progress."""

DISTIL_EVERY = 60.0

MANY_DEATHS = 5
"""A worker that died so often without doing an operation is given up."""

POSTMORTEM = ".postmortem"
"""Ends the name of a process that looks into the death of another."""

LARGEST_OF_CORPUS = 1 << 20
"""Bytes of a trace of the corpus; what is larger was not written by a campaign, and would hold up its start."""

MINIMIZE_S = 60.0

_DEATHS = {kind.__name__ for kind in KINDS}
"""What a post-mortem calls a failure that ends a process."""

WITNESS_S = 60.0
"""So long are witnesses waited for at the end."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a worker may take."""

    hang_seconds: float = 60.0  # for one operation
    memory: int = 4 << 30  # bytes, with what it started
    minimize_seconds: float = MINIMIZE_S  # for each new cause

    @property
    def in_ward(self) -> Limits:
        """The limits of a single trace: one that takes half of what kills a worker is to blame for its death."""
        return Limits(self.hang_seconds, self.memory // 2)


@dataclass(slots=True)
class Place:
    """One worker, through all its processes."""

    index: int
    name: str
    target: str
    lane: str | None
    unit: int = 0
    died_in_unit: int = 0
    died_at_once: int = 0
    last_death: "Death | None" = None
    met_again: str | None = None  # by its post-mortem
    state: WorkerState | None = None  # of the process at work
    rate: float = 0.0  # operations done a second, lately
    given_up: bool = False
    begun_stored: bool = False
    whole: Statistics = field(default_factory=Statistics)  # of the process at work, up to the last unit that is done
    half: Counter[str] = field(default_factory=Counter)  # times that causes were met since
    _counted: tuple[float, int] = (0.0, 0)

    def measure(self) -> None:
        """Take the rate since the last call."""
        if self.state is None:
            self.rate = 0.0
            return
        seconds, done = self.state.seconds, self.state.statistics.done
        before_seconds, before_done = self._counted
        if done < before_done:  # another process
            before_seconds, before_done = 0.0, 0
        if seconds > before_seconds:
            self.rate = (done - before_done) / (seconds - before_seconds)
            self._counted = seconds, done


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker died, who does not do so again."""

    text: str
    from_outside: bool  # killed by SIGKILL, which no target sends itself


@dataclass(slots=True)
class StoredRun:
    """What became of one regression on one target and lane."""

    target: str
    lane: str | None
    file: str
    verdict: str  # clean, violates, died, skipped, unreadable, not finished
    text: str


class Supervisor:
    """The work of one party. Implements `crew.Job`.

    ``regressions`` is a folder of traces that the first worker of each lane runs before anything else. Then come those
    of the corpora in the folder of a campaign, ``corpus``, of which each worker of a target runs its share. ``told``
    is called with each thing worth a line.
    """

    def __init__(
        self,
        party: Party,
        places: Sequence[tuple[str, str | None, str]],
        bounds: Bounds,
        *,
        regressions: Path | None = None,
        corpus: Path | None = None,
        twins: bool = True,
        told: Callable[[str], None] = lambda line: None,
        sync: Callable[[], None] | None = None,
    ) -> None:
        self.party = party
        self.bounds = bounds
        self.settings = party.settings
        self.progress = party.progress
        self.places = [Place(i, name, target, lane) for i, (target, lane, name) in enumerate(places)]
        for place in self.places:
            place.unit = self.progress.units.get(place.name, 0)
        self.regressions = regressions
        self.stored_runs: list[StoredRun] = []
        folders = {target: corpus_of(corpus, target) for target in self.settings.targets} if corpus is not None else {}
        self.corpora = {target: Corpus(folder) for target, folder in folders.items()}
        self.twins = twins
        self.told = told
        self.sync = sync
        self.full: str | None = None  # what could not be written
        self.unusable: list[str] = []
        self.unexplained: list[Death] = []
        load = max(1.0, len(places) / n_cores())
        self._witnesses = Witnesses((START_S + bounds.hang_seconds) * load)
        self._statistics: dict[int, Statistics] = {}  # of ended processes, by lane of the progress
        self._lane_of = {place.index: self._lane_at(place) for place in self.places}
        self._by_name = {place.name: place for place in self.places}
        self._pool = ThreadPoolExecutor(1)
        self._tries: dict[str, Future[bool]] = {}
        for key, times in self.progress.half.items():  # those units are done once more
            self.progress.causes[key].times -= times
        self.progress.half = {}
        self._worked_before = self.progress.seconds
        self._began = monotonic()
        self._next_save = self._began + SAVE_EVERY
        self._next_distil = self._began + DISTIL_EVERY
        self.after_kill = False

    def begin(self, when: str) -> None:
        """Take up the work at a date; if an earlier process of this party was killed, look into what it left."""
        self.after_kill = not ended_well(self.party.campaign, self.party.number)
        resumed = bool(self.progress.starts)
        self._note("begin", resumed=resumed, after_kill=self.after_kill, when=when)
        if resumed:
            self._adopt_what_nobody_counted()

    def _lane_at(self, place: Place) -> int:
        """Find what is kept of the lane of a worker, or begin it."""
        lanes = self.progress.lanes
        mine = [i for i, lane in enumerate(lanes) if (lane.target, lane.lane) == (place.target, place.lane)]
        if not mine:
            lanes.append(Lane(place.target, place.lane, Statistics().to_json()))
        index = mine[0] if mine else len(lanes) - 1
        self._statistics.setdefault(index, Statistics.from_json(self.progress.lanes[index].statistics))
        return index

    def _adopt_what_nobody_counted(self) -> None:
        """Count what an earlier process of this party stored before it was killed."""
        counted = causes_of(self.party.campaign)
        for folder in sorted(self.party.failures.iterdir()):
            header = header_of(folder)
            if header is None or header.signature is None:
                continue
            try:
                cause = adopted(folder, header, self.party.number)
            except TraceError as error:
                self._note("unreadable", text=str(error))
                continue
            if cause.key not in counted and cause.target in self.settings.targets:
                self.progress.causes[cause.key] = cause
                self._note("cause", **asdict(cause) | {"key": cause.key, "adopted": True})
        for cause in self.progress.causes.values():
            if cause.replays is None:
                self._try(cause)

    def _try(self, cause: Cause) -> None:
        """Find out whether a cause replays, while the workers go on."""
        trace = str(self.party.failures / cause.folder / "trace.jsonl")
        self._tries[cause.key] = self._pool.submit(replays, trace, cause.target, self.bounds.in_ward)

    # Orders

    def first_commands(self) -> list[Command]:
        """Return what is to be done in each place first: a post-mortem of what a party that was killed left there."""
        commands = []
        for place in self.places:
            if self._has_done_all(place) and self.progress.starts.get(place.name):
                continue
            left = keep_last_trace(self.party.folder, place.name) if self.after_kill else None
            fault = self._fault_of_start(place)
            commands.append(Command(self._order(place)) if left is None else self._postmortem(place, str(left), fault))
        return commands

    @property
    def seconds(self) -> float:
        """Seconds that this party has worked, in all its processes one after another."""
        return self._worked_before + monotonic() - self._began

    def _order(self, place: Place) -> Order:
        left = max(0.1, self.settings.seconds - self.seconds)
        in_a_row, fault = self._units_in_a_row, self._fault_of_start(place)
        units = in_a_row - place.unit % in_a_row
        if self.settings.units is not None:
            units = min(units, self.settings.units - place.unit)
        self.progress.starts[place.name] = self.progress.starts.get(place.name, 0) + 1
        self._note("start", worker=place.name, unit=place.unit, fault=fault)
        place.whole = Statistics()
        plan = Plan(
            self.settings.base,
            self.settings.shard.index,
            place.index,
            place.unit,
            units,
            self._known_on(place, fault),
            notes=bool(self.corpora) and fault is None,
            twins=self.twins,
        )
        place.state = None
        return Order(
            place.target,
            place.lane,
            left,
            0,
            str(self.party.failures),
            place.name,
            fault,
            self.bounds.minimize_seconds,
            plan=plan,
            stored=self._stored_for(place),
            logs=str(self.party.folder),
            sanitize=self._sanitizer_of_start(place),
        )

    @property
    def _units_in_a_row(self) -> int:
        return UNITS_OF_A_FAULT if self.settings.faults else UNITS_OF_A_START

    def _fault_of_start(self, place: Place) -> str | None:
        """Choose the fault that is planted in the process that starts now, at random but the same one each time."""
        if not self.settings.faults:
            return None
        start = place.unit // self._units_in_a_row
        drawn = seed_of(f"{self.settings.base} fault", self.settings.shard.index, place.index, start)
        return self.settings.faults[drawn % len(self.settings.faults)]

    def _sanitizer_of_start(self, place: Place) -> int | None:
        """Choose the seed of the sanitizer of the process that starts now, if there is one."""
        if not self.settings.sanitize:
            return None
        start = place.unit // self._units_in_a_row
        return seed_of(f"{self.settings.base} sanitizer", self.settings.shard.index, place.index, start) & MAX_NUMBER

    def _known_on(self, place: Place, fault: str | None) -> tuple[str, ...]:
        """Return the signatures that need not be minimized any more."""
        causes = self.progress.causes.values()
        return tuple(cause.signature for cause in causes if (cause.target, cause.fault) == (place.target, fault))

    def _stored_for(self, place: Place) -> tuple[Stored, ...]:
        """Say what stored traces a process begins with: regressions that were not run yet, and once in a place its
        share of the corpus.
        """
        stored = []
        if self.regressions is not None and self._stored_left(place):
            stored.append(Stored(str(self.regressions), self._n_stored(place)))
        if place.begun_stored:
            return tuple(stored)
        place.begun_stored = True
        corpus = self.corpora.get(place.target)
        if corpus is not None and corpus.folder.is_dir():
            same = [other for other in self.places if other.target == place.target]
            stored.append(Stored(str(corpus.folder), same.index(place), len(same), LARGEST_OF_CORPUS))
        return tuple(stored)

    def _n_stored(self, place: Place) -> int:
        return sum((run.target, run.lane) == (place.target, place.lane) for run in self.stored_runs)

    def _stored_left(self, place: Place) -> list[str]:
        """List the regressions that a place is still to run."""
        if self.regressions is None or self._first_of_lane(place) is not place:
            return []
        return [path.name for path in traces_in(self.regressions)][self._n_stored(place) :]

    def _first_of_lane(self, place: Place) -> Place:
        return next(other for other in self.places if (other.target, other.lane) == (place.target, place.lane))

    def next_order(self, state: WorkerState) -> Command | None:
        """Settle what became of a process, and say what comes in its place."""
        place = self._by_name.get(state.order.name)
        if place is None:  # a post-mortem
            place = self._by_name[state.order.name.removesuffix(POSTMORTEM)]
            self._end_postmortem(place, state)
        else:
            self._absorb(place, state)
            if state.disk_full:
                self._disk_is_full(state.broken or "")
                return None
            if (how := state.trouble or state.broken) is not None:
                return self._after_death(place, state, how)
            place.died_at_once = 0
        return self._go_on(place)

    def _go_on(self, place: Place) -> Command | None:
        done = self._has_done_all(place) and not self._stored_left(place)
        if done or place.given_up or self.wants_end():
            return None
        return Command(self._order(place))

    def _has_done_all(self, place: Place) -> bool:
        return self.time_is_over or (self.settings.units is not None and place.unit >= self.settings.units)

    def _after_death(self, place: Place, state: WorkerState, how: str) -> Command | None:
        self.progress.deaths[place.name] = self.progress.deaths.get(place.name, 0) + 1
        trace = str(state.last_trace) if state.last_trace is not None else None
        left = self._stored_left(place)
        if left and trace is not None and state.canary is None:  # it comes after the stored traces
            self.stored_runs.append(StoredRun(place.target, place.lane, left[0], "died", how))
        self._note("death", worker=place.name, unit=place.unit, how=how, trace=trace)
        self.told(f"worker {place.name} {how}")
        place.died_at_once = 0 if state.statistics.done or trace is not None else place.died_at_once + 1
        if place.died_at_once >= MANY_DEATHS:
            place.given_up = True
            self._note("given up", worker=place.name, why=how)
            self.told(f"worker {place.name} is given up: it died {MANY_DEATHS} times before its first operation")
            return None
        place.died_in_unit += 1
        place.last_death = Death(f"worker {place.name} {how}", state.killed)
        if trace is None:
            self.unexplained.append(place.last_death)
            return self._go_on(place)
        return self._postmortem(place, trace, state.order.fault)

    def _postmortem(self, place: Place, trace: str, fault: str | None) -> Command:
        bounds = self.bounds
        place.met_again = None
        out, name = str(self.party.failures), f"{place.name}{POSTMORTEM}"
        order = Order(place.target, place.lane, 0.0, 0, out, name, fault, logs=str(self.party.folder))
        asked = PostmortemOrder(
            place.target,
            place.lane,
            trace,
            out,
            name,
            fault,
            bounds.minimize_seconds,
            bounds.hang_seconds,
            bounds.in_ward.memory_bytes,
            self._known_on(place, fault),
        )
        patience = bounds.minimize_seconds + 2 * bounds.hang_seconds + START_S
        return Command(order, "kvlockstep.fuzz.campaign.postmortem", json.dumps(asdict(asked)), patience)

    def _end_postmortem(self, place: Place, state: WorkerState) -> None:
        """Go on behind the unit that kills its workers; do it again if it was something else that did.

        A law that is broken kills no worker: where only the parent was killed, the unit is done again for all else.
        """
        if state.disk_full:
            self._disk_is_full(state.broken or "")
        explained = state.failure["signature"] if state.failure is not None else place.met_again
        verdict = explained or "did not happen again"
        if state.trouble or state.broken:
            verdict = f"could not be held: {state.trouble or state.broken}"
        self._note("postmortem", worker=place.name, verdict=verdict)
        self.told(f"post-mortem of worker {place.name}: {verdict}")
        if explained is None and place.last_death is not None:
            death = place.last_death
            self.unexplained.append(Death(f"{death.text}; {verdict}", death.from_outside))
        if place.died_in_unit > 1 or (explained is not None and self._ends_unit(place, explained)):
            self._next_unit(place, place.unit + 1)

    def _ends_unit(self, place: Place, signature: str) -> bool:
        """Tell whether the work goes on behind the unit in which a post-mortem found this, and it is counted now."""
        return place.last_death is not None or signature.partition(".")[0] in _DEATHS

    def _next_unit(self, place: Place, unit: int) -> None:
        place.unit, place.died_in_unit = unit, 0
        self.progress.units[place.name] = unit

    # Reports

    def hear(self, state: WorkerState, event: dict[str, Any]) -> None:
        """Take a report of a worker, or of a post-mortem."""
        kind = event["event"]
        place = self._by_name.get(state.order.name)
        if place is not None:
            place.state = state
        if kind == "unit" and place is not None:
            self._next_unit(place, event["unit"] + 1)
            place.whole = state.statistics
            place.half.clear()
        elif kind == "canary":
            self.progress.lanes[self._lane_of[self._by_name[state.order.name].index]].canaries.append(
                {"law": event["law"], "operations": event["operations"], "seconds": event["seconds"]}
            )
        elif kind == "full":
            self._disk_is_full(event["text"])
        elif kind == "unusable":  # the crew ends all workers of this target
            self.unusable.append(event["text"])
        elif kind == "again":
            self._count_again(state, event["signature"])
        elif kind == "failure":
            self._take_failure(state, event)
        elif kind == "notes":
            corpus = self.corpora[state.order.target]
            for entry in event["entries"]:
                corpus.add(Entry.from_json(entry))
        elif kind == "twin":
            order = state.order
            self._witnesses.ask(Case(order.target, order.lane, order.fault, event["lines"], event["digest"]))
        elif kind == "stored":
            self._take_stored(state, event)

    def _take_stored(self, state: WorkerState, event: dict[str, Any]) -> None:
        if event["verdict"] == "unreadable":
            self._note("unreadable", worker=state.order.name, text=event["text"])
        if event["folder"] == str(self.regressions):
            target, lane = state.order.target, state.order.lane
            run = StoredRun(target, lane, event["file"], event["verdict"], event.get("text", ""))
            self.stored_runs.append(run)

    def _count_again(self, state: WorkerState, signature: str) -> None:
        place = self._by_name.get(state.order.name)
        if place is None:
            place = self._by_name[state.order.name.removesuffix(POSTMORTEM)]
            place.met_again = signature
            if not self._ends_unit(place, signature):
                return
        for cause in self.progress.causes.values():
            if (cause.signature, cause.target, cause.fault) == (signature, state.order.target, state.order.fault):
                self._count(state, cause)

    def _count(self, state: WorkerState, cause: Cause, times: int = 1) -> None:
        """Count that a cause was met once more; with no ``times``, that what it says already is of a unit at hand."""
        cause.times += times
        place = self._by_name.get(state.order.name)
        if place is not None:
            place.half[cause.key] += 1

    def _take_failure(self, state: WorkerState, event: dict[str, Any]) -> None:
        folder = Path(event["folder"])
        cause = Cause(
            event["signature"],
            state.order.target,
            state.order.fault,
            folder.name,
            event.get("law") or event["signature"].partition(".")[0],
            state.lane or state.order.lane,
            state.order.name,
            round(self.seconds, 1),
            event["operations"],
            event["found_len"],
            event["minimized_len"],
            event["ending"],
            event.get("root", ""),
        )
        if state.order.name not in self._by_name:
            looked_into = self._by_name[state.order.name.removesuffix(POSTMORTEM)]
            cause.times = int(self._ends_unit(looked_into, cause.signature))
        earlier = self.progress.causes.get(cause.key)
        if earlier is not None:
            self._count(state, earlier, cause.times)
            earlier.minimized_len = min(earlier.minimized_len, cause.minimized_len)
            return
        self.progress.causes[cause.key] = cause
        self._count(state, cause, 0)
        self._note("cause", **asdict(cause) | {"key": cause.key, "unit": event.get("unit")})
        self.told(f"found {cause.signature} on {cause.target}: {cause.minimized_len} operations, {folder}")
        self._try(cause)
        self._keep()

    def _absorb(self, place: Place, state: WorkerState) -> None:
        """Add what an ended process did to the counts of its lane."""
        index = self._lane_of[place.index]
        self._statistics[index].add(state.statistics)
        lane = self.progress.lanes[index]
        lane.seconds += state.seconds
        _take_parts(lane, state)
        place.half.clear()
        place.state = None

    # Time

    @property
    def time_is_over(self) -> bool:
        """Tell whether nothing more is to be begun; workers end by themselves."""
        return self.seconds >= self.settings.seconds

    def wants_end(self) -> bool:
        """Tell whether all are to end at once: nothing can be written any more."""
        return self.full is not None

    def tick(self) -> None:
        """Do what is to be done about once a second."""
        self.progress.seconds = self.seconds
        self._settle_tries()
        self._settle_twins()
        now = monotonic()
        if now >= self._next_save:
            self._next_save = now + SAVE_EVERY
            self._sample()
            self._save()
        if now >= self._next_distil:
            self._next_distil = now + DISTIL_EVERY
            self._distil()

    def end(self, code: int, lines: Sequence[str], *, interrupted: bool) -> None:
        """Keep the last counts. An interrupted party can be resumed; one that is at its end cannot."""
        if not interrupted:
            for cause in self.progress.causes.values():  # the unit of one that was met before a kill may not be done
                cause.times = max(1, cause.times)
        self.progress.ended = not interrupted and self.full is None
        self._note("interrupted" if interrupted else "end", code=code, lines=list(lines))
        self._save()

    def settle(self) -> None:
        """Come to rest, after the last worker has ended: all that is outstanding is waited for."""
        self.progress.seconds = self.seconds
        for place in self.places:
            if place.state is not None:
                self._absorb(place, place.state)
        self._pool.shutdown(wait=True)
        self._settle_tries()
        self._witnesses.wait(WITNESS_S)
        self._settle_twins()
        self._witnesses.close()
        self._distil()
        self._sample()
        self._save()

    def _settle_tries(self) -> None:
        for key in [key for key, tried in self._tries.items() if tried.done()]:
            self.progress.causes[key].replays = self._tries.pop(key).result()
            self._note("replayed", key=key, replays=self.progress.causes[key].replays)

    def _settle_twins(self) -> None:
        for case in self._witnesses.take():
            self.progress.twins_compared += 1
            if case.again == case.digest:
                continue
            self.progress.twins_differed += 1
            number = self.progress.twins_differed
            path = self.party.flakes / f"{self.party.number:04}-{number}.jsonl"
            self._write(partial(path.write_text, "".join(f"{line}\n" for line in case.lines)))
            self._note(
                "flake", trace=path.name, target=case.target, lane=case.lane, expected=case.digest, got=case.again
            )
            self.told(f"a case did not give the same twice: {path}")

    def _sample(self) -> None:
        total = Statistics()
        for statistics in self.statistics_of_lanes():
            total.add(statistics)
        for place in self.places:
            place.measure()
        classes = {state for _, before, after in total.transitions for state in (before, after)}
        self._note(
            "sample",
            done=total.done,
            cases=total.cases,
            classes=len(classes),
            transitions=len(total.transitions),
            corpus=sum(map(len, self.corpora.values())),
            causes=len(self.progress.causes),
            memory_mib=sum(place.state.memory for place in self.places if place.state is not None) >> 20,
            rates={place.name: round(place.rate) for place in self.places},
        )

    def statistics_of_lanes(self, *, whole: bool = False) -> list[Statistics]:
        """Add up, for each lane of the progress, what ended processes did and those at work have so far.

        Only ``whole`` units are what a party that is killed need not do again.
        """
        totals = []
        for index in range(len(self.progress.lanes)):
            total = Statistics()
            total.add(self._statistics[index])
            for place in self.places:
                if self._lane_of[place.index] == index and place.state is not None:
                    total.add(place.whole if whole else place.state.statistics)
            totals.append(total)
        return totals

    def _save(self) -> None:
        self._keep()
        if self.sync is not None:
            self._write(self.sync)

    def _keep(self) -> None:
        """Write the progress: what is of whole units, and apart from it what is of those at hand."""
        for lane, statistics in zip(self.progress.lanes, self.statistics_of_lanes(whole=True), strict=True):
            lane.statistics = statistics.to_json()
        self.progress.half = dict(sum((place.half for place in self.places), Counter[str]()))
        for place in self.places:
            if place.state is not None:
                _take_parts(self.progress.lanes[self._lane_of[place.index]], place.state)
        self._write(self.party.save)

    def _distil(self) -> None:
        for corpus in self.corpora.values():
            self._write(corpus.save)

    def _note(self, event: str, **facts: Any) -> None:
        self._write(partial(self.party.note, event, **facts))

    def _write(self, write: Callable[[], Any]) -> None:
        """Write something; a disk that is full ends the party, and what is there already stays."""
        try:
            write()
        except OSError as error:
            if self.full is None:
                self.full = f"could not write {error.filename or self.party.folder}: {error.strerror or error}"

    def _disk_is_full(self, said: str) -> None:
        if self.full is None:
            self.full = said
            self._note("disk full", what=said)


def _take_parts(lane: Lane, state: WorkerState) -> None:
    """Take what a worker has seen of what its target can show."""
    lane.capabilities = state.capabilities or lane.capabilities
    lane.hidden = sorted({*lane.hidden, *state.hidden})
    lane.unobserved = [*lane.unobserved, *(one for one in state.unobserved if one not in lane.unobserved)]
