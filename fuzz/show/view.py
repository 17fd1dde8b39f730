"""What is drawn of one side at one moment: pages by owner, requests with their rows, the tree, the sizes.

Works on a broken snapshot, for that is what there is to see: it looks at every slot, takes two owners of a page as
they are, and shows nodes from which no parents lead to the root. What a target does not show is None here too.

With pages of 2, ``a b`` in the tree on page 1 and ``c`` committed by ``r1`` on page 2, the pages are::

    0 padding    1 tree "ff"    2 r1 "f-"    3 free ".."

One letter a slot: ``f`` holds keys and values, ``w`` is being written by a pass in flight, ``o`` is allocated and
holds nothing yet, ``-`` is slack, ``.`` is nobody's use, ``x`` is claimed by two.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvlockstep.invariants import FULL, ROOT, Hold, NodeView, Snapshot, Unit
from kvlockstep.invariants.index import Index
from kvlockstep.invariants.owners import listing, row_owners

FREE = ("free", "")
TREE = ("tree", "")

LENGTHS = ("protected", "committed", "allocated")

MOST_ROWS = 64
"""Of a longer row table only the rows that are wrong are listed."""

MOST_TOKENS = 8
"""Tokens of an edge that stand in the name of a node."""


class Owner(NamedTuple):
    """Who names a page: ``free``, ``tree`` or ``request`` with its name."""

    kind: str
    name: str

    @property
    def words(self) -> str:
        return {"free": "the free list", "tree": "the tree"}.get(self.kind, self.name)


@dataclass(frozen=True, slots=True)
class Cell:
    """One page. ``owners`` is None where not all of them can be seen, and nobody is named."""

    owners: tuple[Owner, ...] | None
    slots: str  # a letter a slot
    tokens: tuple[Unit | None, ...]  # whose keys and values belong there
    generation: int | None
    complaint: str = ""  # what is wrong with a slot of it, beyond its owners

    def words(self, page: int) -> str:
        if self.owners is None:
            return "not shown"
        if not self.owners:
            return "padding" if page == 0 else "nobody"
        counted = {owner: self.owners.count(owner) for owner in self.owners}
        return " and ".join(owner.words + (f" {n} times" if n > 1 else "") for owner, n in counted.items())


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request with its row."""

    name: str
    state: str
    row: int | None
    lengths: tuple[int, int, int] | None  # protected, committed, allocated
    slots: tuple[int, ...]  # that its row names; before it has one, those of the path that it locks
    writes: tuple[int, ...]  # positions that a pass in flight writes
    wrong: tuple[int, ...]  # positions whose slot is not what the law says
    complaint: str  # what is wrong with the first of them

    @property
    def words(self) -> list[str]:
        row = "no row" if self.row is None else f"row {self.row}"
        lengths = zip(LENGTHS, self.lengths or (), strict=False)
        return [self.state, row, *[f"{name} {length}" for name, length in lengths]]


@dataclass(frozen=True, slots=True)
class NodeLine:
    """One node, at its depth in the tree; ``off`` where its parents do not lead to the root."""

    key: int  # first slot of its edge, which is the same on both sides
    depth: int
    units: tuple[Unit, ...]
    slots: tuple[int, ...]
    lock_ref: int
    locked_by: tuple[str, ...] | None  # None where it cannot be seen who locks what
    hits: int | None
    priority: int | None
    namespace: str
    off: bool

    @property
    def words(self) -> list[str]:
        hits = [] if self.hits is None else [f"hits {self.hits}"]
        return [f"slots {runs_in_words(self.slots)}", f"lock {self.lock_ref}", *hits]


class RowCell(NamedTuple):
    """One row of the row table, and who has it."""

    row: int
    words: str
    wrong: bool


@dataclass(frozen=True, slots=True)
class View:
    """One side at one moment."""

    pages: dict[int, Cell]
    rows: tuple[RowCell, ...] | None  # of a long table only those that are wrong
    requests: dict[str, RequestLine] | None
    nodes: tuple[NodeLine, ...] | None
    sizes: tuple[tuple[str, int | None, int | None], ...]  # name, reported, recounted


class Difference(NamedTuple):
    """A thing that is not the same in two views."""

    kind: str  # page, generation, row, request, slots, node, size
    key: int | str
    name: str
    left: str
    right: str


def view_of(
    snapshot: Snapshot,
    tokens: Mapping[str, Sequence[int]],
    holds: Mapping[str, Hold],
    spoiled: Collection[int] = (),
) -> View:
    """Draw a snapshot. ``tokens`` are those of each request, ``holds`` what the passes in flight were given.

    ``spoiled`` are slots that were found to hold other keys and values than belong there.
    """
    index = Index(snapshot)
    owners = owners_of(snapshot)
    return View(
        _pages(index, owners, tokens, holds, spoiled),
        _rows(index),
        _requests(index, owners, holds, spoiled),
        _nodes(index),
        tuple(_sizes(index)),
    )


def owners_of(snapshot: Snapshot) -> dict[int, list[Owner]]:
    """Find everyone who names a page of the pool that every cache has: an edge, a row's tail, the free list."""
    page_size = snapshot.page_size
    owners: dict[int, list[Owner]] = {}
    for page in snapshot.pools[FULL].free_pages or ():
        owners.setdefault(page, []).append(Owner(*FREE))
    for node in snapshot.nodes or ():
        for page in dict.fromkeys(slot // page_size for slot in node.slots.get(FULL, ())):
            owners.setdefault(page, []).append(Owner(*TREE))
    protected = {request.request: request.protected_len for request in snapshot.requests or ()}
    for row in snapshot.rows or ():
        tail = row.slots[max(0, protected.get(row.request, 0)) // page_size * page_size :]
        for page in dict.fromkeys(slot // page_size for slot in tail):
            owners.setdefault(page, []).append(Owner("request", row.request))
    return owners


def _pages(
    index: Index,
    owners: dict[int, list[Owner]],
    tokens: Mapping[str, Sequence[int]],
    holds: Mapping[str, Hold],
    spoiled: Collection[int],
) -> dict[int, Cell]:
    snapshot, page_size = index.snapshot, index.page_size
    pool = snapshot.pools[FULL]
    all_seen = None not in (pool.free_pages, snapshot.nodes, snapshot.rows, snapshot.requests)
    letters: dict[int, str] = {}
    spelled: dict[int, Unit] = {}
    for node in snapshot.nodes or ():
        for slot, unit in zip(node.slots.get(FULL, ()), node.units, strict=False):
            letters[slot] = "x" if slot in letters else "f"
            spelled[slot] = unit
    for row in snapshot.rows or ():
        request = index.requests.get(row.request)
        protected, committed = (request.protected_len, request.committed_len) if request else (0, len(row.slots))
        known = tokens.get(row.request, ())
        writes = set(holds[row.request].write_slots) if row.request in holds else set[int]()
        for pos, slot in enumerate(row.slots):
            if pos >= protected:
                letter = "f" if pos < committed else "w" if slot in writes else "o"
                letters[slot] = "x" if slot in letters else letter
                if pos < len(known):
                    spelled.setdefault(slot, known[pos])
    complaints = {slot: f"slot {slot} holds other keys and values than belong there" for slot in sorted(spoiled)}
    if all_seen:
        complaints |= _illegal_writes(owners, holds, page_size)
    letters |= dict.fromkeys(complaints, "x")
    locks = _wrong_locks(index)
    cells = {}
    for page in sorted({*range(pool.n_pages + 1), *owners}):
        names = owners.get(page, [])
        slack = "-" if any(owner.kind == "request" for owner in names) else "."
        slots = range(page * page_size, (page + 1) * page_size)
        generations = pool.page_generations or []
        cells[page] = Cell(
            tuple(names) if names or all_seen or page == 0 else None,
            "".join(letters.get(slot, slack) for slot in slots),
            tuple(spelled.get(slot) for slot in slots),
            generations[page] if 0 <= page < len(generations) else None,
            next((complaints[slot] for slot in slots if slot in complaints), locks.get(page, "")),
        )
    return cells


def _wrong_locks(index: Index) -> dict[int, str]:
    """Find pages of the tree whose node does not count the requests that lock it."""
    complaints: dict[int, str] = {}
    locked_by = _locked_by(index)
    if locked_by is None:
        return complaints
    for node in index.snapshot.nodes or ():
        holders = locked_by.get(node.node, [])
        if node.lock_ref != len(holders):
            by = f"locked by {' '.join(holders)}" if holders else "locked by nobody"
            for page in dict.fromkeys(slot // index.page_size for slot in node.slots.get(FULL, ())):
                complaints[page] = f"page {page} is {by}, but its lock count is {node.lock_ref}"
    return complaints


def _locked_by(index: Index) -> dict[int, list[str]] | None:
    """For each node the requests that lock it or a node below it; None where a request's path cannot be seen."""
    if index.snapshot.requests is None or None in index.paths.values():
        return None
    found: dict[int, list[str]] = {}
    for name, path in index.paths.items():
        for node in path or ():
            found.setdefault(node.node, []).append(name)
    return found


def _illegal_writes(owners: dict[int, list[Owner]], holds: Mapping[str, Hold], page_size: int) -> dict[int, str]:
    """Find slots that passes in flight write and must not: two of them, or one that does not own the page."""
    writers: dict[int, list[str]] = {}
    for name, hold in holds.items():
        for slot in hold.write_slots:
            writers.setdefault(slot, []).append(name)
    complaints = {}
    for slot, names in writers.items():
        of_page = owners.get(slot // page_size, [])
        if len(names) > 1:
            complaints[slot] = f"slot {slot} is written by {' and '.join(dict.fromkeys(names))}"
        elif Owner("request", names[0]) not in of_page:
            whose = " and ".join(owner.words for owner in of_page) or "nobody"
            complaints[slot] = f"slot {slot} is written by {names[0]}, and its page belongs to {whose}"
    return complaints


def _rows(index: Index) -> tuple[RowCell, ...] | None:
    """Say who has each row. One that nobody has is lost."""
    snapshot = index.snapshot
    if snapshot.rows is None or snapshot.free_rows is None:
        return None
    owners = row_owners(index)
    cells = []
    for row in sorted({*range(1, snapshot.n_rows + 1), *owners}):
        names = [owner.text.removeprefix("request ") for owner in owners.get(row, [])]
        words = " and ".join(dict.fromkeys(names)) or "nobody"
        twice = " twice" if len(set(names)) == 1 < len(names) else ""
        cells.append(RowCell(row, words + twice, len(names) != 1 or not 1 <= row <= snapshot.n_rows))
    return tuple(cell for cell in cells if cell.wrong or snapshot.n_rows <= MOST_ROWS)


def _requests(
    index: Index, owners: dict[int, list[Owner]], holds: Mapping[str, Hold], spoiled: Collection[int]
) -> dict[str, RequestLine] | None:
    snapshot = index.snapshot
    if snapshot.requests is None and snapshot.rows is None:
        return None
    lines = {}
    for name in dict.fromkeys([*index.requests, *index.rows]):
        request, row = index.requests.get(name), index.rows.get(name)
        slots = tuple(row.slots if row is not None else index.path_slots(name) if request is not None else ())
        lengths = (request.protected_len, request.committed_len, request.allocated_len) if request else None
        writes: range | tuple[int, ...] = ()
        if request is not None and name in holds:
            writes = range(request.committed_len, request.committed_len + len(holds[name].write_slots))
        if request is not None:
            state = request.state
        else:
            state = "not shown" if snapshot.requests is None else "no such request"
        number = request.row if request is not None else row.row if row is not None else None
        wrong: dict[int, str] = {}
        if request is not None and snapshot.nodes is not None:
            wrong = _wrong_positions(index, owners, name, slots, holds.get(name), spoiled)
        complaint = next(iter(wrong.values()), "")
        lines[name] = RequestLine(name, state, number, lengths, slots, tuple(writes), tuple(wrong), complaint)
    return lines


def _wrong_positions(
    index: Index,
    owners: dict[int, list[Owner]],
    name: str,
    slots: tuple[int, ...],
    hold: Hold | None,
    spoiled: Collection[int],
) -> dict[int, str]:
    """Find positions whose slot is not the tree's own for the prefix, or not this request's alone, and say why."""
    request = index.requests[name]
    canonical = index.path_slots(name)
    written = dict(enumerate(hold.write_slots, request.committed_len)) if hold is not None else {}
    wrong = {}
    for pos, slot in enumerate(slots):
        page = slot // index.page_size
        in_tree = pos < request.protected_len
        owner = Owner(*TREE) if in_tree else Owner("request", name)
        names = owners.get(page, [])
        if in_tree and index.paths[name] is not None and canonical[pos : pos + 1] != [slot]:
            held = f"the tree has it in slot {canonical[pos]}" if pos < len(canonical) else "no lock protects it"
            wrong[pos] = f"position {pos}: the row says slot {slot}, but {held}"
        elif names != [owner]:
            whose = " and ".join(one.words for one in names) or "nobody"
            should = f"not to {owner.words}" + (" alone" if owner in names else "")
            wrong[pos] = f"position {pos}: slot {slot} is on page {page}, which belongs to {whose}, {should}"
        elif written.get(pos, slot) != slot:
            wrong[pos] = f"position {pos}: the row says slot {slot}, but the pass writes slot {written[pos]}"
        elif slot in spoiled:
            wrong[pos] = f"position {pos}: slot {slot} holds other keys and values than were computed for it"
    return wrong


def _nodes(index: Index) -> tuple[NodeLine, ...] | None:
    """List the nodes as they are read, parents before children; those that do not hang on the root come last."""
    if index.snapshot.nodes is None:
        return None
    below: dict[int, list[NodeView]] = {}
    for node in index.snapshot.nodes:
        below.setdefault(node.parent, []).append(node)
    locked_by = _locked_by(index)
    lines: list[NodeLine] = []
    done: set[int] = set()

    def line_of(node: NodeView, depth: int, off: bool) -> NodeLine:
        slots = node.slots.get(FULL, [])
        holders = tuple(locked_by.get(node.node, ())) if locked_by is not None else None
        name = namespace_in_words(node.namespace)
        key = slots[0] if slots else -2 - node.node
        return NodeLine(
            key, depth, tuple(node.units), tuple(slots), node.lock_ref, holders, node.hits, node.priority, name, off
        )

    todo = [(node, 0) for node in reversed(_in_order(below.get(ROOT, [])))]
    while todo:
        node, depth = todo.pop()
        if id(node) in done:
            continue
        done.add(id(node))
        lines.append(line_of(node, depth, False))
        todo += [(child, depth + 1) for child in reversed(_in_order(below.get(node.node, [])))]
    lines += [line_of(node, 0, True) for node in _in_order(index.snapshot.nodes) if id(node) not in done]
    return tuple(lines)


def _in_order(nodes: Iterable[NodeView]) -> list[NodeView]:
    """Sort by namespace and tokens, which are the same on both sides; by number only where these are not enough."""
    return sorted(
        nodes,
        key=lambda node: (
            namespace_in_words(node.namespace),
            [unit if isinstance(unit, tuple) else (unit,) for unit in node.units],
            node.node,
        ),
    )


def _sizes(index: Index) -> Iterator[tuple[str, int | None, int | None]]:
    snapshot, pool = index.snapshot, index.full.view
    free = None if pool.free_pages is None else len(pool.free_pages) * index.page_size
    evictable = None if snapshot.nodes is None else index.unlocked_slots()
    protected = None if evictable is None else sum(map(len, index.full.edges)) - evictable
    yield "available slots", pool.available, free
    yield "evictable slots", pool.evictable, evictable
    yield "protected slots", pool.protected, protected
    yield "free rows", None if snapshot.free_rows is None else len(snapshot.free_rows), None


def differences(left: View, right: View, *, of_sides: bool) -> list[Difference]:
    """List what is not the same, pages first; of two sides also generations and sizes."""
    found = []
    for page in sorted({*left.pages, *right.pages}):
        one, two = left.pages.get(page), right.pages.get(page)
        words = [cell.words(page) if cell is not None else "not named" for cell in (one, two)]
        if "not shown" not in words and words[0] != words[1]:
            found.append(Difference("page", page, f"page {page}", *words))
        elif of_sides and one is not None and two is not None:
            sides = one.generation, two.generation
            if None not in sides and sides[0] != sides[1]:
                found.append(Difference("generation", page, f"generation of page {page}", *map(str, sides)))
    if left.rows is not None and right.rows is not None:
        rows = [{cell.row: cell.words for cell in side} for side in (left.rows, right.rows)]
        for row in sorted({*rows[0], *rows[1]}):
            words = [side.get(row, "as it should be") for side in rows]
            if words[0] != words[1]:
                found.append(Difference("row", row, f"row {row}", *words))
    found += _request_differences(left, right)
    if left.nodes is not None and right.nodes is not None:
        found += _node_differences(left.nodes, right.nodes)
    if of_sides:
        for (name, one_says, _), (_, two_says, _) in zip(left.sizes, right.sizes, strict=True):
            if None not in (one_says, two_says) and one_says != two_says:
                found.append(Difference("size", name, name, str(one_says), str(two_says)))
    return found


def _request_differences(left: View, right: View) -> Iterator[Difference]:
    if left.requests is None or right.requests is None:
        return
    for name in dict.fromkeys([*left.requests, *right.requests]):
        one, two = left.requests.get(name), right.requests.get(name)
        if one is None or two is None:
            words = ["not in the cache" if line is None else ", ".join(line.words[:2]) for line in (one, two)]
            yield Difference("request", name, name, *words)
            continue
        if words := _differing(one.words, two.words):
            yield Difference("request", name, name, *words)
        if one.slots != two.slots:
            rows = [runs_in_words(line.slots) for line in (one, two)]
            yield Difference("slots", name, f"slots of {name}'s row", *rows)


def _node_differences(left: Sequence[NodeLine], right: Sequence[NodeLine]) -> Iterator[Difference]:
    sides = [{node.key: node for node in side} for side in (left, right)]
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        one, two = sides[0].get(key), sides[1].get(key)
        node = two or one
        assert node is not None, "a key comes from one of the sides"
        name = f"node with tokens {tokens_in_words(node.units)}"
        if one is None or two is None:
            words = ["not there" if side is None else ", ".join(side.words[:2]) for side in (one, two)]
            yield Difference("node", key, name, *words)
        elif parts := _differing(one.words, two.words):
            yield Difference("node", key, name, *parts)
        elif one.units != two.units:
            yield Difference("node", key, name, *[f"tokens {tokens_in_words(side.units)}" for side in (one, two)])


def _differing(one: Sequence[str], two: Sequence[str]) -> list[str]:
    """Say each side's parts that are not those of the other, or nothing.

    >>> _differing(["RUNNING", "row 1"], ["RUNNING", "row 2"])
    ['row 1', 'row 2']
    """
    if len(one) != len(two):
        return [", ".join(one), ", ".join(two)]
    pairs = [pair for pair in zip(one, two, strict=True) if pair[0] != pair[1]]
    return [", ".join(words) for words in zip(*pairs, strict=True)]


def lines_of(found: Sequence[Difference], *, left: str, right: str) -> list[str]:
    """Say differences, a line each; pages that went from one owner to another together are said together.

    >>> lines_of([Difference("page", 3, "page 3", "free", "r1"), Difference("page", 4, "page 4", "free", "r1")],
    ...          left="", right="now ")
    ['pages 3-4: free, now r1']
    """
    together: dict[tuple[str, str], list[int]] = {}
    for one in found:
        if one.kind == "page" and isinstance(one.key, int):
            together.setdefault((one.left, one.right), []).append(one.key)
    lines = [
        f"page{'s' if len(pages) > 1 else ''} {runs_in_words(pages)}: {left}{was}, {right}{now}"
        for (was, now), pages in together.items()
    ]
    return lines + [f"{one.name}: {left}{one.left}, {right}{one.right}" for one in found if one.kind != "page"]


def runs_of(values: Iterable[int]) -> list[int]:
    """Write values as runs: start and length, start and length.

    >>> runs_of([2, 3, 6, 7, 8])
    [2, 2, 6, 3]
    """
    runs: list[int] = []
    for value in values:
        if runs and value == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [value, 1]
    return runs


def runs_in_words(values: Iterable[int]) -> str:
    """Say values as runs.

    >>> runs_in_words([2, 3, 6])
    '2-3 6'
    """
    runs = runs_of(values)
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return listing(str(start) if n == 1 else f"{start}-{start + n - 1}" for start, n in pairs)


def slots_in_words(slots: Sequence[int]) -> str:
    """Say slots with the word for them.

    >>> slots_in_words([2, 3]), slots_in_words([6])
    ('slots 2-3', 'slot 6')
    """
    return f"slot{'s' if len(slots) != 1 else ''} {runs_in_words(slots)}"


def tokens_in_words(units: Sequence[Unit]) -> str:
    shown = [str(unit) if isinstance(unit, int) else "+".join(map(str, unit)) for unit in units[:MOST_TOKENS]]
    return " ".join(shown) + (" .." if len(units) > MOST_TOKENS else "") or "none"


def namespace_in_words(namespace: Any) -> str:
    """Say a namespace; the plain one has no words."""
    key, salt, ids = namespace
    parts = [f"{what} {value!r}" for what, value in (("key", key), ("salt", salt)) if value is not None]
    return ", ".join([*parts, *([f"content {', '.join(map(repr, ids))}"] if ids else [])])
