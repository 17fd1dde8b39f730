"""Bugs planted on purpose: proof that green means something. Start in `gpu_impl.py` and `sglang.py` for the lists."""

from kvlockstep.fuzz.faults.fault import Fault, PatchFault, SourceFault
from kvlockstep.fuzz.faults.gpu_impl import GPU_IMPL_FAULTS
from kvlockstep.fuzz.faults.sglang import SGLANG_FAULTS

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*GPU_IMPL_FAULTS, *SGLANG_FAULTS)}

__all__ = ["FAULTS", "Fault", "PatchFault", "SourceFault"]
