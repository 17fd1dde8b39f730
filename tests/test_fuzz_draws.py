"""The draws: an operation for any integers in any state, prompts at page boundaries, and what a short run reaches."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvlockstep.fuzz import draws
from kvlockstep.fuzz.config import DTYPES, KEY_UNITS, POLICIES, CacheConfig
from kvlockstep.fuzz.dispatch import model_arguments
from kvlockstep.fuzz.draws import NAMESPACES, Draws, around
from kvlockstep.fuzz.labels import LABELS, Memory, name_of
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import _RULES, PAGE_SIZES, RAREST, SHAPES, WEIGHTS, CacheMachine, draw_config, run_cases
from kvlockstep.fuzz.ops import OPS, Abort, kind_of
from kvlockstep.fuzz.statistics import CaseWatcher, Statistics
from kvlockstep.fuzz.targets.reference import ReferenceTarget, new_cache
from kvlockstep.fuzz.trace import decode_op, encode_op

ALL = ReferenceTarget(CacheConfig()).capabilities
KINDS = sorted(_RULES)
INTEGERS = {
    kind: st.fixed_dictionaries({name: st.integers(low, high) for name, (low, high) in drawn.items()})
    for kind, drawn in _RULES.items()
}

drawn_configs = st.tuples(
    st.integers(0, len(PAGE_SIZES) - 1),
    st.integers(0, 15),
    st.integers(0, 4),
    st.integers(0, 15),
    st.integers(0, 6),
    st.integers(0, 47),
)
drawn_steps = st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), INTEGERS[kind]))
one_of_each = st.fixed_dictionaries(INTEGERS)


def apply(model, op):
    """Run an operation on a model, if it is not refused."""
    kind, arguments = kind_of(op), model_arguments(op)
    if model.refusal(kind, *arguments) is None:
        getattr(model, kind)(*arguments)


def assert_is_an_operation(op):
    """It is one of the vocabulary, and a trace can hold it."""
    assert isinstance(op, OPS)
    assert decode_op(encode_op(op), "drawn") == op


@given(config=drawn_configs, steps=st.lists(drawn_steps, min_size=10, max_size=80), last=one_of_each)
@settings(max_examples=60)
def test_every_draw_is_an_operation_in_any_reachable_state(config, steps, last):
    shape = draw_config(ALL, *config)
    shape.validate()
    model = new_cache(shape)
    source = Draws(shape, model, ALL)
    for kind, integers in steps:
        op = getattr(source, kind)(**integers)
        assert_is_an_operation(op)
        apply(model, op)

    for kind, integers in last.items():
        assert_is_an_operation(getattr(source, kind)(**integers))


def test_every_draw_is_an_operation_when_every_request_fills_its_row_by_a_match():
    """Six retracted requests with one token more than a row: each matches the whole row and can only end."""
    shape = CacheConfig(page_size=1, n_pages=12, n_rows=1, max_context_len=3)
    model = new_cache(shape)
    source = Draws(shape, model, ALL)
    for name in draws.NAMES:
        model.submit(name, [1, 2, 3], NAMESPACES[0])
        matched_len = model.match(name)
        model.alloc([(name, 3 - matched_len, ())])
        model.commit(name, 3 - matched_len, [1])
        model.retract(name, True)
        assert model.match(name) == 3
    assert {request.state for request in model.requests.values()} == {"MATCHED"}

    for kind in KINDS:
        for low in (True, False):
            integers = {name: 0 if low else highest for name, (_, highest) in _RULES[kind].items()}
            assert_is_an_operation(getattr(source, kind)(**integers))
    assert isinstance(source.alloc(0, 0, 0, 0), Abort)


def test_feature_that_the_target_lacks_is_not_drawn():
    plain = frozenset({"kv", "sharing"})
    shape = draw_config(plain, 2, 3, 1, 4, 5, 0)
    assert (shape.policy, shape.key_units, shape.prefix_sharing) == ("lru", "token", True)
    assert draw_config(plain, 2, 3, 1, 4, 5, 5).prefix_sharing
    source = Draws(shape, new_cache(shape), plain)

    for space, switch in itertools.product(range(2 * len(NAMESPACES)), range(32)):
        op = source.submit(0, 1, 0, 0, space, switch)
        assert (op.namespace, op.priority, op.private) == (NAMESPACES[0], 0, False)
    source.model.submit("r0", (1, 2, 3), NAMESPACES[0])
    source.model.match("r0")
    for drafts in range(16):
        assert source.alloc(0, 0, 20, drafts).batch[0].drafts == ()


@pytest.mark.parametrize(
    ("capabilities", "drawn"),
    [
        ({"sharing"}, {True}),
        ({"no_sharing"}, {False}),
        ({"sharing", "no_sharing"}, {True, False}),
    ],
    ids=["shares", "shares not", "both"],
)
def test_prefix_sharing_is_drawn_as_the_target_promises(capabilities, drawn):
    shapes = [draw_config(frozenset(capabilities), 0, 0, 0, 0, 0, switches) for switches in range(48)]
    shared = [shape.prefix_sharing for shape in shapes]

    assert set(shared) == drawn
    assert sum(shared) >= 40 or True not in drawn, "sharing is the normal case"


@pytest.mark.parametrize("feature", ["namespaces", "content_ids", "private", "priority", "drafts"])
def test_feature_that_the_target_has_is_drawn(feature):
    shape = CacheConfig(page_size=2)
    source = Draws(
        shape, new_cache(shape), frozenset({feature, "namespaces"} if feature == "content_ids" else {feature})
    )
    submits = [source.submit(0, 2, 0, 0, space, switch) for space in range(2 * len(NAMESPACES)) for switch in range(30)]
    source.model.submit("r0", (1, 2, 3), NAMESPACES[0])
    source.model.match("r0")
    allocs = [source.alloc(0, 0, 20, n).batch[0].drafts for n in range(16)]

    spaces = {op.namespace for op in submits}
    seen = {
        "namespaces": spaces == {space for space in NAMESPACES if not space[2]},
        "content_ids": spaces == set(NAMESPACES),
        "private": {op.private for op in submits} == {True, False},
        "priority": {op.priority for op in submits} == {0, 1, 2, 3},
        "drafts": {len(guessed) for guessed in allocs} >= {0, 1, 2, 3},
    }
    assert [name for name, drawn in seen.items() if drawn] == [feature]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prompts_end_before_at_and_behind_each_page_boundary(page_size):
    shape = CacheConfig(page_size=page_size, max_context_len=20 * page_size)
    source = Draws(shape, new_cache(shape), ALL)
    prompts = [source.submit(0, pages, delta, 0, 0, 20).tokens for pages in range(5) for delta in (-1, 0, 1)]

    expected = {k * page_size + delta for k in (1, 2, 3, 4) for delta in (-1, 0, 1)} - {0}
    assert {len(tokens) for tokens in prompts} >= expected
    longest = max(prompts, key=len)
    assert all(tokens == longest[: len(tokens)] for tokens in prompts)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prompts_of_a_family_part_before_at_and_behind_a_page_boundary(page_size):
    """Two branches share the first ``cut`` tokens, and differ within a page or two behind them."""
    shape = CacheConfig(page_size=page_size, max_context_len=20 * page_size)
    source = Draws(shape, new_cache(shape), ALL)
    for delta in (-1, 0, 1):
        cut = around(2, delta, page_size)
        one, other = (source.submit(family, 2, delta, 8, 0, 20).tokens for family in (0, draws.N_FAMILIES))

        assert len(one) == len(other) > cut + 1
        shared = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        assert cut <= shared < cut + 2 * max(2, page_size)


def test_namespaces_collide_as_joined_text_and_differ_as_parts():
    joined = ["".join([space[0] or "", space[1] or "", *space[2]]) for space in NAMESPACES]

    assert len(set(NAMESPACES)) == len(NAMESPACES)
    assert joined.count("abc") >= 4  # parts cut at different places, and a part that is not there
    assert joined.count("ab") >= 2  # content ids cut at different places
    assert joined.count("") >= 2  # absent and empty


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_sizes_pools_and_rows_are_drawn_small_enough_for_pressure(page_size):
    page = PAGE_SIZES.index(page_size)
    shapes = [
        draw_config(ALL, page, pages, rows, context, 0, 0)
        for pages in (0, 15)
        for rows in (0, 4)
        for context in range(16)
    ]

    assert all(shape.is_valid() for shape in shapes)
    assert min(shape.n_pages * page_size / shape.max_context_len for shape in shapes) <= 1.0
    assert {shape.max_context_len % page_size == 0 for shape in shapes} == ({True} if page_size == 1 else {True, False})


def test_each_switch_is_drawn_with_each_other():
    n = len(POLICIES)
    shapes = [draw_config(ALL, 0, 0, 0, 0, policy, switches) for policy in range(n) for switches in range(48)]

    assert {(s.policy, s.key_units, s.prefix_sharing) for s in shapes} == set(
        itertools.product(POLICIES, KEY_UNITS, (True, False))
    )
    assert {((s.layers, s.kv_heads, s.head_dim), s.dtype) for s in shapes} == set(itertools.product(SHAPES, DTYPES))


def test_each_rule_has_a_weight_and_a_draw():
    rules = [name.split("_")[2] for name in vars(CacheMachine) if name.startswith("op_")]

    weights = {**WEIGHTS, "rarest": RAREST}
    assert {kind: rules.count(kind) for kind in rules} == {kind: weight.rules for kind, weight in weights.items()}
    assert {op.__name__.lower() for op in OPS} == set(WEIGHTS) == set(_RULES)


class Counted:
    """Runs cases on the reference target and counts."""

    config = None
    capabilities = ALL

    def __init__(self):
        self.statistics = Statistics()

    def start(self, config):
        return Lockstep(config, ReferenceTarget(config), watch=CaseWatcher(self.statistics, Memory(config)))

    def run(self, lockstep, op):
        lockstep.run(op)


def test_short_run_is_mostly_done_often_under_pressure_and_reaches_nearly_every_label():
    """About 5000 operations; a default run does at least ten thousand, and must reach every label."""
    cases = Counted()
    run_cases(cases, 7, 60, 90)
    counts = cases.statistics
    missing = [name_of(label) for label in LABELS if not counts.labels[name_of(label)]]
    print(f"{counts.done} done, {counts.refused} refused")
    print(f"{counts.cases_under_pressure} of {counts.cases} cases under pressure")
    print(f"not reached: {', '.join(missing) or 'nothing'}")

    assert counts.done + counts.refused > 2000
    assert counts.done >= 0.6 * (counts.done + counts.refused)
    assert counts.cases_under_pressure >= 0.2 * counts.cases
    assert len(missing) <= 8
    assert {kind for kind, outcome in counts.outcomes if outcome == "done"} == set(WEIGHTS)


def test_drafts_are_never_drawn_for_a_target_without_them():
    shape = CacheConfig(page_size=2)
    source = Draws(shape, new_cache(shape), frozenset({"sharing", "policy:lru"}))
    source.model.submit("r0", (1, 2, 3), NAMESPACES[0])
    source.model.match("r0")
    batches = [source.alloc(0, 0, how, drafts).batch for how in range(32) for drafts in range(16)]

    assert [item for batch in batches for item in batch if item.drafts] == []
