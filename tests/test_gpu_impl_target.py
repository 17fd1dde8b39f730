"""The driver of `gpu_impl`: fingerprints through the cache's own paths, snapshots, and altered copies."""

import itertools
import random
import shutil
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from kvlockstep import gpu_impl
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import AllocItem
from kvlockstep.fuzz.targets.base import KvTarget, Target
from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget, make
from kvlockstep.fuzz.targets.planes import plane_of
from kvlockstep.invariants import FULL, ROOT

SPACE = ("lora-a", None, ("img",))
SHAPES = [  # layers, kv_heads, head_dim, dtype
    (1, 1, 2, "float16"),
    (2, 1, 3, "bfloat16"),
    (3, 2, 8, "float16"),
    (2, 1, 1, "float32"),
    (1, 3, 5, "float32"),
    (2, 3, 1, "float16"),
]


def filled(layers=2, kv_heads=1, head_dim=2, dtype="float16"):
    """A target with one running request of 7 tokens, and the fingerprints of its slots."""
    config = CacheConfig(
        page_size=2, n_pages=5, max_context_len=9, layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    target = make(config)
    target.match("r0", list(range(7)), SPACE, 0, False)
    (write_set,) = target.alloc([AllocItem("r0", 7)]).write_sets
    draw = random.Random(6)
    values = [0, 2**32 - 1, 0x7F800001, 0x7C01FC01, *(draw.getrandbits(32) for _ in range(3))]
    target.write_kv(write_set, values)
    target.commit("r0", 7, [])
    return target, write_set, values


def test_target_fulfils_the_contract():
    target: KvTarget = make(CacheConfig())

    assert isinstance(target, Target)
    assert target.lane in ("cuda", "interpret", "torch")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fingerprints_survive_write_and_read_bit_for_bit(shape):
    target, write_set, values = filled(*shape)
    row = target.snapshot().rows[0].row

    assert target.read_kv(row, 7) == values
    assert target.read_kv(row, 3) == values[:3]
    assert target.read_kv(row, 0) == []
    assert target.read_slots(write_set[::-1]) == values[::-1]
    assert target.read_slots([]) == []
    target.write_kv([], [])
    assert target.read_slots(write_set) == values


def test_every_plane_holds_other_bits_for_the_same_fingerprint():
    target, write_set, _ = filled(layers=3)
    planes = target._cache.device.kv_pool[:, :, write_set[0]].view(torch.int32).flatten().tolist()

    assert len(set(planes)) == 6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_read_names_the_first_plane_that_disagrees(shape):
    layers, kv_heads, head_dim, dtype = shape
    for plane in range(1, 2 * layers):
        target, write_set, values = filled(*shape)
        bits = target._cache.device.kv_pool.view(torch.int32 if dtype == "float32" else torch.int16)
        bits[plane // 2, plane % 2, write_set[4], kv_heads - 1, head_dim - 1] ^= 1
        read = target.read_kv(target.snapshot().rows[0].row, 7)

        assert read == target.read_slots(write_set)
        assert [*read[:4], *read[5:]] == [*values[:4], *values[5:]]
        assert read[4] < 0
        assert plane_of(read[4], layers) == plane


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_bit_of_a_slot_that_was_never_written_changes_its_reading(shape):
    layers, kv_heads, head_dim, dtype = shape
    target, write_set, _ = filled(*shape)
    untouched = next(slot for slot in range(14) if slot not in write_set)
    bits = target._cache.device.kv_pool.view(torch.int32 if dtype == "float32" else torch.int16)
    readings = target.read_slots([untouched])
    for cell in itertools.product(range(layers), range(2), range(kv_heads), range(head_dim)):
        layer, k_or_v, head, dim = cell
        bits[layer, k_or_v, untouched, head, dim] ^= 4
        readings += target.read_slots([untouched])
        bits[layer, k_or_v, untouched, head, dim] ^= 4

    assert max(readings) < 0
    assert len(set(readings)) == 1 + 2 * layers * kv_heads * head_dim


def test_read_marks_a_slot_whose_layers_are_swapped():
    target, write_set, _ = filled()
    target._cache.device.kv_pool[:] = target._cache.device.kv_pool.flip(0).clone()

    assert all(value < 0 for value in target.read_slots(write_set))


def test_snapshot_shows_what_the_tensors_and_lists_hold():
    target, write_set, _ = filled()
    target.checkpoint("r0")
    snapshot = target.snapshot()

    (node,) = snapshot.nodes
    assert (node.parent, node.namespace, node.lock_ref) == (ROOT, SPACE, 1)
    assert node.units == (0, 1, 2, 3, 4, 5)
    assert node.slots == {FULL: write_set[:6]}
    assert snapshot.rows[0].slots == write_set
    assert snapshot.pools[FULL].free_pages == [5]
    assert (snapshot.pools[FULL].available, snapshot.pools[FULL].protected) == (2, 6)
    target._cache.device.row_table[1, 0] = 9
    assert target.snapshot().rows[0].slots == [9, *write_set[1:]]


def test_snapshot_is_the_readers_own():
    """A test may edit a snapshot without reaching the cache or a later snapshot."""
    target, _, _ = filled()
    target.checkpoint("r0")
    first, untouched = target.snapshot(), target.snapshot()
    first.nodes[0].slots[FULL].clear()
    first.pools[FULL].free_pages.clear()
    first.evictable_nodes.append(7)

    assert target.snapshot() == untouched


def test_snapshot_in_bigram_mode_spells_pairs():
    target = make(CacheConfig(page_size=2, key_units="bigram"))
    target.match("r0", [5, 6, 7, 8], SPACE, 0, False)
    target.alloc([AllocItem("r0", 4)])
    target.commit("r0", 4, [])
    target.checkpoint("r0")

    assert target.snapshot().nodes[0].units == ((5, 6), (6, 7))


def test_altered_copy_under_another_name_runs_in_its_own_way(tmp_path):
    """The fault zoo copies the package, edits its text and imports the copy beside the original."""
    folder = tmp_path / "altered_impl"
    shutil.copytree(Path(gpu_impl.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "cache.py").read_text()
    line = "        self.tree.unlock(live.anchor)\n"
    assert text.count(line) == 1
    (folder / "cache.py").write_text(text.replace(line, ""))
    spec = spec_from_file_location("altered_impl", folder / "__init__.py", submodule_search_locations=[str(folder)])
    altered = module_from_spec(spec)
    sys.modules["altered_impl"] = altered
    try:
        spec.loader.exec_module(altered)
        locks = {}
        for name, impl in (("original", gpu_impl), ("altered", altered)):
            target = GpuImplTarget(CacheConfig(page_size=2), impl)
            target.match("r0", [1, 2, 3], SPACE, 0, False)
            target.alloc([AllocItem("r0", 3)])
            target.commit("r0", 3, [])
            target.release("r0")
            locks[name] = target.snapshot().nodes[0].lock_ref
        assert import_module("altered_impl.cache").KvCache is not gpu_impl.KvCache
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "altered_impl"]:
            del sys.modules[name]

    assert locks == {"original": 0, "altered": 1}
