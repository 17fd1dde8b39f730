"""Says in plain words what went wrong and what follows: one function a class of violation.

A function looks at the cache before and after the operation again, so that the sentence names the requests and pages
of this very failure. Where it does not find them, as on a target that shows little, it still says what such a failure
means. The numbers of the check stay in the text of the violation; these sentences do not repeat them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvlockstep.fuzz import sanitizer
from kvlockstep.fuzz.lockstep import TargetRaised
from kvlockstep.fuzz.show.view import FREE, TREE, Owner, namespace_in_words, owners_of, runs_in_words, slots_in_words
from kvlockstep.fuzz.ward import Died, Hung, OutOfMemory
from kvlockstep.invariants import (
    FULL,
    Observation,
    Snapshot,
    Violation,
    agreement,
    content,
    in_flight,
    lengths,
    locks,
    ownership,
    paths,
    promises,
    sizes,
    tree_shape,
    writes,
)
from kvlockstep.invariants.index import Index
from kvlockstep.invariants.owners import plural, row_owners

Owners = dict[int, list[Owner]]


@dataclass(frozen=True, slots=True)
class Case:
    """A violation, and where it was found."""

    violation: Violation
    op: str  # in words
    before: Snapshot
    now: Snapshot
    seen: Observation | None

    @property
    def owners(self) -> Owners:
        return owners_of(self.now)

    @property
    def owners_before(self) -> Owners:
        return owners_of(self.before)

    @property
    def index(self) -> Index:
        return Index(self.now)


def sentence_of(case: Case) -> str:
    """Explain a violation to someone who knows caches and not this project."""
    return SENTENCES[type(case.violation)](case)


def _whose(owners: list[Owner]) -> str:
    """Say whose a page is: ``r1's``, ``the tree's``, ``free``, ``nobody's``."""
    words = [owner.name + "'s" if owner.kind == "request" else _WHOSE[owner.kind] for owner in dict.fromkeys(owners)]
    return " and ".join(words) or "nobody's"


_WHOSE = {"free": "free", "tree": "the tree's"}


# Law 1: pages and rows


def _page_out_of_range(case: Case) -> str:
    n_pages = case.now.pools[FULL].n_pages
    outside = [page for page in case.owners if not 0 <= page <= n_pages]
    named = f"page {outside[0]}" if outside else "a page"
    return (
        f"The cache names {named}, but the pool ends at page {n_pages}: whoever writes there writes into other memory."
    )


def _page_owned_twice(case: Case) -> str:
    return f"{_two_owners(case)}{_likewise(case)}{_lost_meanwhile(case)}"


def _likewise(case: Case) -> str:
    """Name the other pages with the same two owners."""
    shared = [(page, set(names)) for page, names in sorted(case.owners.items()) if page != 0 and len(names) > 1]
    others = [page for page, names in shared[1:] if names == shared[0][1]]
    if not others:
        return ""
    return f" It is the same with page{'s' if len(others) > 1 else ''} {runs_in_words(others)}."


def _lost_meanwhile(case: Case) -> str:
    """Name the pages that lost their owner in the same operation: often another was given back in their place."""
    owners, before = case.owners, case.owners_before
    lost = [page for page in sorted(before) if page != 0 and before[page] and page not in owners]
    if not lost:
        return ""
    whose = list(dict.fromkeys(_whose(before[page]) for page in lost))
    until = f" ({whose[0]} until then)" if len(whose) == 1 else ""
    pages = f"Page {lost[0]}" if len(lost) == 1 else f"Pages {runs_in_words(lost)}"
    belong = "belongs" if len(lost) == 1 else "belong"
    freed = any(Owner(*FREE) in names for page, names in owners.items() if page != 0 and len(names) > 1)
    mistaken = ": it seems that the wrong page was given back" if freed else ""
    return f" {pages}{until} now {belong} to nobody{mistaken}."


def _readers_of(case: Case, page: int) -> list[str]:
    """Name the requests whose rows name a slot of this page."""
    size = case.now.page_size
    return [row.request for row in case.now.rows or () if any(slot // size == page for slot in row.slots)]


def _together(names: list[str]) -> str:
    """Say names in one breath: ``r0``, ``r0 and r1``, ``r0, r1 and r2``, ``r0, r1 and 2 more``."""
    if len(names) <= 3:
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{', '.join(names[:2])} and {len(names) - 2} more"


def _two_owners(case: Case) -> str:
    owners = case.owners
    shared = next((page for page in sorted(owners) if page != 0 and len(owners[page]) > 1), None)
    if shared is None:
        return "One page has two owners: what one of them writes, the other reads as its own text."
    names, before = owners[shared], case.owners_before.get(shared, [])
    requests = sorted({owner.name for owner in names if owner.kind == "request"})
    kinds = {owner.kind for owner in names}
    page = f"page {shared}"
    if len(requests) > 1:
        first = next((owner.name for owner in before if owner.kind == "request" and owner.name in requests), None)
        if first is None:
            pair = " and ".join(requests[:2])
            return f"Requests {pair} were both given {page}: each writes over the other's text, and both read nonsense."
        other = next(name for name in requests if name != first)
        return (
            f"Request {first} still reads {page}, but {page} was given to {other}: "
            f"{first} will see {other}'s text, and the other way around."
        )
    if kinds == {"free"}:
        return (
            f"{page.capitalize()} was given back twice and stands twice in the free list: "
            "two requests will be given it at once, and each will see the other's text."
        )
    if kinds == {"tree"}:
        return (
            f"{page.capitalize()} stands in two places of the radix tree: "
            "two different prefixes share its keys and values, and a request that matches one of them reads the other."
        )
    if kinds == {"free", "tree"}:
        readers = _readers_of(case, shared)
        reading = f", and {_together(readers)} still read{'s' if len(readers) == 1 else ''} it" if readers else ""
        victims = _together([*readers[:2], "whoever matches that prefix"])
        return (
            f"{page.capitalize()} went to the free list, but the radix tree still offers it as a cached "
            f"prefix{reading}: the next request that is given {page} writes over it, "
            f"and {victims} will see that request's text."
        )
    if kinds == {"request", "free"}:
        return (
            f"Request {requests[0]} still uses {page}, but {page} is in the free list: "
            f"the next request that is given it writes over {requests[0]}'s text."
        )
    if kinds == {"request", "tree"}:
        return (
            f"Request {requests[0]} holds {page} as its own, but {page} is also in the radix tree: "
            f"what {requests[0]} writes there changes a prefix that others share, "
            "and when either lets go of it, the other still reads it."
        )
    return (
        f"{page.capitalize()} is {_whose(names)} at once: what one of them writes or gives back, the other still reads."
    )


def _page_leaked(case: Case) -> str:
    owners = case.owners
    n_pages = case.now.pools[FULL].n_pages
    lost = [page for page in range(1, n_pages + 1) if page not in owners]
    if not lost:
        return "A page belongs to nobody any more: it can never be handed out again, and the cache shrinks."
    was = _whose(case.owners_before.get(lost[0], []))
    pages, them = (
        (f"Page {lost[0]} belongs", "it") if len(lost) == 1 else (f"Pages {runs_in_words(lost)} belong", "they")
    )
    return (
        f"{pages} to nobody after {case.op} (before: {was}): {them} can never be handed out again. "
        "The cache leaks until it runs out of pages."
    )


def _row_out_of_range(case: Case) -> str:
    return (
        f"The cache names a row that the row table does not have (rows 1 to {case.now.n_rows}): "
        "whoever uses it reads slots from other memory."
    )


def _row_owned_twice(case: Case) -> str:
    owners = row_owners(case.index)
    shared = next((row for row in sorted(owners) if row != 0 and len(owners[row]) > 1), None)
    if shared is None:
        return "One row of the row table has two owners: each overwrites which slots the other reads."
    requests = [owner.text.removeprefix("request ") for owner in owners[shared] if owner.kind == "request"]
    if len(requests) > 1:
        one, other = requests[:2]
        return (
            f"Requests {one} and {other} have the same row {shared}: "
            "each overwrites which slots the other reads, so one of them will see the other's text."
        )
    if requests:
        flying = case.seen is not None and requests[0] in case.seen.holds
        still = "while its forward pass is still running" if flying else "while it still reads through it"
        return (
            f"Row {shared} of request {requests[0]} was given back {still}: the next request gets row {shared}, "
            f"and {requests[0]} goes on with that request's slots."
        )
    return f"Row {shared} stands twice in the free list: two requests will be given it, and read each other's slots."


def _row_leaked(case: Case) -> str:
    owners = row_owners(case.index)
    lost = [row for row in range(1, case.now.n_rows + 1) if row not in owners]
    named = f"Row {lost[0]}" if lost else "A row"
    return (
        f"{named} belongs to nobody after {case.op}: it can never be used again, "
        "and the cache can serve one request fewer at a time."
    )


def _row_holder_wrong(case: Case) -> str:
    for row in case.now.rows or ():
        request = case.index.requests.get(row.request)
        if request is None:
            return (
                f"Row {row.row} is still held for request {row.request}, which the cache no longer has: "
                "nobody will ever give it back."
            )
        if request.row != row.row:
            return (
                f"Row {row.row} is held for request {row.request}, which itself uses row {request.row}: "
                "it reads through the wrong row."
            )
    for request in case.now.requests or ():
        if request.row is None and request.state != "MATCHED":
            return f"Request {request.request} runs without a row: nobody knows which slots it reads and writes."
        if request.row is not None and request.request not in case.index.rows:
            return (
                f"Request {request.request} reads through row {request.row}, which is not held for it: "
                "another request may be given that row at any time."
            )
    return "A row and its request do not name each other: a request may read through another one's row."


# Law 2: the path that a request locks


def _anchor_off_tree(case: Case) -> str:
    off = [name for name, path in case.index.paths.items() if path is None]
    named = f"Request {off[0]}" if off else "A request"
    return (
        f"{named} holds its lock on a node that no longer hangs on the radix tree: "
        "the prefix it reads is protected by nothing and may be overwritten."
    )


def _protected_len_off_path(case: Case) -> str:
    index = case.index
    for name, path in index.paths.items():
        path_len = sum(len(node.units) for node in path or ())
        protected = index.requests[name].protected_len
        if protected != path_len:
            more = protected > path_len
            return f"Request {name} takes its first {plural(protected, 'position')} for the tree's, but " + (
                f"it locks only {path_len}: the rest may be evicted while {name} reads it."
                if more
                else f"it locks {path_len}: for the rest both {name} and the tree count as owner."
            )
    return "A request locks another length of the tree than it reads from it: what is not locked may be evicted."


def _row_off_canonical_path(case: Case) -> str:
    index, owners = case.index, case.owners
    for name, row in index.rows.items():
        slots = index.path_slots(name)
        off = [pos for pos, (slot, got) in enumerate(zip(slots, row.slots, strict=False)) if slot != got]
        if not off and len(row.slots) < len(slots):
            return (
                f"Request {name}'s row ends at position {len(row.slots)}, inside the prefix that the tree holds for it."
            )
        if off:
            got = row.slots[off[0]]
            page = got // case.now.page_size
            whose = owners.get(page, [])
            stands = "that"
            if whose == [Owner(*FREE)]:
                stands = f"what is left there, and what the next request that is given page {page} writes there,"
            elif whose == [Owner(*TREE)]:
                stands = "that other prefix"
            return (
                f"The tree holds position{'s' if len(off) > 1 else ''} {runs_in_words(off)} of request {name} in "
                f"{slots_in_words([slots[pos] for pos in off])}, but {name}'s row says "
                f"{slots_in_words([row.slots[pos] for pos in off])} (page {page}, {_whose(whose)}): "
                f"{name} reads {stands} in place of its own prefix."
            )
    return "A request's row names other slots than the tree does for the same prefix: it reads something else."


# Laws 3 and 9: what is written, and padding


def _write_slot_repeated(case: Case) -> str:
    by_slot: dict[int, list[str]] = {}
    for name, write_set in _write_sets(case):
        for slot in write_set:
            by_slot.setdefault(slot, []).append(name)
    repeated = [slot for slot, names in by_slot.items() if len(names) > 1]
    if not repeated:
        return "Two positions of one batch are to be written to the same slot: one overwrites the other."
    slot = repeated[0]
    names = list(dict.fromkeys(by_slot[slot]))
    if len(names) == 1:
        return (
            f"Request {names[0]} is told to write two of its positions to slot {slot}: "
            "one overwrites the other, so it loses a token of its own text."
        )
    page = slot // case.now.page_size
    told = (
        f"Requests {names[0]} and {names[1]} are told to write to the same slot {slot} "
        f"(page {page}, {_whose(case.owners.get(page, []))}) in one batch: whoever writes last wins"
    )
    for name, other in (names[:2], names[1::-1]):
        own = _slot_in_row(case, name, slot)
        if own is not None and own != slot:
            return (
                f"{told}, so {other} may see {name}'s text. {name}'s row names slot {own} in its place, which {name} "
                "does not write: it reads what was left there."
            )
    return f"{told}, and the other will see its text."


def _slot_in_row(case: Case, name: str, slot: int) -> int | None:
    """Return what the row of a request names at the position for which it is told to write ``slot``."""
    row, request = case.index.rows.get(name), case.index.requests.get(name)
    write_set = dict(_write_sets(case)).get(name, [])
    if row is None or request is None or slot not in write_set:
        return None
    pos = request.committed_len + write_set.index(slot)
    return row.slots[pos] if pos < len(row.slots) else None


def _write_sets(case: Case) -> list[tuple[str, list[int]]]:
    if case.seen is None or case.seen.write_sets is None:
        return []
    return list(zip(case.seen.requests, case.seen.write_sets, strict=False))


def _write_slot_illegal(case: Case) -> str:
    page_size, owners, index = case.now.page_size, case.owners, case.index
    for name, write_set in _write_sets(case):
        row, request = index.rows.get(name), index.requests.get(name)
        start = request.committed_len if request is not None else 0
        named = row.slots[start : start + len(write_set)] if row is not None else []
        for place, slot in enumerate(write_set):
            page = slot // page_size
            whose = "padding" if page == 0 else _whose(owners.get(page, []))
            if owners.get(page, []) != [Owner("request", name)]:
                return (
                    f"Request {name} is told to write its position {start + place} to slot {slot}, but page {page} is "
                    f"{whose}: it writes over what is not its own."
                )
            if named[place : place + 1] != [slot]:
                reads = f"slot {named[place]}" if place < len(named) else "no slot"
                return (
                    f"Request {name} is told to write its position {start + place} to slot {slot}, but its row names "
                    f"{reads} for it: it will read back something else than it wrote."
                )
    return "A request is told to write to slots that are not its own, or that its row does not name."


def _slot_changed(case: Case) -> str:
    seen = case.seen
    expected, got = (seen.pool_expected, seen.pool_got) if seen is not None else (None, None)
    if expected is None or got is None:
        return "A slot was written that the operation had no right to write: whoever reads it sees something else."
    changed = [slot for slot, (one, two) in enumerate(zip(expected, got, strict=False)) if one != two]
    if not changed:
        return "The pool has another number of slots than it was made with."
    page = changed[0] // case.now.page_size
    whose = "padding" if page == 0 else _whose(case.owners.get(page, []))
    return (
        f"Slots {runs_in_words(changed)} changed during {case.op}, which had no right to write them (page {page} is "
        f"{whose}): whoever reads them sees what was never theirs."
    )


def _padding_owned(case: Case) -> str:
    owners = case.owners.get(0, [])
    if owners:
        return (
            f"Page 0 is padding, which every batch scribbles on, but now it is {_whose(owners)}: "
            "whoever uses it will see garbage."
        )
    return "Row 0 is padding for unused places of a batch, but now it is in use: its slots are scribbled on."


# Law 4: lengths and rows


def _lengths_out_of_order(case: Case) -> str:
    page_size = case.now.page_size
    for r in case.now.requests or ():
        if not 0 <= r.protected_len <= r.committed_len <= r.allocated_len or r.protected_len % page_size:
            return (
                f"Request {r.request} says that {r.protected_len} of its positions are the tree's, {r.committed_len} "
                f"are computed and {r.allocated_len} have a slot: each should be at most the next, and the first "
                f"whole pages of {page_size}. It reads positions that were never computed, or never given a slot."
            )
    return "The lengths of a request are out of order: it reads positions that were never computed."


def _row_overrun(case: Case) -> str:
    longest = case.now.max_context_len
    name = next((r.request for r in case.now.requests or () if longest is not None and r.allocated_len > longest), None)
    return (
        f"{f'Request {name}' if name else 'A request'} has more positions than a row has room for ({longest}): "
        "the rest of it stands in the row of another request."
    )


def _row_length_wrong(case: Case) -> str:
    for name, row in case.index.rows.items():
        request = case.index.requests.get(name)
        if request is not None and len(row.slots) != request.allocated_len:
            return (
                f"Request {name} counts on {plural(request.allocated_len, 'position')}, but its row names "
                f"{plural(len(row.slots), 'slot')}: the others read whatever an earlier request left in the row."
            )
    return "A row names another number of slots than its request counts on."


def _tail_repeats_slot(case: Case) -> str:
    for name, row in case.index.rows.items():
        request = case.index.requests.get(name)
        tail = row.slots[request.protected_len if request else 0 :]
        slot = next((slot for i, slot in enumerate(tail) if slot in tail[:i]), None)
        if slot is not None:
            return (
                f"Request {name} has slot {slot} for two of its positions: "
                "the later one overwrites the earlier, so it loses part of its own text."
            )
    return "A request has one slot for two of its positions: the later one overwrites the earlier."


def _page_not_consecutive(case: Case) -> str:
    page_size = case.now.page_size
    for name, row in case.index.rows.items():
        for pos, slot in enumerate(row.slots):
            first = row.slots[pos // page_size * page_size]
            if slot != first // page_size * page_size + pos % page_size:
                return (
                    f"Request {name}'s row names slot {slot} at position {pos}, which is not where its page has that "
                    "position: kernels that go by pages and kernels that go by slots read different text."
                )
    return (
        "A row does not run along its pages: kernels that go by pages and those that go by slots read different text."
    )


# Laws 5, 6, 7: locks, sizes, tree


def _lock_count_wrong(case: Case) -> str:
    index = case.index
    holders: dict[int, list[str]] = {node: [] for node in index.nodes}
    for name, path in index.paths.items():
        for node in path or ():
            holders[node.node].append(name)
    for node in index.nodes.values():
        count = len(holders[node.node])
        if node.lock_ref == count:
            continue
        where = _pages_of(node.slots.get(FULL, []), case.now.page_size)
        if node.lock_ref < count:
            free = "looks free to evict" if node.lock_ref <= 0 else "is locked too few times"
            return (
                f"{_requests(holders[node.node])} {where} of the radix tree, but the node {free} "
                f"(lock count {node.lock_ref}, should be {count}): eviction can hand the page to another request, "
                f"and {holders[node.node][0]} will see that one's text."
            )
        by = {0: "no request locks it", 1: "only 1 request locks it"}.get(count, f"only {count} requests lock it")
        return (
            f"The node with {where} counts {plural(node.lock_ref, 'lock')}, but {by}: "
            "it can never be evicted, and its pages are lost to the cache."
        )
    return "A lock count of the tree is wrong: what is read may be evicted, or what nobody reads never can."


def _requests(names: list[str]) -> str:
    return f"Request {names[0]} still reads" if len(names) == 1 else f"Requests {', '.join(names)} still read"


def _pages_of(slots: list[int], page_size: int) -> str:
    pages = list(dict.fromkeys(slot // page_size for slot in slots))
    return f"page{'s' if len(pages) != 1 else ''} {runs_in_words(pages)}"


def _root_locked(case: Case) -> str:
    return (
        f"The root of the radix tree counts {plural(case.now.root_lock_ref or 0, 'lock')}: it is never locked, so a "
        "lock was taken or not given back where there is no prefix."
    )


def _sizes_do_not_recount(case: Case) -> str:
    pool, index = case.now.pools[FULL], case.index
    unlocked = index.unlocked_slots()
    held = sum(map(len, index.full.edges))
    for name, reported, counted in (
        ("available", pool.available, len(index.full.free) * case.now.page_size),
        ("evictable", pool.evictable, unlocked),
        ("protected", pool.protected, held - unlocked),
    ):
        if reported is not None and reported != counted:
            more = reported > counted
            return f"The cache says it has {reported} {name} slots; counted one by one there are {counted}. " + (
                "The scheduler admits requests for which there is no room."
                if more and name != "protected"
                else "The scheduler turns requests away although there is room."
                if name != "protected"
                else "The counters of the tree have come apart from the tree, and room is misjudged from now on."
            )
    return "The cache reports a size that is not what is there: the scheduler misjudges the room it has."


def _sizes_do_not_add_up(case: Case) -> str:
    few = "too few" in case.violation.roles
    return "Free, cached and held slots together are " + (
        "fewer than the pool: some slots are lost."
        if few
        else "more than the pool: some slots are counted twice, so somebody will be given what is in use."
    )


def _links_disagree(case: Case) -> str:
    return (
        "A node of the radix tree and its parent do not name each other: a lookup finds another tree than an eviction "
        "does, and a prefix may be freed while it can still be found."
    )


def _namespace_mixed(case: Case) -> str:
    return (
        "A node of the radix tree hangs below a node of another namespace (adapter, salt or content): a request may be "
        "given a prefix that was computed for somebody else."
    )


def _edge_malformed(case: Case) -> str:
    return (
        "A node of the radix tree does not have one slot for each of its tokens, in whole pages: whoever matches it "
        "reads slots that do not belong to those tokens."
    )


def _siblings_share_first_page(case: Case) -> str:
    return (
        "Two children of one node of the radix tree begin with the same tokens: the same prefix is kept twice, and "
        "lookups find now one and now the other."
    )


def _page_on_two_edges(case: Case) -> str:
    tree = [page for page in case.index.full.tree_pages if case.index.full.tree_pages.count(page) > 1]
    named = f"Page {tree[0]}" if tree else "A page"
    return (
        f"{named} stands in two places of the radix tree: two different prefixes share its keys and values, and a "
        "request that matches one of them reads the other."
    )


def _evictable_set_wrong(case: Case) -> str:
    index = case.index
    inner = {node.parent for node in index.nodes.values()}
    for number in case.now.evictable_nodes or ():
        node = index.nodes.get(number)
        if node is not None and node.lock_ref:
            where = _pages_of(node.slots.get(FULL, []), case.now.page_size)
            return (
                f"A node that a request still reads ({where}) is offered for eviction: its pages would be overwritten."
            )
        if node is not None and number in inner:
            return "A node with children is offered for eviction: the prefixes below it would lose their beginning."
    return "A node that nobody reads is not offered for eviction: its pages are lost to the cache while it stays."


# Laws 8 and 10: content


def _content_wrong(case: Case) -> str:
    read = next((read for read in case.seen.reads if read.expected != read.got), None) if case.seen else None
    if read is None:
        return "A request reads back other keys and values than were computed for it: it goes on with another text."
    wrong = [pos for pos, (one, two) in enumerate(zip(read.expected, read.got, strict=False)) if one != two]
    if not wrong:
        return f"Request {read.request} reads back another number of positions than it has computed."
    row = case.index.rows.get(read.request)
    pos = wrong[0]
    slot = row.slots[pos] if row is not None and pos < len(row.slots) else None
    where = "" if slot is None else f" (slot {slot}, page {slot // case.now.page_size})"
    whose = _whose_content(case, read.request, read.got[pos])
    return (
        f"Request {read.request} reads position{'s' if len(wrong) > 1 else ''} {runs_in_words(wrong)}{where} and finds "
        f"{whose}, not what was computed for it: it goes on with another text."
    )


def _whose_content(case: Case, name: str, value: int) -> str:
    assert case.seen is not None, "a read was seen"
    of_requests = {read.request: read.expected for read in case.seen.reads} | case.seen.fingerprints
    for other, known in of_requests.items():
        if value in known:
            return (
                f"its own position {known.index(value)}"
                if other == name
                else f"position {known.index(value)} of {other}"
            )
    slot = next((slot for slot, written in case.seen.written.items() if written == value), None)
    return (
        "keys and values of no token that was ever computed (garbage, or half written)"
        if slot is None
        else f"what was written to slot {slot}"
    )


def _match_too_long(case: Case) -> str:
    matched_len = case.seen.matched_len if case.seen is not None else None
    cached = "" if matched_len is None else f" ({plural(matched_len, 'position')})"
    return (
        f"{_subject(case)} was told that more of its prompt is cached{cached} than may be: whole pages, and never its "
        "last token. Without a token to compute there is no forward pass to take the next one from."
    )


def _subject(case: Case) -> str:
    """Name the request that the operation is about."""
    return f"Request {case.seen.requests[0]}" if case.seen is not None and case.seen.requests else "A request"


def _matched_uncommitted(case: Case) -> str:
    never = "never written" in case.violation.roles
    slots = _foreign_slots(case)
    named = f"{slots_in_words(slots)} ({_pages_of(slots, case.now.page_size)})" if slots else "slots"
    if never:
        return (
            f"{_subject(case)} was given {named} as the beginning of its prompt, which no pass has written yet: "
            "it goes on from a prefix that was never computed."
        )
    node = next((node for node in case.index.nodes.values() if slots and slots[0] in node.slots.get(FULL, ())), None)
    kept = "" if node is None else f", and the tree keeps it under {namespace_in_words(node.namespace) or 'no key'}"
    return (
        f"{_subject(case)} was given {named} as the beginning of its prompt, but what stands there was computed for "
        f"another text, adapter or user{kept}: it goes on from a prefix that is not its own."
    )


def _foreign_slots(case: Case) -> list[int]:
    """Return the slots of a match that do not hold the prefix of the request; none where its path cannot be seen."""
    seen = case.seen
    if seen is None or not seen.matched_len or not seen.requests or case.index.paths.get(seen.requests[0]) is None:
        return []
    name = seen.requests[0]
    pairs = zip(case.index.path_slots(name)[: seen.matched_len], seen.fingerprints.get(name, []), strict=False)
    return [slot for slot, own in pairs if seen.written.get(slot) != own]


# Law 11: in flight, generations


def _in_flight_disturbed(case: Case) -> str:
    index, owners = case.index, case.owners
    for name, hold in (case.seen.holds if case.seen is not None else {}).items():
        request, row = index.requests.get(name), index.rows.get(name)
        if request is None or row is None or request.row != hold.row:
            return (
                f"The forward pass of request {name} is still running, but {case.op} took its row {hold.row} away: "
                "the pass writes where the next request of that row reads."
            )
        for page in hold.page_generations:
            names = owners.get(page, [])
            if Owner("request", name) not in names and Owner(*("tree", "")) not in names:
                return (
                    f"The forward pass of request {name} still uses page {page}, but after {case.op} that page is "
                    f"{_whose(names)}: when the pass lands, it writes over what the next owner put there."
                )
        end = request.committed_len + len(hold.write_slots)
        if row.slots[request.committed_len : end] != hold.write_slots:
            return (
                f"The forward pass of request {name} writes to the slots it was given, but {case.op} changed its row "
                f"meanwhile: {name} will look for its new tokens in slots where they are not."
            )
    return (
        f"What a forward pass in flight still uses changed hands during {case.op}: it will write over another's text."
    )


def _generation_lowered(case: Case) -> str:
    return (
        f"A generation went back during {case.op}: someone who remembers a page or row from before takes it for "
        "unchanged, and reads another request's text."
    )


def _generation_not_raised(case: Case) -> str:
    return (
        f"A page or row was given back during {case.op}, but its generation says that nothing happened: someone who "
        "remembers it from before (a copy to the host, a pass in flight) reads the next owner's text."
    )


# Law 12: promises


def _alloc_promise_broken(case: Case) -> str:
    free = len(case.before.pools[FULL].free_pages or ())
    evictable = Index(case.before).unlocked_slots() // case.now.page_size
    return (
        f"The cache refused {case.op} for want of pages, but {plural(free, 'page')} were free and "
        f"{plural(evictable, 'page')} could be evicted: the request waits, perhaps forever, although there is room."
    )


def _evict_promise_broken(case: Case) -> str:
    return (
        f"The cache was asked for room ({case.op}) and freed less than it could have: requests wait or are thrown out "
        "although there are pages that nobody reads."
    )


def _evict_report_wrong(case: Case) -> str:
    return (
        f"The slots that {case.op} reports as evicted are not those that left the radix tree: whoever follows the "
        "report (statistics, a copy on the host) forgets the wrong prefixes."
    )


def _idle_counts_wrong(case: Case) -> str:
    return (
        "No request runs and nothing is cached, but not every page and row is free: the cache has lost some for good."
    )


def _refusal_changed_state(case: Case) -> str:
    refused = case.seen.refused if case.seen is not None else None
    return (
        f"The cache said no to {case.op} ({refused or 'refused'}) and changed something all the same: the scheduler "
        "tries again from a state that it does not know."
    )


# The comparison with the model


def _outcome_differs(case: Case) -> str:
    return (
        f"The cache gave another answer to {case.op} than the reference model, which follows the specification and "
        "started from the same state: the engine goes on from a result that should not be."
    )


def _choice_illegal(case: Case) -> str:
    return (
        f"In {case.op} the cache took a page, a row or a node to evict that was not free to take: somebody else still "
        "relies on it."
    )


def _requests_differ(case: Case) -> str:
    fields = ", ".join(case.violation.roles)
    return (
        f"After {case.op} the cache has a request in another condition than the reference model ({fields or 'which'}): "
        "it will compute too much, too little or the wrong positions."
    )


def _rows_differ(case: Case) -> str:
    return (
        f"After {case.op} a row names other slots than in the reference model: the request will read and write "
        "elsewhere than it should."
    )


def _free_lists_differ(case: Case) -> str:
    return (
        f"After {case.op} other pages or rows are free than in the reference model: "
        "something was given back too early, too late or not at all."
    )


def _tree_differs(case: Case) -> str:
    return (
        f"After {case.op} the radix tree is not that of the reference model: later requests find more or less cached "
        "than they should, or something else is evicted."
    )


def _age_order_differs(case: Case) -> str:
    return (
        f"After {case.op} the nodes of the radix tree are in another order of age than in the reference model: "
        "eviction will throw out what was used last before what was used first."
    )


def _generations_differ(case: Case) -> str:
    return (
        f"After {case.op} a page or row has another generation than in the reference model: it was given back too "
        "often, or not often enough."
    )


def _sizes_differ(case: Case) -> str:
    return f"After {case.op} the cache reports another size than the reference model: the scheduler misjudges its room."


# What ends an operation


def _target_raised(case: Case) -> str:
    return (
        f"The cache raised {', '.join(case.violation.roles) or 'an error'} in {case.op}, "
        "which the specification allows: the engine would go down here."
    )


def _kernel(case: Case) -> str:
    return f"kernel {case.violation.roles[0]}" if case.violation.roles else "a kernel"


def _memory(case: Case) -> str:
    return " ".join(case.violation.roles[1:]) or "a tensor"


def _kernel_out_of_bounds(case: Case) -> str:
    return (
        f"In {case.op} {_kernel(case)} left the memory of {_memory(case)}: on a GPU it would read or overwrite "
        "whatever lies there, or the engine would go down."
    )


def _kernel_write_unpromised(case: Case) -> str:
    return (
        f"In {case.op} {_kernel(case)} wrote to a place of {_memory(case)} that it has no business with: "
        "whoever owns that place reads something else from now on."
    )


def _kernel_store_repeats(case: Case) -> str:
    return (
        f"In {case.op} {_kernel(case)} stored twice to one place of {_memory(case)} in a single store: "
        "which value stays is left to chance."
    )


def _kernel_writes_collide(case: Case) -> str:
    return (
        f"In {case.op} two programs of {_kernel(case)} wrote to one place of {_memory(case)}: "
        "on a GPU they run at the same time, and which value stays is left to chance."
    )


def _kernel_read_races(case: Case) -> str:
    return (
        f"In {case.op} one program of {_kernel(case)} read a place of {_memory(case)} that another one wrote: "
        "on a GPU they run at the same time, and it may see the old value or the new one."
    )


def _kernel_depends_on_order(case: Case) -> str:
    return (
        f"In {case.op} {_kernel(case)} left something else in {_memory(case)} when its programs ran in another order: "
        "on a GPU, which promises no order, the result is left to chance."
    )


def _died(case: Case) -> str:
    return f"The process died in {case.op}: the engine would go down here. What is drawn is the cache before it."


def _hung(case: Case) -> str:
    return (
        f"The cache did not come back from {case.op}: the engine would hang here. What is drawn is the cache before it."
    )


def _out_of_memory(case: Case) -> str:
    return f"The cache took more and more memory in {case.op}. What is drawn is the cache before it."


SENTENCES: dict[type[Violation], Callable[[Case], str]] = {
    ownership.PageOutOfRange: _page_out_of_range,
    ownership.PageOwnedTwice: _page_owned_twice,
    ownership.PageLeaked: _page_leaked,
    ownership.RowOutOfRange: _row_out_of_range,
    ownership.RowOwnedTwice: _row_owned_twice,
    ownership.RowLeaked: _row_leaked,
    ownership.RowHolderWrong: _row_holder_wrong,
    paths.AnchorOffTree: _anchor_off_tree,
    paths.ProtectedLenOffPath: _protected_len_off_path,
    paths.RowOffCanonicalPath: _row_off_canonical_path,
    writes.WriteSlotRepeated: _write_slot_repeated,
    writes.WriteSlotIllegal: _write_slot_illegal,
    writes.SlotChangedOutsideWriteSet: _slot_changed,
    writes.PaddingOwned: _padding_owned,
    lengths.LengthsOutOfOrder: _lengths_out_of_order,
    lengths.RowOverrun: _row_overrun,
    lengths.RowLengthWrong: _row_length_wrong,
    lengths.TailRepeatsSlot: _tail_repeats_slot,
    lengths.PageNotConsecutive: _page_not_consecutive,
    locks.LockCountWrong: _lock_count_wrong,
    locks.RootLocked: _root_locked,
    sizes.SizesDoNotRecount: _sizes_do_not_recount,
    sizes.SizesDoNotAddUp: _sizes_do_not_add_up,
    tree_shape.LinksDisagree: _links_disagree,
    tree_shape.NamespaceMixed: _namespace_mixed,
    tree_shape.EdgeMalformed: _edge_malformed,
    tree_shape.SiblingsShareFirstPage: _siblings_share_first_page,
    tree_shape.PageOnTwoEdges: _page_on_two_edges,
    tree_shape.EvictableSetWrong: _evictable_set_wrong,
    content.ContentWrong: _content_wrong,
    content.MatchTooLong: _match_too_long,
    content.MatchedUncommitted: _matched_uncommitted,
    in_flight.InFlightDisturbed: _in_flight_disturbed,
    in_flight.GenerationLowered: _generation_lowered,
    in_flight.GenerationNotRaised: _generation_not_raised,
    promises.AllocPromiseBroken: _alloc_promise_broken,
    promises.EvictPromiseBroken: _evict_promise_broken,
    promises.EvictReportWrong: _evict_report_wrong,
    promises.IdleCountsWrong: _idle_counts_wrong,
    promises.RefusalChangedState: _refusal_changed_state,
    agreement.OutcomeDiffers: _outcome_differs,
    agreement.ChoiceIllegal: _choice_illegal,
    agreement.RequestsDiffer: _requests_differ,
    agreement.RowsDiffer: _rows_differ,
    agreement.FreeListsDiffer: _free_lists_differ,
    agreement.TreeDiffers: _tree_differs,
    agreement.AgeOrderDiffers: _age_order_differs,
    agreement.GenerationsDiffer: _generations_differ,
    agreement.SizesDiffer: _sizes_differ,
    TargetRaised: _target_raised,
    sanitizer.KernelAccessOutOfBounds: _kernel_out_of_bounds,
    sanitizer.KernelWriteUnpromised: _kernel_write_unpromised,
    sanitizer.KernelStoreRepeats: _kernel_store_repeats,
    sanitizer.KernelWritesCollide: _kernel_writes_collide,
    sanitizer.KernelReadRaces: _kernel_read_races,
    sanitizer.KernelDependsOnOrder: _kernel_depends_on_order,
    Died: _died,
    Hung: _hung,
    OutOfMemory: _out_of_memory,
}
