"""Machine code of `tree.py`, `victims.py` and `runs.py`, which Cython compiles as they stand.

The ``.pxd`` files here say which of their names are C integers and buffers, and nothing else: there is one text of
the tree, so what is compiled and what is interpreted cannot drift apart. Indices stay checked; where they are not
(`runs.py`) the range is refused before. `native.py` chooses.
"""
