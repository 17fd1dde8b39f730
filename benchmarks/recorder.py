"""What recording a live SGLang cache costs: the same load without and with a recorder, in turn, in one process.

The load is made of SGLang's own `ScheduleBatch` and `PrefillAdder` on real pools and a real tree on the CPU: prompts
that share prefixes, chunked prefill, growing decode batches, retractions under memory pressure. Only the forward pass
is replaced by a random token. All calls into the cache (from `init_next_round_input` to `release_kv_cache`) are
timed, the outermost only, by the CPU time of the thread, which other work on the machine disturbs least; the ratio is
that of those times. Run it in the environment of ``make sglang``:

    .venv-sglang/bin/python benchmarks/recorder.py [--rounds 7] [--tree unified-rust] [--page-size 16]
"""

import argparse
import os
import platform
import random
import statistics
import tempfile
from array import array
from pathlib import Path
from time import thread_time
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

VOCABULARY = 150_000
TREES = ("radix", "unified-python", "unified-rust")


class Load:
    """Drives SGLang's scheduling objects as its event loops do, with or without overlap; no kvlockstep in here."""

    def __init__(
        self,
        engine: Any,
        seed: int,
        *,
        n_requests: int,
        prompt: tuple[int, int],
        output: tuple[int, int],
        shared: int,
        chunk: int,
        overlap: bool = False,
        vocabulary: int = VOCABULARY,
        aborts: float = 0.0,
        looks: float = 0.0,
        ratio: float = 0.3,
        salts: tuple[str | None, ...] = (None,),
    ) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
        from sglang.srt.managers.schedule_policy import PrefillAdder
        from sglang.srt.mem_cache import common
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.engine, self.rng, self.overlap, self.chunk = engine, random.Random(seed), overlap, chunk
        self.aborts, self.looks, self.common, self.finish_abort = aborts, looks, common, FINISH_ABORT
        self.model = SimpleNamespace(vocab_size=vocabulary, is_encoder_decoder=False)
        self.batch_of = lambda reqs: ScheduleBatch.init_new(
            reqs, engine.rows, engine.allocator, engine.cache, self.model, overlap, SpeculativeAlgorithm.NONE
        )
        self.adder_type = PrefillAdder
        prefixes = [[self.token() for _ in range(prompt[0])] for _ in range(shared)]
        self.ratio = ratio
        self.incoming = []
        for i in range(n_requests):
            params = SamplingParams(max_new_tokens=self.rng.randint(*output))
            params.normalize(None)
            tail = [self.token() for _ in range(self.rng.randint(1, prompt[1] - prompt[0]))]
            tokens = array("q", [*self.rng.choice(prefixes), *tail])
            salt = self.rng.choice(salts)
            self.incoming.append(Req(f"client-{i % 7}", "", tokens, params, cache_salt=salt, vocab_size=vocabulary))
        self.waiting: list[Any] = []
        self.running = self.batch_of([])
        self.chunked: Any = None
        self.last: Any = None  # the batch of the last step
        self.results: list[Any] = []  # that were launched and not processed
        self.n_steps = self.n_retracted = self.n_decoded = 0

    def token(self) -> int:
        return self.rng.randrange(self.model.vocab_size)

    def run(self, most: int = 1 << 30) -> None:
        while (self.incoming or self.waiting or not self.running.is_empty() or self.results or self.chunked) and most:
            self.step()
            most -= 1

    def step(self) -> None:
        self.n_steps += 1
        for _ in range(min(len(self.incoming), self.rng.randint(0, 3))):
            self.waiting.append(self.incoming.pop())
        if self.waiting and self.rng.random() < self.looks:
            for req in self.waiting:  # as a cache-aware policy does
                self.common.match_kv_cache(req, self.engine.cache)
        batch = self.next_batch()
        if batch is not None:
            self.results.append((batch.copy(), [self.token() for _ in batch.reqs]))
        if not self.overlap or batch is None or len(self.results) > 1:
            while self.results and (not self.overlap or batch is None or len(self.results) > 1):
                self.process(*self.results.pop(0))
        self.last = batch

    def next_batch(self) -> Any:
        if self.chunked is not None and self.chunked.kv.holds_kv:
            self.common.checkpoint_kv_cache(self.chunked, self.engine.cache)
        if self.last is not None and self.last.forward_mode.is_extend():
            self.last.filter_batch(reqs_to_exclude=[self.chunked] if self.chunked is not None else None)
            if not self.last.is_empty():
                if self.running.is_empty():
                    self.running = self.last
                else:
                    self.running.merge_batch(self.last)
        return self.prefill() or self.decode()

    def prefill(self) -> Any:
        engine = self.engine
        if not self.waiting and self.chunked is None:
            return None
        adder = self.adder_type(
            engine.cache.page_size, engine.cache, engine.allocator, self.running, self.ratio, 1 << 14, self.chunk
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        for req in self.waiting:
            if len(adder.can_run_list) >= engine.rows.available_size():
                break
            req.init_next_round_input(engine.cache)
            if adder.add_one_req(req, self.chunked is not None, None).name != "CONTINUE":
                break
        if not adder.can_run_list:
            return None
        self.waiting = [req for req in self.waiting if req not in adder.can_run_list]
        if adder.new_chunked_req is not None:
            self.chunked = adder.new_chunked_req
        if self.chunked is not None:
            self.chunked.inflight_middle_chunks += 1
        batch = self.batch_of(adder.can_run_list)
        batch.prepare_for_extend()
        for req in batch.reqs:
            req.is_retracted = False
        return batch

    def decode(self) -> Any:
        self.running.filter_batch()
        if self.running.is_empty():
            return None
        if not self.running.check_decode_mem():
            retracted, _, aborted = self.running.retract_decode()
            assert not aborted, "the pool is too small for a single request"
            self.waiting += retracted
            self.n_retracted += len(retracted)
        self.running.prepare_for_decode()
        self.n_decoded += len(self.running.reqs)
        return self.running

    def process(self, batch: Any, tokens: list[int]) -> None:
        cache, allocator = self.engine.cache, self.engine.allocator
        allocator.free_group_begin()
        for req, token in zip(batch.reqs, tokens, strict=True):
            if req.finished() or req.is_retracted:
                continue
            prefills = batch.forward_mode.is_extend()
            if prefills and req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
                continue
            if self.rng.random() < self.aborts:
                req.to_finish = self.finish_abort("a client left")
                req.update_finish_state(0)
                self.common.release_kv_cache(req, cache, checkpoint=False)
                continue
            req.output_ids.append(token)
            req.update_finish_state()
            if req.finished():
                self.common.release_kv_cache(req, cache, checkpoint=True)
            elif prefills:
                self.common.checkpoint_kv_cache(req, cache)
        allocator.free_group_end()


class Stopwatch:
    """Adds up the time of the outermost timed call, while it is entered."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False
        self._undo: list[tuple[Any, str, Any]] = []

    def around(self, function: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return function(*arguments, **named)
            self._inside = True
            start = thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += thread_time() - start
                self._inside = False

        return timed

    def watch(self, load: Load) -> None:
        """Time what the load asks of the cache; the hooks of a recorder are in place already, and are timed with it."""
        from sglang.srt.managers import schedule_batch

        cache, allocator = load.engine.cache, load.engine.allocator
        functions = ("alloc_for_extend", "alloc_for_decode", "release_kv_cache")
        for owner, names in (
            (schedule_batch, functions),
            (load.common, ("release_kv_cache", "checkpoint_kv_cache")),
            (cache, ("match_prefix", "lock", "unlock")),
            (allocator, ("check_decode_capacity", "free_group_end")),
        ):
            for name in names:
                self._undo.append((owner, name, vars(owner).get(name)))
                setattr(owner, name, self.around(getattr(owner, name)))

    def __enter__(self) -> "Stopwatch":
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, was in reversed(self._undo):
            if was is None:
                delattr(owner, name)
            else:
                setattr(owner, name, was)


def run(tree: str, page_size: int, path: Path | None, shape: dict[str, Any]) -> dict[str, float]:
    """Run the load once, with a recorder if there is a path; return what it took."""
    from kvlockstep.fuzz.config import CacheConfig
    from kvlockstep.fuzz.targets.sglang.engine import build
    from kvlockstep.fuzz.targets.sglang_record import record

    config = CacheConfig(page_size, shape["slots"] // page_size, 128, 4096, layers=1)
    engine = build(config, tree, need_sort=False)
    load = Load(engine, 1, **shape["load"])
    live = record(engine.cache, path) if path is not None else None
    with Stopwatch() as watch:
        watch.watch(load)
        load.run()
    told = {"seconds": watch.seconds, "steps": load.n_steps, "retracted": load.n_retracted, "decoded": load.n_decoded}
    if live is not None:
        live.stop()
        assert live.stopped == "stopped by its owner", live.stopped
        told |= {"ops": live.n_ops, "bytes": live.n_bytes}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tree", choices=TREES, default="unified-rust")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument(
        "--overlap", action="store_true", help="launch each pass before the result of the last is known"
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help="of a decode on a GPU, to set the cost against")
    asked = parser.parse_args()
    load = {"n_requests": asked.requests, "prompt": (256, 1500), "output": (50, 200), "shared": 8, "chunk": 1024}
    shape = {"slots": 32_000, "load": load | {"ratio": 0.0, "overlap": asked.overlap}}
    without, recorded, last = [], [], dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recorded.jsonl")
        run(asked.tree, asked.page_size, None, shape)  # once, so that everything is imported and warm
        for turn in range(asked.rounds):
            for target in (None, path) if turn % 2 == 0 else (path, None):
                took = run(asked.tree, asked.page_size, target, shape)
                (without if target is None else recorded).append(took["seconds"])
                last = took if target is not None else last
    ratios = [b / a for a, b in zip(without, recorded, strict=True)]
    extra = statistics.median(recorded) - statistics.median(without)
    per_step = extra / last["steps"] * 1e6
    print(
        f"Python {platform.python_version()} on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n"
        f"{asked.tree}, pages of {asked.page_size}, {asked.requests} requests, {last['steps']:.0f} steps, "
        f"{last['decoded']:.0f} tokens decoded, {last['retracted']:.0f} requests retracted\n"
        f"in the cache: {statistics.median(without):.3f} s without, {statistics.median(recorded):.3f} s recorded\n"
        f"ratio: {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f}, {asked.rounds} rounds)\n"
        f"recorded: {last['ops']:.0f} operations, {last['ops'] / statistics.median(recorded):.0f} a second of cache "
        f"time, {last['bytes'] / last['ops']:.0f} bytes and {extra / last['ops'] * 1e6:.2f} us each\n"
        f"that is {per_step:.0f} us a step, {per_step / asked.step_ms / 10:.2f} % of one of {asked.step_ms:g} ms"
    )


if __name__ == "__main__":
    main()
