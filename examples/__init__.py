"""A small cache that is none of kvlockstep's own, and the targets that put it under test: see docs/adopt.md."""
