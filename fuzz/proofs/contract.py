"""Give one contract to CrossHair, in a process of its own, in which nothing can import torch.

    python -m kvlockstep.fuzz.proofs.contract NAME SECONDS {sound,fault} [CALL]

``fault`` makes the function wrong first. With a ``CALL``, as CrossHair writes a counterexample, that is run instead, on
concrete values: what CrossHair reports may be false, where it compares lists by itself. What comes of it is printed:
``kept``, ``outside`` of the precondition, or ``broken``.
"""

import ast
import sys
import traceback
from importlib import import_module
from inspect import getsourcelines, unwrap
from typing import Any

from kvlockstep.fuzz.proofs.faults import plant


def replayed(contract: str, call: str) -> str:
    """Call a contract as a counterexample says, and tell what comes of it."""
    home, name = contract.split(".")
    function: Any = getattr(import_module(f"kvlockstep.fuzz.proofs.{home}"), name)
    parsed = ast.parse(call, mode="eval").body
    assert isinstance(parsed, ast.Call), f"{call} is a call"
    values = [ast.literal_eval(value) for value in parsed.args]
    named = {word.arg or "": ast.literal_eval(word.value) for word in parsed.keywords}
    try:
        function(*values, **named)
    except AssertionError as error:
        at = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.name == name]
        return "outside" if at[0] <= _end_of_precondition(function) else "broken"
    except Exception:
        return "broken"
    return "kept"


def _end_of_precondition(function: Any) -> int:
    """Give the last line of the first assertion of a contract."""
    lines, first = getsourcelines(unwrap(function))
    (definition,) = ast.parse("".join(lines)).body
    assert isinstance(definition, ast.FunctionDef), "a contract is a function"
    precondition = next(part for part in definition.body if isinstance(part, ast.Assert))
    return first - 1 + (precondition.end_lineno or 0)


def main(contract: str, seconds: str, subject: str, *call: str) -> int:
    """Check, or replay where there is a call."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    if subject == "fault":
        plant(contract)
    if call:
        print(replayed(contract, *call))  # noqa: T201
        return 0
    from crosshair.main import unwalled_main

    target = f"kvlockstep.fuzz.proofs.{contract}"
    options = ["--report_all", "--analysis_kind=asserts", f"--per_condition_timeout={seconds}"]
    return int(unwalled_main(["check", *options, target]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
