"""Each fault of SGLang is found from scratch by a law that may name it, and only in the target that carries it.

The hunts run in this process, which has imported SGLang: with one seed each, or importing would cost more than
looking. `kvlockstep faults` hunts each in a process of its own, with three seeds; docs/sglang-faults.md shows that.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.faults import FAULTS, PatchFault, hunt, sglang_patching
from kvlockstep.fuzz.faults.sglang import SGLANG_FAULTS
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import Alloc, AllocItem, Commit, Match, Release, Submit
from kvlockstep.fuzz.registry import SGLANG_TARGETS, TargetUnusable, factory_for
from kvlockstep.invariants.ownership import RowOwnedTwice

pytestmark = pytest.mark.needs("sglang")

SECONDS = 60.0
MINIMIZE_SECONDS = 0.5
N_OPERATIONS = 2000
SOME = replace(SGLANG_FAULTS[0], name="planted-by-a-test", story="A test plants it.", hides_behind=None)


@pytest.fixture
def patches(monkeypatch):
    """Collect the patches that are made, to ask them how often they were reached."""
    made = []

    class Kept(sglang_patching.Patch):
        def __init__(self, plant):
            super().__init__(plant)
            made.append(self)

    monkeypatch.setattr(sglang_patching, "Patch", Kept)
    return made


@pytest.fixture
def short_runs(monkeypatch):
    """Let every hunt end after so many operations, done or refused."""

    class Shorter(hunt.Worker):
        def run(self, lockstep, op):
            if self.statistics.done + self.statistics.refused >= N_OPERATIONS:
                self.interrupt()
            super().run(lockstep, op)

    monkeypatch.setattr(hunt, "Worker", Shorter)


def places_of(fault):
    """List where a fault puts its code, without putting it there."""
    places = []
    fault.plant(SimpleNamespace(around=lambda place, wrapper: places.append(place), operation=""))
    return places


def owners_of(fault):
    return [sglang_patching._resolve(place)[0] for place in places_of(fault)]


def contents_of(owners):
    return [dict(vars(owner)) for owner in owners]


def all_faults():
    return [pytest.param(fault, id=fault.name) for fault in SGLANG_FAULTS]


def hunt_for(fault):
    def test(record_property, patches):
        found = hunt.hunt_here(fault, 0, SECONDS, MINIMIZE_SECONDS)

        cost = f"{found.operations:>6} operations {found.seconds:>5.1f} s"
        length = f"{found.found_len:>3} to {found.minimized_len:>3}"
        record_property("show", f"fault {fault.name:<42} seed 0: {cost}, {length}, {found.law}")
        assert found.trouble is None
        assert found.caught, f"{found.law or 'nothing'} named it after {found.operations}, expected {fault.laws}"
        assert found.minimized_len <= found.found_len
        assert patches[0].reached > 0

    return test


for planted in SGLANG_FAULTS:
    name = f"test_fault_{planted.name.replace('-', '_')}_is_caught_as_{'_or_'.join(planted.laws)}"
    globals()[name] = hunt_for(planted)


@pytest.mark.parametrize("target", SGLANG_TARGETS)
@pytest.mark.usefixtures("short_runs")
def test_wrappers_that_change_nothing_are_not_caught(target, patches, monkeypatch):
    """All places of all faults at once: what is caught is the mistake in a wrapper, never that there is one."""
    places = sorted({place for fault in SGLANG_FAULTS if fault.target == target for place in places_of(fault)})

    def plant(patch):
        for place in places:
            patch.around(place, lambda original, *arguments, **named: original(*arguments, **named))

    monkeypatch.setitem(FAULTS, SOME.name, replace(SOME, target=target, plant=plant))

    found = hunt.hunt_here(FAULTS[SOME.name], 0, SECONDS, MINIMIZE_SECONDS)

    assert found.law is None
    assert patches[0].reached > N_OPERATIONS


@pytest.mark.usefixtures("short_runs")
def test_fault_without_a_patch_is_not_caught(patches, monkeypatch):
    monkeypatch.setitem(FAULTS, SOME.name, replace(SOME, plant=lambda patch: None))

    found = hunt.hunt_here(FAULTS[SOME.name], 0, SECONDS, MINIMIZE_SECONDS)

    assert (found.caught, found.law) == (False, None)
    assert patches[0].reached == 0


@pytest.mark.parametrize("fault", all_faults())
def test_fault_is_in_place_only_while_its_target_works(fault):
    owners = owners_of(fault)
    before = contents_of(owners)
    patch = sglang_patching.Patch(fault.plant)

    with patch.in_force("snapshot"):
        during = contents_of(owners)
    after = contents_of(owners)

    assert during != before
    assert after == before


def test_fault_is_taken_out_where_the_target_raises():
    fault = FAULTS["row-freed-twice"]
    before = contents_of(owners_of(fault))
    target = factory_for(fault.target, fault.name)(CacheConfig())

    with pytest.raises(TypeError):
        target.alloc()

    assert contents_of(owners_of(fault)) == before


def test_clean_target_works_beside_a_faulty_one():
    fault, config = FAULTS["row-freed-twice"], CacheConfig()
    faulty = Lockstep(config, factory_for(fault.target, fault.name)(config))
    clean = Lockstep(config, factory_for(fault.target)(config))
    ops = [Submit("a", (1, 2, 3), (None, None, ())), Match("a"), Alloc((AllocItem("a", 3),)), Commit("a", 3)]
    for op in ops:
        faulty.run(op)
        clean.run(op)

    with pytest.raises(RowOwnedTwice):
        faulty.run(Release("a"))

    clean.run(Release("a"))
    assert sorted(clean.now.free_rows) == list(range(1, config.n_rows + 1))


@pytest.mark.parametrize("place", [".radix_cache:RadixCache.no_such", ".no_such_module:RadixCache.evict"])
def test_fault_whose_place_sglang_does_not_have_makes_the_target_unusable(place, monkeypatch):
    plant = sglang_patching.around(place, lambda original: None)
    monkeypatch.setitem(FAULTS, SOME.name, replace(SOME, plant=plant))

    with pytest.raises(TargetUnusable, match=f"'planted-by-a-test' does not apply: SGLang has no {place}"):
        factory_for(SOME.target, SOME.name)


def test_every_allowance_of_a_target_has_a_fault_that_hides_behind_it():
    from kvlockstep.fuzz.targets.sglang.target import ALLOWANCES

    declared = frozenset().union(*ALLOWANCES.values())

    assert {fault.hides_behind for fault in SGLANG_FAULTS} - {None} == declared


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in SGLANG_FAULTS if fault.hides_behind])
def test_fault_hides_behind_an_allowance_of_its_own_target(fault):
    target = factory_for(fault.target)(CacheConfig())

    assert isinstance(fault, PatchFault)
    assert fault.hides_behind in target.allowances
