"""Refusals of the reference model: which one, in which order, and that nothing changes."""

import pickle

import pytest

from kvlockstep.reference import Cache
from kvlockstep.reference import refusals as no

NS = (None, None, ())


def new_cache(**changes):
    shape = {"page_size": 2, "n_pages": 4, "n_rows": 2, "max_context_len": 8} | changes
    return Cache(**shape)


def matched(cache, name, n_tokens=3):
    cache.submit(name, list(range(n_tokens)), NS)
    cache.match(name)


def in_flight(cache, name, n_tokens=3, n=1, drafts=()):
    matched(cache, name, n_tokens)
    cache.alloc([(name, n, drafts)])


def running(cache, name, n_tokens=3, n=1):
    in_flight(cache, name, n_tokens, n)
    cache.commit(name, n, [])


def assert_refused(cache, kind, refusal, *arguments):
    before = pickle.dumps(cache)

    asked = cache.refusal(kind, *arguments)
    with pytest.raises(refusal) as raised:
        getattr(cache, kind)(*arguments)

    assert type(asked) is refusal
    assert str(asked) == str(raised.value)
    assert pickle.dumps(cache) == before, f"{kind} {arguments} changed something"


ARGUMENTS = {
    "peek": (),
    "match": (),
    "commit": (1, []),
    "checkpoint": (),
    "release": (),
    "abort": (),
    "retract": (False,),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_every_operation_refuses_unknown_name(kind):
    assert_refused(new_cache(), kind, no.UnknownRequest, "r0", *ARGUMENTS[kind])


LEGAL = {
    "NEW": {"peek", "match", "abort"},
    "MATCHED": {"abort", "retract"},
    "RUNNING": {"checkpoint", "release", "abort", "retract"},
    "IN_FLIGHT": {"commit", "abort"},
}


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("state", LEGAL)
def test_state_decides_which_operations_are_done(state, kind):
    cache = new_cache()
    if state == "NEW":
        cache.submit("r0", [1, 2, 3], NS)
    else:
        {"MATCHED": matched, "RUNNING": running, "IN_FLIGHT": in_flight}[state](cache, "r0")
    assert cache.requests["r0"].state == state

    if kind in LEGAL[state]:
        assert cache.refusal(kind, "r0", *ARGUMENTS[kind]) is None
        getattr(cache, kind)("r0", *ARGUMENTS[kind])
    else:
        refusal = no.InFlight if state == "IN_FLIGHT" else no.WrongState
        assert_refused(cache, kind, refusal, "r0", *ARGUMENTS[kind])


@pytest.mark.parametrize("prepare", [matched, in_flight, running])
def test_submit_refuses_live_name(prepare):
    cache = new_cache()
    prepare(cache, "r0")

    assert_refused(cache, "submit", no.WrongState, "r0", [1], NS)
    assert_refused(cache, "submit", no.WrongState, "r0", [], NS)


def test_submit_refuses_waiting_name():
    cache = new_cache()
    cache.submit("r0", [1], NS)

    assert_refused(cache, "submit", no.WrongState, "r0", [1], NS)


def test_submit_checks_tokens():
    cache = new_cache(max_context_len=3)

    assert_refused(cache, "submit", no.BadArgument, "r0", [], NS)
    assert_refused(cache, "submit", no.ContextTooLong, "r0", [1, 2, 3, 4], NS)
    cache.submit("r0", [1, 2, 3], NS)


def test_submit_accepts_name_that_was_used_before():
    cache = new_cache()
    running(cache, "r0")
    cache.release("r0")

    cache.submit("r0", [1], NS)

    assert cache.requests["r0"].state == "NEW"


def test_alloc_looks_at_batch_shape_before_its_items():
    cache = new_cache()

    assert_refused(cache, "alloc", no.EmptyBatch, [])
    assert_refused(cache, "alloc", no.DuplicateInBatch, [("r9", 1, []), ("r9", 1, [])])


def test_alloc_reports_first_bad_item_in_batch_order():
    cache = new_cache()
    in_flight(cache, "r0")
    matched(cache, "r1")
    cache.submit("r2", [1], NS)

    assert_refused(cache, "alloc", no.UnknownRequest, [("r9", 1, []), ("r0", 1, [])])
    assert_refused(cache, "alloc", no.InFlight, [("r0", 1, []), ("r9", 1, [])])
    assert_refused(cache, "alloc", no.WrongState, [("r2", 1, []), ("r0", 1, [])])
    assert_refused(cache, "alloc", no.BadArgument, [("r1", 0, []), ("r9", 1, [])])


@pytest.mark.parametrize(
    ("n", "drafts"),
    [(0, []), (-1, []), (4, []), (1, [7]), (3, [7]), (2, [7, 8])],
    ids=["nothing", "negative", "more than known", "drafts only", "drafts too early", "drafts without a known token"],
)
def test_alloc_refuses_number_that_tokens_do_not_give(n, drafts):
    cache = new_cache()
    matched(cache, "r0", n_tokens=3)

    assert_refused(cache, "alloc", no.BadArgument, [("r0", n, drafts)])


def test_alloc_accepts_drafts_behind_the_last_known_token():
    cache = new_cache()
    matched(cache, "r0", n_tokens=3)

    assert cache.alloc([("r0", 5, [7, 8])]).write_sets == [[2, 3, 4, 5, 6]]


def test_alloc_checks_number_before_context_length():
    cache = new_cache(max_context_len=3)
    matched(cache, "r0", n_tokens=3)

    assert_refused(cache, "alloc", no.ContextTooLong, [("r0", 4, [7])])
    assert_refused(cache, "alloc", no.BadArgument, [("r0", 4, [])])


def test_last_sampled_token_never_gets_kv_when_context_is_full():
    cache = new_cache(max_context_len=3)
    matched(cache, "r0", n_tokens=3)
    cache.alloc([("r0", 3, [])])
    cache.commit("r0", 3, [9])

    assert cache.requests["r0"].tokens == [0, 1, 2, 9]
    assert_refused(cache, "alloc", no.ContextTooLong, [("r0", 1, [])])


def test_alloc_asks_for_rows_before_pages():
    cache = new_cache(n_rows=1, n_pages=1)
    matched(cache, "r0")
    matched(cache, "r1")

    assert_refused(cache, "alloc", no.OutOfRows, [("r0", 3, []), ("r1", 3, [])])
    assert_refused(cache, "alloc", no.OutOfPages, [("r0", 3, [])])
    assert_refused(cache, "alloc", no.BadArgument, [("r0", 3, []), ("r1", 9, [])])


def test_alloc_evicts_nothing_when_pages_do_not_suffice():
    cache = new_cache(n_pages=2)
    running(cache, "r0", n_tokens=3, n=2)
    cache.release("r0")
    cache.submit("r1", [9, 9, 9, 9, 9], NS)
    cache.match("r1")

    assert_refused(cache, "alloc", no.OutOfPages, [("r1", 5, [])])
    assert str(cache.refusal("alloc", [("r1", 5, [])])) == "3 pages asked, 1 free and 1 evictable"


def test_locked_pages_do_not_count_as_evictable():
    cache = new_cache(n_pages=2)
    running(cache, "r0", n_tokens=3, n=2)
    cache.checkpoint("r0")
    cache.submit("r1", [9, 9, 9], NS)
    cache.match("r1")

    assert_refused(cache, "alloc", no.OutOfPages, [("r1", 3, [])])


@pytest.mark.parametrize(
    ("kept", "sampled"),
    [(-1, []), (1, []), (2, []), (6, []), (0, [9]), (3, [9, 9]), (2, [9])],
)
def test_commit_refuses_what_the_pass_cannot_have_given(kept, sampled):
    cache = new_cache()
    in_flight(cache, "r0", n_tokens=3, n=5, drafts=[7, 8])

    assert_refused(cache, "commit", no.BadArgument, "r0", kept, sampled)


def test_commit_refuses_sample_when_prefill_is_not_done():
    cache = new_cache()
    in_flight(cache, "r0", n_tokens=3, n=2)

    assert_refused(cache, "commit", no.BadArgument, "r0", 2, [9])
    cache.commit("r0", 2, [])


def test_commit_of_pending_abort_is_checked_as_usual():
    cache = new_cache()
    in_flight(cache, "r0", n_tokens=3, n=2)
    cache.abort("r0")

    assert_refused(cache, "commit", no.BadArgument, "r0", 1, [])
    cache.commit("r0", 0, [])
    assert "r0" not in cache.requests


@pytest.mark.parametrize("n", [0, -1])
def test_evict_refuses_less_than_one_slot(n):
    assert_refused(new_cache(), "evict", no.BadArgument, n)


@pytest.mark.parametrize("prepare", [matched, in_flight, running])
def test_reset_refuses_while_a_request_is_admitted(prepare):
    cache = new_cache()
    prepare(cache, "r0")

    assert_refused(cache, "reset", no.WrongState)
