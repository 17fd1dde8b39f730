"""The table of live requests that adapters compose, against the reference model: refusals, states, lengths, tokens."""

import random
from collections import Counter

import pytest

from kvlockstep.fuzz.ops import NO_NAMESPACE, AllocItem
from kvlockstep.fuzz.targets.base import (
    REFUSALS,
    BadArgument,
    ContextTooLong,
    DuplicateInBatch,
    EmptyBatch,
    InFlight,
    Refused,
    UnknownRequest,
    WrongState,
)
from kvlockstep.fuzz.targets.requests import ALLOWED_IN, RequestTable
from kvlockstep.reference.cache import Cache
from kvlockstep.reference.state import ALLOWED_STATES

NAMES = ("r0", "r1", "r2", "r3")
MAX_CONTEXT_LEN = 9
KINDS = (*["submit", "match", "alloc", "commit"] * 4, *ALLOWED_STATES, "evict", "reset")
ROOM = ("OutOfRows", "OutOfPages")  # the adapter's to refuse


class Pair:
    """A model and a table, told the same; the table hears of nothing that names a waiting request."""

    def __init__(self, rng, n_pages):
        self.rng = rng
        self.model = Cache(page_size=2, n_pages=n_pages, n_rows=2, max_context_len=MAX_CONTEXT_LEN)
        self.table = RequestTable(MAX_CONTEXT_LEN)
        self.outcomes = Counter()

    def step(self):
        kind = self.rng.choice(KINDS)
        arguments = getattr(self, f"draw_{kind}", self.draw_name)()
        refused = self.model.refusal(kind, *arguments)
        expected = None if refused is None else type(refused).__name__
        unheard = self.is_unheard(kind, arguments)
        if not unheard:
            got = self.told(kind, *arguments)
            assert got == (None if expected in ROOM else expected), kind
            self.outcomes[kind, expected] += 1
        if expected is None:
            value = getattr(self.model, kind)(*arguments)
            if not unheard:
                self.follow(kind, arguments, value)
        self.compare()

    def is_unheard(self, kind, arguments):
        """Tell whether a target is not asked: the operation names a request that waits, or a match an unknown one."""
        if kind in ("evict", "reset"):
            return False
        names = [item[0] for item in arguments[0]] if kind == "alloc" else [arguments[0]]
        states = [self.model.requests[name].state if name in self.model.requests else None for name in names]
        return kind == "submit" or (states == [None] if kind in ("peek", "match") else "NEW" in states)

    def told(self, kind, *arguments):
        """Ask the table as an adapter does; give the name of the refusal."""
        try:
            self.ask(kind, arguments)
        except Refused as refused:
            return type(refused).__name__
        return None

    def ask(self, kind, arguments):
        if kind in ("peek", "match"):
            self.table.refuse_known(arguments[0], kind)
        elif kind == "alloc":
            lives = self.table.batch([AllocItem(name, n, tuple(drafts)) for name, n, drafts in arguments[0]])
            assert [live.request for live in lives] == [name for name, _, _ in arguments[0]]
        elif kind == "commit":
            assert self.table.commit(*arguments).request == arguments[0]
        elif kind == "abort":
            before = self.table.live.get(arguments[0])
            flies = before is not None and before.state == "IN_FLIGHT"
            assert self.table.abort(arguments[0]) is (None if flies else before)
        elif kind == "evict":
            self.table.evict_check(*arguments)
        elif kind == "reset":
            self.table.reset_check()
        else:
            assert self.table.named(arguments[0], kind) is self.table.live[arguments[0]]

    def follow(self, kind, arguments, value):
        """Tell the table what was done, as an adapter does."""
        live = self.table.live.get(arguments[0]) if kind not in ("alloc", "evict", "reset") else None
        if kind == "match":
            request = self.model.requests[arguments[0]]
            facts = (list(request.tokens), request.namespace, request.priority, request.private)
            self.table.matched(arguments[0], *facts, value)
        elif kind == "alloc":
            for name, n, drafts in arguments[0]:
                self.table.launched(self.table.live[name], n, drafts)
        elif kind == "commit" and not live.abort_pending:
            self.table.landed(live, *arguments[1:])
        elif kind in ("commit", "release", "retract") or (kind == "abort" and not live.abort_pending):
            self.table.ended(live)

    def compare(self):
        admitted = {name: r for name, r in self.model.requests.items() if r.state != "NEW"}

        assert self.table.live.keys() == admitted.keys()
        for name, r in admitted.items():
            live = self.table.live[name]
            assert (live.request, live.state, live.abort_pending) == (name, r.state, r.abort_pending)
            assert (live.tokens, live.namespace, live.priority) == (r.tokens, r.namespace, r.priority)
            assert (live.private, live.drafts, live.n) == (r.private, r.drafts, r.in_flight_n)
            assert (live.committed_len, live.allocated_len) == (r.committed_len, r.allocated_len)
            assert (live.uncomputed, live.known_in_flight) == (r.uncomputed, r.known_in_flight)

    # What is asked: mostly what could be done, and everything beside it.

    def draw_name(self):
        return (self.rng.choice(NAMES),)

    def draw_submit(self):
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, MAX_CONTEXT_LEN + 1))]
        namespace = self.rng.choice((NO_NAMESPACE, ("a", None, ())))
        return (self.rng.choice(NAMES), tokens, namespace, self.rng.randrange(3), self.rng.random() < 0.2)

    def draw_retract(self):
        return (self.rng.choice(NAMES), self.rng.random() < 0.5)

    def draw_evict(self):
        return (self.rng.randrange(-1, 5),)

    def draw_reset(self):
        return ()

    def draw_alloc(self):
        names = self.rng.choices(NAMES, k=self.rng.randrange(4)) if self.rng.random() < 0.5 else [self.one_ready()]
        return ([(name, *self.draw_pass(name)) for name in names],)

    def one_ready(self):
        ready = [name for name, live in self.table.live.items() if live.state != "IN_FLIGHT"]
        return self.rng.choice(ready or NAMES)

    def draw_pass(self, name):
        live = self.table.live.get(name)
        known = live.uncomputed if live is not None else 2
        known += self.rng.choice((0, 0, 0, 0, -known, -1, 1))
        drafts = [self.rng.randrange(2) for _ in range(self.rng.choice((0, 0, 0, 1, 2, 3)))]
        return known + len(drafts), drafts

    def draw_commit(self):
        name = self.rng.choice([name for name, live in self.table.live.items() if live.state == "IN_FLIGHT"] or NAMES)
        n = self.table.live[name].n if name in self.table.live else 1
        kept = self.rng.choice((n, n, n, 0, 1, n - 1, n + 1, -1))
        return (name, kept, [1] * self.rng.choice((0, 1, 1, 1, 2)))


@pytest.fixture(scope="module")
def outcomes():
    """Run the pair through many cases; give how often each operation ended how."""
    rng, total = random.Random(7), Counter()
    for case in range(800):
        pair = Pair(rng, n_pages=6 if case % 4 else 40)
        for _ in range(60):
            pair.step()
        total += pair.outcomes
    return total


@pytest.mark.parametrize("kind", [*ALLOWED_STATES, "evict", "reset"])
def test_table_refuses_what_the_model_refuses(outcomes, kind):
    """The comparison is made at every step of the fixture; here, that nothing was left out of it."""
    in_flight = {"peek", "match", "alloc", "checkpoint", "release", "retract"}
    wrong_state = {"peek", "match", "commit", "checkpoint", "release", "reset"}
    expected = {None}
    expected |= {"InFlight"} if kind in in_flight else set()
    expected |= {"WrongState"} if kind in wrong_state else set()
    expected |= {"BadArgument"} if kind in {"alloc", "commit", "evict"} else set()
    expected |= {"UnknownRequest"} if kind not in {"peek", "match", "evict", "reset"} else set()
    expected |= {"EmptyBatch", "DuplicateInBatch", "ContextTooLong", *ROOM} if kind == "alloc" else set()

    assert {refused for asked, refused in outcomes if asked == kind} == expected
    assert min(count for (asked, _), count in outcomes.items() if asked == kind) >= 40


def table_with(**states):
    """Make a table with one request in each state named, of four tokens and none matched."""
    table = RequestTable(MAX_CONTEXT_LEN)
    for name, state in states.items():
        live = table.matched(name, [1, 2, 3, 4], NO_NAMESPACE, 0, False, 0)
        if state != "MATCHED":
            table.launched(live, 4, [])
        if state == "RUNNING":
            table.landed(live, 4, [5])
    return table


BAD_ITEMS = [  # each is refused for its own reason, in the order of precedence
    (AllocItem("nobody", 1), UnknownRequest),
    (AllocItem("flying", 1), InFlight),
    (AllocItem("ready", 0), BadArgument),
    (AllocItem("long", 10, (0,) * 6), ContextTooLong),
]


@pytest.mark.parametrize(("item", "refusal"), BAD_ITEMS, ids=lambda value: getattr(value, "__name__", ""))
def test_first_bad_item_of_a_batch_names_the_refusal(item, refusal):
    """Precedence is item by item: an earlier item that is too long goes before a later one that is unknown."""
    table = table_with(flying="IN_FLIGHT", ready="MATCHED", long="MATCHED", good="MATCHED")
    others = [other for other, _ in BAD_ITEMS if other.request != item.request]

    for other in others:
        with pytest.raises(refusal):
            table.batch([AllocItem("good", 4), item, other])


def test_shape_of_a_batch_goes_before_its_items():
    table = table_with(ready="MATCHED")

    with pytest.raises(DuplicateInBatch):
        table.batch([AllocItem("nobody", 1), AllocItem("ready", 1), AllocItem("ready", 1)])
    with pytest.raises(EmptyBatch):
        table.batch([])


def test_refused_operation_leaves_the_table_as_it_was():
    table = table_with(running="RUNNING", flying="IN_FLIGHT")

    with pytest.raises(WrongState):
        table.commit("running", 1, [])
    with pytest.raises(BadArgument):
        table.commit("flying", 5, [])
    with pytest.raises(InFlight):
        table.named("flying", "release")

    states = {name: (live.state, live.committed_len, live.tokens) for name, live in table.live.items()}
    assert states == {"running": ("RUNNING", 4, [1, 2, 3, 4, 5]), "flying": ("IN_FLIGHT", 0, [1, 2, 3, 4])}


def test_landed_takes_accepted_guesses_and_the_sample():
    table = table_with(r0="RUNNING")
    live = table.named("r0", "alloc")
    table.launched(live, 4, [6, 7, 8])

    table.landed(table.commit("r0", 2, [9]), 2, [9])

    assert (live.tokens, live.committed_len, live.allocated_len) == ([1, 2, 3, 4, 5, 6, 9], 6, 8)
    assert (live.state, live.n, live.drafts) == ("RUNNING", 0, [])


def test_pending_abort_is_for_the_adapter_to_end():
    table = table_with(r0="IN_FLIGHT")

    assert table.abort("r0") is None
    assert table.abort("r0") is None, "a second abort is accepted"
    with pytest.raises(InFlight):
        table.refuse_known("r0")
    live = table.commit("r0", 4, [])
    assert live.abort_pending
    with pytest.raises(AssertionError, match="r0 ends here"):
        table.landed(live, 4, [])

    table.ended(live)
    table.refuse_known("r0")
    table.reset_check()


def test_table_keeps_its_own_copy_of_the_tokens():
    table, tokens = RequestTable(MAX_CONTEXT_LEN), [1, 2]
    live = table.matched("r0", tokens, NO_NAMESPACE, 0, False, 0)
    tokens.append(3)

    assert live.tokens == [1, 2]


def test_every_refusal_but_those_of_room_is_one_of_the_table():
    """What is left to the adapter is named in the module's docstring."""
    import kvlockstep.fuzz.targets.requests as module

    assert {kind.__name__ for kind in REFUSALS} - set(vars(module)) == set(ROOM)
    assert all(name in module.__doc__ for name in ROOM)
    assert {kind for kind, states in ALLOWED_STATES.items() if states != ("NEW",)} == set(ALLOWED_IN)
