"""Law 3: what a forward pass may write. Law 9: nothing else was written, and padding is nobody's.

The write sets are those that ``alloc`` returned, not what the row says at commit. The pool's bytes
are compared as fingerprints, each slot once.

Not verified here: how many positions ``alloc`` was asked for (the comparison with the model), the
order in which K and V of the layers are written, and writes between two commits that were undone.
"""

from itertools import chain

from kvlockstep.invariants.index import Seen
from kvlockstep.invariants.owners import (
    first_repeated,
    kinds,
    listing,
    operation,
    owner_facts,
    page_owners,
    plural,
    row_owners,
    slot_facts,
    span,
)
from kvlockstep.invariants.violation import Violation


class WriteSlotRepeated(Violation):
    """A slot stands twice in the write sets of one batch: two positions would race for it."""


class WriteSlotIllegal(Violation):
    """A write slot that is not the request's own, or not the one its row names."""


class SlotChangedOutsideWriteSet(Violation):
    """A slot holds other bytes than the last pass that may write it left there."""


class PaddingOwned(Violation):
    """Page 0 or row 0 has an owner."""


def no_write_slot_repeats(seen: Seen) -> None:
    """No slot stands twice in the write sets of a batch."""
    write_sets = seen.observation.write_sets or []
    slots = list(chain.from_iterable(write_sets))
    if len(set(slots)) != len(slots):
        slot = first_repeated(slots)
        facts = [
            ("position", f"{pos} of the write set of request {request}")
            for request, write_set in zip(seen.observation.requests, write_sets, strict=True)
            for pos, written in enumerate(write_set)
            if written == slot
        ]
        raise WriteSlotRepeated(
            f"slot {slot} stands {len(facts)} times in the write sets of {operation(seen.observation)}, expected 1",
            facts + slot_facts(seen.now, slot),
            kinds(page_owners(seen.now).get(slot // seen.now.page_size, [])),
        )


def write_sets_are_row_segments(seen: Seen) -> None:
    """Each request of the batch gets one write set: its row's slots from ``committed_len`` on."""
    write_sets = seen.observation.write_sets
    if write_sets is not None and len(write_sets) != len(seen.observation.requests):
        raise WriteSlotIllegal(
            f"{operation(seen.observation)} gave {len(write_sets)} write sets, "
            f"expected {len(seen.observation.requests)}",
            roles=("batch",),
        )
    for name, write_set in zip(seen.observation.requests, seen.observation.write_sets or (), strict=False):
        row, request = seen.now.rows.get(name), seen.now.requests.get(name)
        if row is None or request is None:
            raise WriteSlotIllegal(
                f"request {name} was given a write set and has no row, expected a row", roles=("no row",)
            )
        start = request.committed_len
        named = row.slots[start : start + len(write_set)]
        if write_set != named or start < request.protected_len:
            raise WriteSlotIllegal(
                f"write set of request {name} is not its row at {span(start, start + len(write_set))}",
                [
                    ("expected", listing(named)),
                    ("got", listing(write_set)),
                    ("protected", f"positions {span(0, request.protected_len)}"),
                ],
                ("request", "row"),
            )


def write_slots_belong_to_the_request(seen: Seen) -> None:
    """Every write slot is in range, not padding, and on a page of that request's own tail."""
    page_size = seen.now.page_size
    for name, write_set in zip(seen.observation.requests, seen.observation.write_sets or (), strict=False):
        own = set(seen.now.full.tails.get(name, ()))
        pages = {slot // page_size for slot in write_set}
        wrong = sorted(page for page in pages if page not in own or page == 0)
        if wrong:
            slot = next(slot for slot in write_set if slot // page_size == wrong[0])
            owners = page_owners(seen.now).get(wrong[0], [])
            raise WriteSlotIllegal(
                f"write slot {slot} of request {name} is on page {wrong[0]}, expected a page of its own tail",
                owner_facts(owners) if wrong[0] else [("page 0", "padding")],
                kinds(owners) if wrong[0] else ("padding",),
            )


def only_the_write_set_changed(seen: Seen) -> None:
    """Every slot of the pool holds what the last pass that was allowed to write it left there."""
    expected, got = seen.observation.pool_expected, seen.observation.pool_got
    if expected != got and expected is not None and got is not None:
        if len(expected) != len(got):
            raise SlotChangedOutsideWriteSet(
                f"the pool has {len(got)} slots, expected {len(expected)}", roles=("length",)
            )
        changed = [slot for slot, value in enumerate(got) if value != expected[slot]]
        slot = changed[0]
        owners = page_owners(seen.now).get(slot // seen.now.page_size, [])
        raise SlotChangedOutsideWriteSet(
            f"{plural(len(changed), 'slot')} changed outside the write set of {operation(seen.observation)}, "
            "expected 0",
            [
                ("slots", listing(changed)),
                ("expected", f"{expected[slot]:#010x} in slot {slot}"),
                ("got", f"{got[slot]:#010x}"),
                *slot_facts(seen.now, slot),
            ],
            kinds(owners) if slot >= seen.now.page_size else ("padding",),
        )


def padding_page_is_nobodys(seen: Seen) -> None:
    """Page 0 is not free, on no edge and in no row's tail."""
    for name, pool in seen.now.pools.items():
        if not pool.adds_up:
            owners = page_owners(seen.now, name).get(0, [])
            if owners:
                raise PaddingOwned(
                    f"page 0 is padding and has {plural(len(owners), 'owner')}, expected 0",
                    owner_facts(owners),
                    kinds(owners),
                )


def padding_row_is_nobodys(seen: Seen) -> None:
    """Row 0 is not free and no request holds it."""
    now = seen.observation.now
    if 0 in (now.free_rows or ()) or 0 in [row.row for row in now.rows or ()]:
        owners = row_owners(seen.now)[0]
        raise PaddingOwned(
            f"row 0 is padding and has {plural(len(owners), 'owner')}, expected 0", owner_facts(owners), kinds(owners)
        )
