"""Bugs made by a library: small systematic changes of the pure Python parts of `gpu_impl`, one in each mutant.

Faults planted by hand show that what their author had in mind is found. Mutants ask about every comparison, number,
condition and statement alike. Most changes are made by the operators of Cosmic Ray; two that it lacks stand here,
against the same interface: a statement left out, and two branches exchanged. (mutmut, the other library there is,
makes a number larger only, a comparison its neighbour only, and has no interface for operators of one's own.)

Of Cosmic Ray's operators those are used whose result somebody could have written: ``+`` becomes ``-`` or ``*``, not
``>>``; ``==`` becomes ``!=`` or ``<``, not ``is``. Not mutated is what does not decide what the cache does: type
annotations, decorators, imports, docstrings, whatever stands in a ``raise`` (its message; that it is left out is a
mutant), and assertions, which hold. This is read off the syntax tree; see `_decides_nothing`. A condition with an
``else`` is not negated, because its branches are exchanged.

A mutant is told by its module, the function, the operator, the text of the line, and which one of those that are the
same in all this; so an edit elsewhere does not rename it. `target_name` makes it a target: it can be fuzzed, and a
trace replayed on it, like any other.
"""

import difflib
import hashlib
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword
from parso.tree import Leaf, NodeOrLeaf

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults.patching import copy_of_package, original_home
from kvlockstep.fuzz.registry import Factory
from kvlockstep.fuzz.targets.base import Target

MODULES = ("arithmetic.py", "cache.py", "free_stack.py", "plan.py", "runs.py", "tree.py", "victims.py")
"""The parts of `gpu_impl` that are pure Python and decide something."""

LIKE_FOR_LIKE = re.compile(
    r"ReplaceBinaryOperator_(Add|Sub|Mul|FloorDiv|Mod)_(Add|Sub|Mul|FloorDiv|Mod)"
    r"|ReplaceComparisonOperator_(Eq|NotEq|Lt|LtE|Gt|GtE)_(Eq|NotEq|Lt|LtE|Gt|GtE)"
    r"|ReplaceComparisonOperator_(Is_IsNot|IsNot_Is)"
    r"|ReplaceUnaryOperator_Delete_(USub|Not)"
    r"|AddNot|ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceAndWithOr|ReplaceOrWithAnd"
    r"|ReplaceBreakWithContinue|ReplaceContinueWithBreak|NumberReplacer|ZeroIterationForLoop"
)
"""The operators of Cosmic Ray that are used."""


class DoesNotImport(Exception):
    """A mutant whose package cannot even be imported: no test was needed to see that."""


class DropStatement(Operator):  # type: ignore[misc]
    """Leaves out a simple statement of a function; imports, assertions and docstrings are none that does anything."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.type == "simple_stmt" and node.search_ancestor("funcdef") is not None:
            first = node.children[0]
            without_effect = {"string", "assert_stmt", "import_name", "import_from"}
            if first.type not in without_effect and first.get_code().strip() != "pass":
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.children = [Keyword("pass", node.start_pos, node.get_first_leaf().prefix), node.children[-1]]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("def f():\n    g()\n    h()\n", "def f():\n    pass\n    h()\n"),)


class SwapBranches(Operator):  # type: ignore[misc]
    """Exchanges the two branches of an ``if`` with an ``else``, or of a conditional expression."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if _branches(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        one, other = _branches(node)
        a, b = node.children[one], node.children[other]
        first, second = a.get_first_leaf(), b.get_first_leaf()
        first.prefix, second.prefix = second.prefix, first.prefix
        node.children[one], node.children[other] = b, a
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("x = a if b else c", "x = c if b else a"),
            Example("if a:\n    b()\nelse:\n    c()\n", "if a:\n    c()\nelse:\n    b()\n"),
        )


def _branches(node: NodeOrLeaf) -> tuple[int, ...]:
    """Return where among the children of a node its two branches stand, if it has two."""
    children = getattr(node, "children", ())
    if node.type == "if_stmt" and len(children) == 7:  # if TEST : SUITE else : SUITE
        return 3, 6
    return (0, 4) if node.type == "test" and len(children) == 5 else ()


@cache
def operators() -> dict[str, Operator]:
    """Return the operators by name, Cosmic Ray's and the two that it lacks."""
    core = OperatorProvider()
    found = {name: core[name]() for name in core if LIKE_FOR_LIKE.fullmatch(name)}
    return found | {operator.__name__: operator() for operator in (DropStatement, SwapBranches)}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module. ``occurrence`` is its number among the places of its operator in the whole module."""

    module: str
    scope: str  # of the function, as in ``PrefixTree._split``; empty outside of any
    operator: str
    line: str  # the line that it changes, or the first of them
    nth: int  # among those that are the same in all the above
    occurrence: int

    @property
    def id(self) -> str:
        return " | ".join((self.module, self.scope, self.operator, self.line, str(self.nth)))

    @property
    def target_name(self) -> str:
        """Name it as a target for the command line."""
        return f"{__name__}:mutant_{_digest(self.id)}"

    def text(self) -> str:
        """Return the module with the change in it."""
        mutated = mutate_code(_source(self.module), operators()[self.operator], self.occurrence)
        assert isinstance(mutated, str), f"no place number {self.occurrence} for {self.operator} in {self.module}"
        return mutated

    def diff(self) -> str:
        """Show the change, without lines around it."""
        before, after = _source(self.module).splitlines(), self.text().splitlines()
        lines = difflib.unified_diff(before, after, lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def _source(module: str) -> str:
    return (original_home() / module).read_text()


# Which there are


@cache
def mutants_of(module: str) -> tuple[Mutant, ...]:
    """List the mutants of one module, in the order of operators and places."""
    return tuple(mutants_in(_source(module), module))


def mutants_in(source: str, module: str) -> Iterator[Mutant]:
    """Do the same for a module that reads ``source``."""
    tree = get_ast(source)
    nodes = list(ast_nodes(tree))
    lines = source.splitlines()
    for name, operator in operators().items():
        n_places = 0
        seen: Counter[tuple[str, str]] = Counter()
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                occurrence = n_places
                n_places += 1
                leaf = tree.get_leaf_for_position(start)
                assert leaf is not None
                if _decides_nothing(leaf, name) or (name == "AddNot" and _branches(node)):
                    continue
                scope, line = _scope(leaf), lines[start[0] - 1].strip()
                yield Mutant(module, scope, name, line, seen[scope, line], occurrence)
                seen[scope, line] += 1


def _decides_nothing(leaf: Leaf, operator: str) -> bool:
    """Tell whether a place is in an annotation, a decorator, an assertion, or in what a ``raise`` raises."""
    node: Any = leaf
    while node.parent is not None:
        parent = node.parent
        if parent.type in ("decorator", "assert_stmt", "tfpdef"):
            return True
        if parent.type == "raise_stmt" and operator != DropStatement.__name__:
            return True
        if parent.type == "annassign" and node is parent.children[1]:
            return True
        if parent.type == "funcdef" and node is parent.annotation:
            return True
        node = parent
    return False


def _scope(leaf: Leaf) -> str:
    names: list[str] = []
    node: Any = leaf
    while (node := node.parent) is not None:
        if node.type in ("funcdef", "classdef"):
            names.insert(0, node.name.value)
    return ".".join(names)


@cache
def all_mutants() -> dict[str, Mutant]:
    """Return every mutant by its id."""
    return {mutant.id: mutant for module in MODULES for mutant in mutants_of(module)}


def sample(seed: int, n: int) -> list[Mutant]:
    """Return ``n`` mutants, plainly at random: each is as likely as any other, so the score is one of the whole.

    They are those whose id and seed give the smallest hashes. So a larger sample holds a smaller one, and an edit
    of the source changes only the part of it that it touches.
    """
    ranked = sorted(all_mutants().values(), key=lambda mutant: (_digest(f"{seed} {mutant.id}"), mutant.id))
    return ranked[:n]


# As targets


def mutated_factory(mutant: Mutant) -> Factory:
    """Return a factory of targets that carry the mutant. The package is imported with the first of them.

    That raises DoesNotImport where it cannot be.
    """

    @cache
    def package() -> Any:
        try:
            copy = copy_of_package("mutant_" + _digest(mutant.id), {mutant.module: mutant.text()})
            importlib.import_module(f"{copy.__name__}.cache")  # which imports the rest
            return copy
        except Exception as error:
            raise DoesNotImport(f"{type(error).__name__}: {error}") from error

    def make(config: CacheConfig) -> Target:
        from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget

        target: Target = GpuImplTarget(config, impl=package())
        return target

    return make


@cache
def _by_digest() -> dict[str, Mutant]:
    return {_digest(mutant.id): mutant for mutant in all_mutants().values()}


def __getattr__(name: str) -> Callable[..., Target]:
    """Give the factory that `Mutant.target_name` names, as if each stood in this module."""
    mutant = _by_digest().get(name.removeprefix("mutant_")) if name.startswith("mutant_") else None
    if mutant is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return mutated_factory(mutant)
