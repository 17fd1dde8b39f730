"""Choose how kernels run in this process: ``cuda``, ``interpret`` or ``torch``.

``cuda`` compiles the Triton kernels; ``interpret`` runs the same kernels through Triton's interpreter
on the CPU, slowly, to test them; ``torch`` runs their twins, which need no Triton launch. A lane asked
for by name is a promise: where it cannot be kept, ``LaneUnavailable`` is raised. ``auto`` (the default)
promises nothing and takes ``cuda`` where a GPU is at hand and ``torch`` elsewhere; the interpreter is a
test instrument and must be asked for.

Triton reads ``TRITON_INTERPRET`` while it is imported and cannot change its mind afterwards, so the
first choice between ``cuda`` and ``interpret`` holds for the life of the process. ``kernels.py`` imports
Triton, hence must be imported after the choice.
"""

import os
import sys

LANES = ("cuda", "interpret", "torch")
VARIABLE = "KVLOCKSTEP_LANE"


class LaneUnavailable(RuntimeError):
    """The lane that was promised cannot run in this process."""


def choose_lane(want: str | None = None) -> str:
    """Settle the lane of this process and make Triton ready for it.

    ``want`` wins over the environment variable ``KVLOCKSTEP_LANE``; both may say ``auto``.
    """
    asked = want or os.environ.get(VARIABLE) or "auto"
    if asked not in (*LANES, "auto"):
        raise LaneUnavailable(f"lane {asked!r}: expected one of {', '.join(LANES)}, auto")
    import torch

    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "torch"
    if asked == "cuda" and not torch.cuda.is_available():
        raise LaneUnavailable("lane 'cuda': torch finds no GPU")
    if asked != "torch":
        _prepare_triton(interpreted=asked == "interpret")
    return asked


def _prepare_triton(interpreted: bool) -> None:
    """Import Triton in the wanted mode, or find that it was imported in the other one."""
    if "triton" not in sys.modules:
        if interpreted:
            os.environ["TRITON_INTERPRET"] = "1"
        else:
            os.environ.pop("TRITON_INTERPRET", None)
    import triton.language as tl

    # Triton's own helpers were decorated while it was imported, and show in which mode that was.
    if (type(tl.sum).__name__ == "InterpretedFunction") != interpreted:
        mode, other = ("interpret", "compiled") if interpreted else ("cuda", "interpreted")
        raise LaneUnavailable(f"lane {mode!r}: Triton was imported earlier in this process, in {other} mode")
    if interpreted:
        # Without this, tl.device_assert and the check for int32 overflow are skipped silently.
        from triton.runtime import interpreter

        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)
