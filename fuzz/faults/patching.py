"""Plants a fault: copies the package of `gpu_impl`, edits one line of the copy, and imports it under its own name.

The copy lives beside the original in the same process, so a test can hold both; its files exist on disk,
because Triton reads the source of kernels from there. An edit whose text does not stand exactly once is an
error: a fault that does not apply is neither caught nor missed.
"""

import atexit
import importlib
import importlib.util
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults.fault import SourceFault
from kvlockstep.fuzz.registry import Factory
from kvlockstep.fuzz.targets.base import Target


class FaultDoesNotApply(Exception):
    """The text that the fault replaces does not stand exactly once in its file."""


@cache
def _folder_of_copies() -> Path:
    folder = tempfile.mkdtemp(prefix="kvlockstep-faults-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def patched_package(fault: SourceFault) -> ModuleType:
    """Import a copy of `gpu_impl` with the fault in it. Raises FaultDoesNotApply."""
    original = importlib.util.find_spec("kvlockstep.gpu_impl")
    assert original is not None
    assert original.origin is not None
    home = Path(original.origin).parent
    source = (home / fault.module).read_text()
    if source.count(fault.old) != 1:
        raise FaultDoesNotApply(f"its text stands {source.count(fault.old)} times in {fault.module}, expected 1")
    name = "gpu_impl_with_" + fault.name.replace("-", "_")
    folder = _folder_of_copies() / name
    shutil.copytree(home, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / fault.module).write_text(source.replace(fault.old, fault.new))
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def faulty_factory(fault: SourceFault) -> Factory:
    """Return a factory of targets that carry the fault."""
    from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget

    package = patched_package(fault)

    def make(config: CacheConfig) -> Target:
        target: Target = GpuImplTarget(config, impl=package)
        return target

    return make
