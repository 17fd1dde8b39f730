"""The catalogue of planted faults: how many there are, of which kinds, what they need, and which laws may name them.

Those of `gpu_impl` apply, inside of a function, and leave the original alone.

That those of SGLang apply and leave it alone needs SGLang, and is tested in ``tests/sglang``.
"""

import ast
import importlib
import importlib.util
import pkgutil
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvlockstep import gpu_impl, invariants
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults import FAULTS, SourceFault
from kvlockstep.fuzz.faults.fault import KINDS, NEEDS
from kvlockstep.fuzz.faults.gpu_impl import GPU_IMPL_FAULTS
from kvlockstep.fuzz.faults.hunt import may_name
from kvlockstep.fuzz.faults.patching import FaultDoesNotApply, patched_package
from kvlockstep.fuzz.faults.sglang import SGLANG_FAULTS
from kvlockstep.fuzz.lockstep import TargetRaised
from kvlockstep.fuzz.registry import SGLANG_TARGETS, TargetUnusable, factory_for
from kvlockstep.fuzz.targets.gpu_impl import make
from kvlockstep.invariants import Violation
from kvlockstep.reference.allowances import ALLOWANCES

ORIGINAL = Path(gpu_impl.__file__).resolve().parent

CHARTER = {
    "lock only the last node": "lock-only-last-node",
    "forget to unlock on abort": "abort-keeps-lock",
    "split copies the lock count wrongly": "split-loses-lock-count",
    "checkpoint does not rewrite the row": "checkpoint-keeps-row",
    "checkpoint frees the canonical instead of the duplicate page": "checkpoint-frees-canonical",
    "partial page freed twice at release": "partial-page-freed-twice",
    "write set repeats a slot across two requests": "write-set-of-first-request-for-all",
    "page size ignored in match": "matched-pages-counted-as-tokens",
    "namespace ignored in the child lookup": "namespace-ignored-in-child-lookup",
    "bigram key one longer than its slots": "bigram-key-one-too-long",
    "evict frees an inner node": "evict-takes-inner-node",
    "generation reset": "reset-sets-generations-back",
    "tail of rejected drafts leaked": "rejected-draft-tail-leaked",
    "row freed while in flight": "row-freed-while-in-flight",
    "row 0 handed out": "padding-row-handed-out",
}
"""Bugs that every version of the harness has to find."""

SGLANG_CHARTER = {
    "unlock stops one node early": "radix-unlock-stops-one-node-early",
    "split does not copy the lock count": "radix-split-loses-lock-count",
    "publication frees no duplicates": "radix-duplicates-never-freed",
    "publication frees from 0": "radix-duplicates-freed-from-zero",
    "checkpoint does not write the row": "radix-checkpoint-keeps-row",
    "segment freed from a wrong start": "segment-freed-from-second-slot",
    "namespace left out of the child key": "radix-child-key-without-namespace",
    "salt left out of a publication": "unified-publication-without-salt",
    "evict takes a locked leaf": "radix-evicts-locked-leaf",
    "decode ignores the page boundary": "decode-ignores-page-boundary",
    "row freed twice": "row-freed-twice",
    "Rust core told a wrong page size": "rust-core-told-pages-of-one",
    "lru and mru swapped": "rust-core-told-mru-for-lru",
}
"""Bugs in SGLang's own classes that every version of the harness has to find."""

NO_LAW_SEES = {
    "depth, cost, retained memory": "the laws hold for what a snapshot shows, and it shows neither time, nor the depth "
    "of a call, nor bytes that are held beside rows, pages and nodes; a page or row that is retained is another kind",
}
"""Kinds of public bugs of which no fault can be caught, and why."""


def all_faults():
    return [pytest.param(fault, id=fault.name) for fault in FAULTS.values()]


def law_names():
    for module in pkgutil.iter_modules(invariants.__path__, "kvlockstep.invariants."):
        importlib.import_module(module.name)
    found, todo = {TargetRaised.__name__}, [Violation]
    while todo:
        todo += (classes := todo.pop().__subclasses__())
        found.update(cls.__name__ for cls in classes)
    return found


def sources(package):
    folder = Path(package.__file__).resolve().parent
    return {path.name: path.read_text() for path in folder.glob("*.py")}


def with_edit(old, new, name):
    laws = ("TreeDiffers",)
    return SourceFault(
        name=name, story="A test plants it.", kind=KINDS[0], laws=laws, module="tree.py", old=old, new=new
    )


def only_outside_of_functions(source):
    """Give the syntax of a module with the bodies of all functions left out."""

    class Emptied(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            node.body = []
            return node

        def visit_Lambda(self, node):
            node.body = ast.Constant(None)
            return node

    return ast.dump(Emptied().visit(ast.parse(source)))


def test_names_are_unique():
    assert len(FAULTS) == len(GPU_IMPL_FAULTS) + len(SGLANG_FAULTS)


def test_no_two_faults_are_the_same_edit():
    edits = [(fault.module, fault.old, fault.new) for fault in GPU_IMPL_FAULTS]

    assert len(set(edits)) == len(edits)


def test_catalogue_is_large():
    assert len(GPU_IMPL_FAULTS) >= 60
    assert len(SGLANG_FAULTS) >= 20


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_that_a_law_can_see_has_three_faults_of_gpu_impl(kind):
    n_faults = len([fault for fault in GPU_IMPL_FAULTS if fault.kind == kind])

    assert n_faults >= 3 if kind not in NO_LAW_SEES else n_faults == 0


@pytest.mark.parametrize("need", NEEDS)
def test_each_need_has_two_faults_of_gpu_impl(need):
    assert len([fault for fault in GPU_IMPL_FAULTS if need in fault.needs]) >= 2


@pytest.mark.parametrize("described", CHARTER)
def test_catalogue_holds_bug_of_the_charter(described):
    assert CHARTER[described] in {fault.name for fault in GPU_IMPL_FAULTS}


@pytest.mark.parametrize("described", SGLANG_CHARTER)
def test_catalogue_holds_bug_of_the_sglang_charter(described):
    assert SGLANG_CHARTER[described] in {fault.name for fault in SGLANG_FAULTS}


@pytest.mark.parametrize("target", SGLANG_TARGETS)
def test_each_tree_of_sglang_has_several_faults(target):
    assert len([fault for fault in SGLANG_FAULTS if fault.target == target]) >= 10


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in SGLANG_FAULTS])
def test_fault_of_sglang_names_its_target_and_an_allowance_that_exists(fault):
    assert fault.target in SGLANG_TARGETS
    assert fault.hides_behind is None or fault.hides_behind in ALLOWANCES


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed here")
def test_fault_of_sglang_makes_the_target_unusable_where_sglang_is_not_installed():
    with pytest.raises(TargetUnusable, match="target 'sglang:radix': importing"):
        factory_for("sglang:radix", "radix-split-loses-lock-count")


def test_three_faults_are_in_kernels_and_found_interpreted():
    interpreted = [fault for fault in FAULTS.values() if fault.lane == "interpret"]

    assert len(interpreted) >= 3
    assert {fault.module for fault in interpreted} == {"kernels.py"}


@pytest.mark.parametrize("fault", all_faults())
def test_fault_is_described(fault):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", fault.name)
    assert re.fullmatch(r"[A-Z].*[a-z`]\.", fault.story)
    assert fault.kind in KINDS
    assert set(fault.needs) <= set(NEEDS)
    assert len(set(fault.needs)) == len(fault.needs)
    assert fault.bug is None or re.fullmatch(r"[\w-]+/[\w-]+#\d+", fault.bug)


@pytest.mark.parametrize("fault", all_faults())
def test_fault_names_few_laws_and_ones_that_exist(fault):
    assert len(fault.laws) in (1, 2)
    assert len(set(fault.laws)) == len(fault.laws)
    assert set(fault.laws) <= law_names()


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in GPU_IMPL_FAULTS])
def test_fault_edits_exactly_one_place_of_one_file(fault):
    source = (ORIGINAL / fault.module).read_text()
    edited = source.replace(fault.old, fault.new)

    assert source.count(fault.old) == 1
    assert edited != source
    compile(edited, fault.module, "exec")
    assert only_outside_of_functions(edited) == only_outside_of_functions(source), "no call would run what was edited"


def test_patched_copy_differs_from_the_original_in_one_file_only():
    fault = with_edit(
        "        self.tick += 1\n        path = self._descend(ROOT,", "        path = self._descend(ROOT,", "no-tick"
    )
    before = sources(gpu_impl)
    copied = patched_package(fault)

    assert sources(gpu_impl) == before
    assert {name for name, text in sources(copied).items() if text != before[name]} == {"tree.py"}
    assert copied.KvCache is not gpu_impl.KvCache
    assert copied.CacheConfig is not gpu_impl.CacheConfig


def test_original_keeps_working_beside_a_faulty_copy():
    faulty = factory_for("gpu_impl", "padding-row-handed-out")(CacheConfig())

    assert 0 in faulty.snapshot().free_rows
    assert 0 not in make(CacheConfig()).snapshot().free_rows


@pytest.mark.parametrize(("old", "times"), [("text that stands nowhere", 0), ("        self.tick += 1\n", 2)])
def test_fault_whose_text_does_not_stand_once_is_refused(old, times):
    fault = with_edit(old, "pass", f"stands-{times}-times")

    for _ in ("at first", "again"):
        with pytest.raises(FaultDoesNotApply, match=f"stands {times} times in tree.py, expected 1"):
            patched_package(fault)


def test_fault_that_does_not_apply_makes_the_target_unusable(monkeypatch):
    monkeypatch.setitem(FAULTS, "stale", with_edit("text that stands nowhere", "pass", "stale"))

    with pytest.raises(TargetUnusable, match="'stale' does not apply"):
        factory_for("gpu_impl", "stale")


def test_unknown_fault_makes_the_target_unusable():
    with pytest.raises(TargetUnusable, match="unknown fault 'no-such'"):
        factory_for("gpu_impl", "no-such")


def test_fault_of_another_target_makes_the_target_unusable():
    with pytest.raises(TargetUnusable, match="is one of target 'gpu_impl', not of 'reference'"):
        factory_for("reference", "abort-keeps-lock")


def test_divergence_stands_for_every_way_to_differ_and_no_law():
    fault = replace(next(iter(FAULTS.values())), laws=("PageLeaked", "Divergence"))

    assert may_name(fault, "TreeDiffers")
    assert may_name(fault, "PageLeaked")
    assert not may_name(fault, "PageOwnedTwice")
    assert not may_name(replace(fault, laws=("PageLeaked",)), "TreeDiffers")
