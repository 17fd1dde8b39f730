"""A sparse lockstep finds what the full one finds, at the same operation under the same name, and does less for it."""

from pathlib import Path

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import (
    Alloc,
    AllocItem,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Peek,
    Release,
    Retract,
    Submit,
)
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.replay import failing_signature, run_ops
from kvlockstep.fuzz.sparse import Looks, SparseLockstep, automatic_every, narrow
from kvlockstep.fuzz.targets import wrong
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.fuzz.trace import read_trace
from kvlockstep.invariants import Violation

REGRESSIONS = sorted((Path(__file__).resolve().parents[1] / "regressions").glob("*.jsonl"))
CONFIG = CacheConfig(page_size=2, n_pages=12, n_rows=3, max_context_len=16)
NOTHING = Peek("nobody")  # settled by the model alone


def planted():
    """Stored failures of faults that show without an interpreter."""
    for path in REGRESSIONS:
        header = read_trace(path).header
        if header.lane == "torch":
            yield pytest.param(path, id=path.stem)


def story(name, tokens, outputs=3):
    """A request that computes its prompt in two passes, decodes, and is released."""
    first = len(tokens) // 2
    ops = [Submit(name, tokens), Match(name), Alloc((AllocItem(name, first),)), Commit(name, first), Checkpoint(name)]
    ops += [Alloc((AllocItem(name, len(tokens) - first),)), Commit(name, len(tokens) - first, (100,))]
    for i in range(outputs):
        ops += [Alloc((AllocItem(name, 1),)), Commit(name, 1, (101 + i,))]
    return [*ops, Release(name)]


def run_all(lockstep, ops):
    for op in ops:
        lockstep.run(op)


STORIES = [op for i in range(12) for op in story(f"r{i}", (i, 1, 2, 3, 4, 5, 6))]


@pytest.mark.parametrize("path", list(planted()))
@pytest.mark.parametrize("every", [64, 7])
def test_planted_fault_is_narrowed_to_the_operation_that_full_checks_name(path, every):
    trace = read_trace(path)
    config, factory = trace.header.config, factory_for("gpu_impl", trace.header.fault)
    ops = [*[NOTHING] * 70, *trace.ops, *[NOTHING] * 70]

    full = failing_signature(config, ops, factory, 1)
    sparse = failing_signature(config, ops, factory, every)

    assert full[0] == trace.header.signature
    assert sparse == full


@pytest.mark.parametrize("kind", wrong.WRONG, ids=lambda kind: kind.__name__)
def test_wrong_target_is_caught_by_sparse_checks_where_full_ones_catch_it(kind):
    full = failing_signature(CONFIG, STORIES, kind, 1)

    assert failing_signature(CONFIG, STORIES, kind, 64) == full


class ForgetsLocks(ReferenceTarget):
    """From its fifth checkpoint on, its snapshots count one lock too many; nothing that it returns is wrong."""

    def __init__(self, config):
        super().__init__(config)
        self.checkpoints = 0

    def checkpoint(self, request):
        super().checkpoint(request)
        self.checkpoints += 1

    def snapshot(self):
        snapshot = super().snapshot()
        if self.checkpoints >= 5:
            snapshot.nodes[0].lock_ref += 1
        return snapshot


def test_what_only_a_snapshot_shows_is_found_late_and_narrowed():
    fifth = [step for step, op in enumerate(STORIES) if isinstance(op, Checkpoint)][4]
    said = []

    run = run_ops(CONFIG, STORIES, ForgetsLocks, check_every=64, say=said.append)

    assert (run.signature, run.steps) == ("LockCountWrong.checkpoint.too-many", fifth + 1)
    first_seen = dict(run.violation.facts)["first seen"]
    assert first_seen == "by a check every 64 operations at step 63, as LockCountWrong; narrowed down to this step"
    assert said == ["looking closer at operations 0 to 63, from the start"]


def test_long_stretch_is_narrowed_in_two_goes():
    looks, asked = Looks(1000, 10_000), []

    def again(closer):
        asked.append(closer.every_in_stretch)
        broken_at = 4321
        step = next(step for step in range(broken_at, 10_000) if closer.at(step))
        return Violation("broken"), step

    assert narrow((Violation("broken"), 4999), looks, again)[1] == 4321
    assert asked == [31, 1]


def test_violation_that_does_not_come_again_is_kept():
    found = (Violation("broken"), 4999)

    assert narrow(found, Looks(1000, 10_000), lambda looks: None) is found


class LosesOneValue(ReferenceTarget):
    """The KV of the second pass of r3 is never written, which its next read shows, whatever the bookkeeping says."""

    def __init__(self, config):
        super().__init__(config)
        self.passes = 0

    def write_kv(self, slots, values):
        self.passes += 1
        if self.passes != 3:
            super().write_kv(slots, values)


def test_new_positions_are_read_at_once():
    run = run_ops(CONFIG, STORIES, LosesOneValue, check_every=10_000)
    third = [step for step, op in enumerate(STORIES) if isinstance(op, Commit)][2]

    assert (run.violation.__class__.__name__, run.steps) == ("ContentWrong", third + 1)
    assert "as ContentWrong" in dict(run.violation.facts)["first seen"]
    assert f"at step {third}," in dict(run.violation.facts)["first seen"]


class OverwritesPublished(ReferenceTarget):
    """A retraction writes into the first page, which is published and which other rows name too."""

    def retract(self, request, publish):
        super().retract(request, publish)
        self.kv.update(dict.fromkeys((2, 3), 99))


@pytest.mark.parametrize("last", [Checkpoint("r1"), Release("r1")], ids=["checkpoint", "release"])
def test_whole_row_is_read_at_checkpoint_and_release(last):
    started = [*story("r0", (1, 2, 3, 4, 5, 6), 0)]
    more = [Submit("r1", (1, 2, 3, 4, 9)), Match("r1"), Alloc((AllocItem("r1", 1),)), Commit("r1", 1, (7,))]
    spoiled = [Submit("r2", (8, 8)), Match("r2"), Retract("r2"), last, *[NOTHING] * 20]
    lockstep = SparseLockstep(CONFIG, OverwritesPublished(CONFIG), looks=Looks(1000, 1000))
    ops = [*started, *more, *spoiled]

    with pytest.raises(Violation) as caught:
        run_all(lockstep, ops)

    assert type(caught.value).__name__ == "ContentWrong"
    assert ops[lockstep.step] == last


class Counts(ReferenceTarget):
    def __init__(self, config):
        super().__init__(config)
        self.snapshots = 0

    def snapshot(self):
        self.snapshots += 1
        return super().snapshot()


def run_counted(kind, every):
    target = kind(CONFIG)
    lockstep = SparseLockstep(CONFIG, target, looks=Looks(every, len(STORIES)))
    for op in STORIES:
        lockstep.run(op)
    return target.snapshots


def test_cache_is_seen_whole_before_and_after_each_look_only():
    assert run_counted(Counts, 50) == 1 + 2 * (len(STORIES) // 50 + 1)


def test_target_without_glance_is_seen_whole_where_a_row_is_taken():
    class NoGlance(Counts):
        def __getattribute__(self, name):
            if name == "glance":
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert run_counted(NoGlance, 50) > 2 * 12


def test_every_operation_at_k_1_is_what_a_lockstep_does():
    digests = []
    for make in (Lockstep, lambda *args, **kw: SparseLockstep(*args, looks=Looks(1, len(STORIES)), **kw)):
        lockstep = make(CONFIG, ReferenceTarget(CONFIG), digest=True)
        for op in [*STORIES, Evict(3)]:
            lockstep.run(op)
        digests.append(lockstep.digest())

    assert digests[0] == digests[1]


def test_same_trace_and_k_give_the_same_digest():
    runs = [run_ops(CONFIG, STORIES, ReferenceTarget, digest=True, check_every=k) for k in (9, 9, 10)]

    assert runs[0].digest == runs[1].digest != runs[2].digest
    assert runs[0].tally == run_ops(CONFIG, STORIES, ReferenceTarget).tally


@pytest.mark.parametrize(("n_pages", "every"), [(1023, 1), (1024, 64), (16_384, 1024)])
def test_large_pools_are_looked_at_less_often(n_pages, every):
    assert automatic_every(CacheConfig(page_size=16, n_pages=n_pages)) == every
