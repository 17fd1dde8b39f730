"""Every state that a tiny cache can reach, breadth first: what random runs hope for, done exhaustively.

A `World` fixes a tiny config and the finite list of operations that are tried in every state, those that
get refused included. States that no later operation can tell apart are merged, so that the search ends:

* Rows and pages by number are left out. SPEC section 6 leaves their choice free; the model takes the
  lowest. Which pages a row names follows from its request's lengths and from laws 1 and 2, and those are
  checked on every transition, also on one into a state that was seen before.
* Generations are left out: they only grow, and no operation reads them.
* The names of the two requests are left out: whatever is tried on one is tried on the other.
* Of a node's stamp, creation tick, hits and priority only what the policy reads is kept, and ticks and
  hits as their rank among the nodes. ``lru`` sees the order of stamps and nothing else; ``slru`` whether
  hits reach 2. For these the merge is exact. For ``lfu`` it is not: hits 1 and 2 rank as 1 and 3 do, yet
  one more hit ties the first pair only. So with ``lfu`` states may be missed; none is invented.

What is carried along but does not tell states apart (generations, the pool's content, what labels
remember) is that of the first path that reached the state.

Not explored: choices other than the lowest, more than two requests, more than one namespace unless the
world's prompts have them.
"""

import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.dispatch import model_arguments
from kvlockstep.fuzz.labels import Memory
from kvlockstep.fuzz.model_runner import ModelRunner
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
from kvlockstep.fuzz.targets.reference import ReferenceTarget, snapshot_of
from kvlockstep.invariants import FULL, Hold, Observation, Snapshot
from kvlockstep.reference.cache import Allocated, Cache
from kvlockstep.reference.refusals import Refused
from kvlockstep.reference.requests import Request
from kvlockstep.reference.tree import Mark

Check = Callable[[Observation], None]
Label = Callable[[Observation, Memory], Sequence[str]]

REQUESTS = ("r0", "r1")


@dataclass(frozen=True, slots=True)
class World:
    """A tiny config, and the tokens from which the operations to try are made."""

    config: CacheConfig
    prompts: tuple[Submit, ...]  # both requests are submitted with each; the name in it does not matter
    sampled: tuple[int, ...] = (0,)
    drafts: tuple[tuple[int, ...], ...] = ()

    def operations(self) -> list[Op]:
        """List what is tried in every state, well-formed or not."""
        longest = self.config.max_context_len
        ops: list[Op] = [Alloc(()), Alloc((AllocItem("r0", 1), AllocItem("r0", 1))), Reset()]
        ops += [Evict(n) for n in (0, 1, self.config.page_size + 1)]
        for name in REQUESTS:
            ops += [Submit(name, p.tokens, p.namespace, p.priority, p.private) for p in self.prompts]
            ops += [Submit(name, ()), Submit(name, (0,) * (longest + 1))]
            ops += [Peek(name), Match(name), Checkpoint(name), Release(name), Abort(name)]
            ops += [Retract(name, False), Retract(name, True)]
            ops += [Commit(name, kept) for kept in range(longest + 2)]
            ops += [Commit(name, kept, (token,)) for kept in range(longest + 1) for token in self.sampled]
            ops += [Commit(name, 1, (0, 0))]
            ops += [Alloc((AllocItem(name, n),)) for n in range(longest + 2)]
            ops += [Alloc((AllocItem(name, n, drafts),)) for drafts in self.drafts for n in range(longest + 2)]
        for one, other in (REQUESTS, REQUESTS[::-1]):
            small = [(n, drafts) for n in (1, 2) for drafts in ((), *self.drafts)]
            ops += [Alloc((AllocItem(one, *first), AllocItem(other, *second))) for first in small for second in small]
        return ops


@dataclass(slots=True)
class Report:
    """What a search covered."""

    states: int = 0
    transitions: int = 0  # operations that were done, each in each state
    refused: Counter[str] = field(default_factory=Counter)
    depth: int = 0  # operations from the empty cache to the last state reached
    labels: Counter[str] = field(default_factory=Counter)
    closed: bool = True  # every reachable state was expanded

    def __str__(self) -> str:
        lines = [
            f"{self.states} states, {self.transitions} transitions, depth {self.depth}, "
            + ("closed" if self.closed else "not closed: stopped at the bound on states"),
            "refused: " + ", ".join(f"{kind} {n}" for kind, n in sorted(self.refused.items())),
        ]
        lines.append("labels: " + ", ".join(f"{label} {n}" for label, n in sorted(self.labels.items())))
        return "\n  ".join(lines)


@dataclass(slots=True)
class Walker:
    """A cache at one state, with what the path to it left behind."""

    target: ReferenceTarget
    runner: ModelRunner
    memory: Memory
    holds: dict[str, Hold] = field(default_factory=dict)

    @classmethod
    def at_start(cls, config: CacheConfig) -> "Walker":
        target = ReferenceTarget(config)
        return cls(target, ModelRunner(target, config.n_slots), Memory(config))

    @property
    def cache(self) -> Cache:
        return self.target.cache

    def asked(self, op: Op, now: Snapshot, refused: str | None) -> Observation:
        """Say what an operation asks for; of a refused one that is all there is to see."""
        cache = self.cache
        seen = Observation(0, kind_of(op), named_requests(op), 0, refused, now, now, written=self.runner.written)
        seen.key_units = self.cache.key_units
        for name in seen.requests:
            if name in cache.requests:
                seen.fingerprints[name] = self.runner.fingerprints(name, cache.requests[name])
        if isinstance(op, Commit):
            seen.n = op.kept
        elif isinstance(op, Alloc) and refused in (None, "OutOfPages"):
            seen.n = cache.pages_needed([(item.request, item.n, item.drafts) for item in op.batch])
        elif isinstance(op, Evict):
            seen.n = op.n
        seen.holds = dict(self.holds)
        return seen

    def step(self, op: Op, before: Snapshot) -> Observation:
        """Run an operation that is not refused; play the forward pass around it."""
        cache, runner = self.cache, self.runner
        seen = self.asked(op, before, None)
        if isinstance(op, Commit):
            runner.land(op.request)
            self.holds.pop(op.request)
        value = getattr(cache, seen.kind)(*model_arguments(op))
        seen.now = snapshot_of(cache)
        if isinstance(op, Alloc):
            assert isinstance(value, Allocated)
            seen.write_sets, seen.evicted = value.write_sets, value.evicted
            self._launch(op, value, seen.now)
        elif isinstance(op, Evict):
            seen.evicted = value
        elif isinstance(op, Peek | Match):
            seen.matched_len = value
        elif isinstance(op, Commit):
            seen.reads = runner.read_rows(dict(cache.requests))
            seen.pool_expected, seen.pool_got = runner.pool_expected, runner.read_pool()
        for name in seen.requests:
            if name not in cache.requests:
                runner.forget(name)
        seen.holds = dict(self.holds)
        return seen

    def _launch(self, op: Alloc, done: Allocated, now: Snapshot) -> None:
        page_generations, row_generations = now.pools[FULL].page_generations, now.row_generations
        assert page_generations is not None, "the model shows generations"
        assert row_generations is not None, "the model shows generations"
        for item, write_set in zip(op.batch, done.write_sets, strict=True):
            r = self.cache.requests[item.request]
            assert r.row is not None, "it is in flight"
            held = {page: page_generations[page] for page in self.cache.rows.pages_of[r.row]}
            self.holds[item.request] = Hold(r.row, row_generations[r.row], held, write_set)
            self.runner.launch(item.request, r, write_set, item.drafts)


def explore(
    world: World, check: Check | None = None, label: Label | None = None, max_states: int | None = None
) -> Report:
    """Try every operation of the world in every state, breadth first.

    ``check`` raises on a broken law; ``label`` names what an operation reached. Each sees every operation
    that was done, and of the refused ones the first of each kind and reason. With ``max_states`` no state
    beyond that many is followed; which ones are is the same in every run.
    """
    ops = world.operations()
    report = Report(states=1)
    start = Walker.at_start(world.config)
    known = {state_key(start.cache)}
    queue = deque([(pickle.dumps(start), 0)])
    told: set[tuple[str, str]] = set()

    def tell(seen: Observation, memory: Memory) -> None:
        if check is not None:
            check(seen)
        if label is not None:
            report.labels.update(label(seen, memory))

    while queue:
        packed, depth = queue.popleft()
        here: Walker = pickle.loads(packed)
        before, key = snapshot_of(here.cache), state_key(here.cache)
        report.depth = depth
        for op in ops:
            kind, arguments = kind_of(op), model_arguments(op)
            refusal = here.cache.refusal(kind, *arguments)
            if refusal is not None:
                _assert_refused(here.cache, kind, arguments, refusal.kind)
                report.refused[refusal.kind] += 1
                if (kind, refusal.kind) not in told:
                    told.add((kind, refusal.kind))
                    tell(here.asked(op, before, refusal.kind), here.memory)
                continue
            walker: Walker = pickle.loads(packed)
            seen = walker.step(op, before)
            report.transitions += 1
            tell(seen, walker.memory)
            after = state_key(walker.cache)
            if after in known:
                continue
            if max_states is not None and len(known) >= max_states:
                report.closed = False
                continue
            known.add(after)
            queue.append((pickle.dumps(walker), depth + 1))
        assert snapshot_of(here.cache) == before, "a refused operation changed something that can be seen"
        assert state_key(here.cache) == key, "a refused operation changed something"
    report.states = len(known)
    return report


def _assert_refused(cache: Cache, kind: str, arguments: Sequence[object], expected: str) -> None:
    """Run an operation that is to be refused: the question and the method give the same answer."""
    try:
        getattr(cache, kind)(*arguments)
    except Refused as refused:
        got = refused.kind
    else:
        got = "done"
    assert got == expected, f"{kind} {arguments}: {got}, expected {expected}"


def state_key(cache: Cache) -> tuple[object, ...]:
    """Return what is the same for two states exactly if they are merged."""
    nodes = cache.tree.nodes()
    marks = [node.end.mark for node in nodes if node.end.mark is not None]
    ranked = _ranks(cache.policy, marks)
    tree = frozenset(
        (tuple((vertex.namespace, vertex.key) for vertex in node.end.path()), rank)
        for node, rank in zip(nodes, ranked, strict=True)
    )
    counts_hits = cache.policy in ("lfu", "slru")
    live = Counter(_request_key(r, counts_hits) for r in cache.requests.values())
    return (frozenset(live.items()), tree)


def _request_key(r: Request, counts_hits: bool) -> tuple[object, ...]:
    return (
        tuple(r.tokens),
        r.namespace,
        r.priority,
        r.private,
        r.state,
        r.protected_len,
        r.committed_len,
        r.allocated_len,
        r.inserted_len if counts_hits else None,  # decides which nodes a later publication counts
        r.in_flight_n,
        tuple(r.drafts),
        r.abort_pending,
    )


def _ranks(policy: str, marks: Sequence[Mark]) -> list[tuple[int, ...]]:
    """Reduce what is remembered of nodes to what the policy can ever see of it."""
    stamps = _rank([mark.stamp for mark in marks])
    match policy:
        case "lru" | "mru":
            return [(stamp,) for stamp in stamps]
        case "fifo" | "filo":
            return [(created,) for created in _rank([mark.created for mark in marks])]
        case "lfu":
            return list(zip(_rank([mark.hits for mark in marks]), stamps, strict=True))
        case "slru":
            return [(min(mark.hits, 2), stamp) for mark, stamp in zip(marks, stamps, strict=True)]
        case "priority":
            return [(mark.priority, stamp) for mark, stamp in zip(marks, stamps, strict=True)]
    raise AssertionError(f"unknown policy {policy}")


def _rank(values: Sequence[int]) -> list[int]:
    order = {value: rank for rank, value in enumerate(sorted(set(values)))}
    return [order[value] for value in values]
