"""What a target may declare beyond its methods: options, page sizes, allowances; and what a trace needs of a target."""

import io
import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.crew import WorkerState, follow
from kvlockstep.fuzz.describe import describe_config
from kvlockstep.fuzz.draws import NAMESPACES, Draws
from kvlockstep.fuzz.label_needs import IMPOSSIBLE_WITH, LARGER_PAGES, NEED_LARGER_PAGES
from kvlockstep.fuzz.labels import LABELS, name_of
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import draw_config, run_cases
from kvlockstep.fuzz.minimize import Minimizer
from kvlockstep.fuzz.ops import Abort, Alloc, AllocItem, Commit, Evict, Match, Release, Reset, Submit
from kvlockstep.fuzz.replay import failing_signature
from kvlockstep.fuzz.report import print_run, unobserved_lines
from kvlockstep.fuzz.requirements import lacking, requirements_of
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.target_check import defect_of
from kvlockstep.fuzz.targets.base import PAGE_SIZES
from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget
from kvlockstep.fuzz.targets.reference import ReferenceTarget, new_cache
from kvlockstep.fuzz.targets.wrong import LeaksOnAbort
from kvlockstep.fuzz.trace import Header, decode_header, encode_header
from kvlockstep.fuzz.verdict import labels_short, merged, remarks
from kvlockstep.fuzz.worker import N_LOOKS, Order, Worker
from kvlockstep.reference.allowances import ALLOWANCES

CONFIG = CacheConfig(page_size=2, n_pages=6, n_rows=3, max_context_len=12)
ALL = ReferenceTarget(CONFIG).capabilities
LORA = ("lora", None, ())
IMAGE = (None, None, ("image",))


def started(name, tokens, **submit):
    return [
        Submit(name, tuple(tokens), **submit),
        Match(name),
        Alloc((AllocItem(name, len(tokens)),)),
        Commit(name, len(tokens)),
    ]


class Switched(ReferenceTarget):
    """Two switches: one takes drafts and discards away, the other does nothing that shows."""

    options = ("lazy", "no_speculation")
    page_sizes = (1, 2, 64)

    def __init__(self, config):
        unknown = set(config.options) - set(self.options)
        if unknown:
            raise ValueError(f"no option {min(unknown)}")
        super().__init__(replace(config, options=()))
        if "no_speculation" in config.options:
            self.capabilities -= {"drafts", "discards"}


class SwitchedAndLeaking(Switched, LeaksOnAbort):
    """It leaks whatever is switched."""


class LeaksWhenLazy(Switched):
    """It leaks with one of the switches only."""

    def __init__(self, config):
        super().__init__(config)
        self.lazy = "lazy" in config.options

    def abort(self, request):
        if self.lazy:
            LeaksOnAbort.abort(self, request)
        else:
            super().abort(request)


# In a config and in a trace


def test_config_without_options_has_the_json_that_it_had_before_there_were_any():
    assert "options" not in CacheConfig().to_json()
    assert encode_header(Header(CacheConfig())).startswith(
        '{"kvlockstep":1,"config":{"page_size":4,"n_pages":16,"n_rows":4,"max_context_len":64,"policy":"lru",'
        '"key_units":"token","prefix_sharing":true,"layers":2,"kv_heads":1,"head_dim":2,"dtype":"float16"},"why":'
    )


def test_options_survive_the_header_and_are_said():
    config = replace(CONFIG, options=("lazy", "no_speculation"))
    line = encode_header(Header(config))

    assert '"dtype":"float16","options":["lazy","no_speculation"]}' in line
    assert decode_header(line, "t:1").config == config
    assert hash(config) != hash(CONFIG)
    assert describe_config(config).endswith(" max_context_len=12 options=lazy,no_speculation")


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("b", "a"), "expected each name once, in order, got b, a"),
        (("a", "a"), "expected each name once, in order, got a, a"),
        (("Lazy",), "expected names of 1..40 small letters, digits and _, got 'Lazy'"),
        ((1,), "expected names of 1..40 small letters, digits and _, got 1"),
        (tuple(f"a{i:02}" for i in range(17)), "expected at most 16, got 17"),
    ],
)
def test_config_with_options_that_cannot_be_is_refused(options, wrong):
    with pytest.raises(ValueError, match=r"config\.options: ") as caught:
        replace(CONFIG, options=options).validate()
    assert str(caught.value) == f"config.options: {wrong}"
    with pytest.raises(ValueError, match=r"config\.options: "):
        CacheConfig.from_json(CONFIG.to_json() | {"options": list(options)})


def test_options_of_another_type_are_refused():
    with pytest.raises(ValueError, match=r"config\.options: expected list, got str"):
        CacheConfig.from_json(CONFIG.to_json() | {"options": "lazy"})


@pytest.mark.parametrize("factory", [ReferenceTarget, GpuImplTarget, Switched])
def test_factory_raises_for_an_option_that_it_does_not_know(factory):
    with pytest.raises((ValueError, TypeError), match="option"):
        factory(replace(CONFIG, options=("fast",)))


# What is drawn

DRAWN = [
    (page, pages, 1, context, policy, switches)
    for page, pages, context, policy, switches in itertools.product(range(5), (0, 7), (3, 900), range(3), (0, 5, 401))
]


def test_options_change_nothing_else_that_is_drawn():
    for drawn in DRAWN:
        plain = draw_config(ALL, *drawn)
        assert plain.options == ()
        assert replace(draw_config(ALL, *drawn, options=("a", "b", "c")), options=()) == plain


def test_each_option_is_on_in_about_half_of_all_configs_whatever_the_others_are():
    names = tuple(f"option{i}" for i in range(16))
    seen = [set(draw_config(ALL, *drawn, options=names).options) for drawn in DRAWN]

    for name, other in itertools.permutations(names, 2):
        with_it = [options for options in seen if name in options]
        assert 0.3 * len(seen) < len(with_it) < 0.7 * len(seen)
        assert 0.2 * len(with_it) < sum(other in options for options in with_it) < 0.8 * len(with_it)
    assert all(draw_config(ALL, *drawn, options=names).is_valid() for drawn in DRAWN)


def test_options_are_sorted_in_a_config_whatever_order_a_target_names_them_in():
    configs = [draw_config(ALL, *drawn, options=("b", "a")) for drawn in DRAWN]

    assert {config.options for config in configs} == {(), ("a",), ("b",), ("a", "b")}


def test_page_sizes_of_the_target_are_drawn():
    drawn = [draw_config(ALL, page, 0, 0, 0, 0, 0, page_sizes=(1, 64)) for page in range(4)]

    assert [config.page_size for config in drawn] == [1, 64, 1, 64]
    assert {draw_config(ALL, page, 0, 0, 0, 0, 0).page_size for page in range(5)} == set(PAGE_SIZES)


def test_pages_of_64_leave_room_for_several_in_a_row_and_in_the_pool():
    for pages, context in itertools.product(range(16), range(16)):
        config = draw_config(ALL, 0, pages, 0, context, 0, 0, page_sizes=(64,))
        assert config.is_valid()
        assert config.max_context_len > 2 * 64
        assert config.n_pages >= 3


class Kept:
    """Runs cases and keeps their configs and operations."""

    config = None

    def __init__(self, factory):
        probe = factory(CacheConfig())
        self.factory = factory
        self.capabilities, self.options, self.page_sizes = probe.capabilities, probe.options, probe.page_sizes
        self.cases = []

    def start(self, config):
        self.cases.append((config, []))
        return Lockstep(config, self.factory(config))

    def run(self, lockstep, op):
        self.cases[-1][1].append(op)
        lockstep.run(op)


def test_case_draws_what_its_own_target_promises():
    kept = Kept(Switched)
    for batch in range(6):
        run_cases(kept, batch, n_cases=6, steps=60)
    needs = {options: Counter() for options in ((), ("lazy",), ("no_speculation",), ("lazy", "no_speculation"))}
    for config, ops in kept.cases:
        needs[config.options].update(requirements_of(config, ops))

    assert {config.page_size for config, _ in kept.cases} == {1, 2, 64}
    for options, seen in needs.items():
        assert sum(seen.values()) > 0, f"{options} was never drawn"
        assert (seen["drafts"] > 0, seen["discards"] > 0) == (("no_speculation" not in options,) * 2)


def test_worker_draws_what_the_target_declares(tmp_path):
    worker = Worker(Order("mine:make", None, 600.0, 0, str(tmp_path), "worker"), Switched, lambda event, **facts: None)

    assert (worker.options, worker.page_sizes) == (("lazy", "no_speculation"), (1, 2, 64))
    plain = Worker(Order("mine:make", None, 1.0, 0, str(tmp_path), "w"), ReferenceTarget, lambda event, **facts: None)
    assert (plain.options, plain.page_sizes) == ((), PAGE_SIZES)


def test_pass_is_thrown_away_only_where_the_target_promises_it():
    for capabilities, drawn in ((frozenset({"sharing"}), False), (frozenset({"sharing", "discards"}), True)):
        source = Draws(CONFIG, new_cache(CONFIG), capabilities)
        source.model.submit("r0", (1, 2, 3), NAMESPACES[0])
        source.model.match("r0")
        source.model.alloc([("r0", 3, ())])
        commits = [source.commit(0, how, 0) for how in range(32)] + [source.reset(who) for who in range(32)]
        kept = {op.kept for op in commits if isinstance(op, Commit)}

        assert (0 in kept) == drawn
        assert 3 in kept


def test_content_ids_are_drawn_only_where_the_target_tells_them_apart():
    source = Draws(CONFIG, new_cache(CONFIG), frozenset({"namespaces"}))
    spaces = {source.submit(0, 1, 0, 0, space, 0).namespace for space in range(2 * len(NAMESPACES))}

    assert spaces == {space for space in NAMESPACES if space[2] == ()}


# What a trace needs


@pytest.mark.parametrize(
    ("ops", "changes", "needs"),
    [
        ([Reset()], {}, []),
        ([Submit("r0", (1,), LORA)], {}, ["namespaces"]),
        ([Submit("r0", (1,), ("", None, ()))], {}, ["namespaces"]),
        ([Submit("r0", (1,), IMAGE)], {}, ["namespaces", "content_ids"]),
        ([Submit("r0", (1,), priority=-1)], {}, ["priority"]),
        ([Submit("r0", (1,), private=True)], {}, ["private"]),
        ([Alloc((AllocItem("r0", 1), AllocItem("r1", 2, (7,))))], {}, ["drafts"]),
        ([Commit("r0", 0)], {}, ["discards"]),
        ([Commit("r0", 1)], {}, []),
        ([], {"key_units": "bigram"}, ["bigram"]),
    ],
)
def test_trace_needs_what_it_makes_use_of(ops, changes, needs):
    config = replace(CONFIG, **changes)

    assert requirements_of(config, ops) == ["policy:lru", "sharing", *needs, "page_size 2"]
    assert lacking(ReferenceTarget(config), config, ops) == []


def test_trace_needs_its_config():
    config = replace(CONFIG, page_size=3, policy="tlru", prefix_sharing=False, options=("lazy",))
    wanted = requirements_of(config, [])

    assert wanted == ["policy:tlru", "no_sharing", "page_size 3", "option lazy"]
    assert lacking(Switched(CONFIG), config, []) == ["page_size 3"]
    assert lacking(ReferenceTarget(CONFIG), config, []) == ["option lazy"]
    assert lacking(GpuImplTarget(CONFIG), config, []) == ["policy:tlru", "option lazy"]


# Minimizing


def minimized(factory, config, ops):
    signature, _ = failing_signature(config, ops, factory)
    assert signature is not None
    search = Minimizer(config, tuple(ops), factory, signature, seconds=60.0)
    assert search.run()
    assert failing_signature(search.config, search.ops, factory)[0] == signature
    return search


LEAK = [*started("r0", (1, 2, 3), namespace=LORA), Evict(3), Abort("r0")]


def test_options_that_do_not_matter_are_switched_off():
    config = replace(CONFIG, options=("lazy", "no_speculation"))

    assert minimized(SwitchedAndLeaking, config, LEAK).config.options == ()
    assert minimized(LeaksWhenLazy, config, LEAK).config.options == ("lazy",)


def test_options_are_never_switched_on():
    assert minimized(SwitchedAndLeaking, CONFIG, LEAK).config.options == ()


def test_minimized_page_size_is_one_that_the_target_names():
    class Two(SwitchedAndLeaking):
        page_sizes = (2, 64)

    assert minimized(Two, replace(CONFIG, page_size=64, n_pages=4, max_context_len=256), LEAK).config.page_size == 2
    assert minimized(SwitchedAndLeaking, CONFIG, LEAK).config.page_size == 1


class LeaksShortPasses(ReferenceTarget):
    """It leaks a page when a pass that was cut short or thrown away lands."""

    def __init__(self, config):
        super().__init__(config)
        self.capabilities -= {"discards"}

    def commit(self, request, kept, sampled):
        r = self.cache.requests.get(request)
        short = r is not None and r.state == "IN_FLIGHT" and 0 <= kept < r.in_flight_n
        super().commit(request, kept, sampled)
        if short and not r.abort_pending:
            self.cache.pages.take(self.cache.pages.free()[0], request)


def test_minimized_commit_keeps_something_where_nothing_may_be_thrown_away():
    ops = [Submit("r0", (1,)), Match("r0"), Alloc((AllocItem("r0", 4, (1, 2, 3)),)), Commit("r0", 2)]
    search = minimized(LeaksShortPasses, CONFIG, ops)

    assert [op.kept for op in search.ops if isinstance(op, Commit)] == [1]
    discarded = minimized(LeaksShortPasses, CONFIG, [*ops[:-1], Commit("r0", 0)])
    assert [op.kept for op in discarded.ops if isinstance(op, Commit)] == [0], "it was thrown away from the start"


# What a target may not declare


@pytest.mark.parametrize(
    ("declared", "defect"),
    [
        ({"options": ("a", "b_2")}, None),
        ({"options": "lazy"}, "options is a str, expected a tuple of names"),
        ({"options": ("b", "a")}, "options: expected each name once, in order, got b, a"),
        ({"options": ("Lazy",)}, "options: expected names of 1..40 small letters, digits and _, got 'Lazy'"),
        ({"page_sizes": (1, 1024)}, None),
        ({"page_sizes": ()}, "page_sizes is a tuple of 0, expected a tuple of one or more ints"),
        ({"page_sizes": 4}, "page_sizes is an int, expected a tuple of one or more ints"),
        ({"page_sizes": (4, 0)}, "page_sizes names 0, which is no page size"),
        ({"page_sizes": (True,)}, "page_sizes names True, which is no page size"),
        ({"allowances": frozenset(ALLOWANCES[:4])}, None),
        ({"allowances": "page_nodes"}, "allowances is a str, expected a frozenset of str"),
        (
            {"allowances": frozenset({"prompt_splits"})},
            "allowances names 'prompt_splits', which is none: did you mean 'prompt_split'?",
        ),
        (
            {"allowances": frozenset({"?"})},
            "allowances names '?', which is none: expected some of split_refreshes_tail, split_dates_upper_new, ",
        ),
        (
            {"allowances": frozenset({"evicts_before_refusal"}), "conformance": "legal"},
            "allowances names 'evicts_before_refusal', which needs conformance 'legal' and the capability 'victim_",
        ),
        (
            {"allowances": frozenset({"pages_overestimated"}), "capabilities": ALL | {"victim_order"}},
            "allowances names 'pages_overestimated', which needs conformance 'legal' and the capability 'victim_",
        ),
        (
            {"allowances": frozenset(ALLOWANCES), "conformance": "legal", "capabilities": ALL | {"victim_order"}},
            None,
        ),
        (
            {"capabilities": ALL - {"namespaces"}},
            "capabilities names 'content_ids' without 'namespaces', of which they are the third part",
        ),
        ({"forget": None}, "forget is None, expected a method"),
        ({"forget": lambda: None}, "forget takes (), expected (request)"),
        ({"forget": lambda request: None}, None),
    ],
)
def test_declaration_that_means_nothing_is_named(declared, defect):
    target = ReferenceTarget(CONFIG)
    for name, value in declared.items():
        setattr(target, name, value)
    said = defect_of(target, CONFIG)

    assert said == defect or (said and defect and said.startswith(defect))


# What a run says of it


def state_of(factory, out, batches=3):
    """Run batches of cases as a worker does, and follow its reports."""
    order = Order("mine:make", None, 600.0, 0, str(out), "worker")
    worker = Worker(order, factory, lambda event, **facts: None)
    state = WorkerState(order)
    follow(state, {"event": "ready", "lane": worker.lane, "capabilities": sorted(worker.capabilities)})
    for batch in range(batches):
        run_cases(worker, batch, n_cases=10, steps=60)
    follow(state, json.loads(json.dumps({"event": "end", **worker.facts()})))
    return state


def printed(states):
    console = Console(file=io.StringIO(), width=120, highlight=False)
    print_run(console, states)
    return [line.split() for line in console.file.getvalue().splitlines()]


class PagesAreNodes(ReferenceTarget):
    allowances = frozenset({"page_nodes", "split_refreshes_tail"})

    def __init__(self, config):
        super().__init__(config)
        self.cache = new_cache(config, self.allowances)


def test_report_counts_the_allowances_that_are_declared_used_or_not(tmp_path):
    state = state_of(PagesAreNodes, tmp_path)
    used = state.statistics.allowances
    rows = printed([state, state])

    assert used["page_nodes"] > 0
    assert used["split_refreshes_tail"] == 0
    assert ["page_nodes", str(2 * used["page_nodes"])] in rows
    assert ["split_refreshes_tail", "0"] in rows
    assert ["allowances", "used"] in rows
    assert merged([state, state]).allowances["page_nodes"] == 2 * used["page_nodes"]


def test_report_is_silent_on_allowances_of_a_target_that_declares_none(tmp_path):
    state = state_of(ReferenceTarget, tmp_path, batches=1)

    assert state.statistics.allowances == Counter()
    assert ["allowances", "used"] not in printed([state])


def test_allowances_survive_json_with_those_that_were_not_used():
    statistics = Statistics(allowances=Counter(page_nodes=2, prompt_split=0))
    copy = Statistics.from_json(json.loads(json.dumps(statistics.to_json())))

    assert copy == statistics
    assert list(copy.allowances) == ["page_nodes", "prompt_split"]


def test_splits_are_not_required_where_every_page_is_a_node(tmp_path):
    state = state_of(PagesAreNodes, tmp_path)
    missed = {name_of(label) for label in labels_short([state])}
    splits = {name_of(label) for label in IMPOSSIBLE_WITH}

    assert {state.statistics.labels[name] for name in splits} == {0}
    assert len(splits) == 4
    assert missed.isdisjoint(splits)
    state.statistics.allowances.clear()
    assert {name_of(label) for label in labels_short([state])} == missed | splits


class PagesOfOne(ReferenceTarget):
    page_sizes = (1,)


def test_partial_pages_are_not_required_where_pages_have_one_token(tmp_path):
    state = state_of(PagesOfOne, tmp_path)
    names = [name_of(label) for label in LABELS if label in NEED_LARGER_PAGES]

    assert [state.statistics.labels[name] for name in names] == [0] * 4
    assert {name_of(label) for label in labels_short([state])}.isdisjoint(names)
    assert remarks([state])[:-1] == [f"label not observable: {name} (needs {LARGER_PAGES})" for name in names]


def hiding(*parts):
    class Hiding(ReferenceTarget):
        def snapshot(self):
            snapshot = super().snapshot()
            for node, part in itertools.product(snapshot.nodes, parts):
                setattr(node, part, None)
            return snapshot

    return Hiding


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        ((), []),
        (("hits",), ["hits of nodes (needs hits)"]),
        (("stamp",), ["ages of nodes (needs stamp and created)"]),
        (
            ("created", "hits", "priority"),
            [
                "ages of nodes (needs stamp and created)",
                "hits of nodes (needs hits)",
                "priority of nodes (needs priority)",
            ],
        ),
    ],
)
def test_part_of_a_node_that_is_hidden_is_said_not_to_be_compared(tmp_path, parts, lines):
    state = state_of(hiding(*parts), tmp_path, batches=1)

    assert unobserved_lines([state]) == [f"not observed: the comparison with the model, {line}" for line in lines]


def test_part_of_a_node_is_looked_for_until_nodes_have_been_seen(tmp_path):
    """A case may begin with more operations on an empty tree than are looked at otherwise."""
    order = Order("mine:make", None, 600.0, 0, str(tmp_path), "worker")
    worker = Worker(order, hiding("hits"), lambda event, **facts: None)
    lockstep = worker.start(CONFIG)
    for _ in range(N_LOOKS + 1):
        worker.run(lockstep, Reset())
    for op in [*started("r0", (1, 2, 3)), Release("r0"), Submit("r1", (1, 2, 3)), Match("r1")]:
        worker.run(lockstep, op)

    assert worker.facts()["hidden"] == ["hits"]


def test_target_that_can_throw_nothing_away_and_has_no_drafts_reuses_no_tail(tmp_path):
    class Plain(ReferenceTarget):
        def __init__(self, config):
            super().__init__(config)
            self.capabilities -= {"drafts", "discards"}

    state = state_of(Plain, tmp_path)
    names = ["tail reused without new page", "pass thrown away", "draft rejected across page boundary"]

    assert [state.statistics.labels[name] for name in names] == [0, 0, 0]
    assert {name_of(label) for label in labels_short([state])}.isdisjoint(names)
    assert "not draw" in remarks([state])[-1]
    assert remarks([state])[-1].endswith("drafts, discards")


def test_lockstep_holds_for_the_target_with_every_option(tmp_path):
    state = state_of(Switched, tmp_path, batches=2)

    assert state.statistics.done > 200
    assert Release.__name__.lower() in {kind for kind, _ in state.statistics.outcomes}
