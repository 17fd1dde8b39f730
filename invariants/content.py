"""Law 8: a request reads what a pass over its own tokens wrote. Law 10: a match returns committed KV only.

The harness plays the model: a fingerprint stands for the namespace and all tokens up to a position,
so that one compare sees aliasing, a stale row, a wrong canonical copy, a swapped layer, sharing
across namespaces, a premature publication and a late write alike.

Not verified here: positions that are not committed, rows that were not read this time, collisions
of 32-bit fingerprints, and the difference between a slot that was written and one whose pass was
thrown away afterwards (its bytes are right all the same).
"""

from kvlockstep.invariants.index import Index, Seen
from kvlockstep.invariants.owners import kinds, listing, operation, page_owners, slot_facts
from kvlockstep.invariants.snapshot import FULL, ROOT, NodeView, Observation, Read
from kvlockstep.invariants.violation import Violation


class ContentWrong(Violation):
    """A request reads through its row what no pass over its own tokens wrote."""


class MatchTooLong(Violation):
    """A match is no whole pages, or leaves no token to compute."""


class MatchedUncommitted(Violation):
    """A match returned slots that do not hold the KV of the request's own prefix."""


def reads_return_what_was_computed(seen: Seen) -> None:
    """Each committed position reads back the fingerprint of its own namespace and tokens."""
    for read in seen.observation.reads:
        if read.expected != read.got:
            if len(read.expected) != len(read.got):
                raise ContentWrong(
                    f"request {read.request} reads {len(read.got)} positions, expected {len(read.expected)}",
                    roles=("length",),
                )
            wrong = [pos for pos, value in enumerate(read.expected) if value != read.got[pos]]
            pos = wrong[0]
            slot = _slot_read(seen.now, read, pos)
            found = _whose(seen.observation, read.got[pos])
            raise ContentWrong(
                f"request {read.request} reads {len(wrong)} of {len(read.expected)} positions wrong, expected 0",
                [
                    ("positions", listing(wrong)),
                    ("expected", f"{read.expected[pos]:#010x} at position {pos} of row {read.row}"),
                    ("got", f"{read.got[pos]:#010x}, {found}"),
                    *([] if slot is None else slot_facts(seen.now, slot)),
                ],
                kinds([] if slot is None else page_owners(seen.now).get(slot // seen.now.page_size, [])),
            )


def _slot_read(index: Index, read: Read, pos: int) -> int | None:
    row = index.rows.get(read.request)
    return row.slots[pos] if row is not None and pos < len(row.slots) else None


def _whose(observation: Observation, fingerprint: int) -> str:
    """Say where else a fingerprint belongs, as far as this observation knows."""
    of_requests = {read.request: read.expected for read in observation.reads} | observation.fingerprints
    for request, fingerprints in of_requests.items():
        if fingerprint in fingerprints:
            return f"which is position {fingerprints.index(fingerprint)} of request {request}"
    slots = [slot for slot, value in observation.written.items() if value == fingerprint]
    return f"which was written to slot {listing(slots)}" if slots else "which was never written"


def match_leaves_a_token_to_compute(seen: Seen) -> None:
    """A match is whole pages of the units of ``tokens[:-1]``."""
    observation, page_size = seen.observation, seen.now.page_size
    if observation.matched_len is None:
        return
    name = observation.requests[0]
    n_tokens = len(observation.fingerprints[name])
    pairs = observation.key_units == "bigram"
    longest = max(0, n_tokens - (2 if pairs else 1)) // page_size * page_size
    if observation.matched_len % page_size or not 0 <= observation.matched_len <= longest:
        raise MatchTooLong(
            f"{observation.kind} of request {name} gave {observation.matched_len} positions, "
            f"expected a multiple of {page_size} up to {longest}",
            [("tokens", str(n_tokens)), ("units", "pairs" if pairs else "tokens")],
            ("tree",),
        )


def match_returns_committed_prefix(seen: Seen) -> None:
    """The slots on the matched path hold the KV of the request's own prefix."""
    observation = seen.observation
    if observation.kind != "match" or not observation.matched_len:
        return
    name, matched_len = observation.requests[0], observation.matched_len
    slots = seen.now.path_slots(name)[:matched_len]
    expected = observation.fingerprints[name][:matched_len]
    got = [observation.written.get(slot) for slot in slots]
    if got != expected:
        pos = next((pos for pos, value in enumerate(got) if value != expected[pos]), len(got))
        value = got[pos] if pos < len(got) else None
        raise MatchedUncommitted(
            f"match of request {name} gave {matched_len} positions, expected at most {pos}, whose KV is its own",
            [
                ("expected", f"{expected[pos]:#010x} at position {pos}"),
                ("got", "nothing written" if value is None else f"{value:#010x}, {_whose(observation, value)}"),
                *(slot_facts(seen.now, slots[pos]) if pos < len(slots) else []),
            ],
            ("tree", "never written" if value is None else "other content"),
        )


def peek_finds_a_committed_prefix(seen: Seen) -> None:
    """Some path of the tree holds the KV of the request's own prefix as far as ``peek`` says."""
    observation = seen.observation
    if observation.kind != "peek" or not observation.matched_len:
        return
    name = observation.requests[0]
    found = _longest_own_prefix(seen, observation.fingerprints[name])
    if observation.matched_len > found:
        raise MatchedUncommitted(
            f"peek of request {name} gave {observation.matched_len} positions, "
            f"expected at most {found}, whose KV is its own",
            [("after", operation(observation))],
            ("tree",),
        )


def _longest_own_prefix(seen: Seen, fingerprints: list[int]) -> int:
    """Positions from the root down whose slots hold ``fingerprints``, in whole pages.

    Every branch that fits is followed: with pairs as units, (a, b) and (a, c) both hold the KV of a.
    """
    page_size, written = seen.now.page_size, seen.observation.written
    children: dict[int, list[NodeView]] = {}
    for node in seen.now.nodes.values():
        children.setdefault(node.parent, []).append(node)
    longest = 0
    todo = [(child, 0) for child in children.get(ROOT, [])]
    while todo:
        node, start = todo.pop()
        slots = node.slots.get(FULL, [])
        expected = fingerprints[start : start + len(slots)]
        same = next((i for i, slot in enumerate(slots) if expected[i : i + 1] != [written.get(slot)]), len(slots))
        longest = max(longest, start + same // page_size * page_size)
        if slots and same == len(slots):
            todo += [(child, start + same) for child in children.get(node.node, [])]
    return longest
