"""The gate in front of a change: what it knows of causes of failure, and how it says what it found.

The command is in ``fuzz/commands/gate.py``; the workers are those of a campaign.
"""
