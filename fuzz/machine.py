"""The Hypothesis machine: one rule function per kind of operation, drawing small integers.

A weight is the same function registered under several names, from one table; Hypothesis switches rules off
per case by name (swarm testing), and what a switched-off rule would have done is mostly done by the step
that needs it (``draws.py``). The machine owns no knowledge of caches: it draws, and runs the lockstep.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.internal.conjecture import providers
from hypothesis.reporting import with_reporter
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.draws import N_FAMILIES, N_NAMES, NAMESPACES, Draws
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import Op
from kvlockstep.fuzz.search import Search
from kvlockstep.fuzz.states import state_class
from kvlockstep.fuzz.targets.base import PAGE_SIZES, allowances_of


class Weight(NamedTuple):
    """How many rules of a kind there are, and the statistic that falls when there is only one, or none of one."""

    rules: int
    statistic: str


WEIGHTS = {
    # Of 100 operations done in a default run about 18 are alloc and 20 commit; 10 are release, which publishes,
    # and 4 abort or retract: with more of these few requests live long enough to share and to be evicted.
    "alloc": Weight(6, "pool exactly full"),
    "commit": Weight(7, "later chunk of a prefill"),
    "checkpoint": Weight(4, "locked edge split"),
    "match": Weight(3, "victim chosen among several by lru"),
    "submit": Weight(2, "batch of two or more"),
    "release": Weight(3, "partial last page at release"),
    "evict": Weight(3, "eviction made parent evictable"),
    "retract": Weight(1, "retract then rematch"),
    "peek": Weight(3, "peek renewed a victim"),
    "abort": Weight(1, "pending abort landed"),
    "reset": Weight(1, "reset with old handles alive"),
}
"""What a weight does for its statistic shows ``benchmarks/biases.py``, as it does for the biases of `Draws`."""

RAREST = Weight(6, "distinct transitions")
"""Rules that leave the kind to the search; ``benchmarks/search_learns.py`` shows what they do."""

SHAPES = ((2, 1, 2), (1, 1, 3), (2, 2, 2), (3, 1, 4))
"""Layers, KV heads and head dim: one word a slot and several, whole ones and a cut one."""


class Case(Protocol):
    """What a machine needs from whoever runs it.

    It may also have ``options`` and ``page_sizes``: those that may be drawn for its target; and a ``search``, which
    knows what was tried least.
    """

    capabilities: frozenset[str]  # those with the default config: what configs are drawn from
    config: CacheConfig | None  # fixed, or None to draw one for each case

    def start(self, config: CacheConfig) -> Lockstep: ...

    def run(self, lockstep: Lockstep, op: Op) -> None: ...


def _shifts(seed_value: int) -> list[int]:
    """Spread a seed over the six integers of a config."""
    mixed = (seed_value * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    return [mixed >> (10 * i) & 0x3FF for i in range(6)]


def _drawn_options(options: Sequence[str], drawn: Sequence[int]) -> tuple[str, ...]:
    """Switch each option on for about half of all configs, by a mix of the integers that the config is drawn from."""
    mixed = 0
    for value in drawn:
        mixed = ((mixed ^ value) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        mixed ^= mixed >> 29
    return tuple(sorted(name for i, name in enumerate(options) if mixed >> (i % 64) & 1))


def draw_config(
    capabilities: frozenset[str],
    page: int,
    pages: int,
    rows: int,
    context: int,
    policy: int,
    switches: int,
    *,
    page_sizes: Sequence[int] = PAGE_SIZES,
    options: Sequence[str] = (),
) -> CacheConfig:
    """Turn integers of any size into a config: pools so small that eviction, refusal and reuse are the normal case."""
    switched_on = _drawn_options(options, (page, pages, rows, context, policy, switches))
    page_size = page_sizes[page % len(page_sizes)]
    pages, rows, context, switches = pages % 16, rows % 5, context % 16, switches % 48
    layers, kv_heads, head_dim = SHAPES[switches // 12 % len(SHAPES)]
    policies = sorted(name.removeprefix("policy:") for name in capabilities if name.startswith("policy:"))
    return CacheConfig(
        page_size=page_size,
        n_pages=3 + pages * 3 // 2 + (8 if page_size == 1 else 0),
        n_rows=1 + rows,
        max_context_len=max(2, page_size * (3 + context // 3) + context % 3 - 1 + (4 if page_size < 3 else 0)),
        policy=policies[policy % len(policies)] if policies else "lru",
        key_units="bigram" if "bigram" in capabilities and switches % 4 == 0 else "token",
        prefix_sharing="sharing" in capabilities and not ("no_sharing" in capabilities and switches % 16 in (5, 8)),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=("float16", "bfloat16", "float32")[switches % 3],
        options=switched_on,
    )


small = st.integers(0, 15)

WHO = (0, 4 * N_NAMES - 1)


class CacheMachine(RuleBasedStateMachine):
    """Draws operations and runs each on both sides. `run_cases` gives it a case."""

    case: ClassVar[Case]
    shift: ClassVar[int] = 0
    """Spread and added to what a config is drawn from: Hypothesis begins every batch with the same draws."""

    lockstep: Lockstep

    @initialize(
        page=st.integers(0, len(PAGE_SIZES) - 1),
        pages=small,
        rows=st.integers(0, 4),
        context=small,
        policy=st.integers(0, 6),
        switches=st.integers(0, 47),
        earlier=st.integers(0, 3),
        family=st.integers(0, 3 * N_FAMILIES - 1),
    )
    def build(
        self, page: int, pages: int, rows: int, context: int, policy: int, switches: int, earlier: int, family: int
    ) -> None:
        config = self.case.config
        if config is None:
            drawn = (page, pages, rows, context, policy, switches)
            shifted = [value + shift for value, shift in zip(drawn, _shifts(self.shift), strict=True)]
            page_sizes, options = getattr(self.case, "page_sizes", PAGE_SIZES), getattr(self.case, "options", ())
            config = draw_config(self.case.capabilities, *shifted, page_sizes=page_sizes, options=options)
        self.lockstep = self.case.start(config)
        # an option that is on may take a capability away
        target = self.lockstep.target
        ahead = "evicts_before_refusal" in allowances_of(target)
        self.draws = Draws(config, self.lockstep.model, frozenset(target.capabilities), may_evict_ahead=ahead)
        for nth in range(earlier):
            self._publish_one(family + 2 * nth, nth)

    def _publish_one(self, family: int, nth: int) -> None:
        """Take one request from submit to release: by rules alone much of a case would pass over an empty tree."""
        cut, extra = 1 + nth % 2, 4 * (nth % 2)
        self.act("submit", {"family": family, "pages": cut, "delta": 1, "extra": extra, "space": 0, "switch": 24 + nth})
        self.act("match", {"who": 0})
        self.act("alloc", {"who": 0, "size": 0, "how": 20, "drafts": 0})
        self.act("commit", {"who": 0, "how": 10, "token": 0})
        self.act("release", {"who": 0, "how": 0})

    def act(self, kind: str, drawn: dict[str, int]) -> None:
        """Run the operation of a kind that the drawn integers stand for."""
        op: Op = getattr(self.draws, kind)(**drawn)
        self.case.run(self.lockstep, op)


_RULES: dict[str, dict[str, tuple[int, int]]] = {
    "submit": {
        "family": (0, 3 * N_FAMILIES - 1),
        "pages": (0, 4),
        "delta": (-1, 1),
        "extra": (0, 8),
        "space": (0, 2 * len(NAMESPACES) - 1),
        "switch": (0, 31),
    },
    "peek": {"who": WHO},
    "match": {"who": WHO},
    "alloc": {"who": WHO, "size": (0, 5), "how": (0, 31), "drafts": (0, 15)},
    "commit": {"who": WHO, "how": (0, 31), "token": (0, N_FAMILIES - 1)},
    "checkpoint": {"who": WHO, "how": (0, 23)},
    "release": {"who": WHO, "how": (0, 23)},
    "abort": {"who": WHO},
    "retract": {"who": WHO, "how": (0, 23)},
    "evict": {"pages": (0, 8), "delta": (-1, 1)},
    "reset": {"who": (0, 31)},
}
"""What is drawn for each kind of operation: integers, from the first to the last of a range."""

LARGEST_NUMBER = 95
"""Of those that a range is filled from: Hypothesis takes numbers from 100 on out of the source of modules nearby."""

N_NUMBERS = max(len(drawn) for drawn in _RULES.values())


def _rule_for(kind: str) -> Callable[..., None]:
    def apply(self: CacheMachine, **drawn: int) -> None:
        self.act(kind, drawn)

    return apply


_BY_WEIGHT = [kind for kind, weight in WEIGHTS.items() for _ in range(weight.rules)]

N_RANKS = 8


def _try_rarest(self: CacheMachine, rank: int, numbers: Sequence[int]) -> None:
    """Try a kind of operation that was tried least in a state like this one, the very least most often."""
    search: Search | None = getattr(self.case, "search", None)
    if search is None:
        kind = _BY_WEIGHT[numbers[-1] % len(_BY_WEIGHT)]
    else:
        kind = search.rarest_first(state_class(self.lockstep.now), list(_RULES))[rank * rank // (2 * N_RANKS)]
    drawn = zip(_RULES[kind].items(), numbers, strict=False)
    self.act(kind, {name: low + number % (high - low + 1) for (name, (low, high)), number in drawn})


def rule_name(rank: int, kind: str, copy: int) -> str:
    """Name one of the rules of a kind, which stands at ``rank`` in WEIGHTS."""
    return f"op_{rank:02}_{kind}_{copy}"


# Hypothesis sorts rules by name and draws the first ones more often; so the number that begins a name puts
# the operations that get a request furthest in front.
for _rank, (_kind, _weight) in enumerate(WEIGHTS.items()):
    for _copy in range(_weight.rules):
        _apply = _rule_for(_kind)
        _apply.__name__ = rule_name(_rank, _kind, _copy)
        _integers: dict[str, Any] = {name: st.integers(*ends) for name, ends in _RULES[_kind].items()}
        _decorate: Any = rule(**_integers)
        setattr(CacheMachine, _apply.__name__, _decorate(_apply))


_LEFT_TO_THE_SEARCH: dict[str, Any] = {
    "rank": st.integers(0, N_RANKS - 1),
    "numbers": st.tuples(*[st.integers(0, LARGEST_NUMBER)] * N_NUMBERS),
}

for _copy in range(RAREST.rules):

    def _again(self: CacheMachine, rank: int, numbers: Sequence[int]) -> None:
        _try_rarest(self, rank, numbers)

    _again.__name__ = rule_name(len(WEIGHTS), "rarest", _copy)
    _decorate = rule(**_LEFT_TO_THE_SEARCH)
    setattr(CacheMachine, _again.__name__, _decorate(_again))


def run_cases(case: Case, seed_value: int, n_cases: int, steps: int) -> None:
    """Run ``n_cases`` fresh cases of at most ``steps`` operations, all drawn from ``seed_value``.

    Nothing is shrunk, stored or printed here: what a case uncovers is raised out of ``case.run``.
    """
    machine = type("CacheMachineOfCase", (CacheMachine,), {"case": case, "shift": seed_value})
    run_machine(machine, seed_value, n_cases, steps)


def run_machine(machine: type[RuleBasedStateMachine], seed_value: int, n_cases: int, steps: int) -> None:
    """Run a machine as `run_cases` does."""
    chosen = settings(
        max_examples=n_cases,
        stateful_step_count=steps,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with with_reporter(lambda text: None), _without_numbers_from_source():
        run_state_machine_as_test(seed(seed_value)(machine), settings=chosen)


@contextmanager
def _without_numbers_from_source() -> Iterator[None]:
    """Keep Hypothesis from drawing integers that it read in the source of modules nearby.

    Which modules are nearby depends on the working folder and on how this package was installed; the same seed
    would draw other cases. There is no setting for it.
    """
    module: Any = providers
    kept = module.HypothesisProvider.__dict__["_local_constants"], module.CONSTANTS_CACHE
    module.HypothesisProvider._local_constants = module.Constants()
    module.CONSTANTS_CACHE = type(module.CONSTANTS_CACHE)(1024)
    try:
        yield
    finally:
        module.HypothesisProvider._local_constants, module.CONSTANTS_CACHE = kept
