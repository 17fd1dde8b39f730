"""The test items of the pytest plugin: stored traces, the canary, fresh cases, and what the target shows.

Each item draws from a seed of its own, which depends on the seed base and the item alone. So whichever process of
pytest-xdist runs it, and in whatever order, it runs the same cases, and no two items are told to run the same.
What an item did travels on its report; the process that prints the summary adds it up.

Wrong usage is settled while pytest is configured, in the process that the user started: there it is one line.
"""

import base64
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
from rich.console import Console

from kvlockstep.fuzz.campaign.seeds import Shard, seed_of
from kvlockstep.fuzz.canary import Canary, RepeatsWriteSlot, look_for_canary
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.crew import WorkerState
from kvlockstep.fuzz.environments import python_for
from kvlockstep.fuzz.failures import current_path, replay_line
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.registry import (
    BUILT_IN,
    LANED,
    Factory,
    TargetUnusable,
    check_lane,
    choose_lane,
    factory_for,
    targets_named,
)
from kvlockstep.fuzz.replay import run_ops, what_it_lacks
from kvlockstep.fuzz.report import print_failure, unobserved_lines
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.targets.base import Target, options_of, page_sizes_of
from kvlockstep.fuzz.trace import Header, TraceError, encode_op, read_trace
from kvlockstep.fuzz.verdict import remarks, replays, unseen_laws
from kvlockstep.fuzz.worker import CaseStopped, Order, Worker

NODE = "kvlockstep"
"""The node that all items hang on; their names follow it, as in ``kvlockstep::canary``."""

CASES, CANARY, SHOWN = 0, 1, 2
"""What is drawn for the items of fresh cases and for the two others, so that no two draw the same."""

CASES_SHOWN = 20
"""Cases after which it is known what a target shows."""

HASH_BYTES = 8

PROPERTY = "kvlockstep"
"""The name under which a report carries what its item did."""

GIT_S = 10.0


class ItemFailed(Exception):
    """An item failed; the text is all there is to say of it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the options ask for, checked."""

    target: str
    lane: str | None  # that was asked for
    fault: str | None
    seed: str
    n_cases: int
    n_shards: int
    traces: tuple[Path, ...]
    out: Path
    minimize_seconds: float
    accepted: frozenset[int]

    def order(self, name: str, seed: int) -> Order:
        """Tell a worker to run from this seed, for as long as it takes."""
        return Order(
            self.target,
            self.lane,
            math.inf,
            seed,
            str(self.out),
            name,
            self.fault,
            self.minimize_seconds,
            canary=False,  # has an item of its own
        )


class CountedCases(Worker):
    """A worker that ends after a number of cases instead of seconds, and tells its traces apart by stable hashes."""

    def __init__(self, order: Order, factory: Factory, n_cases: int) -> None:
        self.reports: dict[str, dict[str, Any]] = {}
        super().__init__(order, factory, self._note)
        self.n_cases = n_cases
        self.hashes: set[bytes] = set()

    def _note(self, event: str, **facts: Any) -> None:
        self.reports[event] = facts

    def start(self, config: CacheConfig) -> Lockstep:
        self._hash_trace()
        if self.statistics.cases == self.n_cases:
            self._spent = True
            raise CaseStopped
        return super().start(config)

    def fuzz(self) -> None:
        """Run the cases, or as many as come before a violation. Raises what the target's factory raises."""
        try:
            super().fuzz()
        finally:
            self.log.close()
        self._hash_trace()
        current_path(Path(self.order.out), self.order.name).unlink(missing_ok=True)  # nobody died on it

    def _hash_trace(self) -> None:
        if self.ops:
            lines = [json.dumps(self.header.config.to_json(), sort_keys=True), *map(encode_op, self.ops)]
            self.hashes.add(blake2b("\n".join(lines).encode(), digest_size=HASH_BYTES).digest())

    def done(self) -> dict[str, Any]:
        """Return what a summary needs, as JSON."""
        statistics = self.statistics.to_json() | {"transitions": []}
        hashes = base64.b64encode(b"".join(sorted(self.hashes))).decode()
        return self.facts() | {"statistics": statistics, "hashes": hashes}


@dataclass(slots=True)
class Total:
    """What all items did, as far as their reports came in."""

    state: WorkerState
    hashes: set[bytes] = field(default_factory=set)
    items: int = 0  # that ran cases
    canary: Canary | None = None
    replayed: int = 0
    not_taken: int = 0

    def add(self, nodeid: str, outcome: str, done: dict[str, Any] | None) -> None:
        if nodeid.startswith(f"{NODE}::regression["):
            self.replayed += outcome != "skipped"
            self.not_taken += outcome == "skipped"
        if done is None:
            return
        if "canary" in done:
            self.canary = Canary(**done["canary"])
            return
        self.items += 1
        packed = base64.b64decode(done["hashes"])
        self.hashes.update(packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES))
        self.state.statistics.add(Statistics.from_json(done["statistics"]))
        self.state.unobserved += [(law, check, needs) for law, check, needs in done["unobserved"]]
        self.state.hidden = sorted({*self.state.hidden, *done["hidden"]})


class Item(pytest.Item):
    """An item of this plugin: a function that fails with a text of its own."""

    def __init__(self, *, function: Callable[["Item"], object], **others: Any) -> None:
        super().__init__(**others)
        self.function = function

    def runtest(self) -> None:
        self.function(self)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, ItemFailed | TargetUnusable):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        return NODE, None, self.name

    def tell(self, done: dict[str, Any]) -> None:
        """Let the report of this item carry what it did."""
        self.user_properties.append((PROPERTY, json.dumps(done)))


class Node(pytest.Collector):
    """What all items hang on; no file, so that none is needed."""

    def __init__(self, *, functions: dict[str, Callable[[Item], object]], **others: Any) -> None:
        super().__init__(**others)
        self.functions = functions

    def collect(self) -> list[Item]:
        return [Item.from_parent(self, name=name, function=function) for name, function in self.functions.items()]


class Gate:
    """The hooks of a run that has a target. Raises pytest.UsageError for options that cannot be followed."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.asked, self.factory, self.probe = _prepared(config)
        self.lane = getattr(self.probe, "lane", None)
        order = self.asked.order("pytest", 0)
        self.total = Total(WorkerState(order, self.lane, sorted(self.probe.capabilities)))
        self.functions = self._functions()
        self.wanted = _taken_from(config, self.functions)

    def _functions(self) -> dict[str, Callable[[Item], object]]:
        """Name all items, with what each does, in the order in which they run."""
        asked = self.asked
        functions: dict[str, Callable[[Item], object]] = {
            f"regression[{path.name}]": partial(self.replay, path=path) for path in asked.traces
        }
        functions["canary"] = self.find_canary
        functions["shown"] = self.see_what_is_shown
        for index in range(1, asked.n_shards + 1):
            shard = Shard(index, asked.n_shards)
            functions[f"cases[{shard}]"] = partial(
                self.run_cases,
                name=f"pytest-cases-{index}",
                seed=seed_of(asked.seed, index, CASES, 0),
                n_cases=asked.n_cases // asked.n_shards + (index <= asked.n_cases % asked.n_shards),
            )
        return functions

    # the items

    def replay(self, item: Item, path: Path) -> None:
        """Run a stored trace on the target, which must hold where somebody's cache once did not."""
        trace = read_trace(path)
        header, config = trace.header, trace.header.config
        if lacks := what_it_lacks(self.factory, config, trace.ops):
            pytest.skip(f"needs {', '.join(lacks)}, which {self.asked.target} does not promise")
        run = run_ops(config, trace.ops, self.factory)
        if run.violation is not None:
            raise ItemFailed(f"{run.violation}\n  replay    {line_that_replays(path, header, self.asked, self.lane)}")
        if run.statistics.done == 0:
            pytest.skip(f"none of {len(trace.ops)} operations was done, so nothing was shown")

    def find_canary(self, item: Item) -> None:
        """Make a mistake on purpose, which must be noticed, or nothing would be."""

        def start(config: CacheConfig) -> Lockstep:
            return Lockstep(config, cast(Target, RepeatsWriteSlot(self.factory(config))))

        promised = self.probe.capabilities, page_sizes_of(self.probe), options_of(self.probe)
        canary = look_for_canary(promised, start, seed_of(self.asked.seed, 1, CANARY, 0))
        item.tell({"canary": {"law": canary.law, "operations": canary.operations, "seconds": canary.seconds}})
        if not canary.caught:
            raise ItemFailed(
                "the canary, a batch that ends in the slot it begins with, was not found: "
                f"{canary.operations} operations, {canary.law or 'no violation'}"
            )

    def see_what_is_shown(self, item: Item) -> None:
        """Run a few cases, and fail if a law of the charter cannot be observed on the target."""
        seed = seed_of(self.asked.seed, 1, SHOWN, 0)
        worker = self.run_cases(item, "pytest-shown", seed, min(CASES_SHOWN, self.asked.n_cases))
        unobserved = worker.facts()["unobserved"]
        if unseen := self._unaccepted(WorkerState(worker.order, unobserved=unobserved)):
            those = WorkerState(worker.order, unobserved=[one for one in unobserved if one[0] in unseen])
            raise ItemFailed("\n".join([*map(_not_observed, unseen), *_indented(unobserved_lines([those]))]))

    def run_cases(self, item: Item, name: str, seed: int, n_cases: int) -> CountedCases:
        """Run fresh cases; raise ItemFailed for the first violation, stored and minimized."""
        try:
            self.asked.out.mkdir(parents=True, exist_ok=True)
            worker = CountedCases(self.asked.order(name, seed), self.factory, n_cases)
            with _ended_by_interrupt(worker) as interrupts:
                worker.fuzz()
        except OSError as error:
            where = error.filename or self.asked.out
            raise ItemFailed(f"could not write {where}: {error.strerror or error}") from error
        item.tell(worker.done())
        if failure := worker.reports.get("failure"):
            if interrupts:
                item.session.shouldstop = "interrupted"
            raise ItemFailed(self._text_of(worker, failure, replayable=not interrupts))
        if interrupts:
            raise KeyboardInterrupt
        return worker

    def _text_of(self, worker: CountedCases, failure: dict[str, Any], *, replayable: bool) -> str:
        path = Path(failure["folder"]) / "trace.jsonl"
        text = StringIO()
        print_failure(Console(file=text, color_system=None), WorkerState(worker.order, failure=failure))
        lines = text.getvalue().splitlines()
        if replayable and not replays(str(path), self.asked.target):
            lines.append("  warning   did not replay in a fresh process")
        return "\n".join([*lines, f"  replay    {replay_line(path, self.asked.target)}"])

    def _unaccepted(self, state: WorkerState) -> list[int]:
        return [law for law in unseen_laws([state]) if law not in self.asked.accepted]

    # the hooks

    def pytest_report_header(self) -> str:
        asked = self.asked
        lane = f" on lane {self.lane}" if self.lane else ""
        traces = f"{len(asked.traces)} traces, " if asked.traces else ""
        cases = f"{asked.n_cases} cases in {asked.n_shards} items"
        return f"kvlockstep: target {asked.target}{lane}, {traces}{cases}, seed base {asked.seed}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give every process of pytest-xdist the same seed base."""
        node.workerinput["kvlockstep_seed"] = self.asked.seed

    @pytest.hookimpl(tryfirst=True)  # before -k and -m choose among them
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        wanted = {name: self.functions[name] for name in self.functions if not self.wanted or name in self.wanted}
        items += session.genitems(Node.from_parent(session, name=NODE, nodeid=NODE, functions=wanted))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.nodeid.startswith(f"{NODE}::"):
            done = [json.loads(str(text)) for name, text in report.user_properties if name == PROPERTY]
            self.total.add(report.nodeid, report.outcome, done[0] if done else None)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Let no run pass that did not show what it must, also if the item that says so was not asked for."""
        if session.exitstatus == pytest.ExitCode.OK and self._unaccepted(self.total.state):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total, counts, canary = self.total, self.total.state.statistics, self.total.canary
        if not (total.items or canary or total.replayed or total.not_taken):
            return
        terminalreporter.section("kvlockstep")
        for line in [
            f"target {self.asked.target}, lane {self.lane or '-'}, seed base {self.asked.seed}",
            f"fresh cases {counts.cases:,}, distinct traces {len(total.hashes):,}, items {total.items}, "
            f"operations done {counts.done:,}, refused {counts.refused:,}",
            *([f"canary found after {canary.operations} operations"] if canary and canary.caught else []),
            *([f"traces replayed {total.replayed}, skipped {total.not_taken}"] if self.asked.traces else []),
        ]:
            terminalreporter.write_line(line)
        if total.items:
            for line in unobserved_lines([total.state]) + remarks([total.state]):
                terminalreporter.write_line(line)
        for law in unseen_laws([total.state]):
            accepted = law in self.asked.accepted
            line = f"law {law} was not observed, accepted" if accepted else _not_observed(law)
            terminalreporter.write_line(line, red=not accepted)


def line_that_replays(path: Path, header: Header, asked: Asked, lane: str | None) -> str:
    """Return the line that replays a trace as this run did, whatever target, lane and fault it was found with."""
    same = asked.target == header.target
    options = []
    if asked.target in BUILT_IN and not same:  # another one is named in any case
        options.append(f"--target {asked.target}")
    if asked.target in LANED and lane != (header.lane if same else None):
        options.append(f"--lane {lane}")
    if asked.fault != (header.fault if same else None):
        options.append(f"--fault {asked.fault or 'none'}")
    command, _, others = replay_line(path, asked.target).partition(" replay ")
    return " ".join([f"{command} replay", *options, others])


def _not_observed(law: int) -> str:
    return f"law {law} was not observed on this target: --kvlockstep-accept-unobserved {law} lets it pass all the same"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


@contextmanager
def _ended_by_interrupt(worker: Worker) -> Iterator[list[int]]:
    """Let Ctrl-C end a worker after its operation, with what it found stored; give the list that then is not empty.

    The second Ctrl-C is what it was: whoever waits for an operation that hangs is let go.
    """
    interrupts: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield interrupts
        return

    def end(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, before)
        worker.interrupt()

    signal.signal(signal.SIGINT, end)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


# what the options ask for


def _prepared(config: pytest.Config) -> tuple[Asked, Factory, Target]:
    """Check all that was asked for, and build a first target. Raises pytest.UsageError."""
    name, lane, fault = (_text(config, option) for option in ("target", "lane", "fault"))
    assert name is not None, "without a target there is nothing to prepare"
    try:
        names = targets_named(name)
        if len(names) > 1:
            raise TargetUnusable(f"--kvlockstep-target {name}: expected one target, got {len(names)}")
        if (python := python_for(name)) != sys.executable:
            remedy = f"run {shlex.quote(python)} -m pytest"
            raise TargetUnusable(f"target {name!r} needs the Python of another environment: {remedy}")
        if lane is not None:
            check_lane(name, lane)
        choose_lane(lane)
        factory = factory_for(name, fault)
        probe = factory(CacheConfig())
    except TargetUnusable as error:
        raise pytest.UsageError(f"kvlockstep: {error}") from error
    except SystemExit as left:
        raise pytest.UsageError(f"kvlockstep: target {name!r} left with status {left.code!r}") from left
    here = config.invocation_params.dir
    out = _text(config, "out")
    folder = config.rootpath / "out" if out is None else here / out
    if folder.exists() and not folder.is_dir():
        raise pytest.UsageError(f"kvlockstep: --kvlockstep-out {folder}: is no folder")
    n_cases = config.getoption("kvlockstep_cases")
    asked = Asked(
        target=name,
        lane=lane,
        fault=fault,
        seed=_seed_base(config),
        n_cases=n_cases,
        n_shards=min(config.getoption("kvlockstep_shards"), n_cases),
        traces=_traces_in(here, _text(config, "regressions")),
        out=folder,
        minimize_seconds=config.getoption("kvlockstep_minimize"),
        accepted=frozenset(config.getoption("kvlockstep_accept_unobserved")),
    )
    return asked, factory, probe


def _text(config: pytest.Config, name: str) -> str | None:
    return cast(str | None, config.getoption(f"kvlockstep_{name}"))


def _seed_base(config: pytest.Config) -> str:
    """Return the text that all cases are drawn from: the one given, else the commit, else 0."""
    if (told := getattr(config, "workerinput", {}).get("kvlockstep_seed")) is not None:
        return cast(str, told)
    if (given := _text(config, "seed")) is not None:
        return given
    command = ["git", "-C", str(config.rootpath), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return "0"
    return done.stdout.strip() or "0"


def _traces_in(here: Path, folder: str | None) -> tuple[Path, ...]:
    """List the traces of a folder, each read once. Raises pytest.UsageError."""
    if folder is None:
        return ()
    option = f"kvlockstep: --kvlockstep-regressions {folder}"
    if not (here / folder).is_dir():
        raise pytest.UsageError(f"{option}: no such folder")
    paths = sorted(path for path in (here / folder).iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
    if not paths:
        raise pytest.UsageError(f"{option}: has no *.jsonl and no *.jsonl.gz")
    for path in paths:
        try:
            read_trace(path)
        except TraceError as error:
            raise pytest.UsageError(f"kvlockstep: {error}") from error
        except OSError as error:
            raise pytest.UsageError(f"kvlockstep: {path}: {error.strerror or error}") from error
    return tuple(paths)


def _taken_from(config: pytest.Config, names: dict[str, Any]) -> set[str]:
    """Take the items that the command line names out of its arguments, for they lie in no file; return their names."""
    wanted: set[str] = set()
    others = []
    for argument in config.args:
        place, separator, name = argument.partition("::")
        ours = Path(os.path.normpath(config.invocation_params.dir / place)) == config.rootpath / NODE
        if not (separator and ours):
            others.append(argument)
        elif name not in names:
            raise pytest.UsageError(f"kvlockstep: no item {name!r}, expected one of {', '.join(names)}")
        else:
            wanted.add(name)
    config.args[:] = others
    return wanted
