"""The shipped implementation in lockstep with the model for a few seconds on each lane, from a seed of its own."""

import pytest

from kvlockstep.fuzz.crew import run_workers
from kvlockstep.fuzz.worker import Order

SECONDS = 8.0
N_DONE = 100
"""Far below what any machine does in that time; how much is enough to say clean is for ``kvlockstep fuzz``."""


@pytest.mark.parametrize("lane", ["torch", "interpret", pytest.param("cuda", marks=pytest.mark.needs("cuda"))], ids=str)
def test_lockstep_holds_for_random_traces(lane, tmp_path, record_property):
    (state,), interrupted = run_workers(
        [Order("gpu_impl", lane, SECONDS, 77, str(tmp_path), lane)], lambda states: None
    )

    record_property("show", f"lockstep, lane {lane}: {state.statistics.done:,} operations done in {SECONDS:g} s")
    assert not interrupted
    assert state.failure is None
    assert (state.ended, state.lane, state.trouble) == (True, lane, None)
    assert state.statistics.done >= N_DONE
