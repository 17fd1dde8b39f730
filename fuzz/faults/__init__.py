"""Bugs planted on purpose: proof that green means something. Start in `gpu_impl.py` for the list."""

from kvlockstep.fuzz.faults.fault import Fault
from kvlockstep.fuzz.faults.gpu_impl import GPU_IMPL_FAULTS

FAULTS: dict[str, Fault] = {fault.name: fault for fault in GPU_IMPL_FAULTS}

__all__ = ["FAULTS", "Fault"]
