"""The checks on the device against the laws in Python: hand-made defects, stored regressions, the faults of the zoo.

After each operation the laws 1 to 3 (and padding, of law 9) that the kernels find broken are those that
`invariants` finds broken on a snapshot. This file runs on the lane of the session, and in a process of its own on
the interpreter, where kernels and twins look at the same caches and must leave the same report.

Not verified here: the lane `cuda`, and what the checks cost.
"""

import os
import subprocess
import sys
from array import array
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from kvlockstep.fuzz.faults import FAULTS
from kvlockstep.fuzz.faults.fault import SourceFault
from kvlockstep.fuzz.lockstep import Lockstep, TargetRaised
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget
from kvlockstep.fuzz.trace import read_trace
from kvlockstep.gpu_impl import CacheConfig, Extend, KvCache
from kvlockstep.gpu_impl.device_checks import Defect, check_device
from kvlockstep.invariants import Violation, writes
from kvlockstep.invariants.checks import CHECKS
from kvlockstep.invariants.index import Seen

LANE = os.environ["KVLOCKSTEP_LANE"]
LANES = tuple(dict.fromkeys((LANE, "torch")))
REGRESSIONS = sorted((Path(__file__).resolve().parents[1] / "regressions").glob("*.jsonl"))
PADDING = (writes.padding_page_is_nobodys, writes.padding_row_is_nobodys)
CHECKED = [check for check in CHECKS if check.law <= 3 or check.function in PADDING]
CHARTER = {violation.__name__ for check in CHECKED for violation in check.violations}


def findings(cache, batch=(), allocation=None):
    """What every lane here says; they must say the same."""
    reports = [check_device(cache, batch, allocation, lane) for lane in LANES]
    assert len({tuple(report.numbers.tolist()) for report in reports}) == 1
    return reports[0].findings()


# Hand-made defects


def busy_cache(page_size=2):
    """``r0`` published its two pages and ended; ``r1`` and ``r2`` share them, and their pass is in flight."""
    sizes = {"page_size": page_size, "n_pages": 24 // page_size, "n_rows": 3, "max_context_len": 16, "head_dim": 4}
    cache = KvCache(CacheConfig(**sizes), LANE)
    cache.match("r0", array("q", range(5)))
    cache.alloc([Extend("r0", 5)])
    cache.commit("r0", 5)
    cache.release("r0")
    for name, last in (("r1", 20), ("r2", 30)):
        cache.match(name, array("q", [0, 1, 2, 3, last, last + 1, last + 2]))
    return cache, cache.alloc([Extend("r1", 3), Extend("r2", 2)])


def slot_of(cache, name, pos):
    return int(cache.device.row_table[cache.requests[name].row, pos])


def name_slot(cache, name, pos, slot):
    cache.device.row_table[cache.requests[name].row, pos] = slot


def write_slot(step, n, slot):
    step.write_set[n] = slot


def give_row(cache, name, row):
    cache.requests[name].row = row


def free_again(cache, step):
    cache.free_pages.free.append(cache.requests["r1"].pages[-1])


def lose_page(cache, step):
    del cache.free_pages.free[0]


def reach_too_far(cache, step):
    """The lengths of a request promise a prefix of one page more than it has locked."""
    cache.requests["r1"].protected_len += 2


def hang_off_the_tree(cache, step):
    cache.requests["r1"].anchor = cache.tree._new_node()


DEFECTS = {
    "free page that the pool does not have": (
        lambda cache, step: cache.free_pages.free.append(13),
        {Defect.PAGE_OUT_OF_RANGE: 13},
    ),
    "row that names no slot of the pool": (
        lambda cache, step: name_slot(cache, "r1", 6, 4000),
        {
            Defect.PAGE_OUT_OF_RANGE: 2000,
            Defect.PAGE_LOST: 4,
            Defect.WRITE_SLOT_OFF_ROW: 8,
            Defect.WRITE_SLOT_OF_OTHER: 8,
        },
    ),
    "negative slot in a row": (
        lambda cache, step: name_slot(cache, "r1", 6, -3),
        {
            Defect.PAGE_OUT_OF_RANGE: -1,
            Defect.PAGE_LOST: 4,
            Defect.WRITE_SLOT_OFF_ROW: 8,
            Defect.WRITE_SLOT_OF_OTHER: 8,
        },
    ),
    "page freed that a request holds": (free_again, {Defect.PAGE_OWNED_TWICE: 4}),
    "page in the rows of two requests": (
        lambda cache, step: name_slot(cache, "r2", 4, slot_of(cache, "r1", 4)),
        {Defect.PAGE_OWNED_TWICE: 3, Defect.WRITE_SLOT_OFF_ROW: 10},
    ),
    "page in no list": (lose_page, {Defect.PAGE_LOST: 12}),
    "padding page free": (
        lambda cache, step: cache.free_pages.free.append(0),
        {Defect.PADDING_PAGE_OWNED: 0},
    ),
    "row that the table does not have": (
        lambda cache, step: cache.free_rows.free.append(4),
        {Defect.ROW_OUT_OF_RANGE: 4},
    ),
    "row free that a request holds": (
        lambda cache, step: cache.free_rows.free.append(1),
        {Defect.ROW_OWNED_TWICE: 1},
    ),
    "row in no list": (lambda cache, step: cache.free_rows.free.pop(), {Defect.ROW_LOST: 3}),
    "padding row free": (
        lambda cache, step: cache.free_rows.free.append(0),
        {Defect.PADDING_ROW_OWNED: 0},
    ),
    "request in flight without a row": (
        lambda cache, step: give_row(cache, "r2", None),
        {
            Defect.REQUEST_WITHOUT_ROW: 1,
            Defect.ROW_LOST: 2,
            Defect.PAGE_LOST: 5,
            Defect.WRITE_SLOT_OFF_ROW: 10,
            Defect.WRITE_SLOT_OF_OTHER: 10,
        },
    ),
    "protected length beyond the path": (
        reach_too_far,
        {Defect.LENGTH_OFF_PATH: 0, Defect.PAGE_LOST: 3, Defect.WRITE_SLOT_OFF_ROW: 6, Defect.WRITE_SLOT_OF_OTHER: 6},
    ),
    "anchor off the tree": (hang_off_the_tree, {Defect.LENGTH_OFF_PATH: 0}),
    "row off the path": (
        lambda cache, step: name_slot(cache, "r2", 3, 9),
        {Defect.ROW_OFF_PATH: 2 * 16 + 3},
    ),
    "write slot twice": (
        lambda cache, step: write_slot(step, 4, slot_of(cache, "r2", 4)),
        {Defect.WRITE_SLOT_REPEATED: 10, Defect.WRITE_SLOT_OFF_ROW: 10},
    ),
    "write slot of the next position": (
        lambda cache, step: write_slot(step, 2, slot_of(cache, "r1", 6) + 1),
        {Defect.WRITE_SLOT_OFF_ROW: 9},
    ),
    "write slot of padding": (
        lambda cache, step: write_slot(step, 0, 1),
        {Defect.WRITE_SLOT_PADDING: 1, Defect.WRITE_SLOT_OFF_ROW: 1},
    ),
    "write slot on a free page": (
        lambda cache, step: write_slot(step, 0, 2 * cache.free_pages.free[-1]),  # the last one listed
        {Defect.WRITE_SLOT_FREE: 12, Defect.WRITE_SLOT_OFF_ROW: 12},
    ),
    "write slot of the tree": (
        lambda cache, step: write_slot(step, 0, slot_of(cache, "r1", 2)),  # on the last page listed
        {Defect.WRITE_SLOT_OF_TREE: 4, Defect.WRITE_SLOT_OFF_ROW: 4},
    ),
    "write slot of another request": (
        lambda cache, step: write_slot(step, 0, slot_of(cache, "r2", 5)),
        {Defect.WRITE_SLOT_OF_OTHER: 11, Defect.WRITE_SLOT_OFF_ROW: 11, Defect.WRITE_SLOT_REPEATED: 11},
    ),
    "write slot beyond the pool": (
        lambda cache, step: write_slot(step, 0, 4000),
        {Defect.WRITE_SLOT_OFF_ROW: 4000},
    ),
}


def test_nothing_is_found_in_a_sound_cache():
    cache, step = busy_cache()

    assert findings(cache, ["r1", "r2"], step) == []


@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_found_where_it_is(name):
    cache, step = busy_cache()
    spoil, expected = DEFECTS[name]
    spoil(cache, step)

    assert {found.defect: found.place for found in findings(cache, ["r1", "r2"], step)} == expected


def test_every_defect_has_a_test_in_which_it_is_found():
    assert {defect for _, expected in DEFECTS.values() for defect in expected} == set(Defect)


def test_neighbours_on_one_page_claim_it_once():
    cache, _ = busy_cache()
    name_slot(cache, "r1", 4, 4000)
    name_slot(cache, "r1", 5, 4001)

    assert {found.defect: found.n for found in findings(cache)} == {Defect.PAGE_OUT_OF_RANGE: 1, Defect.PAGE_LOST: 1}


@pytest.mark.skipif(LANE == "torch", reason="the twins have no programs")
def test_report_is_the_same_for_several_programs(monkeypatch):
    check_kernels = import_module("kvlockstep.gpu_impl.check_kernels")
    monkeypatch.setattr(check_kernels, "_block_of", lambda n, _: 2 if n > 2 else 1)
    for spoil, expected in DEFECTS.values():
        cache, step = busy_cache()
        spoil(cache, step)

        assert {found.defect: found.place for found in findings(cache, ["r1", "r2"], step)} == expected


def test_finding_says_law_and_place():
    cache, step = busy_cache()
    name_slot(cache, "r2", 3, 9)
    reach_too_far(cache, step)

    said = [str(found) for found in check_device(cache).findings() if found.law == 2]

    assert said == [
        "law 2: 1 requests whose protected length is not that of their path, the first at request r1",
        "law 2: 1 cells of rows that do not name the canonical slot, the first at row 2, position 3",
    ]


def test_pages_of_many_programs_are_counted_once():
    """20,000 pages are more than one program takes on any lane."""
    sizes = {"page_size": 1, "n_pages": 40_000, "n_rows": 2, "max_context_len": 20_000, "head_dim": 4}
    cache = KvCache(CacheConfig(**sizes), LANE)
    cache.match("r0", array("q", range(20_000)))
    cache.alloc([Extend("r0", 20_000)])
    cache.commit("r0", 20_000)
    cache.checkpoint("r0")
    cache.match("r1", array("q", [*range(100), *range(-10_000, 0)]))
    step = cache.alloc([Extend("r1", 10_000)])

    assert findings(cache, ["r1"], step) == []
    cache.free_pages.free.extend(range(15_000, 25_000))
    cache.device.row_table[1, 16_000:17_000] = 7
    step.write_set[5000:] = 5
    assert {found.defect: (found.n, found.place) for found in findings(cache, ["r1"], step)} == {
        Defect.PAGE_OWNED_TWICE: (10_000, 15_000),
        Defect.ROW_OFF_PATH: (1000, 20_000 + 16_000),
        Defect.WRITE_SLOT_REPEATED: (4999, 5),
        Defect.WRITE_SLOT_OFF_ROW: (5000, 5),
        Defect.WRITE_SLOT_OF_TREE: (5000, 5),
    }


@pytest.mark.skipif(LANE == "interpret", reason="the interpreter reads tensors on the host")
def test_check_reads_nothing_back():
    spec = spec_from_file_location("guard_of_read_backs", Path(__file__).with_name("test_gpu_impl_no_sync.py"))
    guard = module_from_spec(spec)
    spec.loader.exec_module(guard)
    cache, step = busy_cache()
    name_slot(cache, "r2", 3, 9)

    with guard.nothing_read_back():
        report = check_device(cache, ["r1", "r2"], step)

    assert report.findings()
    with guard.nothing_read_back(), pytest.raises(guard.ReadBack):
        report.findings()


# Against the laws in Python


class Comparison:
    """Runs operations in lockstep, and after each holds the device's verdict against that of the laws."""

    def __init__(self, config, factory):
        self.lockstep = Lockstep(config, factory(config))
        self.cache = self.lockstep.target._cache
        self.allocation = None
        alloc = self.cache.alloc

        def remember(batch):
            self.allocation = alloc(batch)
            return self.allocation

        self.cache.alloc = remember

    def run(self, op):
        """Run one operation; return the name of the law's class that it broke, if any."""
        self.allocation = None
        try:
            self.lockstep.run(op)
        except TargetRaised:
            return "TargetRaised"  # nothing was seen after it
        except Violation as violation:
            self.compare()
            return type(violation).__name__
        self.compare()
        return None

    def compare(self):
        seen = self.lockstep.seen
        batch = seen.requests if self.allocation is not None else ()
        got = {found.law for found in findings(self.cache, batch, self.allocation)}
        assert got == laws_broken(seen), f"{seen.kind} {seen.requests}"


def laws_broken(observation):
    broken = set()
    for check in CHECKED:
        try:
            check.function(Seen(observation))
        except Violation:
            broken.add(check.law)
    return broken


def first_violation(trace_config, ops, factory):
    compared = Comparison(trace_config, factory)
    return next((violation for op in ops if (violation := compared.run(op))), None)


def factory_of(fault):
    lane_fits = fault is None or FAULTS[fault].lane == "torch" or LANE != "torch"
    return factory_for("gpu_impl", fault if lane_fits else None)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_verdict_is_that_of_the_laws_on_a_stored_trace(path):
    trace = read_trace(path)
    header = trace.header

    violation = first_violation(header.config, trace.ops, factory_of(header.fault))

    assert violation == (header.violates if FAULTS[header.fault].lane == "torch" or LANE != "torch" else None)


class Collector:
    """A case that keeps what it ran."""

    config = None
    capabilities = GpuImplTarget.capabilities

    def __init__(self):
        self.factory = factory_for("reference")
        self.traces = []

    def start(self, config):
        self.traces.append((config, []))
        return Lockstep(config, self.factory(config))

    def run(self, lockstep, op):
        self.traces[-1][1].append(op)
        lockstep.run(op)


@cache
def drawn_traces():
    collector = Collector()
    for seed in range(4):
        run_cases(collector, seed, n_cases=20, steps=40)
    return [(config, ops) for config, ops in collector.traces if len(ops) > 30]


@pytest.mark.parametrize("nth", range(3))
def test_verdict_is_that_of_the_laws_on_a_sound_cache(nth):
    config, ops = drawn_traces()[20 * nth]

    assert first_violation(config, ops, factory_of(None)) is None


RARE = {"late-free-takes-page-from-third", "match-trusts-pages-found-before", "third-request-gets-part-of-second"}
"""Faults that a few dozen traces need not show; the last one is among the stored traces."""

SHOWN = [
    name
    for name, fault in FAULTS.items()
    if isinstance(fault, SourceFault) and CHARTER.intersection(fault.laws) and name not in RARE
]


def first_trace_that_shows(factory):
    for config, ops in drawn_traces():
        lockstep = Lockstep(config, factory(config))
        try:
            for op in ops:
                lockstep.run(op)
        except Violation:
            return config, ops
    raise AssertionError("no trace shows the fault")


@pytest.mark.parametrize("name", SHOWN)
def test_verdict_is_that_of_the_laws_on_a_fault_of_the_zoo(name, monkeypatch):
    """The fault is looked for without checks on the device and, where it shows there, on the quickest lane."""
    fault = FAULTS[name]
    if fault.lane != "torch" and LANE == "torch":
        pytest.skip("the twins do not have faults in kernel source")
    factory = factory_of(name)
    with monkeypatch.context() as patch:
        if fault.lane == "torch":
            patch.setenv("KVLOCKSTEP_LANE", "torch")
        config, ops = first_trace_that_shows(factory)

    assert first_violation(config, ops, factory) in (*fault.laws, *CHARTER)


OTHERS = [name for name, fault in FAULTS.items() if isinstance(fault, SourceFault) and name not in SHOWN]


@pytest.mark.parametrize("name", OTHERS)
def test_verdict_is_that_of_the_laws_on_a_fault_of_other_laws(name):
    """One trace, until some law is broken; what it is, is told elsewhere."""
    quickest = "torch" if FAULTS[name].lane == "torch" else "interpret"
    if quickest != LANE:
        pytest.skip(f"looked at on lane {quickest}")
    config, ops = drawn_traces()[OTHERS.index(name) % len(drawn_traces())]

    first_violation(config, ops, factory_of(name))


# On the other lane


@pytest.mark.skipif(LANE == "interpret", reason="the session runs on this lane already")
def test_kernels_say_what_the_twins_say_on_the_interpret_lane():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(Path(__file__))],
        env=os.environ | {"KVLOCKSTEP_LANE": "interpret"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
