"""The faults of SGLang's caches, in the real classes: each the kind of mistake that passes a review there.

``laws`` are the violations that may name a fault; anything else that it raises counts as not caught. Where the
target may differ from SPEC on purpose, a fault that ``hides_behind`` that allowance shows how narrow it is.
They stand by subject in ``sglang_tree.py``, ``sglang_requests.py``, ``sglang_memory.py`` and ``sglang_rust.py``:
first the wrappers, which put the mistake around an original method, then the faults. Importing them imports no
SGLang; a wrapper is put in place by `sglang_patching.Patch`.

Much of what the three trees share is one code in SGLang. A fault in it is planted in one of the three targets.
"""

from kvlockstep.fuzz.faults.sglang_memory import MEMORY_FAULTS
from kvlockstep.fuzz.faults.sglang_requests import REQUEST_FAULTS
from kvlockstep.fuzz.faults.sglang_rust import RUST_FAULTS
from kvlockstep.fuzz.faults.sglang_tree import TREE_FAULTS

SGLANG_FAULTS = (*TREE_FAULTS, *REQUEST_FAULTS, *MEMORY_FAULTS, *RUST_FAULTS)
