"""Every state that a small cache of `gpu_impl` reaches in lockstep with the model, breadth first.

``python -m kvlockstep.fuzz.exhaustive --page-size 1 --pages 3`` searches one scope and prints what it covered. A
`Scope` says which operations there are. In every state each operation that the model does not refuse is run, and of
those that it refuses the first for each reason and the requests it names. Every run is one step of `Lockstep`: all
laws, then the comparison with the model, the KV read back where a pass landed. A violation ends the search, and the
path to it is a trace; as the search goes by length, none is shorter.

A state is not reached again from the start, but copied (``copies.py``). States are merged where `key_of` is the same;
its docstring says what it leaves out. The rest of what is carried along is that of the first path.

`reachable.py` is the same on the model alone, with more switches.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import permutations, product
from pathlib import Path
from types import ModuleType

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.copies import Bench, Key, Saved, key_of
from kvlockstep.fuzz.describe import as_sentence, describe_config, signature_of
from kvlockstep.fuzz.dispatch import model_arguments
from kvlockstep.fuzz.exits import BROKEN, USAGE, VIOLATION, Seconds, Stop, make_console, run_and_exit, writing
from kvlockstep.fuzz.failures import TRACE, replay_line, store_failure
from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults.fault import SourceFault
from kvlockstep.fuzz.faults.patching import patched_package
from kvlockstep.fuzz.labels import LABELS, name_of, reached
from kvlockstep.fuzz.ops import (
    Abort,
    Alloc,
    AllocItem,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Op,
    Peek,
    Release,
    Reset,
    Retract,
    Submit,
    kind_of,
    named_requests,
)
from kvlockstep.fuzz.trace import Header, Trace
from kvlockstep.invariants import Violation
from kvlockstep.reference.cache import Cache

NEED_ROOM = ("OutOfRows", "OutOfPages")
"""Refusals of a batch, and of none of its items."""

SAMPLED = ("none", "last", "any")
"""What may be sampled at the end of a pass."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A small cache, and the operations that there are on it.

    Prompts have one of ``lengths`` and the same token all over a page. What may be sampled, beside nothing, is the last
    known token again or any (SAMPLED); guessed is one token at most, another one than the last. So renaming tokens or
    requests everywhere turns operations into operations, but for a few that are refused whatever they name.
    """

    config: CacheConfig
    lengths: tuple[int, ...]
    n_requests: int = 2
    n_tokens: int = 2
    drafts: bool = True
    sampled: str = "none"

    def __post_init__(self) -> None:
        assert (self.config.policy, self.config.key_units) == ("lru", "token"), "states are merged as these two allow"

    @property
    def requests(self) -> tuple[str, ...]:
        return tuple(f"r{i}" for i in range(self.n_requests))

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(range(1, self.n_tokens + 1))

    def prompts(self) -> list[tuple[int, ...]]:
        size = self.config.page_size
        return [
            tuple(words[pos // size] for pos in range(length))
            for length in self.lengths
            for words in product(self.tokens, repeat=-(-length // size))
        ]

    def operations(self, model: Cache) -> list[Op]:
        """List the operations of the scope that are to be tried in this state, well-formed or not."""
        longest = self.config.max_context_len
        ops: list[Op] = [Evict(0), Evict(1), Evict(self.config.n_slots), Reset()]
        for name in self.requests:
            ops += [Submit(name, prompt) for prompt in self.prompts()]
            ops += [Submit(name, ()), Submit(name, (1,) * (longest + 1))]
            ops += [Peek(name), Match(name), Checkpoint(name), Release(name), Abort(name)]
            ops += [Retract(name, False), Retract(name, True)]
            ops += [Commit(name, kept) for kept in range(longest + 2)]
            ops += [Commit(name, kept, (token,)) for kept in range(longest + 1) for token in self._sampled(model, name)]
            ops += [Commit(name, 1, (1, 1))]
        items = {name: self._items(model, name) for name in self.requests}
        ops += [Alloc(()), *(Alloc((item,)) for name in self.requests for item in items[name])]
        alone = {name: [item for item in items[name] if _fits_alone(model, item)] for name in self.requests}
        for one, other in permutations(self.requests, 2):
            ops += [Alloc(batch) for batch in product(alone[one], alone[other])]
        ops += [Alloc((item, item)) for name in self.requests for item in items[name][:1]]
        return ops

    def _sampled(self, model: Cache, name: str) -> tuple[int, ...]:
        r = model.requests.get(name)
        if self.sampled == "any":
            return self.tokens
        return () if r is None or self.sampled == "none" else (r.tokens[-1],)

    def _items(self, model: Cache, name: str) -> list[AllocItem]:
        longest = self.config.max_context_len
        items = [AllocItem(name, n) for n in range(longest + 2)]
        r = model.requests.get(name)
        if self.drafts and r is not None:
            others = [token for token in self.tokens if token != r.tokens[-1]]
            items += [AllocItem(name, n, (token,)) for n in range(1, longest + 2) for token in others]
        return items

    def __str__(self) -> str:
        lengths = " or ".join(map(str, self.lengths))
        guessed = "one draft at most" if self.drafts else "no drafts"
        sampled = {"none": "none sampled", "last": "the last one sampled again", "any": "any sampled"}[self.sampled]
        return (
            f"{describe_config(self.config)}; {self.n_requests} requests, {self.n_tokens} tokens, "
            f"prompts of {lengths}, {guessed}, {sampled}"
        )


def _fits_alone(model: Cache, item: AllocItem) -> bool:
    refused = model.refusal("alloc", *model_arguments(Alloc((item,))))
    return refused is None or refused.kind in NEED_ROOM


# The search

SAY_EVERY = 15.0  # seconds
INFINITE = 1 << 62
MOST_PROMPTS = 1024


@dataclass(slots=True)
class Found:
    """A violation, and the operations that lead to it from the empty cache."""

    violation: Violation
    ops: list[Op]

    @property
    def signature(self) -> str:
        return signature_of(self.violation, kind_of(self.ops[-1]))


@dataclass(slots=True)
class Report:
    """What a search covered."""

    scope: Scope
    states: int = 1
    transitions: int = 0  # operations that were done, each in each state
    refused: Counter[str] = field(default_factory=Counter)
    depth: int = 0  # every sequence of as many operations was tried; where closed, the most that a state needs
    closed: bool = False  # every reachable state was expanded
    seconds: float = 0.0
    labels: Counter[str] = field(default_factory=Counter)
    found: Found | None = None
    parents: list[tuple[int, Op | None]] = field(default_factory=lambda: [(-1, None)])
    digests: list[bytes] = field(default_factory=list)  # of the keys of the states

    def path_to(self, state: int) -> list[Op]:
        """List the operations by which a state was reached first. States are numbered as they were found, from 0 on."""
        ops = []
        state, op = self.parents[state]
        while op is not None:
            ops.append(op)
            state, op = self.parents[state]
        return ops[::-1]

    def how_far(self) -> str:
        if self.found is not None:
            return "violated"
        return "all reachable states" if self.closed else f"to depth {self.depth}, not closed"

    def never_reached(self) -> list[str]:
        return [name for name in map(name_of, LABELS) if name not in self.labels]


def explore(
    scope: Scope,
    package: ModuleType | None = None,
    *,
    seconds: float | None = None,
    max_states: int | None = None,
    say: Callable[[Report], None] | None = None,
) -> Report:
    """Run every operation of the scope in every state that it reaches, until none is new or the bounds are met.

    ``package`` is another copy of `gpu_impl`, for one with a fault in it. With ``max_states`` no state is expanded
    once as many are known: what is covered then is the same in every run; with ``seconds`` it is not. ``say`` is told
    every few seconds. Ends at the first violation.
    """
    started = time.monotonic()
    next_word = started + SAY_EVERY
    report = Report(scope)
    bench = Bench(scope.config, package)
    report.digests.append(digest_of(key_of(bench, scope.tokens)))
    known = set(report.digests)
    queue = deque([(0, 0, bench.save())])
    while queue:
        here, report.depth, saved = queue.popleft()
        for op, key in _step(bench, scope, report, here, saved):
            digest = digest_of(key)
            if digest not in known:
                known.add(digest)
                queue.append((report.states, report.depth + 1, bench.save()))
                report.parents.append((here, op))
                report.digests.append(digest)
                report.states += 1
        now = time.monotonic()
        report.seconds = now - started
        if report.found is not None:
            return report
        if say is not None and now >= next_word:
            next_word = now + SAY_EVERY
            say(report)
        if queue and ((seconds is not None and now - started > seconds) or report.states >= (max_states or INFINITE)):
            report.depth = queue[0][1]
            return report
    report.closed = True
    return report


def _step(bench: Bench, scope: Scope, report: Report, here: int, saved: Saved) -> Iterator[tuple[Op, Key]]:
    """Run each operation in a saved state; stand in the state behind each that changed it, and give that one's key.

    Stops at a violation.
    """
    bench.restore(saved)
    seen = bench.look()
    told: set[tuple[str, str, tuple[str, ...]]] = set()
    tried = []
    for op in scope.operations(bench.lockstep.model):
        kind = kind_of(op)
        refused = bench.lockstep.model.refusal(kind, *model_arguments(op))
        if refused is None:
            tried.append(op)
            continue
        why = (kind, refused.kind, tuple(named_requests(op)))
        if why not in told:
            told.add(why)
            tried.append(op)
    key, as_saved, step = key_of(bench, scope.tokens), True, bench.lockstep.step
    for op in tried:
        if not as_saved:
            bench.restore(saved, seen)
        bench.lockstep.step = step
        try:
            outcome = bench.lockstep.run(op)
        except Violation as violation:
            report.found = Found(violation, [*report.path_to(here), op])
            return
        if outcome.refused is None:
            report.transitions += 1
        else:
            report.refused[outcome.refused] += 1
        observation = bench.lockstep.seen
        assert observation is not None, "an operation was run"
        report.labels.update(reached(observation, bench.memory))
        after = key_of(bench, scope.tokens)
        as_saved = outcome.refused is not None and after == key and bench.holds_tensors_of(saved)
        if not as_saved:
            yield op, after


def digest_of(key: Key) -> bytes:
    """Stand for a key in the set of known ones; two keys share one by chance of 2^-128."""
    return blake2b(repr(key).encode(), digest_size=16).digest()


# As a command


def print_report(console: Console, report: Report) -> None:
    """Print what was covered as a table, and which labels were reached."""
    table = Table(title=str(report.scope), title_justify="left", box=SIMPLE_HEAD)
    for name in ("scope", "states", "transitions", "refused", "depth", "closed", "seconds"):
        table.add_column(name, justify="left" if name == "scope" else "right")
    config = report.scope.config
    table.add_row(
        f"P={config.page_size}, {config.n_pages} pages",
        f"{report.states:,}",
        f"{report.transitions:,}",
        f"{report.refused.total():,}",
        str(report.depth),
        "yes" if report.closed else "no",
        f"{report.seconds:.0f}",
    )
    console.print(table)
    counted = [f"{name} {n:,}" for name, n in sorted(report.labels.items())]
    refused = [f"{name} {n:,}" for name, n in sorted(report.refused.items())]
    for what, names in (("reached", counted), ("never reached", report.never_reached()), ("refused", refused)):
        console.print(f"{what}: {', '.join(names) or 'nothing'}", soft_wrap=True)


def failure_of(config: CacheConfig, ops: Sequence[Op], package: ModuleType | None = None) -> tuple[str | None, int]:
    """Run operations from the empty cache, with nothing copied; give the signature of what fails and how many ran."""
    bench = Bench(config, package)
    for step, op in enumerate(ops):
        try:
            bench.lockstep.run(op)
        except Violation as violation:
            return signature_of(violation, kind_of(op)), step + 1
    return None, len(ops)


def _store(report: Report, found: Found, fault: str | None, package: ModuleType | None, out: Path) -> Path:
    config = report.scope.config
    text = f"{found.violation}\n  found     among {report.states:,} states, by {len(found.ops)} operations"
    header = Header(
        config,
        why=as_sentence(f"Found in the search over all states: {found.violation.headline}"),
        violates=type(found.violation).__name__,
        signature=found.signature,
        lane=Bench(config, package).target.lane,
        fault=fault,
    )
    trace = Trace(header, found.ops)

    def still_fails(stored: Trace) -> bool:
        return failure_of(stored.header.config, stored.ops, package) == (found.signature, len(stored.ops))

    with writing(str(out)):
        return store_failure(out, trace, trace, text, still_fails) / TRACE


def _with_fault(name: str) -> ModuleType:
    planted = FAULTS.get(name)
    if not isinstance(planted, SourceFault):
        raise Stop(f"--fault {name}: none of gpu_impl; kvlockstep faults lists them", USAGE)
    if planted.lane != "torch":
        raise Stop(f"--fault {name}: shows on lane {planted.lane}, and this search runs on torch", USAGE)
    return patched_package(planted)


EXIT_CODES = (
    "Exit codes: 0 no violation, closed or not; 1 a violation; 2 wrong usage; 12 the harness failed or could not "
    "write, or what it found does not come from the empty cache; 130 interrupted."
)


@click.command(epilog=EXIT_CODES)
@click.option("--page-size", default=1, show_default=True, type=click.IntRange(1, 16), help="Tokens a page.")
@click.option("--pages", default=3, show_default=True, type=click.IntRange(1, 64), help="Pages of the pool.")
@click.option("--rows", default=2, show_default=True, type=click.IntRange(1, 8))
@click.option("--requests", default=2, show_default=True, type=click.IntRange(1, 4))
@click.option("--tokens", default=2, show_default=True, type=click.IntRange(1, 4), help="Different ones.")
@click.option(
    "--length",
    "lengths",
    multiple=True,
    type=click.IntRange(1, 64),
    help="Of a prompt; may be repeated; by default two pages, and one token less.",
)
@click.option("--context", default=None, type=click.IntRange(1, 64), help="Positions of a row; by default two pages.")
@click.option("--drafts/--no-drafts", default=True, show_default=True)
@click.option("--sampled", default="none", show_default=True, type=click.Choice(SAMPLED))
@click.option("--seconds", default=900.0, show_default=True, type=Seconds(), help="At most.")
@click.option("--max-states", default=None, type=click.IntRange(1), help="Expand none once as many are known.")
@click.option("--fault", default=None, help="Plant this fault of gpu_impl.")
@click.option(
    "--out",
    default="out",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for a failure.",
)
def search(
    page_size: int,
    pages: int,
    rows: int,
    requests: int,
    tokens: int,
    lengths: tuple[int, ...],
    context: int | None,
    drafts: bool,
    sampled: str,
    seconds: float,
    max_states: int | None,
    fault: str | None,
    out: Path,
) -> None:
    """Search all states that a small cache of gpu_impl reaches in lockstep with the model.

    Ends when no state is new, or when the time is over; then it says to which depth each sequence of operations was
    tried. A violation is stored as a trace that kvlockstep replay runs.
    """
    config = CacheConfig(page_size, pages, rows, context or 2 * page_size)
    lengths = lengths or (2 * page_size - 1, 2 * page_size)
    if max(lengths) > config.max_context_len:
        raise Stop(f"--length {max(lengths)}: a row has {config.max_context_len} positions, see --context", USAGE)
    n_prompts = sum(tokens ** -(-length // page_size) for length in lengths)
    if n_prompts > MOST_PROMPTS:
        raise Stop(f"--length, --tokens: {n_prompts:,} prompts, at most {MOST_PROMPTS:,}: ask for less", USAGE)
    package = None if fault is None else _with_fault(fault)
    scope = Scope(config, lengths, requests, tokens, drafts, sampled)
    console = make_console()

    last: list[Report] = []

    def say(report: Report) -> None:
        last[:] = [report]
        so_far = f"{report.states:,} states, {report.transitions:,} transitions, at depth {report.depth}"
        console.print(f"{report.seconds:4.0f}/{seconds:g} s  {so_far}", soft_wrap=True)

    try:
        report = explore(scope, package, seconds=seconds, max_states=max_states, say=say)
    except KeyboardInterrupt:
        for report in last:
            print_report(console, report)
        raise
    print_report(console, report)
    found = report.found
    if found is None:
        console.print(f"no law was broken: {report.how_far()}", soft_wrap=True)
        return
    if failure_of(config, found.ops, package) != (found.signature, len(found.ops)):
        raise Stop(f"{found.signature} came from a copied state, and not from the empty cache", BROKEN)
    console.print(str(found.violation), soft_wrap=True)
    path = _store(report, found, fault, package, out)
    console.print(f"  replay    {replay_line(path, 'gpu_impl')}", soft_wrap=True)
    raise SystemExit(VIOLATION)


if __name__ == "__main__":
    run_and_exit(search, "python -m kvlockstep.fuzz.exhaustive")
