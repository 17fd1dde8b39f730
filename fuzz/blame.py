"""Whose fault it was: the lives of the things that a violation names, and the operation that did the damage.

The cause is looked for twice. First in what the target shows: the first operation after which it is not as the model,
even if no law noticed. A lockstep compares the two after each operation, so this finds something before the violation
only where laws were left out. Then, where nothing was to be seen, by leaving out operations: if without some of them
all others do what they did, the model comes to the same state, and the operation that broke the law breaks none, then
what they did to the target was hidden, and it was damage. Say a peek makes a cache remember a node by its number, and
four operations later another node has that number: without the peek all looks the same before the last operation,
which then holds.

Not told here: where in the source of the target the mistake is; and damage that no shorter trace is free of.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import describe_op
from kvlockstep.fuzz.dispatch import model_arguments
from kvlockstep.fuzz.lenient import tell_without
from kvlockstep.fuzz.lives import Lives, Look, Thing
from kvlockstep.fuzz.ops import Alloc, Evict, Op, Submit, kind_of, named_requests
from kvlockstep.fuzz.registry import Factory
from kvlockstep.fuzz.targets.base import allowances_of
from kvlockstep.fuzz.targets.reference import new_cache, snapshot_of
from kvlockstep.invariants import FULL, Divergence
from kvlockstep.invariants.agreement import compare
from kvlockstep.invariants.owners import plural

MOST_THINGS = 4
"""Of those that a violation names, so many lives are told unasked."""

MOST_SETS = 1_000
"""Sets of operations that are left out, to see whether they did the damage."""

MOST_WORK = 200_000
"""Operations that are run on the model to that end; a long trace is tried with fewer sets."""

_NAMED = re.compile(r"\b(page|slot|row|request|node)(s?) (?:whose edge starts at )?(-?\d+(?: \d+)*|\S+)")
_BARE_SLOTS = re.compile(r"\[(\d+)[^\]]*\]|first slot: (\d+)")
_OWN_FACTS = ("step", "config", "reference", "raised at")


class NothingThere(Exception):
    """What was asked for never was; the text is one line that says what there is."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The operation that did the damage, and how that is known."""

    index: int
    text: str
    hidden: bool = False  # nothing that the target shows differed then


def thing_named(lives: Lives, kind: str, asked: int | str) -> Thing:
    """Find what was asked for by its number or name. Raises NothingThere."""
    first = lives.story.first
    if kind == "node":
        thing = lives.node_of_id(int(asked))
        if thing is None:
            if first.nodes is None:
                return Thing("node", asked)  # whose life says that it is not shown
            raise NothingThere(f"node {asked}: never seen, there were {_ranges(lives.ids_seen()) or 'no nodes'}")
        return thing
    thing = Thing(kind, asked)
    if not lives.is_seen(thing):
        n_pages = first.pools[FULL].n_pages
        ends = {"page": n_pages, "slot": (n_pages + 1) * first.page_size - 1, "row": first.n_rows}
        if kind == "request":
            names = sorted({name for step in lives.story.steps for name in named_requests(step.op)})
            raise NothingThere(f"request {asked}: never seen, the trace names {', '.join(names[:12]) or 'none'}")
        raise NothingThere(f"{thing.name}: this cache has {kind}s 0..{ends[kind]}")
    return thing


def _ranges(numbers: list[int]) -> str:
    """Say numbers in order, neighbours as a range: ``0..3 7``."""
    words: list[str] = []
    for number in numbers:
        if words and int(words[-1].rpartition("..")[2]) == number - 1:
            words[-1] = f"{words[-1].partition('..')[0]}..{number}"
        else:
            words.append(str(number))
    return " ".join(words)


def things_of(lives: Lives) -> list[Thing]:
    """List what the violation names, most involved first; where it names nothing, what its operation names."""
    violation = lives.story.violation
    found: dict[Thing, None] = {}
    if violation is not None:
        texts = [violation.headline] + [text for name, text in violation.facts if name not in _OWN_FACTS]
        texts += [name for name, _ in violation.facts if name not in _OWN_FACTS]
        for text in texts:
            found.update(dict.fromkeys(_things_in(text, lives)))
        if not found:
            for name, text in violation.facts:
                if name not in ("step", "config"):
                    found.update(dict.fromkeys(_pages_in(text, lives)))
    for name in named_requests(lives.story.steps[-1].op) if lives.story.steps else ():
        if not found or (violation is not None and len(found) < MOST_THINGS):
            found[Thing("request", name)] = None
    return [thing for thing in found if lives.is_seen(thing)][:MOST_THINGS]


def _things_in(text: str, lives: Lives) -> list[Thing]:
    """Read pages, rows, requests and nodes off a line of a violation; a slot stands for its page."""
    things: list[Thing] = []
    for kind, many, words in _NAMED.findall(text):
        if kind == "request" and not many:
            things.append(Thing("request", words.rstrip(",.;:")))
            continue
        for word in re.findall(r"\d+", words) if re.fullmatch(r"[\d :,.;]+", words) else ():
            number = int(word)
            if kind == "node":
                node = lives.node_of_id(number)
                things += [node] if node is not None else []
            else:
                things.append(
                    Thing("page", number // lives.story.first.page_size if kind == "slot" else number)
                    if kind in ("slot", "page")
                    else Thing(kind, number)
                )
            if not many:
                break
    return things


def _pages_in(text: str, lives: Lives) -> list[Thing]:
    """Read the pages off lists of slots, as of nodes that were evicted."""
    slots = [int(first or second) for first, second in _BARE_SLOTS.findall(text)]
    return [Thing("page", slot // lives.story.first.page_size) for slot in slots]


def seen_cause(lives: Lives) -> Cause | None:
    """Find the first operation, before the one that broke a law, after which the target differs from the model."""
    story = lives.story
    for step in story.steps[: len(story.steps) - (story.violation is not None)]:
        try:
            compare(step.model, step.after, "the model", story.target)
        except Divergence as difference:
            facts = "; ".join(f"{name} {text}" for name, text in difference.facts)
            return Cause(step.index, f"{difference.headline} ({facts})" if facts else difference.headline)
        except Exception as error:  # a snapshot may be broken in any way where laws are left out
            return Cause(step.index, f"what {story.target} shows cannot be compared: {type(error).__name__}: {error}")
    return None


def hidden_cause(lives: Lives, factory: Factory, without: frozenset[int] = frozenset()) -> Cause | None:
    """Find operations without which all is as before the one that broke a law, but for the damage; name the last.

    Of several such sets the smallest counts, and of those of one size the latest. Raises TargetUnusable.
    """
    story = lives.story
    if story.violation is None:
        return None
    ops = [step.op for step in story.steps]
    law, last = type(story.violation).__name__, ops[-1]
    allowances = allowances_of(factory(story.config))
    state, done = _modelled(story.config, allowances, ops[:-1], law)
    for left_out in _sets_to_leave_out(ops[:-1]):
        kept = [index for index in range(len(ops) - 1) if index not in left_out]
        if _modelled(story.config, allowances, [ops[i] for i in kept], law) != (state, [done[i] for i in kept]):
            continue
        told = tell_without(story.config, [*(ops[i] for i in kept), last], factory, without)
        if told.violation is None and len(told.steps) == len(kept) + 1:
            did = [index for index in left_out if _did_something(lives, index)]
            if did:
                return Cause(did[-1], _ranges(list(left_out)), hidden=True)
    return None


def _did_something(lives: Lives, index: int) -> bool:
    """Tell whether an operation came to the target and was not refused."""
    seen = lives.story.steps[index].seen
    return seen is not None and seen.before is not seen.now and seen.refused is None


def _sets_to_leave_out(ops: Sequence[Op]) -> list[tuple[int, ...]]:
    """List sets of operations: neighbours, and all that name one request; small ones first, later ones first."""
    most = min(MOST_SETS, MOST_WORK // max(1, len(ops)))
    longest = max(1, min(len(ops), most // max(1, len(ops))))
    runs = [tuple(range(end - size, end)) for size in range(1, longest + 1) for end in range(len(ops), size - 1, -1)]
    lives: list[tuple[int, ...]] = []
    for name in dict.fromkeys(name for op in reversed(ops) for name in named_requests(op)):
        mine = [index for index, op in enumerate(ops) if named_requests(op) == [name]]
        begins = [place for place, index in enumerate(mine) if isinstance(ops[index], Submit)]
        lives += [tuple(mine[begin:end]) for begin, end in pairwise([*begins, len(mine)])]
    sets = {*runs[: most - min(len(lives), most // 2)], *lives[: most // 2]}
    return sorted(sets, key=lambda each: (len(each), [-index for index in reversed(each)]))


def _modelled(
    config: CacheConfig, allowances: Collection[str], ops: Sequence[Op], law: str
) -> tuple[object, list[object]]:
    """Run operations on a model alone; return its state, and what each gave, but for numbers of pages, rows and nodes.

    Ages and generations count for themselves: they tell how a state was come to. They are part of it only where the
    law is about them.
    """
    model = new_cache(config, allowances)
    gave: list[object] = []
    for op in ops:
        kind, arguments = kind_of(op), model_arguments(op)
        refusal = model.refusal(kind, *arguments)
        value: Any = getattr(model, kind)(*arguments) if refusal is None else type(refusal).__name__
        if isinstance(op, Evict | Alloc) and refusal is None:
            evicted = value if isinstance(op, Evict) else value.evicted
            value = [len(slots) for slots in evicted]
        gave.append(value)
    look = Look(snapshot_of(model))
    nodes = sorted(
        (repr(key), len(node.units), node.lock_ref, node.hits, node.priority) for key, node in look.nodes.items()
    )
    requests = sorted(
        (
            *(name, r.state, tuple(r.tokens), repr(r.namespace), r.priority, r.private),
            *(r.protected_len, r.committed_len, r.allocated_len, r.in_flight_n, tuple(r.drafts), r.inserted_len),
            *(r.abort_pending, _anchor_of(look, name) if r.state != "NEW" else ""),
        )
        for name, r in model.requests.items()
    )
    counted: list[object] = []
    if "Generation" in law:
        counted += [sorted(model.pages.generations), sorted(model.rows.generations)]
    if "AgeOrder" in law:
        counted += [repr(key) for key in sorted(look.nodes, key=lambda key: look.nodes[key].stamp or 0)]
    return (nodes, requests, counted), gave


def _anchor_of(look: Look, request: str) -> str:
    anchor = look.index.requests[request].anchor
    return "" if anchor is None else repr(look.key_of.get(anchor))


def cause_lines(lives: Lives, found: Cause | None, n_ops: int) -> list[str]:
    """Say what the life came to: the violation, and the operation that did the damage, as far as it can be told.

    ``n_ops`` is the length of the trace, which may go on behind where the model could follow.
    """
    story = lives.story
    if story.violation is None:
        ran = len(story.steps)
        held = "no violation" if ran == n_ops else f"no violation up to op {ran - 1}, behind which {story.stopped}"
        if found is None:
            return [held]
        return [held, f"cause      {_op(lives, found.index)}: first difference from the model: {found.text}"]
    last = len(story.steps) - 1
    lines = [f"violation  {_op(lives, last)}: {type(story.violation).__name__}: {story.violation.headline}"]
    as_the_model = f"{story.target} is as the model in all it shows"
    if found is None:
        return [*lines, f"cause      {_op(lives, last)} itself, as far as can be told: before it {as_the_model}"]
    distance = plural(last - found.index, "operation")
    lines.append(f"cause      {_op(lives, found.index)}, {distance} before it was noticed")
    if not found.hidden:
        return [*lines, f"           first difference from the model: {found.text}"]
    ops = f"op {found.text}" if found.text.isdigit() else f"ops {found.text}"
    return [
        *lines,
        f"           it did hidden damage: until op {last} {as_the_model},",
        f"           but without {ops} the model comes to the same state, and op {last} breaks no law",
    ]


def _op(lives: Lives, index: int) -> str:
    return f"op {index} ({describe_op(lives.story.steps[index].op)})"


def life_lines(lives: Lives, thing: Thing) -> list[str]:
    """Lay one life out: a heading, and a line an operation in columns."""
    lines = lives.life(thing)
    ops = [_shortened(line.op) for line in lines]
    number, width = len(str(max(1, len(lives.story.steps)))), max(map(len, ops))
    texts = []
    for line, op in zip(lines, ops, strict=True):
        place = f"op {line.index:<{number}}  {op:<{width}}" if line.index >= 0 else f"{'before':<{number + 5 + width}}"
        texts.append(f"  {place}  {line.text}" + (f"   <- {line.mark}" if line.mark else ""))
    return [thing.name, *texts]


def _shortened(op: str, limit: int = 28) -> str:
    return op if len(op) <= limit else f"{op[: limit - 2]}.."
