"""What can only be learned on a GPU: do the kernels agree with their twins there, do the laws hold, how fast is it.

It needs PyTorch, Triton and NumPy; where pytest and Hypothesis are missing too, the test files are skipped and the
table says so. Operations are drawn from seeds without Hypothesis, so every machine runs the same ones. Parts:

    tests         the test files of kernels and cache on this lane (skipped without pytest and Hypothesis)
    lanes         stored traces and drawn ones give the same digests on this lane and on `torch`
    lockstep      drawn operations against the model for --seconds, all laws after each
    read_backs    copies to the host and waits that the profiler sees in cache operations, allocations padded and not
    bandwidth     bytes that the kernels read and write in a second, against a copy of a large tensor
    latency       wall time of `alloc` for a batch of decoding requests: launched, and by replayed graph
    checks        the device checks on 4 million slots and 4,096 rows: what they find, and what they cost

On the lanes `interpret` and `torch` sizes are small and times are those of a CPU: a rehearsal of this script.
A part that fails or finds something says so in its line, and the exit code is 1.

Run: benchmarks/on_gpu.sh [--lane cuda] [--seconds 120] [--only PART,...]
"""

import argparse
import importlib.util
import inspect
import os
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.draws import Draws
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import Op
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.replay import run_ops
from kvlockstep.fuzz.targets.gpu_impl import GpuImplTarget
from kvlockstep.fuzz.trace import read_trace
from kvlockstep.gpu_impl import CacheConfig as ImplConfig
from kvlockstep.gpu_impl import Extend, KvCache, LaneUnavailable, choose_lane
from kvlockstep.gpu_impl.device_checks import Finding, bytes_touched, check_device
from kvlockstep.gpu_impl.graphs import GraphedDevice
from kvlockstep.gpu_impl.plan import BatchPlan
from kvlockstep.invariants import Violation

ROOT = Path(__file__).resolve().parents[1]
TEST_FILES = ("kernels", "cache", "target", "no_sync", "padded", "device_checks")
KINDS = ("submit", "match", "alloc", "commit", "checkpoint", "release", "peek", "evict", "abort", "retract", "reset")
OFTEN = (3, 4, 8, 9, 4, 3, 2, 2, 1, 1, 1)
READ_BACKS = ("Memcpy DtoH", "cudaStreamSynchronize", "cudaEventSynchronize")
"""Names in a profile. The profiler itself waits for the whole device at its end, which is another call."""
MOST_SECONDS = 460
OPS_OF_CASE = 60


@dataclass(frozen=True, slots=True)
class Setup:
    """Where all runs, and for how long."""

    lane: str
    seconds: float  # of the lockstep
    began: float  # by perf_counter

    @property
    def on_gpu(self) -> bool:
        return self.lane == "cuda"

    @property
    def device(self) -> str:
        return "cuda" if self.on_gpu else "cpu"


class Found(Exception):
    """A part found something wrong; its line tells what."""


# Drawn operations


def drawn_config(draw: random.Random) -> CacheConfig:
    page_size = draw.choice((1, 2, 3, 4, 16))
    return CacheConfig(
        page_size=page_size,
        n_pages=draw.randrange(4, 24),
        n_rows=draw.randrange(1, 5),
        max_context_len=page_size * draw.randrange(3, 8) + draw.randrange(3),
        policy=draw.choice(("lru", "mru", "fifo", "filo", "lfu", "slru", "priority")),
        key_units=draw.choice(("token", "token", "bigram")),
        layers=draw.choice((1, 2)),
        head_dim=draw.choice((2, 3, 4)),
        dtype=draw.choice(("float16", "bfloat16", "float32")),
    )


def drawn_op(draw: random.Random, draws: Draws) -> Op:
    kind = draw.choices(KINDS, OFTEN)[0]
    function = getattr(draws, kind)
    numbers = {name: draw.randrange(32) for name in inspect.signature(function).parameters}
    if "delta" in numbers:
        numbers["delta"] = draw.randrange(-1, 2)
    if "pages" in numbers:
        numbers["pages"] = draw.randrange(5)
    op: Op = function(**numbers)
    return op


def case(seed: int) -> Iterator[tuple[Lockstep, Op]]:
    """Draw a config and then operations, each for the state that the one before left. The caller runs them."""
    draw = random.Random(seed)
    config = drawn_config(draw)
    lockstep = Lockstep(config, factory_for("gpu_impl")(config), digest=True)
    draws = Draws(config, lockstep.model, GpuImplTarget.capabilities)
    for _ in range(OPS_OF_CASE):
        yield lockstep, drawn_op(draw, draws)


@contextmanager
def on_lane(lane: str, then: str) -> Iterator[None]:
    """Build caches on another lane for a while: the twins run in any process."""
    os.environ["KVLOCKSTEP_LANE"] = lane
    try:
        yield
    finally:
        os.environ["KVLOCKSTEP_LANE"] = then


# Parts: each yields lines of the table


def tests(setup: Setup) -> Iterator[tuple[str, str]]:
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        yield "tests", f"skipped: {' and '.join(missing)} not installed; lanes, lockstep and checks run all the same"
        return
    files = [
        str(ROOT / "tests" / f"test_gpu_impl_{name}.py") for name in (TEST_FILES if setup.on_gpu else TEST_FILES[:1])
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not interpret_lane", *files]
    left = max(1.0, MOST_SECONDS - (time.perf_counter() - setup.began))
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        yield "tests", f"cut off: {len(files)} files took longer than the {left:.0f} s that were left"
        return
    last = (done.stdout.strip().splitlines() or ["nothing printed"])[-1]
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise Found(last)
    yield "tests", f"{len(files)} files: {last}"


def lanes(setup: Setup) -> Iterator[tuple[str, str]]:
    here, twins = {}, {}
    paths = sorted((ROOT / "regressions").glob("*.jsonl"))
    seeds = range(100 if setup.on_gpu else 10)
    for lane, digests in ((setup.lane, here), ("torch", twins)):
        with on_lane(lane, setup.lane):
            for path in paths:
                trace = read_trace(path)
                run = run_ops(trace.header.config, trace.ops, factory_for("gpu_impl"), digest=True)
                digests[path.name] = (run.signature, run.digest)
            for seed in seeds:
                for lockstep, op in case(seed):
                    lockstep.run(op)
                digests[f"seed {seed}"] = (None, lockstep.digest())
    differ = [name for name in here if here[name] != twins[name] or here[name][0] is not None]
    if differ:
        raise Found(f"{len(differ)} of {len(here)} traces differ from lane torch, the first is {differ[0]}")
    yield "lanes", f"{len(paths)} stored and {len(seeds)} drawn traces: equal digests on {setup.lane} and torch"


def lockstep(setup: Setup) -> Iterator[tuple[str, str]]:
    """A case in four also runs the device checks after each operation, which must find nothing."""
    started, seed, n_ops, n_done, n_checked = time.perf_counter(), 0, 0, 0, 0
    while time.perf_counter() - started < setup.seconds:
        for run, op in case(1_000_000 + seed):
            try:
                n_done += run.run(op).refused is None
            except Violation as violation:
                raise Found(f"seed {1_000_000 + seed}, {op}: {violation}") from violation
            n_ops += 1
            if seed % 4 == 0:
                found = check_device(vars(run.target)["_cache"]).findings()
                if found:
                    raise Found(f"seed {1_000_000 + seed}, {op}: the device checks say {found[0]}")
                n_checked += 1
        seed += 1
    seconds = time.perf_counter() - started
    yield (
        "lockstep",
        f"{n_ops} operations ({n_done} done) of {seed} cases in {seconds:.0f} s, {n_ops / seconds:.0f} a second: "
        f"no law broken; {n_checked} device checks, nothing found",
    )


def decoding_cache(setup: Setup, n_requests: int, length: int) -> KvCache:
    n_pages = n_requests * (length // 16 + 4)
    config = ImplConfig(page_size=16, n_pages=n_pages, n_rows=n_requests, max_context_len=length + 64, head_dim=4)
    cache = KvCache(config, setup.lane, partial(GraphedDevice, buckets=(n_requests,)))
    for nth in range(n_requests):
        cache.match(f"r{nth}", array("q", range(nth * length, (nth + 1) * length)))
    cache.alloc([Extend(f"r{nth}", length) for nth in range(n_requests)])
    for nth in range(n_requests):
        cache.commit(f"r{nth}", length, array("q", [1]))
    return cache


def decode(cache: KvCache) -> float:
    """Run one decode step of all requests; return the seconds that its `alloc` took on the host."""
    batch = [Extend(name, 1) for name in cache.requests]
    started = time.perf_counter()
    cache.alloc(batch)
    seconds = time.perf_counter() - started
    for name in cache.requests:
        cache.commit(name, 1, array("q", [1]))
    return seconds


def read_backs(setup: Setup) -> Iterator[tuple[str, str]]:
    if not setup.on_gpu:
        yield "read_backs", "skipped: there is no profiler of copies on this lane; a guard stands in the tests"
        return
    cache = decoding_cache(setup, 4, 40)
    kv = torch.ones((1, 4, 1, 4), dtype=torch.bfloat16, device=setup.device)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        for _ in range(3):
            step = cache.alloc([Extend(name, 1) for name in cache.requests])
            cache.write_kv(step.write_set, kv, kv)
            check_device(cache, list(cache.requests), step)
            for name in cache.requests:
                cache.commit(name, 1, array("q", [1]))
        cache.device.buckets.clear()
        cache.alloc([Extend(name, 1) for name in cache.requests])
        cache.commit("r0", 1)
        cache.release("r0")
    names = [event.name for event in profile.events() or ()]
    seen = [name for name in names if any(word in name for word in READ_BACKS)]
    if seen:
        raise Found(f"{len(seen)} read-backs: {', '.join(sorted(set(seen)))}")
    yield "read_backs", f"0 copies to the host and 0 waits for a stream among {len(names)} events"


def seconds_of(setup: Setup, call: Callable[[], object], repeats: int) -> float:
    """Time a call on the device, the median of several."""
    call()
    times = []
    for _ in range(repeats):
        if setup.on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return median(times)


def bandwidth(setup: Setup) -> Iterator[tuple[str, str]]:
    from kvlockstep.gpu_impl.kernels import kernels_of

    run = kernels_of(setup.lane)
    repeats = 20 if setup.on_gpu else 3
    layers, n_slots, words, n, width = (8, 1 << 17, 256, 1 << 13, 4096) if setup.on_gpu else (1, 1 << 10, 16, 64, 256)
    pool = torch.zeros((layers, 2, n_slots, words), dtype=torch.int64, device=setup.device)
    other = torch.empty_like(pool[: max(1, layers // 2)])
    copied = 2 * other.numel() * 8
    copy = copied / seconds_of(setup, lambda: other.copy_(pool[: other.shape[0]]), repeats)
    yield "bandwidth of a copy", f"{copy / 1e9:.1f} GB/s ({copied / 1e6:.0f} MB read and written)"

    draw = torch.Generator().manual_seed(1)
    slots = torch.randperm(n_slots, generator=draw)[:n].int().to(setup.device)
    k, v = torch.ones((2, layers, n, words), dtype=torch.int64, device=setup.device).unbind()
    rows = torch.zeros((65, width), dtype=torch.int32, device=setup.device)
    length = min(n, width)
    rows[1, :length] = slots[:length]
    plan, page_size = BatchPlan(16), 16
    for row in range(1, 65):
        plan.add(row, 0, 0, width, array("i", range(1, width // page_size + 1)))
    buffer = torch.tensor(plan.buffer().tolist(), dtype=torch.int32, device=setup.device)
    pages = torch.arange(1, width // page_size + 1, dtype=torch.int32, device=setup.device)
    moved = 2 * 2 * layers * words * 8
    parts = {
        "scatter_kv": (lambda: run.scatter_kv(pool, slots, k, v), moved * n),
        "gather_kv": (lambda: run.gather_kv(pool, rows, 1, length), moved * length),
        "apply_plan": (
            lambda: run.apply_plan(rows, buffer, plan.n_runs, plan.n_row_positions, plan.n_positions, page_size),
            4 * plan.n_positions + 4 * len(buffer),
        ),
        "rewrite_row": (lambda: run.rewrite_row(rows, 1, 0, pages, page_size), 4 * width + 4 * len(pages)),
    }
    for name, (call, n_bytes) in parts.items():
        seconds = seconds_of(setup, call, repeats)
        rate = n_bytes / seconds
        yield f"bandwidth of {name}", f"{rate / 1e9:.1f} GB/s, {rate / copy:.0%} of a copy ({seconds * 1e6:.0f} us)"


def latency(setup: Setup) -> Iterator[tuple[str, str]]:
    n, length = (256, 512) if setup.on_gpu else (8, 32)
    cache = decoding_cache(setup, n, length)
    device: Any = cache.device
    for name in ("replayed", "launched"):
        if name == "launched":
            device.buckets.clear()
        times = [decode(cache) for _ in range(20)]
        yield f"latency, {name}", f"alloc of {n} decoding requests: {median(times[3:]) * 1e6:.0f} us on the host"


def checks(setup: Setup) -> Iterator[tuple[str, str]]:
    for page_size in (16, 1):
        n_rows, length = (4096, 1024) if setup.on_gpu else (16, 64)
        yield from _checks_of(setup, page_size, n_rows, length, f"checks, P={page_size}")


def _checks_of(setup: Setup, page_size: int, n_rows: int, length: int, name: str) -> Iterator[tuple[str, str]]:
    """Fill a pool: each request has published half of its length, and writes the other half now."""
    n_pages, half = n_rows * length // page_size, length // 2
    sizes = {"n_pages": n_pages, "n_rows": n_rows, "max_context_len": length + 1, "head_dim": 1}
    cache = KvCache(ImplConfig(page_size=page_size, **sizes), setup.lane)
    for nth in range(n_rows):
        cache.match(f"r{nth}", array("q", range(nth * length, (nth + 1) * length)))
    batch = list(cache.requests)
    cache.alloc([Extend(request, half) for request in batch])
    for request in batch:
        cache.commit(request, half)
        cache.checkpoint(request)
    step = cache.alloc([Extend(request, half) for request in batch])

    def check(lane: str = setup.lane) -> list[Finding]:
        return check_device(cache, batch, step, lane).findings()

    if check():
        raise Found(f"{name}: a sound cache, but {check()[0]}")
    repeats = 5 if setup.on_gpu else 2
    started = time.perf_counter()
    for _ in range(repeats):
        check()
    whole = (time.perf_counter() - started) / repeats
    n_half = n_rows * half
    n_bytes = bytes_touched(page_size, n_pages, n_rows, n_pages // 2, n_half, n_half, n_half)
    busy = _busy_seconds(setup, check)
    on_device = "" if busy is None else f", {busy * 1e6:.0f} us of it kernels at {n_bytes / busy / 1e9:.0f} GB/s"
    yield name, f"{n_pages} pages, {n_rows} rows: nothing found, in {whole * 1e3:.1f} ms{on_device}"

    cache.device.row_table[cache.requests[batch[-1]].row, 3] += 1
    if not check() or check() != check("torch"):
        raise Found(f"{name}: a row was spoiled: {check()}, the twins say {check('torch')}")
    yield f"{name}, spoiled", str(check()[0])


def _busy_seconds(setup: Setup, call: Callable[[], object]) -> float | None:
    """Sum up the time of the kernels of a call; None without a GPU."""
    if not setup.on_gpu:
        return None
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        call()
        torch.cuda.synchronize()
    return (
        sum(
            event.device_time_total
            for event in profile.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in event.name
        )
        / 1e6
    )


def machine(setup: Setup) -> Iterator[tuple[str, str]]:
    import triton

    name = torch.cuda.get_device_name() if setup.on_gpu else "no GPU, a rehearsal: times are a CPU's"
    yield "machine", f"lane {setup.lane}, {name}, torch {torch.__version__}, triton {triton.__version__}"


PARTS = (machine, checks, bandwidth, latency, read_backs, lanes, lockstep, tests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", default="cuda", choices=("cuda", "interpret", "torch"))
    parser.add_argument("--seconds", type=float, default=120, help="of the lockstep")
    parser.add_argument("--only", help="parts to run, with commas between them; all if it is not given")
    arguments = parser.parse_args()
    chosen = [part.__name__ for part in PARTS] if arguments.only is None else arguments.only.split(",")
    if unknown := set(chosen) - {part.__name__ for part in PARTS}:
        parser.error(f"--only {min(unknown)}: expected some of {', '.join(part.__name__ for part in PARTS)}")
    setup = Setup(arguments.lane, arguments.seconds, time.perf_counter())
    os.environ["KVLOCKSTEP_LANE"] = setup.lane
    try:
        choose_lane()
    except LaneUnavailable as error:
        print(f"on_gpu: {error}; --lane interpret is a rehearsal without a GPU", file=sys.stderr)
        return 2
    lines: list[tuple[str, str]] = []
    failed = 0
    for part in [part for part in PARTS if part.__name__ in chosen]:
        print(f"{part.__name__} ...", file=sys.stderr, flush=True)
        try:
            for line in part(setup):
                lines.append(line)
                print(f"{line[0]}: {line[1]}", file=sys.stderr, flush=True)
        except Exception as error:  # one part that fails must not hide the rest
            failed += 1
            lines.append((part.__name__, f"FAILED: {type(error).__name__}: {error}".splitlines()[0]))
    wide = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(f"{name.ljust(wide)}  {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
