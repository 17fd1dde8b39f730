"""kvlockstep: a slow reference model of a KV cache in lockstep with an optimized one.

Start in ``kvlockstep.reference.cache`` for the law, in ``kvlockstep.fuzz.lockstep`` for the comparison.
"""
