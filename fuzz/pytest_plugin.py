"""The pytest plugin: ``pytest --kvlockstep-target package.module:factory`` fuzzes a cache among somebody's own tests.

pytest loads this module in every run of an environment that has kvlockstep, so it holds options only. Without a target
nothing else of kvlockstep is imported; what the options do is in ``pytest_items.py``, and docs/pytest.md shows it.
"""

import argparse
import math
from collections.abc import Callable

import pytest

MAX_CASES = 1_000_000_000
MAX_ITEMS = 10_000
MAX_SECONDS = 24 * 3600.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvlockstep", "fuzzing a KV cache against its reference model")
    group.addoption(
        "--kvlockstep-target",
        metavar="NAME",
        help="the cache under test, built-in or package.module:factory; without it nothing of this group is done",
    )
    group.addoption("--kvlockstep-lane", metavar="LANE", help="how its kernels run: cuda, interpret or torch")
    group.addoption(
        "--kvlockstep-cases",
        metavar="N",
        type=_whole_number(MAX_CASES),
        default=400,
        help="fresh cases in all, default 400",
    )
    group.addoption(
        "--kvlockstep-shards",
        metavar="N",
        type=_whole_number(MAX_ITEMS),
        default=8,
        help="test items that the cases are split over, default 8",
    )
    group.addoption(
        "--kvlockstep-seed",
        metavar="TEXT",
        help="what cases are drawn from, default the commit of the rootdir, and 0 where it has none",
    )
    group.addoption("--kvlockstep-regressions", metavar="DIR", help="traces to replay: *.jsonl and *.jsonl.gz")
    group.addoption("--kvlockstep-out", metavar="DIR", help="where failures are stored, default out under the rootdir")
    group.addoption(
        "--kvlockstep-minimize",
        metavar="SECONDS",
        type=_seconds,
        default=30.0,
        help="time to look for a shorter trace of each failure, default 30",
    )
    group.addoption(
        "--kvlockstep-accept-unobserved",
        metavar="LAW",
        type=int,
        choices=(1, 2, 3),
        action="append",
        default=[],
        help="a law of the charter (1, 2, 3) that the target need not show",
    )
    group.addoption("--kvlockstep-fault", metavar="NAME", help="plant a named fault first, to see it found")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("kvlockstep_target") is None or config.getoption("help"):
        return
    from kvlockstep.fuzz.pytest_items import Gate

    config.pluginmanager.register(Gate(config), "kvlockstep-gate")


def _whole_number(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:12]) <= most):
            raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {most}, got {text!r}")
        return int(text)

    return read


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to {MAX_SECONDS:g}, got {text!r}")
    return seconds
