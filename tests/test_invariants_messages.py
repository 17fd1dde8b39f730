"""What a violation says: the rule with its numbers first, then the things involved, one a line."""

import pytest

from kvlockstep.invariants import FULL
from kvlockstep.invariants.checks import CHECKS, run_checks, unobserved
from kvlockstep.invariants.violation import Violation


def message(observation):
    with pytest.raises(Violation) as caught:
        run_checks(observation)
    return str(caught.value)


def test_double_count_names_all_owners_and_the_last(hand_built):
    seen = hand_built["release"]
    seen.now.pools[FULL].free_pages.append(8)

    assert message(seen) == (
        "PageOwnedTwice: page 8 has 2 owners, expected 1\n"
        "  owner     free list\n"
        "  owner     request r2, positions [4, 6)\n"
        "  was       request r2, positions [4, 6), before release r1"
    )


def test_leak_names_the_last_owner_and_operation(hand_built):
    seen = hand_built["release"]
    seen.now.pools[FULL].free_pages.remove(7)

    assert message(seen) == (
        "PageLeaked: page 7 has 0 owners, expected 1\n  was       request r1, positions [8, 9), before release r1"
    )


def test_roles_of_a_leak_are_kinds_of_owner(hand_built):
    seen = hand_built["release"]
    seen.now.pools[FULL].free_pages.remove(7)

    with pytest.raises(Violation) as caught:
        run_checks(seen)

    assert caught.value.roles == ("nobody", "was request")


def test_stale_row_names_slots_and_their_owners(hand_built):
    seen = hand_built["checkpoint"]
    seen.now.rows[0].slots[6:8] = [14, 15]

    assert message(seen) == (
        "RowOffCanonicalPath: row 1 of request r1 at position 6: expected slot 12, got 14\n"
        "  protected positions [0, 8)\n"
        "  anchor    node 5 (tokens 9 10)\n"
        "  slot 12   page 6, node 5 (tokens 9 10), positions [6, 8)\n"
        "  slot 14   page 7, request r1, positions [8, 9)"
    )


def test_wrong_content_says_whose_it_is(hand_built):
    seen = hand_built["commit"]
    expected, found = seen.reads[1].expected[5], seen.reads[0].expected[7]
    seen.reads[1].got[5] = found

    assert message(seen) == (
        "ContentWrong: request r3 reads 1 of 6 positions wrong, expected 0\n"
        "  positions 5\n"
        f"  expected  {expected:#010x} at position 5 of row 3\n"
        f"  got       {found:#010x}, which is position 7 of request r1\n"
        "  slot 21   page 10, request r3, positions [4, 6)"
    )


def test_broken_promise_says_asked_and_available(hand_built):
    seen = hand_built["refused"]
    seen.n = 4

    assert message(seen) == (
        "AllocPromiseBroken: OutOfPages for 4 pages (8 slots), expected success with 4 free and 4 evictable slots\n"
        "  refused   alloc r3"
    )


def test_refusal_for_another_reason_breaks_no_promise(hand_built):
    seen = hand_built["refused"]
    seen.n = -1

    run_checks(seen)


def test_facts_line_up_under_a_long_name():
    violation = Violation("one rule", [("owner", "node 3"), ("sglang:radix", "page 4")])

    assert str(violation) == "Violation: one rule\n  owner        node 3\n  sglang:radix page 4"


def test_checks_run_in_the_order_of_the_charter():
    laws = [check.law for check in CHECKS]

    assert laws[: laws.index(9)] == sorted(laws[: laws.index(9)])
    assert [law for law in laws if law != 9] == sorted(law for law in laws if law != 9)
    assert set(laws) == set(range(1, 13))


def test_check_claims_one_sentence():
    claims = [check.claim for check in CHECKS]

    assert [claim for claim in claims if not claim.endswith(".")] == []
    assert len(set(claims)) == len(claims)


def test_everything_is_observed_on_a_full_snapshot(hand_built):
    assert unobserved(hand_built["commit"].now) == []


@pytest.mark.parametrize(
    ("part", "laws"),
    [
        ("requests", {1, 2, 3, 4, 5, 6, 9, 10, 11, 12}),
        ("rows", {1, 2, 3, 4, 6, 9, 11}),
        ("free_rows", {1, 9}),
        ("nodes", {1, 2, 3, 5, 6, 7, 9, 10, 11, 12}),
        ("evictable_nodes", {7}),
        ("root_lock_ref", {5}),
        ("max_context_len", {4}),
        ("row_generations", {11}),
    ],
)
def test_hidden_part_skips_its_checks_and_no_others_fire(hand_built, part, laws):
    for seen in hand_built.values():
        setattr(seen.now, part, None)
        setattr(seen.before, part, None)

        assert {check.law for check in unobserved(seen.now)} == laws
        run_checks(seen)


@pytest.mark.parametrize(
    ("part", "laws"),
    [
        ("free_pages", {1, 3, 6, 9, 11, 12}),
        ("page_generations", {11}),
        ("available", {6}),
        ("evictable", {6}),
        ("protected", {6}),
    ],
)
def test_hidden_part_of_a_pool_skips_its_checks_and_no_others_fire(hand_built, part, laws):
    for seen in hand_built.values():
        setattr(seen.now.pools[FULL], part, None)
        setattr(seen.before.pools[FULL], part, None)

        assert {check.law for check in unobserved(seen.now)} == laws
        run_checks(seen)


def test_harness_without_kv_skips_content_laws(hand_built):
    skipped = unobserved(hand_built["commit"].now, harness_parts=["fingerprints"])

    assert [check.name for check in skipped] == ["reads_return_what_was_computed", "only_the_write_set_changed"]


def test_hidden_anchor_skips_paths_and_locks(hand_built):
    seen = hand_built["commit"]
    seen.now.requests[0].anchor = None

    assert {check.law for check in unobserved(seen.now)} == {2, 5, 10}
    run_checks(seen)


def test_second_pool_is_owned_by_edges_and_free_list(hand_built):
    """A pool that requests hold nothing of, such as a host tier: its pages are counted for themselves."""
    seen = hand_built["match"]
    for snapshot in (seen.before, seen.now):
        pool = snapshot.pools["host"] = type(snapshot.pools[FULL])(3, [1, 3], [0, 0, 0, 0], 4, 2, 0)
        leaf = next(node for node in snapshot.nodes if node.node == 3)
        leaf.slots["host"] = [4, 5]
    run_checks(seen)

    pool.free_pages.pop()

    assert message(seen).startswith("PageLeaked: page 3 has 0 owners, expected 1\n  pool      host")


def test_index_of_one_operation_serves_the_next(hand_built):
    evict, release = hand_built["evict"], hand_built["release"]

    index = run_checks(evict)

    assert run_checks(release, before=index).snapshot is release.now


def test_index_of_another_snapshot_is_refused(hand_built):
    index = run_checks(hand_built["match"])

    with pytest.raises(AssertionError, match="of another snapshot"):
        run_checks(hand_built["release"], before=index)


@pytest.mark.parametrize("order", [1, -1])
def test_peek_follows_every_branch_that_holds_the_prefix(hand_built, order):
    """With pairs as units two siblings may hold the KV of the same token; only one of them leads on."""
    seen = hand_built["peek"]
    seen.before = seen.now = hand_built["evict"].before
    seen.now.nodes = seen.now.nodes[::order]
    nodes = {view.node: view for view in seen.now.nodes}
    for view in nodes.values():
        view.units = [(token, token + 1) for token in view.units]
    for slot, same in zip(nodes[3].slots[FULL], nodes[2].slots[FULL], strict=True):
        seen.written[slot] = seen.written[same]
    path = [slot for node in (1, 2, 5) for slot in nodes[node].slots[FULL]]
    seen.fingerprints["r3"] = [seen.written[slot] for slot in path] + [1, 2]
    seen.matched_len = len(path)

    run_checks(seen)
