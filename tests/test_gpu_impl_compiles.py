"""Every kernel compiles ahead of time for named GPUs, on a machine without one.

The interpreter accepts source that the compiler rejects; this proves the source, not its results.
"""

import os
import subprocess
import sys

COMPILE = """
import inspect, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvlockstep.gpu_impl import kernels

CONSTANTS = {"PAGE_SIZE": 16, "WORDS": 256, "BLOCK": 1024}
INT32_POINTERS = {"row_table_ptr", "write_set_ptr", "plan_ptr", "pages_ptr", "slots_ptr"}

def type_of(name, integer):
    if name in CONSTANTS:
        return "constexpr"
    if name.endswith("_ptr"):
        return "*i32" if name in INT32_POINTERS else "*i64"
    return integer if name == "n_elements" else "i32"

for name, kernel in sorted(vars(kernels).items()):
    if not isinstance(kernel, triton.JITFunction):
        continue
    for capability in (80, 90):
        for integer in ("i32", "i64"):
            source = ASTSource(
                fn=kernel,
                signature={argument: type_of(argument, integer) for argument in kernel.arg_names},
                constexprs={c: value for c, value in CONSTANTS.items() if c in kernel.arg_names},
            )
            triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
    print(name)
"""


def test_kernels_compile_for_sm_80_and_sm_90_without_a_gpu(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["apply_plan_kernel", "gather_kv_kernel", "rewrite_row_kernel", "scatter_kv_kernel"]
