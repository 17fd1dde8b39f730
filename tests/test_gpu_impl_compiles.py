"""Every kernel compiles ahead of time for named GPUs, on a machine without one, into few registers and no spills.

The interpreter accepts source that the compiler rejects; this proves the source, not its results. What is printed
and bounded: registers of a thread, and what of them would have gone to memory, as ptxas counts them for NVIDIA and
the metadata in the assembly does for AMD. Scalars are compiled as 32 and as 64 bits, as Triton would choose by
their values; the larger count is shown.

Not verified here: that the binaries run, and their speed.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict

import pytest

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
MOST_REGISTERS = 128
"""Of 255 (NVIDIA) or 512 (AMD); 1,024 elements in blocks of 128 threads leave 16 warps a multiprocessor."""

KERNELS = {
    "apply_plan_kernel",
    "check_paths_kernel",
    "check_writes_kernel",
    "claim_listed_kernel",
    "claim_tails_kernel",
    "count_marks_kernel",
    "gather_kv_kernel",
    "rewrite_row_kernel",
    "scatter_kv_kernel",
}

COMPILE = """
import importlib, json, pathlib, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from kvlockstep import gpu_impl

CONSTANTS = {"PAGE_SIZE": 16, "WORDS": 256, "BLOCK": 1024}
INT64_POINTERS = {"pool_ptr", "k_ptr", "v_ptr", "report_ptr"}

def type_of(name, integer):
    if name.isupper():
        return "constexpr"
    if name.endswith("_ptr"):
        return "*i64" if name in INT64_POINTERS else "*i32"
    return integer if name == "n_elements" else "i32"

def nvidia(compiled, architecture):
    capability = int(architecture.removeprefix("sm_"))
    suffix = "a" if capability >= 90 else ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}{suffix}", ptx.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = re.search(r"(\\d+) bytes spill stores, (\\d+) bytes spill loads", said).groups()
    return int(re.search(r"Used (\\d+) registers", said)[1]), int(stores) + int(loads)

def amd(compiled, architecture):
    text = compiled.asm["amdgcn"]
    counts = ("vgpr_count", "sgpr_spill_count", "vgpr_spill_count")
    registers, scalars, vectors = (int(re.search(rf"\\.{count}:\\s*(\\d+)", text)[1]) for count in counts)
    return registers, scalars + vectors

for path in sorted(pathlib.Path(gpu_impl.__path__[0]).glob("*.py")):
    if "@triton.jit" not in path.read_text():
        continue
    found = importlib.import_module(f"kvlockstep.gpu_impl.{path.stem}")
    for name, kernel in vars(found).items():
        if not (isinstance(kernel, triton.JITFunction) and name.endswith("_kernel")):
            continue
        constants = [name for name in kernel.arg_names if name.isupper()]
        values = {name: CONSTANTS.get(name, nth) for nth, name in enumerate(constants)}
        for architecture in sys.argv[1:]:
            target = (
                GPUTarget("hip", architecture, 64)
                if architecture.startswith("gfx")
                else GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
            )
            for integer in ("i32", "i64"):
                source = ASTSource(
                    fn=kernel,
                    signature={argument: type_of(argument, integer) for argument in kernel.arg_names},
                    constexprs=values,
                )
                compiled = triton.compile(source, target=target)
                registers, spills = (amd if target.backend == "hip" else nvidia)(compiled, architecture)
                print(json.dumps([architecture, name, registers, spills]))
                if "n_elements" not in kernel.arg_names:
                    break
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Registers and spills: architecture -> kernel -> the most of each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *ARCHITECTURES],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found = defaultdict(dict)
    for architecture, name, registers, spills in map(json.loads, done.stdout.splitlines()):
        known = found[architecture].get(name, (0, 0))
        found[architecture][name] = (max(known[0], registers), max(known[1], spills))
    return found


def test_kernels_compile_without_a_gpu_in_few_registers_and_without_spills(compiled, record_property):
    """One test for all, so that the kernels are compiled once however the suite is spread over processes."""
    for architecture in ARCHITECTURES:
        figures = ", ".join(
            f"{name.removesuffix('_kernel')} {registers}" + (f" ({spills} spilled)" if spills else "")
            for name, (registers, spills) in sorted(compiled[architecture].items())
        )
        spilled = sum(spills for _, spills in compiled[architecture].values())
        record_property("show", f"compiled for {architecture}, registers a thread: {figures}; {spilled} spills")

    assert set(compiled) == set(ARCHITECTURES)
    assert {architecture: set(kernels) for architecture, kernels in compiled.items()} == dict.fromkeys(
        ARCHITECTURES, KERNELS
    )
    too_many = [
        (architecture, name, registers, spills)
        for architecture, kernels in compiled.items()
        for name, (registers, spills) in kernels.items()
        if registers > MOST_REGISTERS or spills
    ]
    assert too_many == []
