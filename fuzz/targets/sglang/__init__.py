"""SGLang's released KV caches as targets: installed from the registry, unmodified, on a CPU, without a model.

Three targets differ in their tree: ``radix`` (`RadixCache`), ``unified_python`` and ``unified_rust``
(`UnifiedRadixCache` over its Python and its Rust core). All else is shared: real `Req` objects, the real
row pool, allocators and KV pool, and the functions that SGLang's scheduler calls.

Where to read: ``target.py`` turns operations into those calls; ``engine.py`` builds the objects;
``../sglang_trees.py`` looks inside the three trees, and ``../sglang_dump.py`` at all that a snapshot shows, in live
engines too. Importing this package imports SGLang, which takes some seconds, and prepares it for tests.

Not driven: sliding-window and Mamba trees, host tiers, streaming sessions, tensor-parallel groups.
"""

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.targets.sglang.engine import SGLANG_VERSION
from kvlockstep.fuzz.targets.sglang.target import SglangTarget

__all__ = ["SGLANG_VERSION", "SglangTarget", "radix", "unified_python", "unified_rust"]


def radix(config: CacheConfig) -> SglangTarget:
    """Build rows, slots and a `RadixCache`."""
    return SglangTarget(config, "radix")


def unified_python(config: CacheConfig) -> SglangTarget:
    """Build rows, slots and a `UnifiedRadixCache` over its Python core."""
    return SglangTarget(config, "unified-python")


def unified_rust(config: CacheConfig) -> SglangTarget:
    """Build rows, slots and a `UnifiedRadixCache` over its Rust core."""
    return SglangTarget(config, "unified-rust")
