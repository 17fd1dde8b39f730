"""What every test run of this checkout shares: Hypothesis profiles, one thread, the lane, and what may be absent.

A test that needs something not every machine has is marked ``@pytest.mark.needs("cuda")`` and is
skipped, with the reason printed, where that is absent. A run that must not skip it names it in
``KVLOCKSTEP_REQUIRE=cuda,sglang``: then a skip of a test so marked, for whatever reason, is a failure.

SGLang has an environment of its own. A test marked ``needs("sglang")`` runs commands in that one from any other; those
in ``tests/sglang`` import SGLang, run in it, and are skipped as a whole elsewhere: ``make test`` runs both.
"""

import importlib.util
import os
import shutil
import signal
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings

# Before torch is imported; unlike torch.set_num_threads it reaches child processes and costs no import here.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell without job control has Ctrl-C ignored in what it starts with &, and all that is started from there; tests of
# interrupts send it to processes of their own, and to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LANE = os.environ.setdefault("KVLOCKSTEP_LANE", "torch")

ROOT = Path(__file__).resolve().parent

collect_ignore_glob = ["src/kvlockstep/gpu_impl/*kernels.py"]  # looking there for doctests would import Triton

_ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_ANY_SPEED)
settings.register_profile("ci", max_examples=100, derandomize=True, database=None, **_ANY_SPEED)
settings.register_profile("nightly", max_examples=2000, print_blob=True, **_ANY_SPEED)
settings.register_profile(
    "debug", max_examples=20, verbosity=Verbosity.verbose, phases=set(Phase) - {Phase.shrink}, **_ANY_SPEED
)
settings.load_profile("dev")


def _missing_cuda() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch finds no GPU"


def _missing_module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{name} is not installed"


def _missing_browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "firefox")
    return None if any(map(shutil.which, names)) else f"none of {', '.join(names)} is on the path"


def _missing_sglang() -> str | None:
    from kvlockstep.fuzz.environments import sglang_found
    from kvlockstep.fuzz.registry import TargetUnusable

    try:
        sglang_found()
    except TargetUnusable as error:
        return str(error)
    return None


def _missing_compiled() -> str | None:
    from kvlockstep.fuzz.environments import why_not_compiled

    return why_not_compiled()


_MISSING = {
    "browser": _missing_browser,
    "compiled": _missing_compiled,
    "cuda": _missing_cuda,
    "ray": lambda: _missing_module("ray"),
    "sglang": _missing_sglang,
}


def _required() -> set[str]:
    return {name for name in os.environ.get("KVLOCKSTEP_REQUIRE", "").split(",") if name}


def _needs(item: pytest.Item) -> list[str]:
    return [mark.args[0] for mark in item.iter_markers("needs")]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"needs(name): skipped where it is absent; one of {', '.join(_MISSING)}")
    if unknown := _required() - _MISSING.keys():
        raise pytest.UsageError(f"KVLOCKSTEP_REQUIRE: expected some of {', '.join(_MISSING)}, got {min(unknown)!r}")
    import kvlockstep

    origin = Path(kvlockstep.__file__ or "").resolve().parent
    if origin != ROOT / "src" / "kvlockstep":
        raise pytest.UsageError(f"kvlockstep comes from {origin}, not from this checkout: pip install -e {ROOT}")


def pytest_report_header() -> str:
    required = ",".join(sorted(_required())) or "nothing"
    return f"kvlockstep: lane={LANE} required={required}"


class _NeedsSglangHere(pytest.File):
    """A file of tests that import SGLang, where nothing can import it."""

    def collect(self) -> NoReturn:
        pytest.skip("tests/sglang needs sglang: not installed beside this Python; make test runs it in .venv-sglang")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector):
    collectors = yield
    if collectors and file_path.is_relative_to(ROOT / "tests" / "sglang"):
        from kvlockstep.fuzz.environments import sglang_is_here

        if not sglang_is_here():
            return [_NeedsSglangHere.from_parent(parent, path=file_path)]
    return collectors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if unknown := set(_needs(item)) - _MISSING.keys():
            raise pytest.UsageError(f"{item.nodeid} needs {min(unknown)!r}: expected one of {', '.join(_MISSING)}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in _needs(item):
        if reason := _MISSING[name]():
            pytest.skip(f"needs {name}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    promised = sorted(_required().intersection(_needs(item)))
    if report.skipped and promised and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"KVLOCKSTEP_REQUIRE promises {', '.join(promised)}, but: {report.longrepr[2]}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded with ``record_property("show", text)``: figures that a pass alone does not tell."""
    reports = [report for key in ("passed", "failed") for report in terminalreporter.stats.get(key, [])]
    shown = sorted(str(text) for report in reports for name, text in report.user_properties if name == "show")
    if shown:
        terminalreporter.section("figures")
        for text in shown:
            terminalreporter.write_line(text)
