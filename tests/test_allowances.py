"""Each allowance: declared it is no violation, undeclared it is one, and a fault behind it is still found.

The targets are the reference model with the allowance on; the permissive two, which leave the target a choice,
are played on top of it. What the model itself does with an allowance is in ``test_reference_allowances.py``.
"""

from collections import Counter
from contextlib import contextmanager, suppress

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.ops import Abort, Alloc, AllocItem, Commit, Evict, Match, Peek, Release, Retract, Submit
from kvlockstep.fuzz.replay import run_ops
from kvlockstep.fuzz.targets.base import AllocResult, BadArgument, OutOfPages
from kvlockstep.fuzz.targets.reference import ReferenceTarget, new_cache
from kvlockstep.invariants import Violation
from kvlockstep.invariants.agreement import AgeOrderDiffers, ChoiceIllegal, OutcomeDiffers, RequestsDiffer, TreeDiffers
from kvlockstep.reference.allowances import ALLOWANCES
from kvlockstep.reference.eviction import edge_slots
from kvlockstep.reference.tree import Tree

CONFIG = CacheConfig(page_size=2, n_pages=6, n_rows=3, max_context_len=8)


class Allowed(ReferenceTarget):
    """The model with what ``makes`` names. Of a request that waits it remembers how long the prompt was."""

    makes = frozenset()
    allowances = frozenset()
    tree_class = Tree

    def __init__(self, config):
        super().__init__(config)
        self.cache = new_cache(config, self.makes)
        self.prompts = {}
        self._plant()

    def _plant(self):
        self.cache.tree = self.tree_class(self.makes)

    def reset(self):
        super().reset()
        self._plant()

    @contextmanager
    def _known(self, request, *arguments):
        with super()._known(request, *arguments):
            if request in self.prompts:
                self.cache.requests[request].prompt_len = self.prompts[request]
            yield

    def match(self, request, *arguments):
        matched_len = super().match(request, *arguments)
        self.prompts.pop(request, None)
        return matched_len

    def retract(self, request, publish):
        r = self.cache.requests.get(request)
        super().retract(request, publish)
        self.prompts[request] = r.prompt_len

    def forget(self, request):
        self.prompts.pop(request, None)


class Ordered(Allowed):
    """It may choose its victims, and promises the policy's."""

    conformance = "legal"

    def __init__(self, config):
        super().__init__(config)
        self.capabilities |= {"victim_order"}


class Overestimates(Ordered):
    """It makes room for one page more a request before it allocates, unless all stands allocated already."""

    def alloc(self, batch):
        evicted = []
        if self.cache.refusal("alloc", [(item.request, item.n, item.drafts) for item in batch]) is None:
            evicted = self._make_room(batch)
        done = super().alloc(batch)
        return AllocResult(done.write_sets, evicted + done.evicted)

    def _make_room(self, batch):
        size = self.cache.page_size
        missing = self._new(batch) + size * len(batch) - self.cache.available
        return self.cache.evict(missing) if missing > 0 and size > 1 and self._new(batch) else []

    def _new(self, batch):
        requests = [self.cache.requests[item.request] for item in batch]
        return sum(max(0, r.committed_len + item.n - r.allocated_len) for r, item in zip(requests, batch, strict=True))


class OverestimatesByALeafMore(Overestimates):
    def _make_room(self, batch):
        return super()._make_room(batch) + self.cache.evict(1)


class OverestimatesPagesOfOne(Overestimates):
    """The page more that it asks for is one that a page size of one never needs."""

    def _make_room(self, batch):
        missing = self._new(batch) + len(batch) - self.cache.available
        return self.cache.evict(missing) if missing > 0 and self.cache.page_size == 1 else []


class OverestimatesInAnyOrder(Overestimates):
    """Of two leaves it takes the one that is not the next victim."""

    def _make_room(self, batch):
        order = self.cache.victims_in_order()
        missing = self._new(batch) + self.cache.page_size * len(batch) - self.cache.available
        if missing <= 0 or self.cache.page_size == 1 or not self._new(batch):
            return []
        return evict_another(self.cache) or (self.cache.evict(1) if order else [])


class EvictsBeforeRefusal(Ordered):
    """Out of room it has evicted a page or two before it finds out."""

    def alloc(self, batch):
        try:
            return super().alloc(batch)
        except OutOfPages as refused:
            raise OutOfPages(str(refused), self._evict_in_vain()) from None

    def _evict_in_vain(self):
        return self.cache.evict(1 + self.cache.page_size)


class EvictsAnotherBeforeRefusal(EvictsBeforeRefusal):
    def _evict_in_vain(self):
        return evict_another(self.cache)


def evict_another(cache):
    """Evict a leaf that the policy does not name first, if there is one."""
    others = [edge_slots(edge, cache.page_size) for edge in cache.evictable_nodes()]
    others = [slots for slots in others if slots != cache.victims_in_order(1)[0]][:1]
    cache.adopt_eviction(others)
    return others


class NewestTail(Tree):
    """The tail of a split is stamped after the path, not before it."""

    tail = None

    def _split_at(self, vertex):
        was = vertex.mark
        super()._split_at(vertex)
        if vertex.mark is not was:
            below = next(iter(vertex.children.values()))
            while below.mark is None:
                (below,) = below.children.values()
            self.tail = below.mark

    def _stamp(self, end):
        super()._stamp(end)
        if self.tail is not None:
            self.tick += 1
            self.tail.stamp, self.tail = self.tick, None


class DatesLower(Tree):
    """The lower part of a split counts as created at the split, not the upper one."""

    def _split_at(self, vertex):
        was = vertex.mark
        super()._split_at(vertex)
        if vertex.mark is not was:
            below = next(iter(vertex.children.values()))
            while below.mark is None:
                (below,) = below.children.values()
            vertex.mark.created, below.mark.created = below.mark.created, vertex.mark.created


class NodeOfTwoPages(Tree):
    """The last two pages of a publication are one node."""

    def publish(self, start, namespace, keys, *arguments):
        held = self.descend(start, namespace, keys).depth - start.depth
        end = super().publish(start, namespace, keys, *arguments)
        if len(keys) - held > 1:
            end.parent.mark = None
        return end


class SplitsAPageTooEarly(Allowed):
    """It takes the prompt for a page shorter than it is."""

    makes = allowances = frozenset({"prompt_split"})

    def match(self, request, *arguments):
        matched_len = super().match(request, *arguments)
        self.cache.requests[request].prompt_len -= self.cache.page_size
        return matched_len

    def retract(self, request, publish):
        super().retract(request, publish)
        self.prompts[request] += self.cache.page_size


class SplitsWithoutPriority(Allowed):
    """The end at the prompt is made and stamped, and its priority stays."""

    makes = allowances = frozenset({"prompt_split"})

    class tree_class(Tree):  # noqa: N801
        def end_node_at_prompt(self, published, prompt_pages, priority):
            super().end_node_at_prompt(published, prompt_pages, priority - 1)


class ForgetsNothing(Allowed):
    """It takes a new request for the one of that name that it remembers."""

    makes = allowances = frozenset({"prompt_split"})

    def forget(self, request):
        """Keep what it remembers, whoever ended."""


def variant(base=Allowed, makes=(), declares=(), tree_class=Tree):
    """Make a target that does some allowances and declares some."""
    fields = {"makes": frozenset(makes), "allowances": frozenset(declares), "tree_class": tree_class}
    return type(base.__name__, (base,), fields)


class StopCase(BaseException):
    """Ends the cases at the first violation."""


class Cases:
    """Runs drawn operations on fresh targets; keeps the first violation and counts allowances."""

    config = None

    def __init__(self, factory):
        self.factory = factory
        self.capabilities = factory(CONFIG).capabilities
        self.violation = None
        self.used = Counter()
        self.n_done = 0

    def start(self, config):
        return Lockstep(config, self.factory(config), watch=lambda op, seen: self.used.update(seen.allowed))

    def run(self, lockstep, op):
        try:
            self.n_done += lockstep.run(op).refused is None
        except Violation as violation:
            self.violation = violation
            raise StopCase from violation

    def after(self, seed, n_batches=10):
        """Run batches as a worker does: each has configs of its own."""
        with suppress(StopCase):
            for batch in range(n_batches):
                run_cases(self, (seed << 20) + batch, n_cases=15, steps=60)
        return self


PLAYED_BY = {
    **{name: variant(Allowed, [name]) for name in ALLOWANCES[:4]},
    "pages_overestimated": Overestimates,
    "evicts_before_refusal": EvictsBeforeRefusal,
}
"""A target that does what each allowance says; it declares none."""

PERMISSIVE = ("pages_overestimated", "evicts_before_refusal")

FOUND_AS = {
    "split_refreshes_tail": (AgeOrderDiffers, OutcomeDiffers),
    "split_dates_upper_new": (AgeOrderDiffers, OutcomeDiffers),
    "prompt_split": (TreeDiffers, AgeOrderDiffers, RequestsDiffer),
    "page_nodes": (TreeDiffers, RequestsDiffer),
    "pages_overestimated": (OutcomeDiffers,),
    "evicts_before_refusal": (OutcomeDiffers,),
}


def test_every_allowance_is_played():
    assert set(PLAYED_BY) == set(FOUND_AS) == set(ALLOWANCES)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ALLOWANCES)
def test_declared_allowance_is_no_violation_and_counted(name, seed):
    cases = Cases(variant(PLAYED_BY[name], PLAYED_BY[name].makes, [name])).after(seed, n_batches=4)

    assert cases.violation is None, str(cases.violation)
    assert cases.n_done > 500
    assert set(cases.used) == {name}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ALLOWANCES)
def test_undeclared_allowance_is_a_violation(name, seed):
    """Those that leave a choice are declared, but for the one in question: they excuse nothing else."""
    declared = [other for other in PERMISSIVE if other != name]
    violation = Cases(variant(PLAYED_BY[name], PLAYED_BY[name].makes, declared)).after(seed).violation

    assert isinstance(violation, FOUND_AS[name]), str(violation)


def test_allowances_work_together():
    of_splits = ("split_refreshes_tail", "split_dates_upper_new", "prompt_split")
    both = type("Both", (EvictsBeforeRefusal, Overestimates), {})
    cases = Cases(variant(both, of_splits, (*of_splits, *PERMISSIVE))).after(0, n_batches=6)

    assert cases.violation is None, str(cases.violation)
    assert set(cases.used) == {*of_splits, *PERMISSIVE}


def test_declared_allowance_that_the_target_does_not_make_is_a_violation():
    """The model does what an allowance says: it is no licence to do either."""
    for name in ALLOWANCES[:4]:
        violation = Cases(variant(Allowed, (), [name])).after(0).violation

        assert isinstance(violation, FOUND_AS[name]), str(violation)


def test_choice_that_an_allowance_leaves_need_not_be_made():
    cases = Cases(variant(Ordered, (), PERMISSIVE)).after(0, n_batches=4)

    assert cases.violation is None, str(cases.violation)
    assert cases.used == {}


BEHIND = {
    "tail stamped newest": (
        variant(Allowed, ["split_refreshes_tail"], ["split_refreshes_tail"], NewestTail),
        (AgeOrderDiffers, OutcomeDiffers),
    ),
    "lower part dated new": (
        variant(Allowed, ["split_dates_upper_new"], ["split_dates_upper_new"], DatesLower),
        (AgeOrderDiffers, OutcomeDiffers),
    ),
    "prompt split a page too early": (SplitsAPageTooEarly, (TreeDiffers,)),
    "prompt split without its priority": (SplitsWithoutPriority, (TreeDiffers,)),
    "node of two pages": (variant(Allowed, ["page_nodes"], ["page_nodes"], NodeOfTwoPages), (TreeDiffers,)),
    "one leaf beyond the overestimate": (
        variant(OverestimatesByALeafMore, (), ["pages_overestimated"]),
        (OutcomeDiffers,),
    ),
    "overestimate of pages of one": (variant(OverestimatesPagesOfOne, (), ["pages_overestimated"]), (OutcomeDiffers,)),
    "overestimate in any order": (variant(OverestimatesInAnyOrder, (), ["pages_overestimated"]), (OutcomeDiffers,)),
    "wrong leaf before a refusal": (
        variant(EvictsAnotherBeforeRefusal, (), ["evicts_before_refusal"]),
        (OutcomeDiffers,),
    ),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("fault", BEHIND)
def test_fault_behind_a_declared_allowance_is_found(fault, seed):
    factory, laws = BEHIND[fault]
    violation = Cases(factory).after(seed, n_batches=20).violation

    assert isinstance(violation, laws), str(violation)


# The order of victims


def published(name, tokens):
    """Operations that take a request from submit to release."""
    return [
        Submit(name, tuple(tokens)),
        Match(name),
        Alloc((AllocItem(name, len(tokens)),)),
        Commit(name, len(tokens)),
        Release(name),
    ]


TWO_LEAVES = [*published("r0", (1, 1)), *published("r1", (2, 2))]
NEEDS_ONE = [*TWO_LEAVES, *published("r2", (3,) * 5)[:3], *published("r3", (4,) * 4)[:3]]


class EvictsNewestFirst(Ordered):
    def __init__(self, config):
        super().__init__(config)
        self.cache.policy = "mru"


@pytest.mark.parametrize("ops", [[*TWO_LEAVES, Evict(1)], NEEDS_ONE], ids=["evict", "alloc"])
def test_victims_out_of_order_differ_when_the_order_is_promised(ops):
    run = run_ops(CONFIG, ops, EvictsNewestFirst)

    assert run.steps == len(ops)
    assert (type(run.violation), run.violation.roles) == (OutcomeDiffers, ("victims",))
    kind = "evict" if isinstance(ops[-1], Evict) else "alloc"
    assert str(run.violation).splitlines()[:3] == [
        f"OutcomeDiffers: {kind} evicted other nodes",
        "  reference [[2, 3]]",
        "  reference [[4, 5]]",
    ]
    assert run_ops(CONFIG, ops, Ordered).violation is None


def test_one_victim_too_many_differs_when_the_order_is_promised():
    class EvictsTwo(Ordered):
        def evict(self, n_slots):
            return super().evict(n_slots + self.cache.page_size)

    run = run_ops(CONFIG, [*TWO_LEAVES, Evict(1)], EvictsTwo)

    assert (type(run.violation), run.violation.roles) == (OutcomeDiffers, ("victims",))


def test_victim_that_is_no_leaf_is_an_illegal_choice_before_it_is_out_of_order():
    class EvictsHalf(Ordered):
        """It frees one page of a node of two, and says so truly."""

        def evict(self, n_slots):
            (edge,) = self.cache.evictable_nodes()
            self.cache.tree.remove(edge[1:])
            edge[0].mark = edge[1].mark
            self.cache.pages.give_back(edge[1].page)
            return [edge_slots(edge[1:], 2)]

        def snapshot(self):
            snapshot = super().snapshot()
            if len(self.cache.tree.vertices()) == 1:
                snapshot.nodes = None  # or law 12 sees it first
            return snapshot

    run = run_ops(CONFIG, [*published("r0", (1, 1, 2, 2)), Evict(1)], EvictsHalf)

    assert type(run.violation) is ChoiceIllegal


def test_refusal_for_another_reason_may_not_have_evicted():
    """The allowance is about an alloc that finds no room."""

    class EvictsWhenAskedForNothing(variant(Ordered, (), ["evicts_before_refusal"])):
        def evict(self, n_slots):
            if n_slots < 1:
                raise BadArgument("no", self.cache.evict(1))
            return super().evict(n_slots)

    run = run_ops(CONFIG, [*TWO_LEAVES, Evict(0)], EvictsWhenAskedForNothing)

    assert (type(run.violation), run.violation.headline) == (OutcomeDiffers, "a refused operation evicted")


# Requests that a target remembers while they wait


class Listens(Allowed):
    def __init__(self, config):
        super().__init__(config)
        self.forgot = []

    def forget(self, request):
        self.forgot.append(request)


@pytest.mark.parametrize(
    ("ops", "forgot"),
    [
        ([Submit("r0", (1, 2)), Abort("r0")], []),
        ([Submit("r0", (1, 2)), Peek("r0"), Abort("r0")], ["r0"]),
        ([*published("r0", (1, 2))[:4], Retract("r0"), Abort("r0")], ["r0"]),
        ([*published("r0", (1, 2))[:4], Retract("r0"), Match("r0"), Abort("r0")], []),
        ([Submit("r0", (1, 2)), Peek("r0"), Match("r0"), Abort("r0"), Submit("r0", (1,)), Abort("r0")], []),
        ([Submit("r0", (1, 2)), Peek("r0"), Abort("r0"), Submit("r0", (1,)), Abort("r0")], ["r0"]),
    ],
    ids=["never seen", "peeked", "retracted", "matched again", "ended live", "once"],
)
def test_target_is_told_to_forget_a_waiting_request_that_it_has_seen(ops, forgot):
    target = Listens(CONFIG)
    lockstep = Lockstep(CONFIG, target)
    refused = [lockstep.run(op).refused for op in ops]

    assert refused == [None] * len(ops)
    assert target.forgot == forgot


def test_prompt_of_another_request_of_that_name_is_found():
    """The first one had a prompt without a whole page; the second has one of a page, and two pages in all."""
    ops = [
        *published("r0", (1,))[:4],
        Retract("r0"),
        Abort("r0"),
        *published("r0", (1, 2))[:3],
        Commit("r0", 2, (3,)),
        Alloc((AllocItem("r0", 1),)),
        Commit("r0", 1, (4,)),
        Alloc((AllocItem("r0", 1),)),
        Commit("r0", 1),
        Release("r0"),
    ]
    names = ["prompt_split"]

    assert isinstance(run_ops(CONFIG, ops, ForgetsNothing).violation, TreeDiffers)
    assert run_ops(CONFIG, ops, variant(Allowed, names, names)).violation is None


def test_target_that_remembers_nothing_needs_no_forget():
    ops = [Submit("r0", (1, 2)), Peek("r0"), Abort("r0")]

    assert run_ops(CONFIG, ops, ReferenceTarget).violation is None
