"""The faults of `gpu_impl`: each one small edit, the kind of mistake that passes a review.

``laws`` are the violations that may name a fault; anything else that it raises counts as not caught.
They stand by subject in ``gpu_impl_tree.py``, ``gpu_impl_requests.py``, ``gpu_impl_memory.py`` and
``gpu_impl_kernels.py``.
"""

from kvlockstep.fuzz.faults.gpu_impl_kernels import KERNEL_FAULTS
from kvlockstep.fuzz.faults.gpu_impl_memory import MEMORY_FAULTS
from kvlockstep.fuzz.faults.gpu_impl_requests import REQUEST_FAULTS
from kvlockstep.fuzz.faults.gpu_impl_tree import TREE_FAULTS

GPU_IMPL_FAULTS = (*TREE_FAULTS, *REQUEST_FAULTS, *MEMORY_FAULTS, *KERNEL_FAULTS)
