"""The page of one trace: one HTML file that needs no other file and no network, the same for the same story.

The cache after each operation is drawn by the script of the page (``page.js``) from the data that is put together
here: all that can be said in words (who owns a page, what changed, what differs, what went wrong) is settled here.
The data are small because what stays the same is kept once: pages as changes from one operation to the next, all
other things by their number in one list.

Texts come from strangers' traces and targets: what cannot be printed is written out, the data are JSON without any
``<``, the script puts texts in as texts, and the policy of the page lets it run this one script and load nothing.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.describe import describe_config, describe_op, printable
from kvlockstep.fuzz.ops import Alloc, Commit, Evict, Match, Op, Peek, Submit, kind_of, named_requests
from kvlockstep.fuzz.results import defect_of_views
from kvlockstep.fuzz.sanitizer import KernelViolation
from kvlockstep.fuzz.show.sentences import Case, sentence_of
from kvlockstep.fuzz.show.view import (
    Cell,
    Difference,
    NodeLine,
    RequestLine,
    View,
    differences,
    lines_of,
    namespace_in_words,
    runs_of,
    slots_in_words,
    view_of,
)
from kvlockstep.fuzz.story import Step, Story
from kvlockstep.invariants import Divergence, Hold, Snapshot, Violation
from kvlockstep.invariants.checks import CHECKS
from kvlockstep.invariants.index import Index

if TYPE_CHECKING:  # it brings Hypothesis with it, which a page without chances does not need
    from kvlockstep.fuzz.why import Chances

MOST_STEPS = 2_000
MOST_PAGES = 4_096
"""A page of more is slow to read for a person and for a browser."""

MOST_KEPT = 8_000_000
"""Operations times slots: all of them are in memory while the page is made."""

MOST_LINES = 40
"""Lines of what changed, or differs, at one operation; of more the page says how many."""

MOST_UNITS = 256
"""Tokens of one edge."""

SPELLED_PAGES, SPELLED_SLOTS = 40, 8
"""Up to so many pages, of up to so many slots, each slot shows its token."""

N_COLOURS = 8

MEANINGS = {
    "submit": "A request arrives. The cache does not know it yet.",
    "peek": "The scheduler asks how much of the prompt is cached, and locks nothing.",
    "match": "The cached prefix is looked up and locked (in SGLang: match_prefix, then inc_lock_ref).",
    "alloc": "Rows and pages are taken for a forward pass, which is in flight from now on "
    "(in SGLang: alloc_for_extend, alloc_for_decode).",
    "commit": "The forward pass lands: keys and values stand in the slots that it was given.",
    "checkpoint": "Computed whole pages go to the radix tree, and the request runs on "
    "(in SGLang: cache_unfinished_req).",
    "release": "The request is finished: it publishes its pages and gives back the rest "
    "(in SGLang: cache_finished_req).",
    "abort": "The request is ended from outside and publishes nothing.",
    "retract": "The request is put back to wait and gives its pages back (in SGLang: retract_decode).",
    "evict": "Nodes that nobody locks leave the radix tree, and their pages are free (in SGLang: evict).",
    "reset": "Everything is forgotten (in SGLang: flush_cache).",
}
"""What each kind of operation does, for someone who knows an engine and not the words of the trace."""


class TooLarge(ValueError):
    """A trace that no page can hold; the text is one line."""


def check_size(config: CacheConfig, n_ops: int) -> None:
    """Raise TooLarge for a trace that is too long, or of a cache that is too large, for one page."""
    for what, value, high in (
        ("operations", n_ops, MOST_STEPS),
        ("pages of the pool", config.n_pages, MOST_PAGES),
        ("operations times slots", n_ops * config.n_slots, MOST_KEPT),
    ):
        if value > high:
            raise TooLarge(f"{value} {what}, at most {high} can be shown: kvlockstep minimize makes it smaller")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What went wrong, for a person."""

    name: str
    law: str
    sentence: str
    text: str  # of the violation itself


def verdict_of(story: Story) -> Verdict | None:
    """Explain the violation that a story ends in."""
    violation = story.violation
    if violation is None:
        return None
    step = story.steps[-1]
    now = step.after if defect_of_views(step.after) is None else step.before
    case = Case(violation, describe_op(step.op), step.before, now, step.seen)
    return Verdict(type(violation).__name__, _law_of(violation), sentence_of(case), str(violation))


def _law_of(violation: Violation) -> str:
    for check in CHECKS:
        if type(violation) in check.violations:
            return f"Law {check.law}: {check.claim}".replace("``", "")
    if isinstance(violation, Divergence):
        return "No law speaks of it: the implementation differs from the reference model."
    if isinstance(violation, KernelViolation):
        return "No law of the cache speaks of it: a kernel did to memory what no kernel may."
    return "The operation did not end as an operation should."


def page_of(
    story: Story,
    *,
    lane: str | None = None,
    fault: str | None = None,
    why: str | None = None,
    chances: "Chances | None" = None,
) -> str:
    """Return the text of the page. ``why`` is what the trace says of itself.

    Before: ``chances``, if they are given, are those of the operations of this story.
    """
    folder = resources.files(__package__)
    script, style = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_printable)
    template = folder.joinpath("page.html.jinja").read_text(encoding="utf-8")
    facts = [
        ("target", story.target),
        *([("lane", lane)] if lane else []),
        *([("planted fault", fault)] if fault else []),
        ("cache", describe_config(story.config)),
        *([("signature", story.signature)] if story.signature else []),
        *([("trace", why)] if why else []),
    ]
    return environment.from_string(template).render(
        verdict=verdict_of(story),
        story=story,
        facts=facts,
        chances=chances,
        ops=[_op_in_words(step.op) for step in story.steps],
        last=describe_op(story.steps[-1].op) if story.steps else "",
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(_json(_cleaned(_data_of(story) | {"chances": _chances_in(chances)}))),
        n_colours=N_COLOURS,
    )


def _chances_in(chances: "Chances | None") -> dict[str, Any] | None:
    if chances is None:
        return None
    points = [(point.failed, point.tried) for point in chances.points]
    return {"turn": chances.turn, "stands_out": chances.stands_out, "points": points}


def _printable(value: Any) -> Any:
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)


def _cleaned(value: Any) -> Any:
    """Write out what cannot be printed in every text of the data."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _cleaned(one) for key, one in value.items()}
    return [_cleaned(one) for one in value] if isinstance(value, list | tuple) else value


def _json(value: Any) -> str:
    """Write JSON that can stand in a script tag: without ``<``, so nothing in it can end the tag or begin a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _Parts:
    """Things that are kept once, by number."""

    def __init__(self) -> None:
        self.list: list[Any] = []
        self._number: dict[str, int] = {}

    def add(self, part: Any) -> int:
        key = json.dumps(part)
        if key not in self._number:
            self._number[key] = len(self.list)
            self.list.append(part)
        return self._number[key]


class _Texts:
    """The tokens of each request as far as they are known, followed from operation to operation."""

    def __init__(self) -> None:
        self.all: list[list[int]] = []
        self.of: dict[str, int] = {}  # request -> its text, the last one of that name
        self._passes: dict[str, tuple[int, tuple[int, ...]]] = {}  # known positions, drafts

    def known(self) -> dict[str, list[int]]:
        return {name: self.all[number] for name, number in self.of.items()}

    def follow(self, op: Op) -> None:
        """Take note of an operation that was done."""
        if isinstance(op, Submit):
            self.of[op.request] = len(self.all)
            self.all.append(list(op.tokens))
        elif isinstance(op, Alloc):
            for item in op.batch:
                self._passes[item.request] = (item.n - len(item.drafts), item.drafts)
        elif isinstance(op, Commit) and op.request in self.of:
            known, drafts = self._passes.pop(op.request, (0, ()))
            self.all[self.of[op.request]] += [*drafts[: max(0, op.kept - known)], *op.sampled]


def _data_of(story: Story) -> dict[str, Any]:
    spelled = story.config.n_pages <= SPELLED_PAGES and story.config.page_size <= SPELLED_SLOTS
    parts, texts = _Parts(), _Texts()
    names = list(dict.fromkeys(name for step in story.steps for name in named_requests(step.op)))
    holds: dict[str, Hold] = {}
    before = view_of(story.first, {}, {})
    model_before: Snapshot | None = None
    drawn: list[View | None] = [None, None]
    steps = []
    for step in story.steps:
        wrong = story.violation is not None and step is story.steps[-1]
        landed = holds
        if step.outcome is not None and step.outcome.refused is None:
            texts.follow(step.op)
        if step.seen is not None and step.seen.now is not step.seen.before:
            holds = step.seen.holds
        broken = wrong and defect_of_views(step.after) is not None
        behind = wrong and _model_is_behind(step, model_before)
        views = [
            view_of(step.before if broken else step.after, texts.known(), holds, _spoiled(step) if wrong else ()),
            view_of(step.model, texts.known(), landed if behind else holds),
        ]
        changed = differences(before, views[0], of_sides=False)
        differing = [] if behind else differences(views[1], views[0], of_sides=True)
        steps.append(
            {
                "op": _op_in_words(step.op),
                "kind": kind_of(step.op),
                "requests": named_requests(step.op),
                "gave": _gave(step, wrong),
                "refused": step.outcome is not None and step.outcome.refused is not None,
                "wrong": wrong,
                "behind": behind,
                "note": _note(step, wrong, behind, broken),
                "changed": _keys(changed),
                "lines": parts.add(_some(lines_of(changed, left="", right="now "))),
                "differs": _keys(differing),
                "differences": parts.add(_some(lines_of(differing, left="model ", right="implementation "))),
                "writes": runs_of(slot for slots in _written(step, landed).values() for slot in slots),
                "writing": [f"{name} {slots_in_words(slots)}" for name, slots in _written(step, landed).items()],
                "sides": [_side(parts, view, last, texts, spelled) for view, last in zip(views, drawn, strict=True)],
            }
        )
        before, model_before = views[0], step.model
        drawn = [*views]
    return {
        "page_size": story.config.page_size,
        "n_pages": story.config.n_pages,
        "spelled": spelled,
        "colours": {name: i % N_COLOURS for i, name in enumerate(names)},
        "meanings": MEANINGS,
        "target": story.target,
        "texts": texts.all,
        "parts": parts.list,
        "steps": steps,
    }


def _op_in_words(op: Op) -> str:
    """Describe an operation; a request that arrives with the namespace that parts it from others."""
    namespace = namespace_in_words(op.namespace) if isinstance(op, Submit) else ""
    return describe_op(op) + (f", {namespace}" if namespace else "")


def _model_is_behind(step: Step, before: Snapshot | None) -> bool:
    """Tell whether the model did not run: it follows the choices of an alloc or evict only once they are accepted."""
    return isinstance(step.op, Alloc | Evict) and (before is None or step.model == before)


def _note(step: Step, wrong: bool, behind: bool, broken: bool) -> str:
    if not wrong:
        return ""
    if broken:
        return "What the implementation shows after this operation is malformed; it is drawn as it was before."
    if step.seen is None or step.seen.now is step.seen.before:
        return "Nothing could be seen of the implementation after this operation; it is drawn as it was before."
    if behind:
        return "The model is shown before this operation, which it did not run: it goes on only where no law is broken."
    return ""


def _gave(step: Step, wrong: bool) -> str:
    """Say what the operation gave."""
    if wrong:
        return "a law is broken"
    assert step.outcome is not None, "an operation that breaks no law has an outcome"
    if step.outcome.refused is not None:
        return f"refused: {step.outcome.refused}"
    if isinstance(step.op, Match | Peek) and isinstance(step.outcome.value, int):
        return f"{step.outcome.value} positions are cached"
    evicted = sum(map(len, step.seen.evicted)) if step.seen is not None else 0
    if isinstance(step.op, Evict) or evicted:
        return f"done, {evicted} slots evicted"
    return "done"


def _spoiled(step: Step) -> set[int]:
    """Find the slots that hold other keys and values than belong there, as far as they were read back or matched."""
    seen = step.seen
    if seen is None:
        return set()
    pools = zip(seen.pool_expected or (), seen.pool_got or (), strict=False)
    spoiled = {slot for slot, (expected, got) in enumerate(pools) if expected != got}
    rows = {row.request: row.slots for row in seen.now.rows or ()}
    for read in seen.reads:
        slots = zip(rows.get(read.request, ()), read.expected, read.got, strict=False)
        spoiled |= {slot for slot, expected, got in slots if expected != got}
    if seen.kind == "match" and seen.matched_len:
        name = seen.requests[0]
        path = Index(seen.now).path_slots(name)[: seen.matched_len]
        spoiled |= {s for s, own in zip(path, seen.fingerprints[name], strict=False) if seen.written.get(s) != own}
    return spoiled


def _written(step: Step, holds: Mapping[str, Hold]) -> dict[str, list[int]]:
    """Return the write sets of this operation: those that an alloc gave out, or that of the pass that landed."""
    refused = step.seen is None or step.seen.refused is not None
    if isinstance(step.op, Commit) and step.op.request in holds and not refused:
        return {step.op.request: holds[step.op.request].write_slots}
    if step.seen is None or step.seen.write_sets is None:
        return {}
    return dict(zip(step.seen.requests, step.seen.write_sets, strict=False))


def _keys(found: Sequence[Difference]) -> dict[str, list[int | str]]:
    keys: dict[str, list[int | str]] = {}
    for one in found:
        kind = {"generation": "page", "slots": "request"}.get(one.kind, one.kind)
        if one.key not in keys.setdefault(kind, []):
            keys[kind].append(one.key)
    return keys


def _some(lines: list[str]) -> list[str]:
    left = len(lines) - MOST_LINES
    return lines if left <= 0 else [*lines[:MOST_LINES], f"and {left} more"]


def _side(parts: _Parts, view: View, last: View | None, texts: _Texts, spelled: bool) -> dict[str, Any]:
    known = last.pages if last is not None else {}
    pages: list[int] = []
    for page, cell in view.pages.items():
        if known.get(page) != cell:
            pages += [page, parts.add(_cell(page, cell, spelled))]
    requests = None
    if view.requests is not None:
        requests = parts.add([parts.add(_request(parts, line, texts)) for line in view.requests.values()])
    nodes = None
    if view.nodes is not None:
        nodes = parts.add([parts.add(_node(parts, line)) for line in view.nodes])
    gone = [page for page in known if page not in view.pages]
    rows = None if view.rows is None else parts.add(view.rows)
    side = {"pages": pages, "rows": rows, "requests": requests, "nodes": nodes, "sizes": parts.add(view.sizes)}
    return side | ({"gone": gone} if gone else {})


def _cell(page: int, cell: Cell, spelled: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"owners": cell.owners, "words": cell.words(page), "slots": cell.slots}
    if cell.generation is not None:
        found["generation"] = cell.generation
    if cell.complaint:
        found["complaint"] = cell.complaint
    return found | ({"tokens": cell.tokens} if spelled else {})


def _request(parts: _Parts, line: RequestLine, texts: _Texts) -> dict[str, Any]:
    return {
        "name": line.name,
        "state": line.state,
        "row": line.row,
        "lengths": line.lengths,
        "slots": parts.add(runs_of(line.slots)),
        "writes": runs_of(line.writes),
        "wrong": runs_of(line.wrong),
        "complaint": line.complaint,
        "text": texts.of.get(line.name),
    }


def _node(parts: _Parts, line: NodeLine) -> dict[str, Any]:
    return {
        "key": line.key,
        "depth": line.depth,
        "units": parts.add([unit if isinstance(unit, int) else "+".join(map(str, unit)) for unit in _shown(line)]),
        "n_units": len(line.units),
        "slots": parts.add(runs_of(line.slots)),
        "lock": line.lock_ref,
        "locked_by": line.locked_by,
        "hits": line.hits,
        "priority": line.priority,
        "namespace": line.namespace,
        "off": line.off,
    }


def _shown(line: NodeLine) -> Iterator[Any]:
    yield from line.units[:MOST_UNITS]


def ended_in(story: Story, op: Op, violation: Violation, signature: str) -> Story:
    """Add the operation in which the process ended to the story of those before it: nothing of it could be seen."""
    last = story.steps[-1] if story.steps else None
    now: Snapshot = last.after if last is not None else story.first
    model = last.model if last is not None else story.first
    step = Step(len(story.steps), op, None, now, now, model, None)
    return replace(story, steps=(*story.steps, step), violation=violation, signature=signature)
