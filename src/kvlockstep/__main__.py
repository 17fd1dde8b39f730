"""``python -m kvlockstep`` is the command ``kvlockstep``."""

from kvlockstep.fuzz.cli import main

main()
