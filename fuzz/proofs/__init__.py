"""What is proved of the arithmetic, apart from the code it is proved of. `kvlockstep.fuzz.prove` runs it.

`implementation.py`, `model.py` and `agreement.py` hold contracts for CrossHair: each function starts with the one
assertion that is its precondition, and the later ones are its claim. `sides.py` counts through small numbers,
`twins.py` through small shapes of the kernels, `properties.py` holds properties and the faults planted in them.

None of this imports torch, `twins.py` left out.
"""
