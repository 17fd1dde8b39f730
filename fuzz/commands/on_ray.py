"""``kvlockstep fuzz --for 30m --ray ADDRESS``: all shards of a campaign on Ray, and the verdict on them together."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from kvlockstep.fuzz.campaign.ending import Outcome, verdict_of_party
from kvlockstep.fuzz.campaign.folder import FolderUnusable
from kvlockstep.fuzz.campaign.live import duration
from kvlockstep.fuzz.campaign.merging import Merged, check_out, merge
from kvlockstep.fuzz.campaign.ray_shards import Cluster, RayUnusable, ShardEnd, ShardOrder
from kvlockstep.fuzz.campaign.seeds import Shard
from kvlockstep.fuzz.campaign.store import Store, StoreUnusable
from kvlockstep.fuzz.commands.campaign import Asked, kinds_for, print_end, reached
from kvlockstep.fuzz.crew import n_cores
from kvlockstep.fuzz.exits import BROKEN, CLEAN, INTERRUPTED, UNKNOWN, USAGE, VIOLATION, Stop, writing

SHARDS_RUN = (CLEAN, VIOLATION, UNKNOWN)
"""Exit codes of a shard that did its work."""


def run_on_ray(console: Console, asked: Asked, address: str) -> int:
    """Run ``asked.workers`` shards, merge what they stored, print what it came to, and return the exit code."""
    if asked.store is None:
        raise Stop(f"--ray {address}: say --store URL with it, a store that all nodes reach", USAGE)
    if asked.shard != Shard():
        raise Stop(f"--shard {asked.shard}: not with --ray, which runs all shards", USAGE)
    if asked.resume:
        raise Stop("--resume: not with --ray; the same --base and --store go on", USAGE)
    kinds, not_run = kinds_for(console, asked)
    with writing(f"--out {asked.out}"):
        try:
            check_out(asked.out)
        except FolderUnusable as error:
            raise Stop(f"--out {error}", USAGE) from error
    store = reached(asked.store)
    base = asked.base or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    gpus = sum(lane == "cuda" for _, lane in kinds)
    here = asked.workers or max(1, n_cores() // len(kinds))
    try:
        cluster = Cluster(address, here * len(kinds), here * gpus)
    except RayUnusable as error:
        raise Stop(str(error), USAGE) from error
    try:
        total = asked.workers or max(1, cluster.cpus // len(kinds))
        orders = [
            ShardOrder(f"shard {i}/{total}", _arguments(asked, base, Shard(i, total), len(kinds)), os.getcwd(), *each)
            for i, each in enumerate([(len(kinds), gpus)] * total, 1)
        ]
        targets = ", ".join(dict.fromkeys(target for target, _ in kinds))
        console.print(
            f"{total} shards on Ray at {address}: {targets} for {duration(asked.seconds)}, "
            f"workers of each: {len(kinds)}, store {store.shown}, seed base {base}; "
            f"the same command with --base {base} goes on",
            soft_wrap=True,
        )
        ends, interrupted = cluster.run(orders, lambda line: console.print(line, soft_wrap=True))
    finally:
        cluster.close()
    return _end(console, asked, store, ends, not_run, interrupted=interrupted)


def _arguments(asked: Asked, base: str, shard: Shard, workers: int) -> tuple[str, ...]:
    assert asked.store is not None, "without a store nothing is run"
    store = asked.store if "://" in asked.store else str(Path(asked.store).absolute())
    given = {
        "--for": f"{asked.seconds:.1f}s",
        "--target": asked.target,
        "--lanes": ",".join(asked.lanes),
        "--workers": str(workers),
        "--shard": str(shard),
        "--base": base,
        "--store": store,
        "--hang-seconds": str(asked.bounds.hang_seconds),
        "--memory": _size(asked.bounds.memory),
    }
    if asked.units is not None:
        given["--units"] = str(asked.units)
    if asked.faults:
        given["--fault"] = ",".join(asked.faults)
    words = [f"{name}={value}" for name, value in given.items()]
    words += [f"--accept-unobserved={law}" for law in asked.accepted]
    return (*words, "--sanitize") if asked.sanitize else tuple(words)


def _size(n_bytes: int) -> str:
    """Write a size as it is read.

    >>> _size(4 << 30), _size(512 << 20)
    ('4G', '512M')
    """
    return f"{n_bytes >> 30}G" if n_bytes % (1 << 30) == 0 else f"{n_bytes >> 20}M"


def _end(
    console: Console, asked: Asked, store: Store, ends: Sequence[ShardEnd], not_run: Sequence[str], *, interrupted: bool
) -> int:
    """Merge, print, and return the exit code."""
    refused = [f"{end.name}: {end.complaint}" for end in ends if end.code == USAGE]
    if refused and len(refused) == len(ends):
        raise Stop(refused[0], USAGE)
    with writing(f"--out {asked.out}"):
        try:
            merged = merge(store, asked.out)
        except (FolderUnusable, StoreUnusable) as error:
            if interrupted:
                raise Stop(f"interrupted before anything was stored: {error}", INTERRUPTED) from error
            raise Stop(f"--store {error}", BROKEN) from error
    verdict = verdict_of_party(merged.progress, merged.seconds, _outcome(asked, merged, ends, not_run))
    print_end(console, merged, verdict, interrupted=False)
    if interrupted:
        console.print("interrupted; the same command with that --base goes on", soft_wrap=True)
        return INTERRUPTED
    return verdict.code


def _outcome(asked: Asked, merged: Merged, ends: Sequence[ShardEnd], not_run: Sequence[str]) -> Outcome:
    broken = [f"{end.name}: {end.complaint}" for end in ends if end.code == BROKEN]
    failed = [end for end in ends if end.code not in (*SHARDS_RUN, BROKEN)]
    said = [f"{e.name} ended with exit code {e.code}: {e.complaint}" for e in failed if e.code is not None]
    said += [f"{end.name} is lost: {end.complaint}" for end in failed if end.code is None]
    unexplained = [*said, *(f"the store holds what is no shard's: {what}" for what in merged.skipped)]
    return Outcome(broken[0] if broken else None, [], [], unexplained, not_run, asked.accepted, twins=True)
