"""Recordings of live SGLang caches: driven by SGLang's own scheduling objects, read back by the targets."""

import gc
import importlib.util
import os
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import Abort, Alloc, Checkpoint, Evict, Match, Peek, Release, Reset, Retract, Submit
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.trace import encode_op, read_trace

pytestmark = pytest.mark.needs("sglang")

TREES = ("radix", "unified-python", "unified-rust")
ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmarks" / "recorder.py"


def load_type():
    spec = importlib.util.spec_from_file_location("recorder_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Load


def built(tree="radix", need_sort=False, **config):
    from kvlockstep.fuzz.targets.sglang.engine import build

    shape = {"page_size": 4, "n_pages": 80, "n_rows": 8, "max_context_len": 160, "layers": 1} | config
    return build(CacheConfig(**shape), tree, need_sort=need_sort)


def loaded(engine, seed=3, **options):
    given = {"n_requests": 16, "prompt": (8, 30), "output": (1, 20), "shared": 2, "chunk": 16, "vocabulary": 5000}
    given |= {"looks": 0.2, "aborts": 0.02, "salts": (None, "a")}
    return load_type()(engine, seed, **(given | options))


def recorded(engine, path, **options):
    from kvlockstep.fuzz.targets.sglang_record import record

    return record(engine.cache, path, **options)


def tree_of(view):
    """Spell a tree: namespace, path and locks of each node, whatever its number."""
    nodes = {node.node: node for node in view.nodes()}

    def path(node):
        return (path(nodes[node.parent]) if node.parent in nodes else ()) + node.units

    return sorted((str(node.namespace), path(node), node.lock_ref) for node in nodes.values())


def replayed(path):
    """Replay a recording on its target, to the letter: nothing violated, nothing refused."""
    trace = read_trace(path)
    lockstep = Lockstep(trace.header.config, factory_for(trace.header.target)(trace.header.config))
    refused = [(op, outcome.refused) for op in trace.ops if (outcome := lockstep.run(op)).refused]
    assert refused == []
    assert path.read_text().splitlines()[1:] == [encode_op(op) for op in trace.ops]  # canonical lines
    return trace, lockstep.target


def kinds(trace):
    return {type(op) for op in trace.ops}


def request(tokens, **options):
    from kvlockstep.fuzz.targets.sglang.engine import Req, SamplingParams

    params = SamplingParams(max_new_tokens=50)
    params.normalize(None)
    return Req("a client's", "", array("q", tokens), params, **options)


def assert_same_tree(engine, target, tree):
    from kvlockstep.fuzz.targets.sglang_trees import view_of

    assert tree_of(view_of(engine.cache, tree)) == tree_of(target._view)


# A load, and its replay


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
@pytest.mark.parametrize("tree", TREES)
def test_recording_of_a_load_replays_clean_to_the_same_tree(tree, overlap, tmp_path):
    path, policy = tmp_path / "t.jsonl", "lfu" if overlap else "lru"
    engine = built(tree, n_pages=48, policy=policy, need_sort=overlap)
    live = recorded(engine, path, policy=policy)
    loaded(engine, overlap=overlap).run()
    live.stop()
    trace, target = replayed(path)

    assert trace.header.why.rstrip().endswith("operations, stopped by its owner")
    assert trace.header.target == f"sglang:{tree}"
    assert trace.header.config.options == (("need_sort",) if overlap else ()) + ("no_speculation",) or not overlap
    assert (trace.header.config.n_pages, trace.header.config.policy) == (48, policy)
    assert {Submit, Peek, Match, Alloc, Checkpoint, Release, Abort} <= kinds(trace)
    assert_same_tree(engine, target, tree)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_recording_under_memory_pressure_has_retracts_and_evictions(overlap, tmp_path):
    engine = built("unified-rust", n_pages=30, page_size=4)
    live = recorded(engine, tmp_path / "t.jsonl")
    load = loaded(engine, overlap=overlap, ratio=0.0, prompt=(4, 10), output=(20, 40), aborts=0)
    load.run()
    live.stop()
    trace, target = replayed(tmp_path / "t.jsonl")

    assert load.n_retracted
    assert sum(isinstance(op, Retract) for op in trace.ops) == load.n_retracted
    assert Evict in kinds(trace)
    assert_same_tree(engine, target, "unified-rust")


@pytest.mark.parametrize("config", [{"page_size": 1}, {"key_units": "bigram"}, {"prefix_sharing": False}], ids=str)
def test_recording_of_other_caches_replays_clean(config, tmp_path):
    engine = built("unified-python", n_pages=200 if "page_size" in config else 80, **{"page_size": 4} | config)
    live = recorded(engine, tmp_path / "t.jsonl")
    loaded(engine, overlap=True).run()
    live.stop()
    trace, target = replayed(tmp_path / "t.jsonl")

    assert {name: getattr(trace.header.config, name) for name in config} == config
    assert_same_tree(engine, target, "unified-python")


FAULTS = {
    "radix": ("row-freed-twice", "RowOwnedTwice"),
    "unified-python": ("unified-publication-without-salt", "TreeDiffers"),
    "unified-rust": ("unified-prompt-split-frees-prompt", "PageOwnedTwice"),
}


@pytest.mark.parametrize("tree", TREES)
def test_recording_replayed_with_a_fault_shows_it_and_minimizes(tree, command, tmp_path):
    fault, law = FAULTS[tree]
    engine = built(tree)
    with recorded(engine, tmp_path / "t.jsonl"):
        loaded(engine, n_requests=8, chunk=8, looks=0).run()

    code, out, err = command("replay", tmp_path / "t.jsonl")
    assert (code, err) == (0, "")
    assert "CLEAN: " in out
    code, out, err = command("replay", "--fault", fault, tmp_path / "t.jsonl")
    assert (code, err) == (1, "")
    assert f"FAILED: {law}" in out
    code, out, err = command("minimize", "--fault", fault, "--seconds", 5, tmp_path / "t.jsonl")
    assert code == 0, out + err
    trace = read_trace(tmp_path / "t.min.jsonl")
    assert (trace.header.violates, trace.header.fault) == (law, fault)
    assert len(trace.ops) <= 20


def test_recording_with_pseudonyms_replays_clean_and_shows_no_token(tmp_path):
    engine = built("unified-rust")
    load = loaded(engine, vocabulary=1 << 20, salts=("a secret", None))
    tokens = {token for req in load.incoming for token in req.origin_input_ids}
    with recorded(engine, tmp_path / "t.jsonl", pseudonyms="key"):
        load.run()
    trace, _ = replayed(tmp_path / "t.jsonl")

    assert "a secret" not in (tmp_path / "t.jsonl").read_text()
    shown = {token for op in trace.ops if isinstance(op, Submit) for token in op.tokens}
    assert len(shown & tokens) < len(tokens) / 20
    assert len(shown) >= len(tokens)


# What is left behind, and when it begins and ends


def everything(engine):
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import allocation, common

    owners = (engine.cache, engine.allocator, engine.rows)
    names = ("alloc_for_extend", "alloc_for_decode", "alloc_for_spec_decode", "release_kv_cache", "checkpoint_kv_cache")
    modules = (schedule_batch, allocation, common)
    functions = [vars(module).get(name) for module in modules for name in names]
    return [{name: value for name, value in vars(owner).items() if callable(value)} for owner in owners], functions


@pytest.mark.parametrize("tree", TREES)
def test_hooks_are_gone_when_the_recording_ends(tree, tmp_path):
    engine = built(tree)
    before = everything(engine)
    live = recorded(engine, tmp_path / "t.jsonl")
    during = everything(engine)
    live.stop()
    live.stop()

    assert during != before
    assert everything(engine) == before
    assert not (tmp_path / "t.jsonl").exists()


def test_bound_ends_the_recording_and_not_the_load(tmp_path):
    engine = built("unified-python")
    before = everything(engine)
    live = recorded(engine, tmp_path / "t.jsonl", max_ops=100)
    load = loaded(engine)
    load.run()
    trace, _ = replayed(tmp_path / "t.jsonl")

    assert live.stopped == "stopped at the bound of 100 operations"
    assert 80 < len(trace.ops) <= 100
    assert live.n_ops == len(trace.ops)
    assert load.running.is_empty()
    assert everything(engine) == before


def test_full_disk_is_not_noticed_by_the_load(tmp_path):
    engine = built("radix")
    live = recorded(engine, "/dev/full")
    loaded(engine).run()

    assert live.stopped == "ended early: No space left on device"


def test_recording_of_a_cache_in_use_waits_for_its_flush(tmp_path):
    engine = built("unified-rust")
    load = loaded(engine)
    load.run(15)
    live = recorded(engine, tmp_path / "t.jsonl")
    load.run()
    assert live.n_ops == 0
    engine.cache.reset()
    engine.rows.clear()
    engine.allocator.clear()
    loaded(engine, seed=8).run()
    engine.cache.reset()
    engine.rows.clear()
    engine.allocator.clear()
    loaded(engine, seed=9).run()
    live.stop()
    trace, target = replayed(tmp_path / "t.jsonl")

    assert trace.ops.count(Reset()) == 1
    assert trace.ops[0] != Reset()
    assert_same_tree(engine, target, "unified-rust")


def test_two_caches_of_one_process_have_two_recordings(tmp_path):
    one, two = built("radix"), built("unified-rust")
    lives = [recorded(engine, tmp_path / f"{n}.jsonl") for n, engine in enumerate((one, two))]
    with pytest.raises(ValueError, match="this cache is recorded already"):
        recorded(one, tmp_path / "again.jsonl")
    loads = [loaded(engine, seed) for seed, engine in enumerate((one, two))]
    for _ in range(200):
        for load in loads:
            load.run(1)
        if not (loads[0].incoming or loads[0].waiting):
            lives[0].stop()
    lives[1].stop()

    assert replayed(tmp_path / "0.jsonl")[0].header.target == "sglang:radix"
    assert_same_tree(two, replayed(tmp_path / "1.jsonl")[1], "unified-rust")


def test_child_of_a_fork_leaves_the_file_to_its_parent(tmp_path):
    engine = built("radix")
    live = recorded(engine, tmp_path / "t.jsonl")
    load = loaded(engine)
    load.run(5)
    n_bytes = (tmp_path / "t.jsonl").stat().st_size
    child = os.fork()
    if child == 0:
        load.run(20)
        os._exit(0 if live.stopped else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "t.jsonl").stat().st_size == n_bytes
    load.run()
    live.stop()
    replayed(tmp_path / "t.jsonl")


# Single operations


def prefilled(engine, req, sampled=77):
    from kvlockstep.fuzz.targets.sglang.engine import alloc_for_extend, checkpoint_kv_cache

    req.init_next_round_input(engine.cache)
    req.lock = engine.cache.lock(req.last_node)
    req.extend_end = len(req.origin_input_ids) + len(req.output_ids)
    alloc_for_extend(batch_of(engine, [req]))
    if sampled is not None:
        req.output_ids.append(sampled)
        checkpoint_kv_cache(req, engine.cache)


def batch_of(engine, reqs):
    import torch

    ends = torch.tensor([req.extend_end for req in reqs])
    return SimpleNamespace(
        reqs=reqs,
        device="cpu",
        tree_cache=engine.cache,
        req_to_token_pool=engine.rows,
        token_to_kv_pool_allocator=engine.allocator,
        seq_lens=ends,
        seq_lens_cpu=ends,
        prefix_lens=[req.prefix_len for req in reqs],
        extend_lens=[req.extend_end - req.prefix_len for req in reqs],
        extend_num_tokens=sum(req.extend_end - req.prefix_len for req in reqs),
        hisparse_coordinator=None,
        maybe_evict_swa=lambda: None,
        is_dllm=lambda: False,
    )


def test_looks_of_every_length_are_told_as_they_were(tmp_path):
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.common import match_kv_cache, touch_waiting_prefix
    from sglang.srt.mem_cache.radix_cache import RadixKey

    engine = built("radix")
    live = recorded(engine, tmp_path / "t.jsonl")
    prefilled(engine, request(range(12)))
    other = request(range(8))  # all of it is cached: a full look goes further than its match may
    match_kv_cache(other, engine.cache)
    match_kv_cache(other, engine.cache)
    touch_waiting_prefix(other, engine.cache)
    engine.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", [*range(4), 90, 91, 92, 93]), None)))
    other.init_next_round_input(engine.cache)
    private = request([5, 6, 7], positional_embed_overrides=__embeds())
    private.init_next_round_input(engine.cache)
    del other
    gc.collect()
    engine.cache.evict(SimpleNamespace(num_tokens=1, swa_num_tokens=0, mamba_num=0))
    live.stop()
    trace, target = replayed(tmp_path / "t.jsonl")

    names = [op.request for op in trace.ops if isinstance(op, Submit)]
    assert names == ["r0", "r1", "r1.look", "look2", "look3", "r4"]
    assert [op.request for op in trace.ops if isinstance(op, Peek)] == [
        "r1.look",
        "r1.look",
        "look2",
        "look3",
        "r1",
        "r4",
    ]
    assert [op.private for op in trace.ops if isinstance(op, Submit)] == [False] * 5 + [True]
    assert trace.ops[-3:] == [Abort("r1"), Abort("r1.look"), Evict(1)]
    assert_same_tree(engine, target, "radix")


def __embeds():
    from kvlockstep.fuzz.targets.sglang.engine import SOME_EMBEDS

    return SOME_EMBEDS


def test_request_that_gives_up_its_lock_waits_again(tmp_path):
    engine = built("unified-python")
    live = recorded(engine, tmp_path / "t.jsonl")
    prefilled(engine, request(range(12)))
    other = request(range(10))
    other.init_next_round_input(engine.cache)
    tried = engine.cache.lock(other.last_node)
    engine.cache.unlock(tried)
    other.lock = engine.cache.lock(other.last_node)
    engine.cache.unlock(other.lock)
    other.lock = None
    prefilled(engine, other)
    live.stop()
    trace, target = replayed(tmp_path / "t.jsonl")

    of_other = [op for op in trace.ops if getattr(op, "request", None) == "r1"]
    assert of_other[1:4] == [Match("r1"), Retract("r1"), Match("r1")]
    assert_same_tree(engine, target, "unified-python")


@pytest.mark.parametrize("page_size", [1, 4])
def test_speculative_decode_is_told_with_its_drafts(page_size, tmp_path):
    import torch
    from sglang.srt.mem_cache import allocation, common

    from kvlockstep.fuzz.targets.sglang.engine import FINISH_LENGTH, get_spec

    engine = built("radix", page_size=page_size)
    with get_spec().override(speculative_algorithm="EAGLE"):
        live = recorded(engine, tmp_path / "t.jsonl")
        reqs = [request(range(start, start + 9)) for start in (0, 50)]
        for req in reqs:
            prefilled(engine, req)
        for accepted in ((90, 91, 92), (93,), (94, 95, 96, 97)):
            now = torch.tensor([req.kv.kv_allocated_len for req in reqs], dtype=torch.int32)
            ends = torch.maximum(now, torch.tensor([req.kv.kv_committed_len + 4 for req in reqs], dtype=torch.int32))
            allocation.alloc_for_spec_decode(
                engine.cache,
                engine.rows,
                reqs=reqs,
                req_pool_indices=torch.tensor([req.kv.req_pool_idx for req in reqs]),
                cur_kv_lens=now,
                cur_kv_lens_cpu=now,
                nxt_kv_lens=ends,
                nxt_kv_lens_cpu=ends,
                num_needed_tokens=int((ends - now).sum()),
                batch=SimpleNamespace(device="cpu", hisparse_coordinator=None),
            )
            for req in reqs:
                req.output_ids.extend(accepted)
                req.kv.kv_committed_len += len(accepted)
        reqs[0].finished_len = len(reqs[0].output_ids) - 2  # it stops inside of what was accepted last
        reqs[0].finished_reason = FINISH_LENGTH(length=reqs[0].finished_len)
        common.release_kv_cache(reqs[0], engine.cache, checkpoint=True)
        common.release_kv_cache(reqs[1], engine.cache, checkpoint=False)
        live.stop()
    trace, target = replayed(tmp_path / "t.jsonl")

    batches = [[(item.n, item.drafts) for item in op.batch] for op in trace.ops if isinstance(op, Alloc)]
    assert batches[2:] == [[(4, (90, 91, 0))] * 2, [(4, (0, 0, 0))] * 2, [(4, (94, 95, 0)), (4, (94, 95, 96))]]
    assert "no_speculation" not in trace.header.config.options
    assert_same_tree(engine, target, "radix")


def test_allocation_that_fails_ends_the_recording_with_its_line(tmp_path):
    engine = built("radix", n_pages=4)
    live = recorded(engine, tmp_path / "t.jsonl")
    with pytest.raises(RuntimeError, match="out of memory"):
        prefilled(engine, request(range(20)))
    trace = read_trace(tmp_path / "t.jsonl")

    assert live.stopped == "ended early: alloc_for_extend raised RuntimeError"
    assert isinstance(trace.ops[-1], Alloc)


def end_early(engine, what):
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.common import release_kv_cache
    from sglang.srt.mem_cache.radix_cache import RadixKey

    req = request(range(10))
    prefilled(engine, req)
    if what == "insert":
        key = RadixKey(array("q", range(60, 64)), None)
        engine.cache.insert(InsertParams(key=key, value=engine.allocator.alloc(4)))
    elif what == "reset":
        engine.cache.reset()
    elif what == "clear":
        engine.rows.clear()
    elif what == "session":
        prefilled(engine, request(range(5), session_id="one"))
    elif what == "began":
        prefilled(engine, old := request(range(5)))
        release_kv_cache(old, engine.cache, checkpoint=False)
        again = request(range(5))
        again.output_ids.append(3)
        prefilled(engine, again)
    elif what == "again":
        req.init_next_round_input(engine.cache)
    elif what == "tokens":
        prefilled(engine, request([1 << 40]))
    elif what == "two":
        req.output_ids.extend([1, 2])
        release_kv_cache(req, engine.cache, checkpoint=False)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("insert", "alloc of slots outside of what is recorded"),
        ("reset", "a reset while r0 runs"),
        ("clear", "pools that are cleared without a reset of the tree"),
        ("session", "a request of a session"),
        ("began", "a request that began before the recording"),
        ("again", "r0 is matched again while it holds what it was given"),
        ("tokens", "ValueError: a trace has at most 1048576 tokens in 0..2147483647 in one operation"),
    ],
)
def test_what_no_trace_can_say_ends_the_recording_and_is_named(what, reason, tmp_path):
    engine = built("radix")
    before = everything(engine)
    live = recorded(engine, tmp_path / "t.jsonl")
    end_early(engine, what)

    assert live.stopped == f"ended early: {reason}"
    assert everything(engine) == before
    trace, _ = replayed(tmp_path / "t.jsonl")
    assert trace.header.why.rstrip().endswith(f"ended early: {reason}")
    assert Checkpoint("r0") in trace.ops


def test_cache_with_a_second_pool_is_refused(tmp_path):
    from kvlockstep.fuzz.targets.sglang_trees import ComponentType

    engine = built("unified-python")
    engine.cache.tree_components = (ComponentType.FULL, ComponentType.SWA)
    with pytest.raises(TypeError, match="with swa cannot be dumped"):
        recorded(engine, tmp_path / "t.jsonl")


PROGRAM = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("load", {str(BENCHMARK)!r})
load = importlib.util.module_from_spec(spec)
spec.loader.exec_module(load)
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.targets.sglang.engine import build
options = dict(n_requests=6, prompt=(8, 20), output=(1, 9), shared=2, chunk=16)
for n, tree in enumerate(("unified-rust", "radix")):
    if n == 1 and os.fork():
        os.wait()
        break
    engine = build(CacheConfig(page_size=4, n_pages=80, n_rows=8, layers=1, policy="fifo"), tree, need_sort=False)
    load.Load(engine, 1, **options).run()
sys.exit(5)
"""


def test_command_records_the_caches_of_a_program_and_its_children(tmp_path):
    out = tmp_path / "t.jsonl"
    command = [sys.executable, "-P", "-m", "kvlockstep", "record", str(out), "--", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert done.returncode == 5, done.stderr
    targets = [replayed(path)[0].header for path in (out, tmp_path / "t-1.jsonl")]
    assert [header.target for header in targets] == ["sglang:unified-rust", "sglang:radix"]
    assert {header.config.policy for header in targets} == {"fifo"}
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [str(out), str(tmp_path / "t-1.jsonl")]
    assert "operations on sglang:unified-rust. Recorded from a live SGLang: " in done.stdout
