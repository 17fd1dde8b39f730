"""The sanitizer on kernels written here, and on those of `gpu_impl`: planted mistakes are named, honest ones are not.

Needs the lane interpret, on which `test_sanitizer.py` runs this file.
"""

import os
import re
import threading
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults.patching import copy_of_package, original_home
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.machine import run_cases
from kvlockstep.fuzz.minimize import Minimizer
from kvlockstep.fuzz.ops import Alloc, AllocItem, Checkpoint, Commit, Match, Submit
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.replay import failing_signature, run_ops
from kvlockstep.fuzz.sanitizer import (
    KernelAccessOutOfBounds,
    KernelDependsOnOrder,
    KernelReadRaces,
    KernelStoreRepeats,
    KernelViolation,
    KernelWritesCollide,
    KernelWriteUnpromised,
    Sanitizer,
)
from kvlockstep.fuzz.targets.base import OutOfPages
from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget
from kvlockstep.fuzz.targets.sanitized import PROMISES, sanitized
from kvlockstep.fuzz.trace import read_trace
from kvlockstep.gpu_impl.lane import choose_lane

if os.environ["KVLOCKSTEP_LANE"] != "interpret":
    pytest.skip("run on lane interpret by test_sanitizer.py", allow_module_level=True)

choose_lane("interpret")  # before Triton is imported
triton, tl = import_module("triton"), import_module("triton.language")
interpreter = import_module("triton.runtime.interpreter")

REGRESSIONS = sorted((Path(__file__).resolve().parents[1] / "regressions").glob("*.jsonl"))

# Kernels


@triton.jit
def copy_kernel(from_ptr, to_ptr, n, shift, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(to_ptr + i + shift, tl.load(from_ptr + i, mask=i < n, other=0), mask=i < n)


@triton.jit
def read_kernel(from_ptr, to_ptr, shift, block: tl.constexpr):
    i = tl.arange(0, block)
    tl.store(to_ptr + i, tl.load(from_ptr + i + shift))


@triton.jit
def halve_kernel(to_ptr, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(to_ptr + i // 2, i)


@triton.jit
def fold_kernel(to_ptr, n_cells, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(to_ptr + i % n_cells, i)


@triton.jit
def count_kernel(count_ptr):
    tl.store(count_ptr, tl.load(count_ptr) + 1)


@triton.jit
def atomic_count_kernel(count_ptr, shift):
    tl.atomic_add(count_ptr + shift, 1)


@triton.jit
def half_atomic_count_kernel(count_ptr):
    before = tl.atomic_add(count_ptr, 0)
    tl.atomic_xchg(count_ptr, before + 1)


@triton.jit
def last_one_kernel(last_ptr):
    tl.atomic_xchg(last_ptr, tl.program_id(0))


@triton.jit
def locked_count_kernel(lock_ptr, count_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.atomic_xchg(count_ptr, tl.atomic_add(count_ptr, 0) + 1)
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def bytes_kernel(to_ptr):
    if tl.program_id(0) == 0:
        tl.store(to_ptr, 1)
    else:
        tl.store(to_ptr.to(tl.pointer_type(tl.int8)) + 2, tl.full((), 1, tl.int8))


@triton.jit
def wide_kernel(to_ptr, step, block: tl.constexpr):
    i = tl.arange(0, block)
    cells = to_ptr + (tl.program_id(0) * block + i) * step
    tl.store(cells.to(tl.pointer_type(tl.int32)), i)


@triton.jit
def grid_kernel(to_ptr, n):
    tl.store(to_ptr + tl.program_id(0) * n + tl.program_id(1) + (tl.program_id(1) == 2) * 100, 1)


@triton.jit
def asking_kernel(to_ptr):
    tl.device_assert(tl.program_id(0) < 2, "too many")
    tl.store(to_ptr + tl.program_id(0), 1)


@triton.jit
def store_to(to_ptr, i):
    tl.store(to_ptr + i, i)


@triton.jit
def calling_kernel(to_ptr):
    store_to(to_ptr, tl.program_id(0))


@triton.jit
def which_kernel(one_ptr, other_ptr, to_ptr, n, block: tl.constexpr):
    i = tl.arange(0, block)
    chosen = tl.where(i % 2 == 0, one_ptr + i, other_ptr + i)
    tl.store(to_ptr + i, tl.load(chosen), mask=i < n)


def numbers(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def finding_of(launch, seed=0, promises=None):
    """Launch under the sanitizer and return what it raised."""
    with pytest.raises(KernelViolation) as raised, Sanitizer(seed, promises).watching():
        launch()
    return raised.value


def facts_of(finding):
    return [f"{name}: {text}" for name, text in finding.facts]


# Accesses and their tensors


def test_honest_launch_leaves_the_bits_it_leaves_unwatched():
    source = torch.arange(50, dtype=torch.int32)
    plain, watched = numbers(50), numbers(50)

    copy_kernel[(4,)](source, plain, 50, 0, block=16)
    with Sanitizer(1).watching():
        copy_kernel[lambda meta: (4,)](source, watched, 50, 0, block=16, num_warps=4)

    assert torch.equal(plain, watched)
    assert torch.equal(watched, source)


def test_store_outside_is_caught_before_it_happens():
    buffer = numbers(12)
    source = torch.arange(8, dtype=torch.int32) + 1

    finding = finding_of(lambda: copy_kernel[(2,)](source, buffer[:8], 8, 2, block=4))

    assert type(finding) is KernelAccessOutOfBounds
    assert finding.headline == "copy_kernel stores to element 8 of to_ptr, expected one of its 8"
    assert facts_of(finding) == [
        "kernel: copy_kernel, program 1 of 2",
        "lanes: [2, 4) of 4",
        "pointer: to_ptr, int32 [8]",
    ]
    assert finding.roles == ("copy_kernel", "to_ptr")
    assert buffer[8:].tolist() == [0] * 4


def test_address_in_another_tensor_of_the_launch_is_outside_all_the_same():
    buffer = numbers(16)

    finding = finding_of(lambda: copy_kernel[(1,)](buffer[8:], buffer[:8], 8, 4, block=8))

    assert "element 8 of to_ptr" in finding.headline


@pytest.mark.parametrize("shift", [-1, 2])
def test_load_outside_is_caught(shift):
    finding = finding_of(lambda: read_kernel[(1,)](numbers(9), numbers(8), shift, block=8))

    assert type(finding) is KernelAccessOutOfBounds
    assert "read_kernel loads element" in finding.headline
    assert "lanes: [0, 1) of 8" in facts_of(finding) or "lanes: [7, 8) of 8" in facts_of(finding)


def test_atomic_operation_outside_is_caught():
    finding = finding_of(lambda: atomic_count_kernel[(1,)](numbers(1), 1))

    assert finding.headline == "atomic_count_kernel updates element 1 of count_ptr, expected one of its 1"


def test_lanes_that_are_masked_off_may_point_anywhere():
    with Sanitizer(0).watching():
        copy_kernel[(1,)](numbers(3), numbers(3), 3, 0, block=8)


def test_gap_between_the_elements_of_a_tensor_is_outside_of_it():
    wide = numbers(4, 6)

    finding = finding_of(lambda: copy_kernel[(1,)](numbers(8), wide[:, :3], 8, 0, block=8))

    assert "stores to element 3 of to_ptr" in finding.headline
    assert "pointer: to_ptr, int32 [4, 3] with strides [6, 1]" in facts_of(finding)


def test_pointers_to_two_tensors_are_held_to_the_right_one():
    with Sanitizer(0).watching():
        which_kernel[(1,)](numbers(7), numbers(8), numbers(8), 8, block=8)
    finding = finding_of(lambda: which_kernel[(1,)](numbers(8), numbers(7), numbers(8), 8, block=8))

    assert "loads element 7 of other_ptr" in finding.headline


def test_access_in_a_function_that_a_kernel_calls_is_caught():
    finding = finding_of(lambda: calling_kernel[(3,)](numbers(2)))

    assert finding.headline == "calling_kernel stores to element 2 of to_ptr, expected one of its 2"
    with Sanitizer(0).watching():
        calling_kernel[(3,)](numbers(3))


def test_program_of_a_grid_of_two_axes_is_named_by_its_index():
    finding = finding_of(lambda: grid_kernel[(2, 3)](numbers(2, 3), 3))

    assert "kernel: grid_kernel, program 2 at (0, 2, 0) of 6" in facts_of(finding)


# Promises


def test_store_inside_of_the_tensor_that_is_not_promised_is_caught():
    def promise(given):
        return {"to_ptr": torch.arange(given["n"]).numpy()}

    launch = partial(copy_kernel[(1,)], numbers(4), numbers(2, 4), 4, 1, block=4)
    finding = finding_of(launch, 0, {"copy_kernel": promise})

    assert type(finding) is KernelWriteUnpromised
    assert finding.headline == "copy_kernel stores to to_ptr[1, 0], expected what it promises to write"
    assert "lanes: [3, 4) of 4" in facts_of(finding)


def test_tensor_that_a_promise_does_not_name_is_only_read():
    launch = partial(copy_kernel[(1,)], numbers(4), numbers(4), 4, 0, block=4)
    finding = finding_of(launch, 0, {"copy_kernel": lambda given: {}})

    assert type(finding) is KernelWriteUnpromised


# Races


def test_address_twice_in_one_store_is_caught():
    finding = finding_of(lambda: halve_kernel[(1,)](numbers(4), block=8))

    assert type(finding) is KernelStoreRepeats
    assert finding.headline == "halve_kernel stores to to_ptr[0] with 2 lanes at once, expected 1"
    assert "lanes: [0, 2) of 8" in facts_of(finding)


def test_address_written_by_two_programs_is_caught():
    finding = finding_of(lambda: fold_kernel[(3,)](numbers(10), 10, block=4))

    assert type(finding) is KernelWritesCollide
    assert finding.headline == "programs 0 and 2 of fold_kernel both write to_ptr[0], expected one program there"
    assert facts_of(finding)[:3] == [
        "kernel: fold_kernel, program 2 of 3, program 0 of 3",
        "lanes: [2, 3) of 4 of program 2",
        "lanes: [0, 1) of 4 of program 0",
    ]


def test_byte_of_an_element_that_another_program_writes_is_caught():
    finding = finding_of(lambda: bytes_kernel[(2,)](numbers(1)))

    assert type(finding) is KernelWritesCollide
    assert "addresses: 1 in common" in facts_of(finding)


def test_every_cell_of_a_store_wider_than_an_element_must_be_promised():
    halves = torch.zeros(9, dtype=torch.int16)
    promises = {"wide_kernel": lambda _: {"to_ptr": np.arange(7)}}
    finding = finding_of(lambda: wide_kernel[(1,)](halves, 2, block=4), promises=promises)

    assert type(finding) is KernelWriteUnpromised
    assert "wide_kernel stores to to_ptr[7]" in finding.headline
    assert "lanes: [3, 4) of 4" in facts_of(finding)


def test_stores_of_one_block_that_overlap_in_part_are_caught():
    finding = finding_of(lambda: wide_kernel[(1,)](torch.zeros(9, dtype=torch.int16), 1, block=4))

    assert type(finding) is KernelStoreRepeats
    assert "lanes: [0, 2) of 4" in facts_of(finding)


def test_programs_that_overlap_in_part_are_caught():
    finding = finding_of(lambda: wide_kernel[(2,)](torch.zeros(9, dtype=torch.int16), 1, block=1))

    assert type(finding) is KernelWritesCollide
    assert "wide_kernel both write to_ptr[1]" in finding.headline


def test_wide_stores_side_by_side_are_honest():
    halves = torch.zeros(16, dtype=torch.int16)
    with Sanitizer(0).watching():
        wide_kernel[(2,)](halves, 2, block=4)

    assert halves.tolist() == [0, 0, 1, 0, 2, 0, 3, 0] * 2


def test_counter_that_is_not_atomic_is_caught():
    finding = finding_of(lambda: count_kernel[(3,)](numbers(1)))

    assert type(finding) is KernelReadRaces
    assert finding.headline == (
        "program 1 of count_kernel reads count_ptr[0], which program 0 writes, expected one program there"
    )
    assert "lanes: [0, 1) of 1 of program 1" in facts_of(finding)


def test_atomic_counter_and_lock_are_no_race():
    count, lock, locked = numbers(1), numbers(1), numbers(1)

    for seed in range(4):
        with Sanitizer(seed).watching():
            atomic_count_kernel[(5,)](count, 0)
            locked_count_kernel[(5,)](lock, locked)

    assert count.tolist() == [20]
    assert locked.tolist() == [20]


# Orders


def test_order_of_programs_that_shows_is_caught():
    finding = finding_of(lambda: last_one_kernel[(6,)](numbers(1)))

    assert type(finding) is KernelDependsOnOrder
    assert finding.headline.startswith("last_one_kernel leaves other bits in last_ptr[0] with its programs")
    assert "expected: bytes 05 00 00 00, with the programs in order" in facts_of(finding)


def test_counter_in_two_atomic_halves_is_caught_by_interleaving_alone():
    found = {}
    for seed in range(12):
        try:
            with Sanitizer(seed).watching():
                half_atomic_count_kernel[(8,)](numbers(1))
        except KernelDependsOnOrder as finding:
            found[seed] = finding

    assert len(found) >= 2
    assert all(finding.headline.endswith("with its programs interleaved") for finding in found.values())
    for seed, finding in found.items():
        again = finding_of(lambda: half_atomic_count_kernel[(8,)](numbers(1)), seed)
        assert str(again) == str(finding)
    assert len({str(finding) for finding in found.values()}) > 1


def test_launches_of_one_seed_are_not_all_run_in_the_same_order():
    sanitizer, results = Sanitizer(0), set()
    for _ in range(12):
        try:
            with sanitizer.watching():
                last_one_kernel[(6,)](numbers(1))
        except KernelDependsOnOrder as finding:
            results.add(dict(finding.facts)["got"])

    assert len(results) > 1


# Afterwards


def clean():
    launch = interpreter.GridExecutor.__call__
    hooked = [name for name in vars(interpreter.interpreter_builder) if name.startswith("create_")]
    return not hooked and launch.__module__ == interpreter.__name__ and threading.active_count()


def test_interpreter_is_as_it_was_after_a_finding_and_after_an_error():
    before = clean()
    assert before
    for seed in range(6):
        finding_of(lambda: last_one_kernel[(8,)](numbers(1)), seed)
        assert clean() == before
    finding_of(lambda: count_kernel[(3,)](numbers(1)))
    assert clean() == before
    with pytest.raises(interpreter.InterpreterError, match="too many"), Sanitizer(0).watching():
        asking_kernel[(3,)](numbers(8))
    assert clean() == before


# gpu_impl

SAME = tuple(range(1, 6))
CONFIG = CacheConfig(page_size=5, n_pages=6, n_rows=3, max_context_len=5)
OPS = [Submit("r0", SAME), Match("r0"), Submit("r1", SAME), Match("r1")]
OPS += [Alloc((AllocItem("r0", 5), AllocItem("r1", 5))), Commit("r0", 5), Commit("r1", 5)]
OPS += [Checkpoint("r0"), Checkpoint("r1")]
"""Two requests with one prompt: the second checkpoint rewrites a row, which is full."""

ROW_STORE = "    tl.store(row_table_ptr + cell, slot.to(tl.int32), mask=mask)\n"
POOL_STORE = "    tl.store(pool_ptr + target, tl.load(k_ptr + i, mask=mask, other=0), mask=mask)\n"
POOL_SLOT = "    slot = tl.load(slots_ptr + nth, mask=mask, other=0).to(tl.int64)\n"
PLANTED = {
    "store one past the row": (
        ROW_STORE,
        ROW_STORE.replace("mask=mask", "mask=i <= n"),
        "KernelWriteUnpromised.checkpoint.rewrite_row_kernel+row_table_ptr",
        ["kernel: rewrite_row_kernel, program 2 of 3", "lanes: [1, 2) of 2", "pointer: row_table_ptr, int32 [4, 5]"],
    ),
    "duplicate slot across two programs": (
        POOL_SLOT,
        POOL_SLOT.replace("nth", "tl.minimum(nth, n - 2)"),
        "KernelWritesCollide.commit.scatter_kv_kernel+pool_ptr",
        ["kernel: scatter_kv_kernel, program 1 of 3, program 0 of 3", "lanes: [0, 1) of 4 of program 1"],
    ),
    "missing mask": (
        POOL_STORE,
        POOL_STORE.replace(", mask=mask)\n", ")\n"),
        "KernelAccessOutOfBounds.commit.scatter_kv_kernel+pool_ptr",
        ["kernel: scatter_kv_kernel, program 2 of 3", "lanes: [2, 4) of 4"],
    ),
    "missing mask of a load": (
        POOL_STORE,
        POOL_STORE.replace("k_ptr + i, mask=mask, other=0", "k_ptr + i"),
        "KernelAccessOutOfBounds.commit.scatter_kv_kernel+k_ptr",
        ["kernel: scatter_kv_kernel, program 2 of 3", "lanes: [2, 4) of 4"],
    ),
}


def planted_factory(name, seed=0):
    old, new = PLANTED[name][:2]
    text = (original_home() / "kernels.py").read_text()
    assert text.count(old) == 1
    package = copy_of_package("sanitized_" + re.sub(r"\W", "_", name), {"kernels.py": text.replace(old, new)})
    return lambda config: sanitized(GpuImplTarget(config, impl=package), seed)


@pytest.mark.parametrize("name", PLANTED)
def test_mistake_planted_in_a_kernel_is_named_with_program_and_lanes(name):
    signature, facts = PLANTED[name][2:]
    factory = planted_factory(name)

    run = run_ops(CONFIG, OPS, factory)

    assert run.signature == signature
    assert set(facts) <= set(facts_of(run.violation))
    assert "lane=interpret" in dict(run.violation.facts)["config"]
    again = run_ops(CONFIG, OPS, factory)
    assert str(again.violation) == str(run.violation)


def test_store_one_past_the_row_is_named_by_the_cell_of_the_next_row():
    run = run_ops(CONFIG, OPS, planted_factory("store one past the row"))

    assert run.violation.headline == (
        "rewrite_row_kernel stores to row_table_ptr[3, 0], expected what it promises to write"
    )


def test_finding_is_minimized_to_what_it_needs():
    factory = planted_factory("missing mask")
    ops = [*OPS, Submit("r2", (9,)), *OPS]
    signature, _ = failing_signature(CONFIG, ops, factory)

    search = Minimizer(CONFIG, tuple(ops), factory, signature, seconds=10)
    search.run()

    assert [type(op) for op in search.ops] == [Submit, Match, Alloc, Commit]
    assert failing_signature(search.config, search.ops, factory)[0] == signature


def test_finding_is_a_violation_and_a_refusal_stays_one():
    target = factory_for("gpu_impl", sanitize=0)(CacheConfig(n_pages=1))
    target.match("r0", list(range(9)), (None, None, ()), 0, False)

    with pytest.raises(OutOfPages):
        target.alloc([AllocItem("r0", 9)])


def test_each_kernel_that_operations_launch_has_a_promise():
    module = import_module("kvlockstep.gpu_impl.kernels")

    assert {name for name in vars(module) if name.endswith("_kernel")} == set(PROMISES)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.name[:4])
def test_regression_gives_no_finding_and_the_same_history(path):
    trace = read_trace(path)
    plain = run_ops(trace.header.config, trace.ops, factory_for("gpu_impl"), digest=True)

    watched = run_ops(trace.header.config, trace.ops, factory_for("gpu_impl", sanitize=3), digest=True)

    assert (watched.signature, watched.digest) == (None, plain.digest)


class Drawn:
    """Cases as a worker draws them. Implements `machine.Case`."""

    config = None

    def __init__(self, factory):
        self.factory = factory
        probe = factory(CacheConfig())
        self.capabilities, self.page_sizes, self.options = probe.capabilities, (1, 2, 3, 4, 16), ()
        self.search = None
        self.n_ops = 0

    def start(self, config):
        return Lockstep(config, self.factory(config))

    def run(self, lockstep, op):
        self.n_ops += 1
        lockstep.run(op)


def test_drawn_operations_give_no_finding():
    case = Drawn(factory_for("gpu_impl", sanitize=11))

    run_cases(case, 5, n_cases=6, steps=60)

    assert case.n_ops > 200
