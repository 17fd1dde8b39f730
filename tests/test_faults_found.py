"""Each fault of `gpu_impl` is found from scratch within a minute, with each of three seeds, by a law that may name it.

The tests are generated from the catalogue, one for each fault and seed, so that workers share them out. Each hunt is
a process of its own, forked from one that has done the imports, without example database, corpus or stored trace; the
clock starts at its first operation. ``kvlockstep faults`` prints the same as a table.
"""

import pytest

from kvlockstep.fuzz.faults.gpu_impl import GPU_IMPL_FAULTS
from kvlockstep.fuzz.faults.hunt import hunt
from kvlockstep.fuzz.faults.nursery import Nurseries

SECONDS = 60.0
MINIMIZE_SECONDS = 0.5


@pytest.fixture(scope="module")
def nurseries():
    made = Nurseries()
    yield made
    made.close()


def assert_caught_and_not_made_longer(fault, found):
    """How short it gets depends on the load in these two seconds; ``test_fuzz_minimize.py`` pins that."""
    assert found.trouble is None
    assert found.caught, f"{found.law or 'nothing'} named it after {found.operations} operations, expected {fault.laws}"
    assert found.minimized_len <= found.found_len


def hunt_for(fault):
    @pytest.mark.parametrize("seed", range(3), ids="seed{}".format)
    def test(seed, record_property, nurseries):
        found = hunt(fault, seed, SECONDS, MINIMIZE_SECONDS, start=nurseries.run)

        cost = f"{found.operations:>6} operations {found.seconds:>5.1f} s"
        length = f"{found.found_len:>2} to {found.minimized_len:>2}"
        record_property("show", f"fault {fault.name:<42} seed {seed}: {cost}, {length}, {found.law}")
        assert_caught_and_not_made_longer(fault, found)

    return test


for planted in GPU_IMPL_FAULTS:
    name = f"test_fault_{planted.name.replace('-', '_')}_is_caught_as_{'_or_'.join(planted.laws)}"
    globals()[name] = hunt_for(planted)
