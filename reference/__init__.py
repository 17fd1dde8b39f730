"""The model: SPEC sections 1 to 6 as slow, plain Python that can be checked by reading.

What can be derived is derived and not kept: free pages are those without an owner, lock counts come
from the live locks, the evictable nodes and all sizes from the tree. It knows no implementation and
imports nothing but the standard library.

Start in `cache.py` (the operations); `state.py` answers what would be refused, `tree.py` is the
prefix tree, `eviction.py` the policies, `keys.py` the identity of a prefix. `allowances.py` has the
named differences from SPEC that a cache under test may declare; without one the model is SPEC.

Left out: the bytes in the slots, and more than one pass in flight per request.
"""

from kvlockstep.reference.cache import Allocated, Cache
from kvlockstep.reference.choices import Choice, IllegalChoice
from kvlockstep.reference.refusals import Refused
from kvlockstep.reference.requests import Request

__all__ = ["Allocated", "Cache", "Choice", "IllegalChoice", "Refused", "Request"]
