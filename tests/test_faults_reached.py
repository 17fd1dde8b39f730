"""A faulty copy of `gpu_impl` counts how often its edited place is reached: there, in that branch, and no more."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults import FAULTS, SourceFault
from kvlockstep.fuzz.faults.fault import KINDS
from kvlockstep.fuzz.faults.gpu_impl import GPU_IMPL_FAULTS
from kvlockstep.fuzz.faults.patching import FaultDoesNotApply, counted_edit, faulty_factory, path_to_edit
from kvlockstep.fuzz.ops import NO_NAMESPACE, AllocItem

CALL = "count_reached()"


def with_edit(module, old, new):
    return SourceFault(
        name="of-a-test",
        story="A test plants it.",
        kind=KINDS[0],
        laws=("TreeDiffers",),
        module=module,
        old=old,
        new=new,
    )


def target_with(name, **config):
    return faulty_factory(FAULTS[name])(CacheConfig(page_size=2, **config))


def match(target):
    target.match("r0", [1, 2, 3, 4, 5], NO_NAMESPACE, 0, False)


def run(target, n=5):
    match(target)
    target.alloc([AllocItem("r0", n)])


def publish(target, n=5):
    run(target, n)
    target.commit("r0", n, [])
    target.release("r0")


def around_call(text):
    """Give the lines before and after the call that counts."""
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index(CALL)
    return lines[at - 1], lines[at + 1]


def test_edited_statement_counts_each_time_it_is_reached():
    target = target_with("retract-keeps-row")
    assert target.reached == 0

    for n_retracted in (1, 2, 3):
        match(target)
        assert target.reached == n_retracted - 1
        target.retract("r0", False)
        assert target.reached == n_retracted


def test_edit_in_a_branch_counts_only_where_that_branch_runs():
    target = target_with("abort-keeps-lock")

    run(target)
    target.abort("r0")  # waits for its pass, in the other branch
    target.commit("r0", 0, [])
    assert target.reached == 0

    match(target)
    target.abort("r0")
    assert target.reached == 1


def test_branch_that_is_taken_away_still_counts():
    target = target_with("peek-leaves-old-rank")

    match(target)
    assert target.reached == 0

    target.peek("r1", [1, 2, 3], NO_NAMESPACE, False)
    assert target.reached == 1


def test_statement_that_is_taken_away_still_counts():
    target = target_with("recycled-node-keeps-hits")

    publish(target)
    assert target.reached == 1

    publish(target, n=1)  # what is there already makes no new node
    assert target.reached == 1


def test_statement_that_is_appended_counts_and_the_one_before_does_not():
    before, after = around_call(counted_edit(FAULTS["reset-sets-generations-back"]).counted)

    assert before == "self.tree.clear()"
    assert after == "self.free_pages = FreeStack(self.config.n_pages)"


def test_edit_in_a_lambda_counts_the_calls_of_that_lambda():
    counts = {}
    for policy in ("lru", "slru"):
        target = target_with("slru-protects-one-hit-too-late", policy=policy)
        publish(target)
        counts[policy] = target.reached

    assert counts["lru"] == 0
    assert counts["slru"] > 0


def test_targets_of_one_factory_count_together_and_those_of_another_apart():
    make = faulty_factory(FAULTS["retract-keeps-row"])
    first, second = make(CacheConfig()), make(CacheConfig())
    other = target_with("retract-keeps-row")

    for target in (first, second):
        match(target)
        target.retract("r0", False)

    assert (first.reached, second.reached, other.reached) == (2, 2, 0)


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in GPU_IMPL_FAULTS])
def test_fault_has_a_place_that_counts_and_is_the_same_otherwise(fault):
    edit = counted_edit(fault)
    counted = ast.parse(edit.counted)

    assert edit.counted.count(CALL) == 2  # its definition and the place
    assert ast.unparse(without_counting(counted)) == ast.unparse(ast.parse(edit.plain))
    assert edit.kernel == (fault.module == "kernels.py" and fault.name != "kernel-search-one-step-short")


def without_counting(tree):
    class Without(ast.NodeTransformer):
        def visit_Expr(self, node):
            return None if ast.unparse(node) == CALL else node

        def visit_BoolOp(self, node):
            return node.values[1] if ast.unparse(node.values[0]) == CALL else node

        def visit_FunctionDef(self, node):
            return None if node.name == "count_reached" else self.generic_visit(node)

        def visit_Assign(self, node):
            return None if ast.unparse(node) == "n_reached = 0" else self.generic_visit(node)

    tree = Without().visit(tree)
    for node in ast.walk(tree):
        assert getattr(node, "body", None) != [], "the call is alone in a branch that was there before"
    return tree


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("tree.py", "\nTOKEN_BYTES = 4\n", "\nTOKEN_BYTES = 8\n"),
        ("cache.py", "    in_flight_n: int = 0\n", "    in_flight_n: int = 1\n"),
        ("free_stack.py", "    def take(self, n: int)", "    def take(self, n: int, m: int = 0)"),
        ("kernels.py", '"row", "start", "n", "width"', '"row", "start", "n"'),
        ("victims.py", '    "lru": lambda stamp, created,', '    "lru": lambda stamp, *created,'),
    ],
)
def test_edit_outside_of_any_function_is_refused(module, old, new):
    with pytest.raises(FaultDoesNotApply, match="outside of any function"):
        faulty_factory(with_edit(module, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        self._requeue(anchor)\n", "        self._requeue(anchor)  # as before\n"),
        ("        self._requeue(anchor)\n", "        self._requeue(\n            anchor\n        )\n"),
    ],
)
def test_edit_that_changes_no_code_is_refused(old, new):
    with pytest.raises(FaultDoesNotApply, match=r"changes no code of tree\.py"):
        faulty_factory(with_edit("tree.py", old, new))


def test_edit_that_is_no_python_is_refused():
    with pytest.raises(FaultDoesNotApply, match=r"with it tree\.py is no Python"):
        faulty_factory(with_edit("tree.py", "        self._requeue(anchor)\n", "        self._requeue(anchor\n"))


@pytest.mark.parametrize(
    ("edited", "fields"),
    [
        ("if a:\n  b()\nelif c:\n  e()\nelse:\n  f()", "body.0 orelse.0 body.0 value func id"),
        ("if a:\n  b()\nelif c:\n  d()\nelse:\n  e()\n  f()", "body.0 orelse.0 orelse.0"),
        ("if a:\n  b()\nelif c:\n  d()\nelse:\n  f()\n  e()", "body.0 orelse.0 orelse.1"),
        ("if a:\n  b()\nelif not c:\n  d()\nelse:\n  f()", "body.0 orelse.0 test"),
        ("if a:\n  b()\nelse:\n  f()", "body.0 orelse.0"),
        ("if a:\n  b()\nelif c:\n  d()", "body.0 orelse.0 orelse.0"),
        ("if a:\n  g()\nelif c:\n  g()\nelse:\n  f()", "body.0"),
        ("if a:\n  b()\nelif c:\n  d()\nelse:\n  f()\ng()", "body.1"),
        ("b()", "body.0"),
    ],
)
def test_path_leads_to_the_innermost_place_that_holds_the_whole_edit(edited, fields):
    original = "if a:\n  b()\nelif c:\n  d()\nelse:\n  f()"
    path = path_to_edit(ast.parse(original), ast.parse(edited))

    named = [step.field if step.index is None else f"{step.field}.{step.index}" for step in path]
    assert " ".join(named) == fields


def test_compiled_kernel_counts_nothing_and_says_so(monkeypatch):
    monkeypatch.setattr("kvlockstep.gpu_impl.lane.choose_lane", lambda: "cuda")
    target = target_with("kernel-row-rewrite-one-short")

    assert target.reached is None
    assert CALL not in (Path(sys.modules[type(target._cache).__module__].__file__).parent / "kernels.py").read_text()


@pytest.mark.parametrize(("lane", "expected"), [("interpret", "1"), ("torch", "0")])
def test_edit_in_a_kernel_counts_where_the_kernel_is_interpreted(lane, expected):
    script = (
        "from kvlockstep.fuzz.config import CacheConfig\n"
        "from kvlockstep.fuzz.faults import FAULTS\n"
        "from kvlockstep.fuzz.faults.patching import faulty_factory\n"
        "from kvlockstep.fuzz.ops import NO_NAMESPACE, AllocItem\n"
        "target = faulty_factory(FAULTS['kernel-offset-of-batch-position'])(CacheConfig())\n"
        "target.match('r0', [1, 2, 3], NO_NAMESPACE, 0, False)\n"
        "assert target.reached == 0\n"
        "target.alloc([AllocItem('r0', 3)])\n"
        "print(target.reached)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"KVLOCKSTEP_LANE": lane},
        check=True,
    )

    assert done.stdout.strip() == expected
