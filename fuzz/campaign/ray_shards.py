"""Runs shards of a campaign as tasks of Ray: each is ``kvlockstep fuzz --for ... --shard I/N`` in a process of its own.

Ray only finds a place for each shard, and starts it again somewhere if its Ray worker, or the node, dies. The shard
then goes on where it was in the store. Its process ends when its Ray worker does, so that no shard is at work twice
for longer than some seconds. Nothing of a result travels through Ray but an exit code and the last lines.

kvlockstep, and the targets, must be installed on each node, and the store reached from there.
"""

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

RETRIES = 20
"""So often is a shard started again whose Ray worker was lost: a night on machines that may be taken away."""

SAY_EVERY = 60.0
"""Seconds between lines that a shard passes on; what was found is passed on at once."""

N_LAST = 20

REACH_S = 10.0

ENDING_S = 10.0
"""After this time the processes of shards whose Ray workers are gone have ended, too."""


class RayUnusable(Exception):
    """Ray is not there; the text is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """One shard: its name, and the arguments of its ``kvlockstep fuzz``, but for the folder."""

    name: str
    arguments: tuple[str, ...]
    folder: str  # where it is started, if that is on its node
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class ShardEnd:
    """How a shard ended."""

    name: str
    code: int | None  # None: it was lost, and that is what its line says
    lines: tuple[str, ...]  # its last

    @property
    def complaint(self) -> str:
        """The last thing that it complained of, or the last that it said."""
        complaints = [line for line in self.lines if line.startswith("kvlockstep: ")]
        return (complaints or list(self.lines) or ["it said nothing"])[-1].removeprefix("kvlockstep: ")


class Cluster:
    """A connection to Ray. ``address`` is ``auto``, ``local``, which starts one on this machine, or HOST:PORT."""

    def __init__(self, address: str, cpus: int, gpus: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of two shards that differ in their numbers are two lines
        try:
            import ray
        except ImportError as error:
            raise RayUnusable("--ray: Ray is not installed: pip install 'kvlockstep[ray]'") from error
        self._ray: Any = ray
        if address not in ("auto", "local"):
            _check_that_somebody_listens(address)
        options: dict[str, Any] = {"address": address, "logging_level": "warning"}
        if address == "local":  # on loopback alone
            options |= {"num_cpus": cpus, "num_gpus": gpus, "include_dashboard": False}
            options |= {"_node_ip_address": "127.0.0.1"}
        try:
            ray.init(**options)
        except Exception as error:  # of several types, by what is wrong
            text = " ".join(str(error).split())[:300]
            raise RayUnusable(f"--ray {address}: {text}: name a Ray that runs, or local to start one here") from error

    @property
    def cpus(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 1))

    def run(self, orders: Sequence[ShardOrder], told: Callable[[str], None]) -> tuple[list[ShardEnd], bool]:
        """Run all shards to their ends; return how they ended, and if that was cut short by Ctrl-C or SIGTERM."""
        ray, ends = self._ray, list[ShardEnd]()
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            pending = {self._submit(order): order for order in orders}
            while pending:
                for done in ray.wait(list(pending), timeout=1.0)[0]:
                    end = self._end_of(pending.pop(done).name, done)
                    told(f"{end.name} ended, exit code {end.code}" if end.code is not None else f"{end.name} is lost")
                    ends.append(end)
        except KeyboardInterrupt:
            self.close()
            sleep(ENDING_S)
            return ends, True
        finally:
            signal.signal(signal.SIGTERM, before)
        return ends, False

    def _submit(self, order: ShardOrder) -> Any:
        options = {"num_cpus": order.cpus, "num_gpus": order.gpus, "max_retries": RETRIES, "name": order.name}
        return self._ray.remote(follow_shard).options(**options).remote(order)

    def _end_of(self, name: str, task: Any) -> ShardEnd:
        try:
            code, lines = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return ShardEnd(name, None, (" ".join(str(error).split())[:300],))
        return ShardEnd(name, code, lines)

    def close(self) -> None:
        self._ray.shutdown()


def _check_that_somebody_listens(address: str) -> None:
    """See at once what Ray would try for minutes. Raises RayUnusable."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise RayUnusable(f"--ray {address}: expected auto, local or HOST:PORT")
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        raise RayUnusable(f"--ray {address}: {error}: name a Ray that runs, or local to start one here") from error


def follow_shard(order: ShardOrder) -> tuple[int, tuple[str, ...]]:
    """Run one shard on a node, pass on a line now and then; return its exit code and its last lines."""
    lines = deque[str](maxlen=N_LAST)
    next_line = 0.0
    with TemporaryDirectory(prefix="kvlockstep-") as out:
        command = [sys.executable, "-P", "-m", "kvlockstep", "fuzz", *order.arguments]
        process = subprocess.Popen(
            [*command, "--out", out, "--end-with-parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=order.folder if Path(order.folder).is_dir() else None,
        )
        assert process.stdout is not None
        for line in map(str.rstrip, process.stdout):
            lines.append(line)
            if monotonic() >= next_line or line.startswith(("found ", "kvlockstep: ")):
                next_line = monotonic() + SAY_EVERY
                print(line, flush=True)  # noqa: T201  Ray brings it to whoever waits
        return process.wait(), tuple(lines)
