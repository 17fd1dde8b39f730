"""What happened to one thing of a cache, operation by operation: a page, a slot, a row, a request or a node.

A life is read off consecutive snapshots. For each the thing's *aspects* are collected (who owns it, which rows name
it, its lock count, its generation), and where one changed from a snapshot to the next, that is said. The same aspects
of the model's snapshots tell since when the thing is not as it should be.

With pages of 2, a page of a prompt that was published and evicted::

    before                          in the free list, generation 0
    op 2   alloc r0 n=2             taken from the free list by r0, positions [0, 2)
    op 4   release r0               published: node 0 (tokens 1 2)
    op 5   evict 2                  freed with node 0 (tokens 1 2), generation 0 -> 1

Ids of nodes mean something within one snapshot only, so a node is known by its namespace and the key units from the
root to its end. That end stays where it is when the edge is split: the upper part is the new node.

Not shown: what a target keeps to itself, as its order of victims.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from kvlockstep.fuzz.describe import describe_op
from kvlockstep.fuzz.ops import Submit
from kvlockstep.fuzz.story import Step, Story
from kvlockstep.invariants import FULL, ROOT, Hold, Namespace, NodeView, Snapshot, Unit
from kvlockstep.invariants.index import Index
from kvlockstep.invariants.owners import anchor_name, listing, node_name, plural, span


class NodeKey(NamedTuple):
    """What a node is known by over time."""

    namespace: Namespace
    units: tuple[Unit, ...]  # from the root to its end


class Thing(NamedTuple):
    """Something that has a life: its kind, and its number, name or key."""

    kind: str  # slot, page, row, request, node
    key: Any

    @property
    def name(self) -> str:
        if not isinstance(self.key, NodeKey):
            return f"{self.kind} {self.key}"
        return f"node of tokens {_tokens(self.key.units)}" + _of_namespace(self.key.namespace)


class Owner(NamedTuple):
    """One owner of a page: the free list, a node or a request, and the positions there that are on the page."""

    kind: str  # free, tree, request
    key: Any
    start: int = 0
    end: int = 0


Reader = tuple[str, int, int, int]
"""A row that names a page: request, row, and the positions at which it does."""

Aspects = dict[str, Any]
"""What there is to say of a thing at one moment; None for what the target does not show."""

NOT_SHOWN = "not shown by this target"


def _tokens(units: Iterable[Unit], limit: int = 8) -> str:
    return listing((unit if isinstance(unit, int) else f"{unit[0]}+{unit[1]}" for unit in units), limit)


def _of_namespace(namespace: Namespace) -> str:
    return "" if namespace == (None, None, ()) else f" in namespace {namespace}"


class Look:
    """One snapshot, with its things found by what they are known by."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.index = Index(snapshot)

    @cached_property
    def key_of(self) -> dict[int, NodeKey]:
        """Keys of the nodes whose parents lead to the root, by id."""
        keys = {}
        for node in self.snapshot.nodes or ():
            path = self.index.path(node.node)
            if path is not None:
                keys[node.node] = NodeKey(node.namespace, tuple(unit for above in path for unit in above.units))
        return keys

    @cached_property
    def nodes(self) -> dict[NodeKey, NodeView]:
        return {key: self.index.nodes[node] for node, key in self.key_of.items()}

    @property
    def shows_owners(self) -> bool:
        snapshot = self.snapshot
        parts = (snapshot.pools[FULL].free_pages, snapshot.nodes, snapshot.rows, snapshot.requests)
        return all(part is not None for part in parts)

    @property
    def shows_readers(self) -> bool:
        return None not in (self.snapshot.rows, self.snapshot.requests)

    def _runs(self) -> Iterable[tuple[Owner, list[int]]]:
        """Who owns slots by naming them one after the other, with the slots; ``start`` is the position of the first."""
        for node in self.snapshot.nodes or ():
            key = self.key_of.get(node.node)
            start = 0 if key is None else len(key.units) - len(node.units)
            yield Owner("tree", node.node if key is None else key, start), node.slots.get(FULL, [])
        for row in self.snapshot.rows or ():
            request = self.index.requests.get(row.request)
            start = 0 if request is None else request.protected_len // self.index.page_size * self.index.page_size
            yield Owner("request", row.request, start), row.slots[start:]

    @cached_property
    def owners(self) -> dict[int, list[Owner]]:
        """Owners of each page."""
        page_size = self.index.page_size
        owners: dict[int, list[Owner]] = {}
        for page in self.snapshot.pools[FULL].free_pages or ():
            owners.setdefault(page, []).append(Owner("free", ""))
        for owner, slots in self._runs():
            spans: dict[int, Owner] = {}
            for pos, slot in enumerate(slots, owner.start):
                first = spans.get(slot // page_size, owner._replace(start=pos))
                spans[slot // page_size] = first._replace(end=pos + 1)
            for page, part in spans.items():
                owners.setdefault(page, []).append(part)
        return owners

    @cached_property
    def readers(self) -> dict[int, list[Reader]]:
        """Rows that name a page among what they share with the tree: request, row and positions."""
        readers: dict[int, list[Reader]] = {}
        for row in self.snapshot.rows or ():
            request = self.index.requests.get(row.request)
            spans: dict[int, tuple[int, int]] = {}
            for pos, slot in enumerate(row.slots[: request.protected_len if request else 0]):
                page = slot // self.index.page_size
                spans[page] = (spans.get(page, (pos, pos))[0], pos + 1)
            for page, (start, end) in spans.items():
                readers.setdefault(page, []).append((row.request, row.row, start, end))
        return readers

    def owner_name(self, owner: Owner) -> str:
        if owner.kind == "free":
            return "the free list"
        if owner.kind == "request":
            return str(owner.key)
        node = self.nodes.get(owner.key) or self.index.nodes.get(owner.key)
        return node_name(node) if node is not None else f"node {owner.key}"

    def aspects(self, thing: Thing) -> Aspects:
        """Collect what there is to say of a thing; nothing where it is not there."""
        return _ASPECTS[thing.kind](self, thing.key)


def _aspects_of_page(look: Look, page: int) -> Aspects:
    generations = look.snapshot.pools[FULL].page_generations
    owners = tuple(sorted(look.owners.get(page, ()), key=repr)) if look.shows_owners else None
    nodes = [look.nodes[owner.key] for owner in owners or () if owner.kind == "tree" and owner.key in look.nodes]
    return {
        "owners": owners,
        "readers": tuple(sorted(look.readers.get(page, ()))) if look.shows_readers else None,
        "lock count of its node": nodes[0].lock_ref if len(nodes) == 1 else None,
        "generation": generations[page] if generations is not None and page < len(generations) else None,
    }


def _aspects_of_slot(look: Look, slot: int) -> Aspects:
    rows = look.snapshot.rows
    named = [(row.request, row.row, pos) for row in rows or () for pos, other in enumerate(row.slots) if other == slot]
    return _aspects_of_page(look, slot // look.index.page_size) | {"named": tuple(sorted(named)) if rows else None}


def _aspects_of_row(look: Look, row: int) -> Aspects:
    snapshot = look.snapshot
    if snapshot.rows is None or snapshot.free_rows is None:
        return {"holders": None}
    views = [view for view in snapshot.rows if view.row == row]
    holders = ["the free list"] * snapshot.free_rows.count(row) + [view.request for view in views]
    generations = snapshot.row_generations
    return {
        "holders": tuple(sorted(holders)),
        "slots": tuple(views[0].slots) if views else (),
        "lengths": (tuple(_lengths(look, view.request) for view in views) or None) if look.shows_readers else None,
        "generation": generations[row] if generations is not None and row < len(generations) else None,
    }


def _lengths(look: Look, request: str) -> tuple[int, int, int] | None:
    view = look.index.requests.get(request)
    return None if view is None else (view.protected_len, view.committed_len, view.allocated_len)


def _aspects_of_request(look: Look, name: str) -> Aspects:
    if look.snapshot.requests is None:
        return {"state": None}
    view = look.index.requests.get(name)
    if view is None:
        return {}
    row = look.index.rows.get(name)
    return {
        "state": view.state,
        "lengths": _lengths(look, name),
        "row": view.row,
        "slots": tuple(row.slots) if row is not None else None,
        "anchor": "the root"
        if view.anchor == ROOT
        else look.key_of.get(view.anchor)
        if view.anchor is not None
        else None,
    }


def _aspects_of_node(look: Look, key: NodeKey) -> Aspects:
    if look.snapshot.nodes is None:
        return {"edge": None}
    node = look.nodes.get(key)
    if node is None:
        return {}
    below = [other for other, view in look.nodes.items() if view.parent == node.node]
    return {
        "edge": span(len(key.units) - len(node.units), len(key.units)),
        "slots": tuple(node.slots.get(FULL, ())),
        "lock count": node.lock_ref,
        "children": len(below),
        "hits": node.hits,
        "priority": node.priority,
        "stamp": node.stamp,
    }


_ASPECTS: dict[str, Callable[[Look, Any], Aspects]] = {
    "page": _aspects_of_page,
    "slot": _aspects_of_slot,
    "row": _aspects_of_row,
    "request": _aspects_of_request,
    "node": _aspects_of_node,
}

_OWN_COUNT = ("stamp",)
"""Aspects of which each side keeps count for itself."""


@dataclass(frozen=True, slots=True)
class Line:
    """What one operation did to a thing. ``index`` is -1 for how it was at the start."""

    index: int
    op: str
    text: str
    mark: str = ""  # what is wrong with it from here on


class Lives:
    """All lives of one story. ``last`` is the operation that broke a law, if one did."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.looks = [Look(story.first)]
        for step in story.steps:
            self.looks.append(self.looks[-1] if step.after is step.before else Look(step.after))
        self.models = [Look(step.model) for step in story.steps]
        self.holds: list[dict[str, Hold]] = [{}]
        for step in story.steps:
            stayed = step.seen is None or step.seen.before is step.seen.now
            self.holds.append(self.holds[-1] if stayed or step.seen is None else step.seen.holds)

    def is_seen(self, thing: Thing) -> bool:
        """Tell whether there ever was such a thing."""
        snapshot = self.story.first
        if thing.kind == "page":
            return thing.key in range(snapshot.pools[FULL].n_pages + 1)
        if thing.kind == "slot":
            return thing.key in range((snapshot.pools[FULL].n_pages + 1) * snapshot.page_size)
        if thing.kind == "row":
            return thing.key in range(snapshot.n_rows + 1)
        if thing.kind == "request":
            submitted = any(isinstance(step.op, Submit) and step.op.request == thing.key for step in self.story.steps)
            return submitted or any(look.aspects(thing) for look in self.looks)
        return any(look.aspects(thing) for look in self.looks)

    def node_of_id(self, node: int) -> Thing | None:
        """Find the node that was called by this number last."""
        for look in reversed(self.looks):
            if node in look.key_of:
                return Thing("node", look.key_of[node])
        return None

    def ids_seen(self) -> list[int]:
        return sorted({node for look in self.looks for node in look.key_of})

    def apart(self, thing: Thing, index: int) -> str | None:
        """Say what of a thing is not as in the model after an operation; None if all is that can be compared."""
        got, expected = self.looks[index + 1].aspects(thing), self.models[index].aspects(thing)
        if not got and not expected:
            return None
        if None in list(got.values())[:1]:
            return None  # this target does not show such things
        if not got or not expected:
            return "the model has none" if got else "the model has one"
        for name, value in expected.items():
            if name not in _OWN_COUNT and value is not None and got.get(name) is not None and got[name] != value:
                return f"the model has {_said(self.models[index], name, value)}"
        return None

    def first_apart(self, thing: Thing) -> int | None:
        """Return the first operation, before the one that broke a law, after which a thing is not as in the model."""
        held = len(self.story.steps) - (self.story.violation is not None)
        return next((index for index in range(held) if self.apart(thing, index)), None)

    def life(self, thing: Thing) -> list[Line]:
        """Tell a life: how the thing was at the start, and a line for each operation that did something to it."""
        start = self.looks[0].aspects(thing)
        lines = [Line(-1, "", _at_start(thing, self.looks[0], start))]
        first_apart = self.first_apart(thing)
        for step in self.story.steps:
            said = self._told(thing, step)
            marks = [_wrong(self.looks[step.index + 1].aspects(thing), self.looks[step.index].aspects(thing))]
            if step.index == first_apart:
                said = said or ["unchanged"]
                marks.append(self.apart(thing, step.index) or "")
            if step.index == len(self.story.steps) - 1 and self.story.violation is not None:
                said = said or ["unchanged"]
                marks.insert(0, type(self.story.violation).__name__)
            if said:
                lines.append(Line(step.index, describe_op(step.op), "; ".join(said), ", ".join(filter(None, marks))))
        return lines

    def _told(self, thing: Thing, step: Step) -> list[str]:
        look_before, look_after = self.looks[step.index], self.looks[step.index + 1]
        before, after = look_before.aspects(thing), look_after.aspects(thing)
        said = []
        if thing.kind == "request" and isinstance(step.op, Submit) and step.op.request == thing.key:
            done = step.outcome is not None and step.outcome.refused is None
            said.append("submitted" if done else f"refused: {step.outcome.refused if step.outcome else 'not run'}")
        if before != after:
            said += _TELL[thing.kind](thing, look_before, look_after, before, after)
        if thing.kind in ("page", "slot"):
            said += self._flights(thing, step.index)
        if thing.kind == "request":
            said += _refusal(thing, step)
        return said

    def _flights(self, thing: Thing, index: int) -> list[str]:
        """Say which passes took off with this page or slot in hand, and which landed."""
        page_size = self.story.first.page_size
        page = thing.key if thing.kind == "page" else thing.key // page_size
        mine = range(page * page_size, (page + 1) * page_size) if thing.kind == "page" else (thing.key,)
        said = []
        was, now = self.holds[index], self.holds[index + 1]
        for name in sorted({*was, *now}):
            if was.get(name) == now.get(name):
                continue
            for hold, took_off in ((was.get(name), False), (now.get(name), True)):
                if hold is None:
                    continue
                written = [slot for slot in hold.write_slots if slot in mine]
                if not written and page not in hold.page_generations:
                    continue
                what = f"writes {_slots(written)}" if written else "reads it"
                said.append(f"a pass of {name} that {what} is in flight" if took_off else f"the pass of {name} landed")
        return said


def _slots(slots: list[int]) -> str:
    return f"slot {slots[0]}" if len(slots) == 1 else f"slots {listing(slots)}"


def _refusal(thing: Thing, step: Step) -> list[str]:
    refused = step.outcome.refused if step.outcome is not None else None
    named = step.seen is not None and thing.key in step.seen.requests and not isinstance(step.op, Submit)
    return [f"refused: {refused}"] if refused and named else []


def _wrong(after: Aspects, before: Aspects) -> str:
    """Mark a thing that has more or fewer owners than one, at the operation that made it so."""
    for name in ("owners", "holders"):
        count = after.get(name)
        if count is not None and len(count) != 1 and count != before.get(name):
            return "nobody's" if not count else f"{'two' if len(count) == 2 else len(count)} owners"
    return ""


def _said(look: Look, name: str, value: Any) -> str:
    """Say one aspect by itself."""
    if name == "owners":
        owners = [f"{look.owner_name(owner)}{_positions(owner)}" for owner in value]
        return (
            " and ".join(owners) + (" as its owner" if len(owners) == 1 else " as its owners") if owners else "no owner"
        )
    if name == "holders":
        return f"{' and '.join(value)} as its holder" if value else "no holder"
    if name in ("readers", "named"):
        return f"it named by {' and '.join(_reader(*reader) for reader in value)}" if value else "no row that names it"
    if name == "slots":
        return f"{_slots(list(value))}" if value else "no slots"
    if name == "lengths":
        return f"lengths {_lengths_words(value)}"
    if name == "anchor":
        return f"its lock at {_anchor_words(look, value)}"
    return f"{name} {value}"


def _positions(owner: Owner) -> str:
    return "" if owner.kind == "free" else f", positions {span(owner.start, owner.end)}"


def _reader(request: str, row: int, start: int, end: int | None = None) -> str:
    return f"{request} (row {row}, {f'position {start}' if end is None else f'positions {span(start, end)}'})"


def _lengths_words(lengths: Any) -> str:
    if lengths and isinstance(lengths[0], tuple):
        return " and ".join(_lengths_words(each) for each in lengths if each)
    return "none" if not lengths else "protected {}, committed {}, allocated {}".format(*lengths)


def _anchor_words(look: Look, anchor: Any) -> str:
    if isinstance(anchor, NodeKey):
        node = look.nodes.get(anchor)
        return f"the node of tokens {_tokens(anchor.units)}" if node is None else node_name(node)
    return str(anchor)


def _at_start(thing: Thing, look: Look, aspects: Aspects) -> str:
    if thing.kind in ("request", "node"):
        shown = aspects.get("state", "") is not None and aspects.get("edge", "") is not None
        return "not there yet" if shown else NOT_SHOWN
    owners = aspects.get("owners", aspects.get("holders"))
    if owners is None:
        return NOT_SHOWN
    generation = "" if aspects.get("generation") is None else f", generation {aspects['generation']}"
    if not owners:
        padding = thing.key == 0 or (thing.kind == "slot" and thing.key < look.index.page_size)
        return ("padding, nobody's" if padding else "nobody's") + generation
    return ("in the free list" if "free" in repr(owners) else _said(look, "owners", owners)) + generation


def _counted(name: str, before: Aspects, after: Aspects) -> list[str]:
    """Say how a number changed, where both snapshots have it."""
    was, now = before.get(name), after.get(name)
    return [f"{name} {was} -> {now}"] if None not in (was, now) and was != now else []


def _tell_page(thing: Thing, was: Look, now: Look, before: Aspects, after: Aspects) -> list[str]:
    said = []
    old, new = Counter(before["owners"] or ()), Counter(after["owners"] or ())
    gone, come = list((old - new).elements()), list((new - old).elements())
    readers = {reader for reader in after.get("readers") or () if reader not in (before.get("readers") or ())}
    if gone or come:
        said.append(_transfer(was, now, gone, come, after.get("readers") or (), bool(old)))
        readers = {reader for reader in readers if not any(o.kind == "request" and o.key == reader[0] for o in gone)}
    said += [f"{_reader(*reader)} reads it too" for reader in sorted(readers)]
    left = {reader[0] for reader in before.get("readers") or ()} - {reader[0] for reader in after.get("readers") or ()}
    said += [f"{name} reads it no more" for name in sorted(left)]
    if thing.kind == "slot":
        said += _tell_named(before.get("named") or (), after.get("named") or ())
    return said + _counted("lock count of its node", before, after) + _counted("generation", before, after)


def _tell_named(before: Iterable[Any], after: Iterable[Any]) -> list[str]:
    came, went = [name for name in after if name not in before], [name for name in before if name not in after]
    said = [f"position {pos} of row {row} ({request}) names it" for request, row, pos in came]
    return said + [f"position {pos} of row {row} ({request}) names it no more" for request, row, pos in went]


def _transfer(
    was: Look,
    now: Look,
    gone: list[Owner],
    come: list[Owner],
    readers: Iterable[tuple[str, int, int, int]],
    owned: bool,
) -> str:
    """Say how a page went from one owner to another."""
    if len(gone) == 1 and len(come) == 1:
        old, new = gone[0], come[0]
        match old.kind, new.kind:
            case "free", "request":
                still = [_reader(*reader) for reader in readers if reader[0] != new.key]
                reads = f" while {' and '.join(still)} still reads it" if still else ""
                return f"taken from the free list by {new.key}{_positions(new)}{reads}"
            case "request", "tree":
                named = [reader[1] for reader in readers if reader[0] == old.key]
                return f"published by {old.key}: {now.owner_name(new)}" + (
                    f", row {named[0]} names it" if named else ""
                )
            case "tree", "free":
                still = [_reader(*reader) for reader in readers]
                reads = f" while {' and '.join(still)} still reads it" if still else ""
                return f"freed with {was.owner_name(old)}{reads}"
            case "request", "free":
                still = [_reader(*reader) for reader in readers]
                reads = f" while {' and '.join(still)} still reads it" if still else ""
                return f"given back by {old.key}{reads}"
            case "request", "request" if old.key == new.key:
                return f"{new.key} has it at positions {span(new.start, new.end)} now"
            case "tree", "tree":
                return f"{was.owner_name(old)} was split or changed: now of {now.owner_name(new)}"
            case _:
                return f"went from {was.owner_name(old)} to {now.owner_name(new)}{_positions(new)}"
    lost = " and ".join(f"{was.owner_name(owner)}{_positions(owner)}" for owner in gone)
    won = " and ".join(f"{now.owner_name(owner)}{_positions(owner)}" for owner in come)
    if not come:
        return f"no longer of {lost}"
    return f"{'now also of' if owned and not gone else 'now of'} {won}" + (f", no longer of {lost}" if lost else "")


def _tell_row(thing: Thing, was: Look, now: Look, before: Aspects, after: Aspects) -> list[str]:
    said = []
    if before["holders"] != after["holders"]:
        said.append(_change_of_holder(before["holders"] or (), after["holders"] or ()))
    said += _written(
        before.get("slots") or (), after.get("slots") or (), bool(after["holders"] and before.get("slots"))
    )
    if before.get("lengths") != after.get("lengths") and after.get("lengths"):
        said.append(_lengths_words(after["lengths"]))
    return said + _counted("generation", before, after)


def _change_of_holder(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    if before == ("the free list",) and len(after) == 1:
        return f"taken by {after[0]}"
    if after == ("the free list",) and len(before) == 1:
        return f"given back by {before[0]}"
    return f"held by {' and '.join(after) or 'nobody'}, before by {' and '.join(before) or 'nobody'}"


def _written(before: tuple[int, ...], after: tuple[int, ...], was_held: bool) -> list[str]:
    """Say which positions of a row name other slots than before."""
    if not after or before == after:
        return []
    said = []
    changed = [pos for pos in range(min(len(before), len(after))) if before[pos] != after[pos]]
    if changed and was_held:
        start, end = changed[0], changed[-1] + 1
        said.append(f"rewritten at {span(start, end)}: {listing(before[start:end])} -> {listing(after[start:end])}")
    if len(after) > len(before):
        said.append(f"names {_slots(list(after[len(before) :]))} at {span(len(before), len(after))}")
    elif len(after) < len(before):
        said.append(f"names nothing at {span(len(after), len(before))} any more")
    return said


def _tell_request(thing: Thing, was: Look, now: Look, before: Aspects, after: Aspects) -> list[str]:
    if not after:
        row = before.get("row")
        return ["gone or waiting again" + ("" if row is None else f", its row {row} given back")]
    said = []
    had = before.get("row")
    if before.get("state") != after["state"]:
        said.append(str(after["state"]))
    if had != after["row"]:
        said.append(f"takes row {after['row']}" if had is None else f"row {had} -> {after['row']}")
    if before.get("lengths") != after["lengths"] and after["lengths"]:
        said.append(_lengths_words(after["lengths"]))
    said += _written(before.get("slots") or (), after.get("slots") or (), bool(before.get("slots")))
    if before.get("anchor") != after["anchor"]:
        said.append(f"locks the path to {_anchor_words(now, after['anchor'])}")
    return said


def _tell_node(thing: Thing, was: Look, now: Look, before: Aspects, after: Aspects) -> list[str]:
    if before and not after:
        return [f"{node_name(was.nodes[thing.key])} is removed, slots {listing(before['slots'])}"]
    node = now.nodes[thing.key]
    if not before:
        whole = [other for other in was.nodes if _is_inside(thing.key, other, was)]
        made = f"split off {node_name(was.nodes[whole[0]])}, above it" if whole else "made"
        parent = anchor_name(now.index, node.parent)
        counts = f"lock count {node.lock_ref}" + ("" if node.hits is None else f", {plural(node.hits, 'hit')}")
        return [f"{made}: {node_name(node)} below {parent}, slots {listing(after['slots'])}, {counts}"]
    said = []
    if before["edge"] != after["edge"]:
        said.append(f"{node_name(node)} is split or merged: its edge is {after['edge']} now, was {before['edge']}")
    elif before["slots"] != after["slots"]:
        said.append(f"slots {listing(before['slots'])} -> {listing(after['slots'])}")
    for name in ("lock count", "children", "hits", "priority"):
        said += _counted(name, before, after)
    if before["stamp"] != after["stamp"]:
        said.append("used")
    return said


def _is_inside(key: NodeKey, other: NodeKey, look: Look) -> bool:
    """Tell whether a path ended inside the edge that leads to another node."""
    start = len(other.units) - len(look.nodes[other].units)
    return (
        other.namespace == key.namespace
        and start < len(key.units) < len(other.units)
        and other.units[: len(key.units)] == key.units
    )


_TELL: dict[str, Callable[[Thing, Look, Look, Aspects, Aspects], list[str]]] = {
    "page": _tell_page,
    "slot": _tell_page,
    "row": _tell_row,
    "request": _tell_request,
    "node": _tell_node,
}
