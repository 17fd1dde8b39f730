"""Dumps of live SGLang caches: read back they are what the caches show, and a defect in them is named."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from kvlockstep.fuzz.commands.check import check
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import Alloc, AllocItem, Checkpoint, Commit, Match, Release, Submit
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.snapshot_file import read
from kvlockstep.invariants.agreement import compare

pytestmark = pytest.mark.needs("sglang")

TREES = ("radix", "unified-python", "unified-rust")
NS = (None, None, ())


@pytest.fixture(params=TREES)
def live(request):
    """A cache in the middle of its work: one request ended, one runs, two are in flight, one is matched."""
    config = CacheConfig(page_size=4, n_pages=32, n_rows=6, max_context_len=64)
    lockstep = Lockstep(config, factory_for(f"sglang:{request.param}")(config))
    for name, tokens in (("r0", range(10)), ("r1", [*range(6), 50, 51, 52]), ("r2", range(60, 73))):
        lockstep.run(Submit(name, tuple(tokens), NS if name != "r2" else ("lora-a", None, ())))
        found = lockstep.run(Match(name)).value
        lockstep.run(Alloc((AllocItem(name, len(tokens) - found),)))
        lockstep.run(Commit(name, len(tokens) - found, (9,)))
        if name != "r2":
            lockstep.run({"r0": Release, "r1": Checkpoint}[name](name))
    for name in ("r3", "r4"):
        lockstep.run(Submit(name, (*range(8), 70, 71, 72, 73)))
        lockstep.run(Match(name))
    lockstep.run(Alloc((AllocItem("r2", 1), AllocItem("r3", 4))))
    return lockstep.target


def reqs(target):
    return [one.engine.req for one in target._table.live.values()]


def write_sets(target):
    rows = {view.request: view.slots for view in target.snapshot().rows}
    lives = target._table.live.values()
    return {one.request: rows[one.request][one.committed_len : one.committed_len + one.n] for one in lives if one.n}


def dump_of(target, path, **options):
    """Dump as a live engine would, which has the cache and its `Req`s, and no target; all its passes are counted."""
    from kvlockstep.fuzz.targets.sglang_dump import dump

    for one in target._table.live.values():  # SGLang counts a pass without speculation as committed at its launch
        if one.n and not one.engine.ahead:
            one.engine.req.kv.kv_committed_len += one.n
            one.engine.ahead = one.n
    return dump(path, target._engine.cache, reqs(target), **options)


def checked(*words):
    done = CliRunner().invoke(check, list(map(str, words)))
    return done.exit_code, done.output


def test_dump_reads_back_as_the_cache_is_and_is_clean(live, tmp_path):
    path = tmp_path / "dump.json.gz"
    shown = dump_of(live, path, write_sets=write_sets(live), source="a test")
    dumped = read(path)

    compare(live.snapshot(), shown)  # whose nodes have other numbers
    assert dumped.snapshot == shown
    assert {view.request: view.state for view in shown.requests} == {
        "r1": "RUNNING",
        "r2": "IN_FLIGHT",
        "r3": "IN_FLIGHT",
        "r4": "MATCHED",
    }
    assert dumped.write_sets == write_sets(live)
    code, out = checked(path)
    assert code == 0, out
    assert out.splitlines()[-1] == "clean: no law that one snapshot shows is broken"


def test_dump_without_write_sets_is_not_clean(live, tmp_path):
    dump_of(live, tmp_path / "dump.json")
    code, out = checked(tmp_path / "dump.json")

    assert code == 10, out
    assert "law 3 could not be checked, the snapshot has no write_sets: --accept-unobserved 3" in out
    assert checked(tmp_path / "dump.json", "--accept-unobserved", "3")[0] == 0


def test_page_that_is_freed_twice_in_a_live_cache_is_named(live, tmp_path):
    import torch

    allocator = live._engine.allocator
    slot = live.snapshot().nodes[0].slots["full"][0]
    allocator.free_pages = torch.cat([allocator.free_pages, torch.tensor([slot // 4])])
    dump_of(live, tmp_path / "dump.json", write_sets=write_sets(live))
    code, out = checked(tmp_path / "dump.json")

    assert code == 1, out
    assert f"PageOwnedTwice: page {slot // 4} has 2 owners, expected 1\n  owner     free list\n" in out


def test_request_that_is_not_handed_over_shows_as_lost(live, tmp_path):
    from kvlockstep.fuzz.targets.sglang_dump import dump

    dump(tmp_path / "dump.json", live._engine.cache, reqs(live)[1:], write_sets=None)
    code, out = checked(tmp_path / "dump.json")

    assert code == 1, out
    assert "RowLeaked: row " in out
    assert "LockCountWrong: " in out


def test_write_set_of_a_request_that_is_not_there_writes_nothing(live, tmp_path):
    with pytest.raises(ValueError, match="write_sets: no request 'r9' with a row or a lock among the requests"):
        dump_of(live, tmp_path / "dump.json", write_sets={"r9": [4]})
    assert list(tmp_path.iterdir()) == []


def test_names_that_clients_sent_are_made_printable_and_stay_apart(live, tmp_path):
    for req, rid in zip(reqs(live), ("a b", "a\x1b", "a\n", "x" * 500), strict=True):
        req.rid = rid
    shown = dump_of(live, tmp_path / "dump.json")

    assert [view.request for view in shown.requests] == ["a?b", "a?", "a?~2", "x" * 190]
    assert read(tmp_path / "dump.json").snapshot == shown


def test_requests_are_found_wherever_a_scheduler_keeps_them():
    from kvlockstep.fuzz.targets.sglang_dump import requests_of

    a, b, c, d, e = (SimpleNamespace(rid=name) for name in "abcde")
    batch = SimpleNamespace(reqs=[a, b])
    scheduler = SimpleNamespace(
        running_batch=batch,
        last_batch=None,
        cur_batch_for_debug=batch,
        chunked_req=c,
        waiting_queue=[d, a],
        result_queue=[(SimpleNamespace(reqs=[e, b]), None)],
    )

    assert requests_of(scheduler) == [a, b, e, c, d]
    assert requests_of(SimpleNamespace(running_batch=batch)) == [a, b]


@pytest.mark.parametrize("live", ["unified-python"], indirect=True)
def test_cache_with_a_host_tier_or_a_second_pool_is_refused(live, tmp_path):
    from kvlockstep.fuzz.targets.sglang_dump import tree_of
    from kvlockstep.fuzz.targets.sglang_trees import ComponentType

    live._engine.cache.cache_controller = object()
    with pytest.raises(TypeError, match="a UnifiedRadixCache with a host tier cannot be dumped"):
        tree_of(live._engine.cache)
    live._engine.cache.cache_controller = None
    live._engine.cache.tree_components = (ComponentType.FULL, ComponentType.SWA)
    with pytest.raises(TypeError, match=r"with swa cannot be dumped, expected full attention only"):
        tree_of(live._engine.cache)
    with pytest.raises(TypeError, match="a SimpleNamespace cannot be dumped, expected a RadixCache or"):
        tree_of(SimpleNamespace())


ALIVE = """
import os, sys
from array import array
from types import ModuleType
from transformers import AutoProcessor
for name in ("", ".io", ".transforms", ".transforms.functional"):  # an engine has it; the environment of the tests not
    module = sys.modules["torchvision" + name] = ModuleType("torchvision" + name)
    module.decode_jpeg = module.InterpolationMode = None
import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
import sglang.srt.mem_cache.radix_cache as module
clock, environment = module.time, dict(os.environ)
rows = ReqToTokenPool(4, 32, "cpu", False)
allocator = TokenToKVPoolAllocator(64, torch.float16, "cpu", None, False)
pools = {"req_to_token_pool": rows, "token_to_kv_pool_allocator": allocator}
cache = RadixCache(CacheInitParams(disable=False, page_size=1, **pools))
cache.insert(InsertParams(key=RadixKey(array("q", [1, 2, 3]), None), value=allocator.alloc(3)))
from kvlockstep.fuzz.targets.sglang_dump import dump
dump(sys.argv[1], cache, [], write_sets={}, source="alive")
assert "kvlockstep.fuzz.targets.sglang" not in sys.modules, "the targets prepare SGLang for tests"
assert module.time is clock and dict(os.environ) == environment
"""


def test_dump_in_a_process_of_its_own_changes_nothing_there(tmp_path):
    """No target, no preparation: what an engine imports, and one call."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", ALIVE, str(tmp_path / "dump.json")], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr[-3000:]
    code, out = checked(tmp_path / "dump.json")
    assert code == 0, out
    assert "64 slots in pages of 1, 1 node, 0 requests, 0 held rows, dumped from alive" in out
    assert Path(tmp_path / "dump.json").read_text().startswith('{\n"kvlockstep_snapshot":1,\n"source":"alive",\n')
