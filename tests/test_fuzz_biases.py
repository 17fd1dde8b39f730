"""Each bias of the generator names a statistic that exists, draws from its range, and is used."""

import re
from pathlib import Path

import pytest

from kvlockstep.fuzz import biases, draws
from kvlockstep.fuzz.biases import Bias
from kvlockstep.fuzz.labels import LABELS, name_of
from kvlockstep.fuzz.ops import OPS
from kvlockstep.fuzz.targets.base import REFUSALS
from kvlockstep.reference.allowances import ALLOWANCES

BIASES = {name: value for name, value in vars(biases).items() if isinstance(value, Bias)}
KINDS = {op.__name__.lower() for op in OPS}
OUTCOMES = {f"{kind}: {refusal.__name__}" for kind in KINDS for refusal in REFUSALS}


def test_there_are_biases():
    assert len(BIASES) > 30


@pytest.mark.parametrize("name", BIASES)
def test_bias_names_a_statistic_that_a_run_shows(name):
    known = {name_of(label) for label in LABELS} | OUTCOMES | set(ALLOWANCES)

    assert BIASES[name].statistic in known


@pytest.mark.parametrize("name", BIASES)
def test_bias_takes_some_of_the_integers_it_is_drawn_from_and_not_all(name):
    bias = BIASES[name]

    assert 0 < len(bias.drawn) < bias.of
    assert set(bias.drawn) <= set(range(bias.of))
    assert all(number in bias for number in bias.drawn)
    assert bias.of not in bias


def test_every_bias_is_used_and_every_one_used_exists():
    used = set(re.findall(r"biases\.([A-Z_]+)", Path(draws.__file__).read_text()))

    assert used == set(BIASES)
