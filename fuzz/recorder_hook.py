"""Switches the recorder on in a program that `kvlockstep record` starts, once it builds a cache of SGLang.

`kvlockstep record` puts a folder in front of the module path of the program, with a ``sitecustomize.py`` that calls
`install`. Nothing of SGLang is imported here: when the program imports one of its trees, that class learns to record
each cache that it builds. The first one that begins takes the file, each later one, in whatever process, the next
free name: ``out.jsonl``, ``out-1.jsonl``, ``out-2.jsonl``.
"""

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "KVLOCKSTEP_RECORD"
"""Names the file and the bounds, as JSON, for the program and what it starts."""

TREES = {
    "sglang.srt.mem_cache.radix_cache": "RadixCache",
    "sglang.srt.mem_cache.unified_radix_cache": "UnifiedRadixCache",
}


def paths_from(path: Path, n: int) -> Path:
    """Return the name of the n-th file, from 0."""
    return path if n == 0 else path.with_name(f"{path.stem}-{n}{path.suffix}")


def claim(path: Path) -> Path:
    """Make the first file that is not there yet, and return its name. Raises OSError."""
    n = 0
    while True:
        try:
            os.close(os.open(paths_from(path, n), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            n += 1
        else:
            return paths_from(path, n)


def install() -> None:
    """Watch for the import of SGLang's trees."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds the two modules as Python would, and has a word with what they define."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in TREES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec.loader if spec is not None else None
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _teach(getattr(module, TREES[name], None))

        loader.exec_module = exec_module
        return spec


def _teach(tree: Any) -> None:
    if tree is None:
        return
    build = tree.__init__

    @functools.wraps(build)
    def built(cache: Any, params: Any, *arguments: Any, **named: Any) -> None:
        build(cache, params, *arguments, **named)
        if type(cache) is tree and cache.req_to_token_pool is not None:
            _record(cache, params)

    tree.__init__ = built


def _record(cache: Any, params: Any) -> None:
    """Record a cache that was just built. Whatever goes wrong is logged, and is no concern of the program."""
    from kvlockstep.fuzz.recorder import log

    try:
        from kvlockstep.fuzz.targets.sglang_record import record

        asked = json.loads(os.environ[VARIABLE])
        key = asked["pseudonyms"]
        record(
            cache,
            Path(asked["path"]),
            policy=params.eviction_policy,
            max_ops=asked["max_ops"],
            max_bytes=asked["max_bytes"],
            pseudonyms=None if key is None else bytes.fromhex(key),
            claim=claim,
        )
    except Exception as error:
        log.warning("not recorded: %s: %s", type(error).__name__, error)


def run_next_customization(folder: str) -> None:
    """Run the ``sitecustomize`` that ours stands in front of, if the program has one."""
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.realpath(path) != folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
