"""The cache's operations on small numbers: what each one does, and what it refuses with nothing changed."""

from array import array

import pytest
import torch

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import AllocItem
from kvlockstep.fuzz.targets import base
from kvlockstep.fuzz.targets.gpu_impl import make
from kvlockstep.gpu_impl import Extend
from kvlockstep.gpu_impl.refusals import BadArgument
from kvlockstep.invariants import FULL, ROOT

SPACE = (None, None, ())
CONFIG = CacheConfig(page_size=2, n_pages=8, n_rows=3, max_context_len=12)


def build(**changes):
    return make(CacheConfig(**(CONFIG.to_json() | changes)))


def letters(text):
    return [ord(letter) for letter in text]


def admit(target, request, text, namespace=SPACE, priority=0, private=False):
    return target.match(request, letters(text), namespace, priority, private)


def compute(target, request, n, drafts=(), kept=None, sampled=()):
    """One pass of one request; return its write set."""
    write_sets = target.alloc([AllocItem(request, n, tuple(drafts))]).write_sets
    target.commit(request, n if kept is None else kept, list(sampled))
    return write_sets[0]


def publish(target, text, namespace=SPACE, request="publisher"):
    matched = admit(target, request, text, namespace)
    compute(target, request, len(text) - matched)
    target.release(request)


def request_of(target, name):
    return next(request for request in target.snapshot().requests if request.request == name)


def row_of(target, name):
    return next(row for row in target.snapshot().rows if row.request == name)


def sizes(target):
    pool = target.snapshot().pools[FULL]
    return pool.available, pool.evictable, pool.protected


def test_life_of_a_request_from_match_to_release():
    target = build()

    assert admit(target, "r0", "abcde") == 0
    write_set = compute(target, "r0", 5, sampled=[1])
    assert row_of(target, "r0").slots == write_set
    assert sizes(target) == (10, 0, 0)
    target.release("r0")
    assert sizes(target) == (12, 4, 0)
    assert admit(target, "r1", "abcde") == 4
    assert sizes(target) == (12, 0, 4)


def test_match_leaves_one_token_to_compute():
    target = build()
    publish(target, "abcd")

    assert admit(target, "r0", "abcd") == 2
    assert admit(target, "r1", "abcdx") == 4


def test_bigram_match_and_publication_need_one_token_more():
    target = build(key_units="bigram")
    publish(target, "abcd")  # pairs ab bc cd: one page

    assert sizes(target) == (14, 2, 0)
    assert admit(target, "r0", "abc") == 0
    assert admit(target, "r1", "abcd") == 2


def test_alloc_uses_rest_of_last_page_before_a_new_one():
    target = build()
    admit(target, "r0", "abcd")
    first = compute(target, "r0", 3)
    second = compute(target, "r0", 1, sampled=[1])

    assert second[0] == first[2] + 1
    assert len(target.snapshot().pools[FULL].free_pages) == 6


def test_alloc_writes_canonical_prefix_when_the_row_is_taken():
    target = build()
    publish(target, "abcd")
    admit(target, "r0", "abcdef")
    write_set = compute(target, "r0", 2)

    assert row_of(target, "r0").slots == target.snapshot().nodes[0].slots[FULL] + write_set


def test_alloc_reuses_tail_of_rejected_drafts():
    target = build()
    admit(target, "r0", "ab")
    first = compute(target, "r0", 5, drafts=[1, 2, 3], kept=2, sampled=[9])
    second = compute(target, "r0", 3, drafts=[4, 5], kept=2, sampled=[8])

    assert second == first[2:5]
    assert request_of(target, "r0").allocated_len == 5
    assert request_of(target, "r0").committed_len == 4


def test_alloc_evicts_only_what_is_missing_and_reports_it():
    target = build()
    publish(target, "abcd")
    publish(target, "wxyz")
    admit(target, "r0", "1234567890")
    done = target.alloc([AllocItem("r0", 10)])

    assert [len(slots) for slots in done.evicted] == [4]
    assert sizes(target) == (2, 4, 0)
    assert admit(target, "r1", "wxyz!") == 4


def test_alloc_batch_splits_one_write_set_by_request():
    target = build()
    for name, text in (("r0", "abc"), ("r1", "xy"), ("r2", "z")):
        admit(target, name, text)
    done = target.alloc([AllocItem("r1", 2), AllocItem("r0", 3), AllocItem("r2", 1)])

    assert [len(slots) for slots in done.write_sets] == [2, 3, 1]
    assert [row_of(target, name).slots for name in ("r1", "r0", "r2")] == done.write_sets


def test_checkpoint_rewrites_row_to_canonical_slots_and_frees_duplicates():
    target = build()
    admit(target, "r0", "abcde")
    own = compute(target, "r0", 5)
    publish(target, "abcx")
    canonical = next(node for node in target.snapshot().nodes if len(node.slots[FULL]) == 4).slots[FULL]
    target.checkpoint("r0")

    row = row_of(target, "r0").slots
    assert row == canonical[:2] + own[2:]
    assert own[0] // 2 in target.snapshot().pools[FULL].free_pages
    assert request_of(target, "r0").protected_len == 4
    assert target.snapshot().pools[FULL].page_generations[own[0] // 2] == 1


def test_checkpoint_of_a_private_request_changes_nothing():
    target = build()
    admit(target, "r0", "abcd", private=True)
    compute(target, "r0", 4)
    before = target.snapshot()
    target.checkpoint("r0")

    assert target.snapshot() == before


def test_no_sharing_still_prefills_in_chunks_and_frees_everything():
    target = build(prefix_sharing=False)
    admit(target, "r0", "abcdef")
    compute(target, "r0", 3)
    target.checkpoint("r0")
    compute(target, "r0", 3)
    target.release("r0")

    assert sizes(target) == (16, 0, 0)
    assert admit(target, "r1", "abcdef") == 0


def test_abort_in_flight_keeps_everything_until_the_pass_lands():
    target = build()
    publish(target, "abcd")
    admit(target, "r0", "abcdef")
    target.alloc([AllocItem("r0", 2)])
    before = target.snapshot()
    target.abort("r0")
    target.abort("r0")

    assert target.snapshot() == before
    target.commit("r0", 2, [])
    assert target.snapshot().requests == []
    assert sizes(target) == (12, 4, 0)


def test_retract_returns_all_tokens_and_forgets_the_name():
    target = build()
    cache = target._cache
    cache.match("r0", array("q", letters("abc")))
    target.alloc([AllocItem("r0", 5, (7, 8))])
    target.commit("r0", 4, [9])

    assert cache.retract("r0", publish=True).tolist() == [*letters("abc"), 7, 9]
    assert target.snapshot().requests == []
    assert admit(target, "r0", "abc") == 2


def test_request_whose_last_sampled_token_has_no_position_can_be_matched_again():
    target = build(max_context_len=4)
    admit(target, "r0", "abcd")
    compute(target, "r0", 4, sampled=[5])
    target.retract("r0", True)

    assert target.match("r0", [*letters("abcd"), 5], SPACE, 0, False) == 4
    with pytest.raises(base.ContextTooLong):
        target.alloc([AllocItem("r0", 1)])


def test_generations_outlive_reset():
    target = build()
    publish(target, "abcd")
    target.evict(2)
    publish(target, "abcd")
    before = target.snapshot()
    target.reset()

    now = target.snapshot()
    held = {slot // 2 for node in before.nodes for slot in node.slots[FULL]}
    raised = [generation + (page in held) for page, generation in enumerate(before.pools[FULL].page_generations)]
    assert now.pools[FULL].page_generations == raised
    assert now.row_generations == before.row_generations
    assert now.nodes == []
    assert sizes(target) == (16, 0, 0)


def test_idle_request_anchors_at_the_root():
    target = build()
    admit(target, "r0", "abc")

    assert request_of(target, "r0").anchor == ROOT
    assert request_of(target, "r0").row is None


def in_all_states():
    """A cache with a request in each state: matched, running, flying."""
    target = build(n_pages=6)
    publish(target, "ab")
    for name in ("running", "flying"):
        admit(target, name, "abcd")
    compute(target, "running", 1)
    target.alloc([AllocItem("flying", 1)])
    admit(target, "matched", "ab" + "x" * 11)
    return target


MISUSE = [
    ("alloc an empty batch", base.EmptyBatch, lambda t: t.alloc([])),
    ("alloc twice", base.DuplicateInBatch, lambda t: t.alloc([AllocItem("nobody", 1), AllocItem("nobody", 1)])),
    ("alloc unknown", base.UnknownRequest, lambda t: t.alloc([AllocItem("matched", 1), AllocItem("nobody", 1)])),
    ("alloc first bad item", base.BadArgument, lambda t: t.alloc([AllocItem("matched", 0), AllocItem("nobody", 1)])),
    ("alloc in flight", base.InFlight, lambda t: t.alloc([AllocItem("flying", 1)])),
    ("alloc nothing", base.BadArgument, lambda t: t.alloc([AllocItem("running", 0)])),
    ("alloc past the tokens", base.BadArgument, lambda t: t.alloc([AllocItem("running", 2)])),
    ("alloc early drafts", base.BadArgument, lambda t: t.alloc([AllocItem("matched", 2, (1,))])),
    ("alloc past the row", base.ContextTooLong, lambda t: t.alloc([AllocItem("running", 10, (1,) * 9)])),
    ("alloc past the pool", base.OutOfPages, lambda t: t.alloc([AllocItem("matched", 9)])),
    ("commit unknown", base.UnknownRequest, lambda t: t.commit("nobody", 1, [])),
    ("commit matched", base.WrongState, lambda t: t.commit("matched", 1, [])),
    ("commit running", base.WrongState, lambda t: t.commit("running", 1, [])),
    ("commit too much", base.BadArgument, lambda t: t.commit("flying", 2, [])),
    ("commit negative", base.BadArgument, lambda t: t.commit("flying", -1, [])),
    ("commit two sampled", base.BadArgument, lambda t: t.commit("flying", 1, [1, 2])),
    ("commit early sample", base.BadArgument, lambda t: t.commit("flying", 1, [1])),
    ("commit nothing sampled", base.BadArgument, lambda t: t.commit("flying", 0, [1])),
    ("checkpoint matched", base.WrongState, lambda t: t.checkpoint("matched")),
    ("checkpoint in flight", base.InFlight, lambda t: t.checkpoint("flying")),
    ("checkpoint unknown", base.UnknownRequest, lambda t: t.checkpoint("nobody")),
    ("release matched", base.WrongState, lambda t: t.release("matched")),
    ("release in flight", base.InFlight, lambda t: t.release("flying")),
    ("release unknown", base.UnknownRequest, lambda t: t.release("nobody")),
    ("abort unknown", base.UnknownRequest, lambda t: t.abort("nobody")),
    ("retract in flight", base.InFlight, lambda t: t.retract("flying", True)),
    ("retract unknown", base.UnknownRequest, lambda t: t.retract("nobody", False)),
    ("match matched", base.WrongState, lambda t: admit(t, "matched", "")),
    ("match in flight", base.InFlight, lambda t: admit(t, "flying", "ab")),
    ("match nothing", base.BadArgument, lambda t: admit(t, "nobody", "")),
    ("match too much", base.ContextTooLong, lambda t: admit(t, "nobody", "x" * 14)),
    ("peek running", base.WrongState, lambda t: t.peek("running", [1], SPACE, False)),
    ("peek in flight", base.InFlight, lambda t: t.peek("flying", [1], SPACE, False)),
    ("peek nothing", base.BadArgument, lambda t: t.peek("nobody", [], SPACE, False)),
    ("evict nothing", base.BadArgument, lambda t: t.evict(0)),
    ("reset while live", base.WrongState, lambda t: t.reset()),
]


@pytest.mark.parametrize(("refusal", "operation"), [case[1:] for case in MISUSE], ids=[case[0] for case in MISUSE])
def test_misuse_is_refused_with_nothing_changed(refusal, operation):
    target = in_all_states()
    before, kv = target.snapshot(), target.read_slots(range(14))

    with pytest.raises(refusal) as caught:
        operation(target)

    assert type(caught.value) is refusal
    assert target.snapshot() == before
    assert target.read_slots(range(14)) == kv


def test_out_of_rows_comes_before_out_of_pages():
    target = build(n_rows=1, n_pages=2)
    for name in ("r0", "r1"):
        admit(target, name, "abcdefgh")
    before = target.snapshot()

    with pytest.raises(base.OutOfRows):
        target.alloc([AllocItem("r0", 8), AllocItem("r1", 8)])
    with pytest.raises(base.OutOfPages):
        target.alloc([AllocItem("r0", 8)])
    assert target.snapshot() == before


def test_double_release_is_refused_with_nothing_changed():
    target = build()
    admit(target, "r0", "abcd")
    compute(target, "r0", 4)
    target.release("r0")
    before = target.snapshot()

    with pytest.raises(base.UnknownRequest):
        target.release("r0")
    assert target.snapshot() == before


def test_list_of_tokens_is_a_type_error_and_admits_nobody():
    target = build()

    with pytest.raises(TypeError, match="expected an array"):
        target._cache.match("r0", [1, 2, 3])
    assert target.snapshot().requests == []


def running(n=4):
    """Make a cache with a request of ``n`` tokens whose pass is in flight."""
    target = build()
    admit(target, "r0", "abcd"[:n])
    target.alloc([AllocItem("r0", n)])
    return target


@pytest.mark.parametrize(
    ("sampled", "error"),
    [(array("i", [4]), TypeError), ([4], TypeError), (array("q", [1 << 31]), OverflowError)],
    ids=["int32", "list", "too large"],
)
def test_sampled_token_of_another_kind_changes_nothing(sampled, error):
    target = running()
    before = target.snapshot()
    with pytest.raises(error):
        target._cache.commit("r0", 4, sampled)

    assert target.snapshot() == before
    target.commit("r0", 4, (4,))
    target.release("r0")
    assert target.snapshot().requests == []


@pytest.mark.parametrize(
    ("drafts", "error"),
    [(array("i", [4]), TypeError), ([4], TypeError), (array("q", [-(1 << 31) - 1]), OverflowError)],
    ids=["int32", "list", "too small"],
)
def test_draft_of_another_kind_changes_nothing(drafts, error):
    target = running()
    target.commit("r0", 4, (4,))
    before = target.snapshot()
    with pytest.raises(error):
        target._cache.alloc([Extend("r0", 2, drafts)])

    assert target.snapshot() == before


@pytest.mark.parametrize("place", range(5))
def test_token_that_could_not_be_published_admits_nobody(place):
    """Wherever it stands: in a page that is looked up, or in the rest that a later pass computes."""
    target = build(page_size=2)
    tokens = array("q", range(5))
    tokens[place] = 1 << 31
    with pytest.raises(OverflowError):
        target._cache.match("r0", tokens)

    assert target.snapshot().requests == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda slots, k, v: (slots, k.float(), v.float()), "k: .*float32, expected .*float16"),
        (lambda slots, k, v: (slots, k.view(torch.int16), v), "k: .*int16, expected .*float16"),
        (lambda slots, k, v: (slots, k, v[:, :-1]), r"v: \[2, 3, .*expected \[2, 4, "),
        (lambda slots, k, v: (slots, k[..., :1], v), "k: "),
        (lambda slots, k, v: (slots[:-1], k, v), r"expected \[2, 3, "),
        (lambda slots, k, v: (slots.long(), k, v), "slots: torch.int64, expected torch.int32"),
    ],
)
def test_kv_of_another_shape_or_type_is_not_written(change, words):
    target = running(3)
    cache = target._cache
    target.commit("r0", 3, (4,))
    written = cache.alloc([Extend("r0", 1)]).write_set
    slots = torch.cat([written, torch.tensor([1, 2, 3], dtype=torch.int32)])
    layers, _, _, *slot = cache.device.kv_pool.shape
    kv = torch.ones((layers, 4, *slot), dtype=cache.device.kv_pool.dtype)
    before = cache.device.kv_pool.clone()
    with pytest.raises(BadArgument, match=words):
        cache.write_kv(*change(slots, kv, kv))

    assert torch.equal(cache.device.kv_pool, before)


@pytest.mark.parametrize(("row", "length"), [(-1, 1), (99, 1), (1, -1), (1, 1 << 20)])
def test_positions_that_there_are_not_are_not_read(row, length):
    with pytest.raises(BadArgument, match=rf"positions \[0, {length}\) of row {row}"):
        running()._cache.read_kv(row, length)


def test_peek_splits_and_stamps_but_locks_nothing():
    target = build()
    publish(target, "abcd")

    assert target.peek("nobody", letters("abxx"), SPACE, False) == 2
    snapshot = target.snapshot()
    assert snapshot.requests == []
    assert [len(node.units) for node in snapshot.nodes] == [2, 2]
    assert [node.lock_ref for node in snapshot.nodes] == [0, 0]
    assert snapshot.nodes[0].stamp > snapshot.nodes[1].stamp
