"""Runs that last: many workers, restarted when they end, over hours and machines; and the gate, which is a short one.

Start reading at ``supervisor.py``, which keeps the workers at work; what a run keeps on disk is in ``folder.py``.
"""
