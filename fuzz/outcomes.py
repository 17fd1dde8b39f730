"""What each operation of a replay gave, in terms that two caches share, and the comparison of caches by it.

Which pages a cache hands out is its own business, so nothing here names a slot: what was evicted is said as prefixes,
each with its namespace and the key units from the root to the end of the node. JSON Lines, written as the trace runs:
a header with the allowances that the cache declares, and then one operation a line:

    {"target": "sglang:radix", "allowances": ["prompt_split"]}
    {"step": 7, "op": "evict", "refused": null, "matched": null, "evicted": [[[null, null, []], [1, 2]]],
     "sizes": [12, 4, 0], "allowed": {}}

``matched`` is the length that a peek or a match found; ``sizes`` are available, evictable and protected slots;
``allowed`` counts the allowances of the cache that made a difference in this operation. Where the cache was not seen
whole (``sparse.py``), ``sizes`` are null, and so is what was evicted.

Not compared: rows, locks and write sets, which the lockstep has held against the model's already.
"""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvlockstep.fuzz.ops import Op
from kvlockstep.invariants import FULL, ROOT, NodeView, Observation

Prefix = list[Any]
"""Namespace and key units, as JSON has them."""

COMPARED = {"refused": "refusals", "matched": "hits", "evicted": "evicted prefixes", "sizes": "sizes"}
"""Fields of an outcome that caches must agree on, and how they are called."""

AGREED = "hits, evicted prefixes and sizes"

DATES_DECIDE = ("fifo", "filo")
"""Policies under which it shows when a node was created."""


class OutcomeLog:
    """Writes the outcome of each operation that a lockstep has accepted. Raises OSError."""

    def __init__(self, path: Path, target: str, allowances: Collection[str]) -> None:
        self._file = path.open("w", buffering=1, encoding="utf-8")  # a target may end the process
        self._file.write(json.dumps({"target": target, "allowances": sorted(allowances)}) + "\n")

    def __call__(self, op: Op, seen: Observation) -> None:
        self._file.write(json.dumps(outcome_of(seen)) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def outcome_of(seen: Observation) -> dict[str, Any]:
    """Say one operation's outcome as a line of the file."""
    pool = seen.now.pools[FULL]
    return {
        "step": seen.step,
        "op": seen.kind,
        "refused": seen.refused,
        "matched": seen.matched_len,
        "evicted": evicted_prefixes(seen),
        "sizes": [pool.available, pool.evictable, pool.protected] if seen.whole else None,
        "allowed": dict(sorted(seen.allowed.items())),
    }


def evicted_prefixes(seen: Observation) -> list[Prefix] | None:
    """List the prefixes that an operation evicted, sorted; None where nobody can see which they were.

    A node that is evicted was there before the operation, since none both publishes and evicts.
    """
    if not seen.evicted:
        return []
    if seen.before.nodes is None or not seen.whole:
        return None
    nodes = {view.node: view for view in seen.before.nodes}
    of_slots = {tuple(sorted(view.slots[FULL])): view for view in nodes.values()}
    evicted = [of_slots.get(tuple(sorted(slots))) for slots in seen.evicted]
    if None in evicted:
        return None
    return sorted((_prefix(view, nodes) for view in evicted if view is not None), key=json.dumps)


def _prefix(view: NodeView, nodes: dict[int, NodeView]) -> Prefix:
    extra_key, cache_salt, content_ids = view.namespace
    units: list[Any] = []
    at: NodeView | None = view
    while at is not None:
        units = [*at.units, *units]
        at = nodes.get(at.parent) if at.parent != ROOT else None
    as_json: Prefix = [
        [extra_key, cache_salt, list(content_ids)],
        [list(u) if isinstance(u, tuple) else u for u in units],
    ]
    return as_json


@dataclass(frozen=True, slots=True)
class Ran:
    """One cache that ran a trace: its name, the allowances it declares, and its outcomes."""

    name: str
    allowances: Collection[str]
    outcomes: Sequence[dict[str, Any]]


def read_outcomes(path: Path) -> Ran | None:
    """Read what an `OutcomeLog` wrote, without a last line that was cut off; None if it never began."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return Ran(whole[0]["target"], whole[0]["allowances"], whole[1:]) if whole else None


@dataclass(slots=True)
class Comparison:
    """What the comparison of several caches gave, as lines; ``agree`` unless something differs that nothing allows."""

    agree: bool = True
    lines: list[str] = field(default_factory=list)


def compare_outcomes(ran: Sequence[Ran], policy: str, group: str) -> Comparison:
    """Compare the caches of a ``group``, each with each other, operation by operation.

    Two that declare the same allowances must agree in everything. Where those of two differ, the first thing to
    differ may be what was evicted, if by then one of these allowances has made a difference to one of the two and
    can decide a victim under the ``policy``; afterwards the two hold different things, and are not compared.
    """
    result = Comparison()
    agreed, allowed = [], []
    for one, other in combinations(ran, 2):
        both, n_both = f"{one.name} and {other.name}", min(len(one.outcomes), len(other.outcomes))
        step = _first_difference(one, other)
        if step is None:
            agreed.append(f"{both} agree on {AGREED}: {n_both} operations")
            continue
        first, second = one.outcomes[step], other.outcomes[step]
        where = f"at step {step} ({first['op']})"
        if reasons := _allowances_behind(one, other, step, policy):
            allowed.append(
                f"{both} evict different prefixes {where}, as {', '.join(reasons)} allows; "
                f"they agree on the {step} operations before, and are not compared from there on"
            )
            continue
        result.agree = False
        names = _differing(first, second)
        result.lines.append(f"{both} differ {where} in {', '.join(COMPARED[name] for name in names)}")
        width = max(len(one.name), len(other.name))
        for name in names:
            result.lines.append(f"  {one.name:<{width}}  {name} {_shown(first[name])}")
            result.lines.append(f"  {other.name:<{width}}  {name} {_shown(second[name])}")
    if result.agree and not allowed:
        agreed = [f"the {group} agree on {AGREED}: {min(len(cache.outcomes) for cache in ran)} operations"]
    result.lines += allowed + agreed
    if len({len(cache.outcomes) for cache in ran}) > 1:
        ended = ", ".join(f"{cache.name} ran {len(cache.outcomes)}" for cache in ran)
        result.lines.append(f"compared as far as both ran: {ended}")
    return result


def _first_difference(one: Ran, other: Ran) -> int | None:
    for step, (first, second) in enumerate(zip(one.outcomes, other.outcomes, strict=False)):
        if _differing(first, second):
            return step
    return None


def _differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """List the fields in which two outcomes differ; what one cache does not show of its victims is not compared."""
    hidden = {"evicted"} if None in (first["evicted"], second["evicted"]) else set()
    return [name for name in COMPARED if name not in hidden and first[name] != second[name]]


def _allowances_behind(one: Ran, other: Ran, step: int, policy: str) -> list[str]:
    """Name the allowances that explain a first difference at a step; none where it is not to be explained."""
    names = _differing(one.outcomes[step], other.outcomes[step])
    if "evicted" not in names or "refused" in names or "matched" in names:
        return []
    found: set[str] = set()
    for cache, peer in ((one, other), (other, one)):
        made: Counter[str] = Counter()
        for outcome in cache.outcomes[: step + 1]:
            made.update(outcome["allowed"])
        found |= {name for name in made if name not in peer.allowances}
    if policy not in DATES_DECIDE:
        found.discard("split_dates_upper_new")
    return sorted(found)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
