"""Mutants of `gpu_impl`: which there are, how they are named, what is looked for, and how the score is counted."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from cosmic_ray.mutating import mutate_code

from kvlockstep import gpu_impl
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults import mutant_hunt, mutants
from kvlockstep.fuzz.faults.hunt import Hunt
from kvlockstep.fuzz.faults.mutant_hunt import Look, Looks, Verdict, look_for, look_for_all, look_of, score_of
from kvlockstep.fuzz.faults.mutants import (
    MODULES,
    DropStatement,
    SwapBranches,
    all_mutants,
    mutants_in,
    mutants_of,
    operators,
    sample,
)
from kvlockstep.fuzz.faults.nursery import Nurseries
from kvlockstep.fuzz.registry import TargetUnusable, factory_for

JUDGED = Path(__file__).resolve().parents[1] / "benchmarks" / "mutants_judged.toml"

SEEN_AT_ONCE = "arithmetic.py | pages_spanned | ReplaceUnaryOperator_Delete_USub | return -(-length // page_size) | 0"
HANGS = "tree.py | PrefixTree.unlock | AddNot | while node != ROOT: | 0"
SHOWS_LESS = "cache.py | KvCache.evictable | DropStatement | return self.tree.evictable * self.config.page_size | 0"
NOTHING_WRONG = "tree.py | PrefixTree.match | NumberReplacer | self.tick += 1 | 0"


def mutants_by_line(source):
    found = {}
    for mutant in mutants_in(source, "sample.py"):
        found.setdefault(mutant.line, []).append(mutant.operator)
    return found


@pytest.fixture(scope="module")
def nurseries():
    opened = Nurseries()
    yield opened
    opened.close()


# Which there are


@pytest.mark.parametrize("operator", [DropStatement, SwapBranches])
def test_operator_of_ours_does_what_its_examples_say(operator):
    for example in operator.examples():
        assert mutate_code(example.pre_mutation_code, operator(), example.occurrence) == example.post_mutation_code


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(x):\n    return (x if x else y)\n", "def f(x):\n    return (y if x else x)\n"),
        ("if a: b()\nelse: c()\n", "if a: c()\nelse: b()\n"),
    ],
)
def test_exchanged_branches_keep_their_blanks(source, expected):
    assert mutate_code(source, SwapBranches(), 0) == expected


@pytest.mark.parametrize(
    "source", ["if a:\n    b()\n", "if a:\n    b()\nelif c:\n    d()\nelse:\n    e()\n", "x = [a, b]\n"]
)
def test_no_other_branches_are_exchanged(source):
    assert mutate_code(source, SwapBranches(), 0) is None


def test_condition_with_an_else_is_exchanged_and_not_negated():
    plain = "def f():\n    if a:\n        b()\n"

    assert mutants_by_line(plain)["if a:"] == ["AddNot"]
    assert mutants_by_line(f"{plain}    else:\n        c()\n")["if a:"] == ["SwapBranches"]


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring with 1 + 2."""\n',
        "from a import b\nimport c\n",
        "def f(x: int | Literal[1]) -> Literal[2]:\n    pass\n",
        "x: dict[int, Literal[3]]\n",
        "@dataclass(frozen=True, slots=True)\nclass C:\n    x: int\n",
        "def f():\n    assert a < 1 and not b, f'{a + 1}'\n",
        "def f():\n    '''A docstring.'''\n    pass\n",
    ],
)
def test_what_decides_nothing_has_no_mutants(source):
    assert list(mutants_in(source, "sample.py")) == []


def test_message_of_a_refusal_has_no_mutants_but_the_refusal_has():
    assert mutants_by_line("def f():\n    raise OutOfPages(f'{1 + n} asked')\n") == {
        "raise OutOfPages(f'{1 + n} asked')": ["DropStatement"]
    }


def test_value_beside_an_annotation_has_mutants():
    assert mutants_by_line("class C:\n    x: Literal[1] = 2\n")["x: Literal[1] = 2"] == ["NumberReplacer"] * 2


def test_every_kind_of_change_is_among_the_operators():
    names = " ".join(operators())

    for kind in ("Comparison", "NumberReplacer", "DropStatement", "SwapBranches", "AddNot", "Binary", "Break"):
        assert kind in names
    assert not re.search(r"Pow|Shift|Bit|_Div|Is_Eq|Eq_Is|Variable|NoOp|Decorator", names)


@pytest.mark.parametrize("module", MODULES)
def test_each_module_has_mutants_of_their_own_names(module):
    found = mutants_of(module)

    assert len(found) >= 30
    assert len({mutant.id for mutant in found}) == len(found)
    assert len({mutant.target_name for mutant in found}) == len(found)


def test_mutant_changes_one_place_of_its_line():
    for mutant in sample(1, 25):
        original = (mutants.original_home() / mutant.module).read_text()

        assert ast.dump(ast.parse(mutant.text())) != ast.dump(ast.parse(original)), mutant.id
        assert mutant.diff().splitlines()[0].removeprefix("-").strip() == mutant.line


def test_names_outlast_an_edit_elsewhere():
    source = (mutants.original_home() / "plan.py").read_text()
    edited = source.replace("class BatchPlan:", "def new(a):\n    return a + 1 if a < 2 else 0\n\n\nclass BatchPlan:")
    before, after = ({mutant.id for mutant in mutants_in(text, "plan.py")} for text in (source, edited))

    assert before < after
    assert all("| new |" in id for id in after - before)


# A sample


def test_sample_is_the_same_for_the_same_seed_and_no_other():
    assert sample(0, 50) == sample(0, 50)
    assert set(sample(0, 50)) != set(sample(1, 50))


def test_larger_sample_holds_the_smaller():
    assert sample(0, 80)[:50] == sample(0, 50)
    assert len({mutant.id for mutant in sample(0, 400)}) == 400


# As targets


def test_mutant_is_a_target_by_name():
    mutant = all_mutants()[SEEN_AT_ONCE]
    faulty, original = factory_for(mutant.target_name)(CacheConfig()), factory_for("gpu_impl")(CacheConfig())
    home = Path(sys.modules[type(faulty._cache).__module__].__file__).parent

    assert (home / mutant.module).read_text() == mutant.text()
    assert type(original._cache) is gpu_impl.KvCache


def test_mutant_that_does_not_exist_is_no_target():
    with pytest.raises(TargetUnusable, match="has no factory 'mutant_0123'"):
        factory_for("kvlockstep.fuzz.faults.mutants:mutant_0123")


def test_mutant_that_cannot_be_imported_says_so(monkeypatch):
    mutant = all_mutants()[SEEN_AT_ONCE]
    monkeypatch.setattr(mutants.Mutant, "text", lambda mutant: "raise NameError('of a mutant')")

    with pytest.raises(TargetUnusable, match="DoesNotImport: NameError: of a mutant"):
        factory_for(mutant.target_name)(CacheConfig())


def test_mutant_that_breaks_a_law_is_caught(nurseries):
    look = look_for(all_mutants()[SEEN_AT_ONCE], 0, 10.0, nurseries)

    assert (look.outcome, look.id) == ("caught", SEEN_AT_ONCE)
    assert look.law is not None


def test_mutant_that_does_what_the_original_does_survives(nurseries):
    look = look_for(all_mutants()[NOTHING_WRONG], 0, 0.5, nurseries)

    assert (look.outcome, look.law, look.seconds) == ("survived", None, 0.5)


def test_mutant_that_shows_less_than_the_original_is_found(nurseries):
    look = look_for(all_mutants()[SHOWS_LESS], 0, 0.5, nurseries)

    assert look.outcome == "unobserved"
    assert look.text.startswith("not shown: ")


def test_mutant_that_never_returns_is_ended(nurseries, monkeypatch):
    monkeypatch.setattr(mutant_hunt, "GRACE", 1.0)

    assert look_for(all_mutants()[HANGS], 0, 4.0, nurseries).outcome == "hung"


@pytest.mark.parametrize(
    ("trouble", "law", "outcome"),
    [
        (None, None, "survived"),
        (None, "PageLeaked", "caught"),
        ("the process hung", None, "hung"),
        ("the process died: exit status -11", None, "died"),
        ("target 'm': its factory raised DoesNotImport: NameError: name 'x'", None, "no import"),
        ("target 'm': its factory raised TypeError: no", None, "caught"),
        ("the harness failed in worker hunt: KeyError: 0", None, "trouble"),
    ],
)
def test_end_of_a_hunt_says_what_became_of_the_mutant(trouble, law, outcome):
    look = look_of(Hunt("m", 3, False, law, operations=7, seconds=1.5, trouble=trouble), 10.0)

    assert look == Look("m", 3, 10.0, outcome, law, 7, 1.5, trouble or "")


# A run over many


def looked_for(monkeypatch, outcomes):
    """Let looks end as ``outcomes`` says, by budget; return the list of those that were had."""
    had = []

    def look(mutant, seed, budget, nurseries):
        had.append((mutant.id, seed, budget))
        return Look(mutant.id, seed, budget, outcomes(mutant, budget))

    monkeypatch.setattr(mutant_hunt, "look_for", look)
    return had


def test_only_survivors_are_looked_for_again_longer_and_from_another_seed(monkeypatch, tmp_path):
    first, second = sample(0, 2)
    had = looked_for(monkeypatch, lambda mutant, budget: "caught" if mutant is first or budget > 10 else "survived")
    looks = Looks(tmp_path / "looks.jsonl")

    list(look_for_all([first, second], 5, 10.0, 1, looks))

    assert had == [(first.id, 5, 10.0), (second.id, 5, 10.0), (second.id, 6, 60.0)]
    assert [looks.last(mutant.id, 5, 10.0).outcome for mutant in (first, second)] == ["caught", "caught"]


def test_run_goes_on_where_it_was_interrupted(monkeypatch, tmp_path):
    chosen, file = sample(0, 3), tmp_path / "looks.jsonl"
    had = looked_for(monkeypatch, lambda mutant, budget: "survived")
    run = look_for_all(chosen, 0, 10.0, 1, Looks(file))
    next(run)
    run.close()
    n_kept = len(Looks(file)._found)
    with file.open("a") as cut:
        cut.write('{"id": "half a')

    list(look_for_all(chosen, 0, 10.0, 1, Looks(file)))
    had_again = had.copy()
    list(look_for_all(chosen, 0, 10.0, 1, Looks(file)))

    assert n_kept >= 1
    assert sorted(json.loads(line)["budget"] for line in file.read_text().splitlines()) == [10.0] * 3 + [60.0] * 3
    assert had == had_again


def test_looks_of_another_seed_or_budget_do_not_count(monkeypatch, tmp_path):
    chosen = sample(0, 1)
    had = looked_for(monkeypatch, lambda mutant, budget: "caught")
    for seed, budget in ((0, 10.0), (1, 10.0), (0, 5.0)):
        list(look_for_all(chosen, seed, budget, 1, Looks(tmp_path / "looks.jsonl")))

    assert [(seed, budget) for _, seed, budget in had] == [(0, 10.0), (1, 10.0), (0, 5.0)]


# The score


def test_score_leaves_out_equivalents_and_what_is_not_imported():
    ends = ["caught"] * 5 + ["hung", "died", "survived", "survived", "survived", "no import", "trouble"]
    looks = [Look(str(number), 0, 10.0, end) for number, end in enumerate(ends)]
    verdicts = {
        "7": Verdict("7", "equivalent", "Because."),
        "8": Verdict("8", "blind spot", "Because."),
        "0": Verdict("0", "equivalent", "Somebody was wrong: it was caught."),
    }
    score = score_of(looks, verdicts)

    assert (score.n, score.n_found, score.n_equivalent, score.n_left_out) == (10, 7, 1, 2)
    assert score.of_all == 7 / 10
    assert score.without_equivalents == 7 / 9


def test_judged_mutants_exist_and_each_has_a_reason():
    judged = mutant_hunt.read_verdicts(JUDGED)

    assert set(judged) <= set(all_mutants())
    assert all(re.fullmatch(r"[A-Z].*\.", verdict.reason) for verdict in judged.values())


@pytest.mark.parametrize(
    "table",
    ['id = "a"\nverdict = "fine"\nreason = "Because."', 'id = "a"\nverdict = "equivalent"\nreason = ""'],
)
def test_verdict_that_is_none_is_refused(tmp_path, table):
    file = tmp_path / "judged.toml"
    file.write_text(f"[[mutant]]\n{table}\n")

    with pytest.raises(ValueError, match=r"judged\.toml: a: expected one verdict"):
        mutant_hunt.read_verdicts(file)
