"""The comparison of two snapshots: every difference is found, in both directions, and nothing else is one."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvlockstep.invariants import FULL, ROOT, Snapshot
from kvlockstep.invariants.agreement import (
    AgeOrderDiffers,
    ChoiceIllegal,
    FreeListsDiffer,
    GenerationsDiffer,
    OutcomeDiffers,
    RequestsDiffer,
    RowsDiffer,
    SizesDiffer,
    TreeDiffers,
    compare,
)
from kvlockstep.invariants.violation import Divergence

SIDES = ("hand-built", "reference", "gpu_impl")


@dataclass(frozen=True)
class Difference:
    """One edit of a snapshot and the divergence that names it."""

    divergence: type[Divergence]
    edit: Callable[[Snapshot], None]

    @property
    def name(self) -> str:
        return self.edit.__name__


DIFFERENCES: list[Difference] = []


def is_named(divergence: type[Divergence]) -> Callable[..., Callable[[Snapshot], None]]:
    """Enter an edit in the table."""

    def enter(edit: Callable[[Snapshot], None]) -> Callable[[Snapshot], None]:
        DIFFERENCES.append(Difference(divergence, edit))
        return edit

    return enter


@is_named(RequestsDiffer)
def state(snapshot):
    snapshot.requests[0].state = "MATCHED"


@is_named(RequestsDiffer)
def protected_length(snapshot):
    snapshot.requests[0].protected_len += 2


@is_named(RequestsDiffer)
def committed_length(snapshot):
    snapshot.requests[0].committed_len -= 1


@is_named(RequestsDiffer)
def allocated_length(snapshot):
    snapshot.requests[0].allocated_len += 1


@is_named(RequestsDiffer)
def row_of_a_request(snapshot):
    snapshot.requests[0].row = 4


@is_named(RequestsDiffer)
def anchor(snapshot):
    snapshot.requests[0].anchor = ROOT


@is_named(RequestsDiffer)
def one_request_is_missing(snapshot):
    snapshot.requests.pop()


@is_named(RequestsDiffer)
def one_request_stands_twice(snapshot):
    snapshot.requests.append(copy.copy(snapshot.requests[0]))


@is_named(RowsDiffer)
def slots_of_a_row(snapshot):
    snapshot.rows[0].slots[-1] += 1


@is_named(RowsDiffer)
def row_is_longer(snapshot):
    snapshot.rows[0].slots.append(25)


@is_named(RowsDiffer)
def holder_of_a_row(snapshot):
    snapshot.rows[0].request = "r9"


@is_named(RowsDiffer)
def one_row_is_missing(snapshot):
    snapshot.rows.pop()


@is_named(FreeListsDiffer)
def one_page_is_not_free(snapshot):
    snapshot.pools[FULL].free_pages.pop()


@is_named(FreeListsDiffer)
def one_page_is_free_twice(snapshot):
    snapshot.pools[FULL].free_pages.append(snapshot.pools[FULL].free_pages[0])


@is_named(FreeListsDiffer)
def another_page_is_free(snapshot):
    snapshot.pools[FULL].free_pages[0] = 99


@is_named(FreeListsDiffer)
def one_row_is_not_free(snapshot):
    snapshot.free_rows.pop()


@is_named(TreeDiffers)
def lock_count(snapshot):
    snapshot.nodes[0].lock_ref += 1


@is_named(TreeDiffers)
def hits(snapshot):
    snapshot.nodes[0].hits += 1


@is_named(TreeDiffers)
def priority(snapshot):
    snapshot.nodes[0].priority += 1


@is_named(TreeDiffers)
def units(snapshot):
    snapshot.nodes[0].units = [99, *snapshot.nodes[0].units[1:]]


@is_named(TreeDiffers)
def slots_of_an_edge(snapshot):
    snapshot.nodes[0].slots[FULL][-1] += 1


@is_named(TreeDiffers)
def namespace(snapshot):
    snapshot.nodes[0].namespace = ("lora-a", "", ())


@is_named(TreeDiffers)
def parent(snapshot):
    child = next(node for node in snapshot.nodes if node.parent != ROOT)
    child.parent = ROOT


@is_named(TreeDiffers)
def one_leaf_is_missing(snapshot):
    inner = {node.parent for node in snapshot.nodes} | {request.anchor for request in snapshot.requests}
    snapshot.nodes.remove(next(node for node in snapshot.nodes if node.node not in inner))


@is_named(TreeDiffers)
def one_node_stands_twice(snapshot):
    snapshot.nodes.append(snapshot.nodes[0])


@is_named(AgeOrderDiffers)
def order_of_stamps(snapshot):
    oldest = min(snapshot.nodes, key=lambda node: node.stamp)
    oldest.stamp = max(node.stamp for node in snapshot.nodes) + 1


@is_named(AgeOrderDiffers)
def one_of_two_equal_stamps(snapshot):
    newest = max(snapshot.nodes, key=lambda node: node.stamp)
    next_newest = max((node for node in snapshot.nodes if node.stamp != newest.stamp), key=lambda node: node.stamp)
    newest.stamp = next_newest.stamp


@is_named(AgeOrderDiffers)
def order_of_creation(snapshot):
    oldest = min(snapshot.nodes, key=lambda node: node.created)
    oldest.created = max(node.created for node in snapshot.nodes) + 1


@is_named(GenerationsDiffer)
def generation_of_a_page(snapshot):
    snapshot.pools[FULL].page_generations[3] += 1


@is_named(GenerationsDiffer)
def generation_of_a_row(snapshot):
    snapshot.row_generations[1] += 1


@is_named(SizesDiffer)
def available(snapshot):
    snapshot.pools[FULL].available += 2


@is_named(SizesDiffer)
def evictable(snapshot):
    snapshot.pools[FULL].evictable += 2


@is_named(SizesDiffer)
def protected(snapshot):
    snapshot.pools[FULL].protected += 2


@is_named(SizesDiffer)
def pages_of_the_pool(snapshot):
    snapshot.pools[FULL].n_pages += 1


def hide(snapshot, *parts):
    """Take parts out of sight."""
    for part in parts:
        setattr(snapshot, part, None)


@pytest.mark.parametrize("turned", [False, True], ids=["in_the_target", "in_the_model"])
@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: f"{d.divergence.__name__}_fires_on_{d.name}")
@pytest.mark.parametrize("side", SIDES)
def test_comparison(told, side, difference, turned):
    honest = told(side)["commit"].now
    edited = copy.deepcopy(honest)

    difference.edit(edited)

    with pytest.raises(Divergence) as caught:
        compare(*((edited, honest) if turned else (honest, edited)))
    assert type(caught.value) is difference.divergence, str(caught.value)
    assert caught.value.roles


def test_every_divergence_of_the_comparison_has_a_difference():
    raised_by_the_lockstep = {OutcomeDiffers, ChoiceIllegal}
    defined = {kind for kind in Divergence.__subclasses__() if kind.__module__ == compare.__module__}

    assert defined - raised_by_the_lockstep == {difference.divergence for difference in DIFFERENCES}


@pytest.mark.parametrize("side", SIDES)
def test_snapshots_of_one_state_agree(told, side):
    for observation in told(side).values():
        compare(observation.now, copy.deepcopy(observation.now))


def test_other_ids_ticks_and_orders_agree(hand_built):
    model = hand_built["commit"].now
    now = copy.deepcopy(model)

    for node in now.nodes:
        node.node += 100
        node.parent += 100 if node.parent != ROOT else 0
        node.stamp = node.stamp * 3 + 7
        node.created = node.created * 2
        node.units = tuple(node.units)
    for request in now.requests:
        request.anchor += 100
    for part in (now.nodes, now.requests, now.rows, now.free_rows, now.pools[FULL].free_pages):
        part.reverse()

    compare(model, now)


@pytest.mark.parametrize(
    "difference", [d for d in DIFFERENCES if d.name != "pages_of_the_pool"], ids=lambda difference: difference.name
)
def test_parts_out_of_sight_are_not_compared(hand_built, difference):
    model = hand_built["commit"].now
    now = copy.deepcopy(model)
    difference.edit(now)

    hide(now, "requests", "rows", "free_rows", "nodes", "row_generations")
    pool = now.pools[FULL]
    pool.free_pages = pool.page_generations = pool.available = pool.evictable = pool.protected = None

    compare(model, now)


@pytest.mark.parametrize("what", ["stamp", "created", "hits", "priority"])
def test_what_a_node_hides_is_not_compared(hand_built, what):
    model = hand_built["commit"].now
    now = copy.deepcopy(model)

    for number, node in enumerate(now.nodes):
        setattr(node, what, None if number == 0 else 77 - number)

    compare(model, now)


def test_message_shows_only_what_differs(hand_built):
    model = hand_built["commit"].now
    now = copy.deepcopy(model)
    now.nodes[0].lock_ref = 2
    now.nodes[0].hits = 5

    with pytest.raises(TreeDiffers) as caught:
        compare(model, now, "reference", "gpu_impl")

    assert str(caught.value) == (
        "TreeDiffers: the node whose edge starts at slot 2 differs in lock_ref hits\n"
        "  reference node 1 (tokens 1 2 3 4): lock_ref 3, hits 2\n"
        "  gpu_impl  node 1 (tokens 1 2 3 4): lock_ref 2, hits 5"
    )


def test_message_names_both_ages(hand_built):
    model = hand_built["commit"].now
    now = copy.deepcopy(model)
    order_of_stamps(now)

    with pytest.raises(AgeOrderDiffers) as caught:
        compare(model, now)

    assert str(caught.value) == (
        "AgeOrderDiffers: nodes are in a different order by stamp\n"
        "  reference oldest first, by first slot: 8 10 6 2\n"
        "  target    oldest first, by first slot: 10 6 2 8"
    )
