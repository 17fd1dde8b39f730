"""The tree and its runs: as machine code where it was built from the sources that are there, else as they stand.

A source that is newer than its machine code is interpreted, and so is all of it where the installation found no C
compiler. `HOW` says which of the two runs, and `WHY_NOT` why it is not compiled.
"""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

MODULES = ("runs", "victims", "tree")

_HERE = Path(__file__).parent


def _why_not() -> str | None:
    """Say why the sources run as they are; None where their machine code does."""
    compiled = _HERE / "compiled"
    for name in MODULES:
        built = [path for suffix in EXTENSION_SUFFIXES if (path := compiled / f"{name}{suffix}").is_file()]
        if not built:
            return f"{name}.py has no machine code: install kvlockstep where there is a C compiler"
        for source in (_HERE / f"{name}.py", compiled / f"{name}.pxd"):
            if source.is_file() and source.stat().st_mtime_ns > built[0].stat().st_mtime_ns:
                return f"{source.name} is newer than its machine code: install kvlockstep again"
    return None


WHY_NOT = _why_not()
HOW = "compiled" if WHY_NOT is None else "interpreted"

if TYPE_CHECKING or WHY_NOT is not None:
    from .runs import int32_bytes, slots_of
    from .tree import PrefixTree
else:
    from .compiled.runs import int32_bytes, slots_of
    from .compiled.tree import PrefixTree

__all__ = ["HOW", "WHY_NOT", "PrefixTree", "int32_bytes", "slots_of"]
