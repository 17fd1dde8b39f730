"""Plants a fault: copies the package of `gpu_impl`, edits one place of the copy, and imports it under its own name.

The copy lives beside the original in the same process, so a test can hold both; its files exist on disk,
because Triton reads the source of kernels from there. An edit whose text does not stand exactly once is an
error: a fault that does not apply is neither caught nor missed.

Nor is one that is never reached, so the copy counts how often it comes to the edited place: a call is added right
before the first statement that the edit changes or adds, or where the statement stood that it takes away, in the
same branch. The place is read off the two syntax trees, so that layout and comments do not matter. In a kernel that
Triton compiles nothing can be counted.
"""

import ast
import atexit
import importlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults.fault import SourceFault
from kvlockstep.fuzz.registry import Factory
from kvlockstep.fuzz.targets.base import Target

if TYPE_CHECKING:
    from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget

COUNTER = '''
n_reached = 0

def count_reached():
    """Count that the edited place is about to run."""
    global n_reached
    n_reached += 1
'''
"""Stands at the top of an edited module."""

NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.c", *(f"*{suffix}" for suffix in EXTENSION_SUFFIXES))
"""Machine code above all: a copy is interpreted, so that what is edited is what runs."""

_copies = count()


class FaultDoesNotApply(Exception):
    """The text that the fault replaces does not stand exactly once, or nothing could show that the edit runs."""


# A copy of the package


@cache
def original_home() -> Path:
    """Return the folder of `gpu_impl`; imports nothing of it."""
    original = importlib.util.find_spec("kvlockstep.gpu_impl")
    assert original is not None
    assert original.origin is not None
    return Path(original.origin).parent


@cache
def _folder_of_copies() -> Path:
    folder = tempfile.mkdtemp(prefix="kvlockstep-faults-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def copy_of_package(name: str, texts: Mapping[str, str]) -> ModuleType:
    """Import a copy of `gpu_impl` of its own, in which the files that ``texts`` names read otherwise.

    Raises whatever its import raises.
    """
    name = f"gpu_impl_{name}_{next(_copies)}"
    folder = _folder_of_copies() / name
    shutil.copytree(original_home(), folder, ignore=NOT_COPIED)
    for file, text in texts.items():
        (folder / file).write_text(text)
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Where an edit is


@dataclass(frozen=True, slots=True)
class Step:
    """One step down a syntax tree: from a node to what stands in a field of it, at an index where that is a list."""

    node: ast.AST
    field: str
    index: int | None

    @property
    def into_statements(self) -> bool:
        return self.index is not None and self.field in ("body", "orelse", "finalbody")

    @property
    def into_function(self) -> bool:
        return isinstance(self.node, ast.FunctionDef | ast.Lambda) and self.field == "body"


def _dump(value: object) -> object:
    if isinstance(value, list):
        return [_dump(item) for item in value]
    return ast.dump(value) if isinstance(value, ast.AST) else value


def path_to_edit(original: ast.AST, edited: ast.AST) -> list[Step]:
    """Go down both trees as long as a single thing differs; the steps are those in the edited one.

    Where statements were added or taken away, the last step is to the index of the first of them.
    """
    differing = [name for name in edited._fields if _dump(getattr(original, name)) != _dump(getattr(edited, name))]
    if len(differing) != 1:
        return []
    (name,) = differing
    before, after = getattr(original, name), getattr(edited, name)
    index: int | None = None
    if isinstance(before, list) and isinstance(after, list):
        was, now = _dump(before), _dump(after)
        assert isinstance(was, list)
        assert isinstance(now, list)
        index = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
        alone = len(was) == len(now) and was[index + 1 :] == now[index + 1 :]
        before, after = (before[index], after[index]) if alone else (None, None)
    step = Step(edited, name, index)
    if isinstance(before, ast.AST) and type(before) is type(after):
        return [step, *path_to_edit(before, after)]
    return [step]


@dataclass(frozen=True, slots=True)
class CountedEdit:
    """The text of a module with a fault in it, without and with the count; ``kernel`` where Triton may compile it."""

    plain: str
    counted: str
    kernel: bool


def counted_edit(fault: SourceFault) -> CountedEdit:
    """Edit the module of a fault, and let it count how often the edited place is reached. Raises FaultDoesNotApply."""
    source = (original_home() / fault.module).read_text()
    times = source.count(fault.old)
    if times != 1:
        raise FaultDoesNotApply(f"its text stands {times} times in {fault.module}, expected 1")
    plain = source.replace(fault.old, fault.new)
    try:
        edited = ast.parse(plain)
    except SyntaxError as error:
        raise FaultDoesNotApply(f"with it {fault.module} is no Python: {error}") from error
    path = path_to_edit(ast.parse(source), edited)
    if not path:
        raise FaultDoesNotApply(f"it changes no code of {fault.module}")
    if not any(step.into_function for step in path):
        raise FaultDoesNotApply(f"its text stands outside of any function of {fault.module}, so nothing shows it run")
    place = next(step for step in reversed(path) if step.into_statements or step.into_function)
    call = ast.Call(ast.Name("count_reached", ast.Load()), [], [])
    if place.index is None:
        assert isinstance(place.node, ast.Lambda)
        place.node.body = ast.BoolOp(ast.Or(), [call, place.node.body])
    else:
        getattr(place.node, place.field).insert(place.index, ast.Expr(call))
    edited.body[_n_leading(edited) : 0] = ast.parse(COUNTER).body
    kernel = any(isinstance(step.node, ast.FunctionDef) and _is_kernel(step.node) for step in path)
    return CountedEdit(plain, ast.unparse(ast.fix_missing_locations(edited)), kernel)


def _n_leading(module: ast.Module) -> int:
    """Count the statements that must stay first: the docstring."""
    return int(ast.get_docstring(module) is not None)


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


# A target with a fault


def patched_package(fault: SourceFault, counted: bool = True) -> ModuleType:
    """Import a copy of `gpu_impl` with the fault in it. Raises FaultDoesNotApply."""
    edit = counted_edit(fault)
    text = edit.counted if counted else edit.plain
    return copy_of_package("with_" + fault.name.replace("-", "_"), {fault.module: text})


def faulty_factory(fault: SourceFault) -> Factory:
    """Return a factory of targets that carry the fault. Raises FaultDoesNotApply.

    They have an attribute ``reached``: how often all of them together came to the edited place, or None where it is
    in a kernel that is compiled.
    """
    in_kernel = counted_edit(fault).kernel

    @cache
    def faulty_class() -> "tuple[ModuleType, type[GpuImplTarget]]":
        from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget
        from kvlockstep.gpu_impl.lane import choose_lane

        counted = not (in_kernel and choose_lane() == "cuda")
        package = patched_package(fault, counted)
        module_name = f"{package.__name__}.{fault.module.removesuffix('.py')}"

        class FaultyTarget(GpuImplTarget):
            @property
            def reached(self) -> int | None:
                # kernels are imported with the first cache
                return cast(int, vars(sys.modules[module_name])["n_reached"]) if counted else None

        return package, FaultyTarget

    def make(config: CacheConfig) -> Target:
        package, faulty = faulty_class()
        target: Target = faulty(config, impl=package)
        return target

    return make
