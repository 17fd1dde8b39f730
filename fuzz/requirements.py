"""What a trace needs of a target: the capabilities, the page size and the options that it makes use of.

A target that lacks one of them may refuse or crash for that reason alone, which says nothing about its cache.
"""

from collections.abc import Sequence

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Alloc, Commit, Op, Submit
from kvlockstep.fuzz.targets.base import Target, options_of


def requirements_of(config: CacheConfig, ops: Sequence[Op]) -> list[str]:
    """List what the trace needs: names of capabilities, ``page_size N``, and ``option X`` for each that is on."""
    submits = [op for op in ops if isinstance(op, Submit)]
    content_ids = any(op.namespace[2] for op in submits)
    used = {
        f"policy:{config.policy}": True,
        "sharing": config.prefix_sharing,
        "no_sharing": not config.prefix_sharing,
        "bigram": config.key_units == "bigram",
        "drafts": any(item.drafts for op in ops if isinstance(op, Alloc) for item in op.batch),
        "discards": any(op.kept == 0 for op in ops if isinstance(op, Commit)),
        "namespaces": content_ids or any(op.namespace[:2] != (None, None) for op in submits),
        "content_ids": content_ids,
        "private": any(op.private for op in submits),
        "priority": any(op.priority for op in submits),
    }
    names = [name for name, is_used in used.items() if is_used]
    return [*names, f"page_size {config.page_size}", *(f"option {name}" for name in config.options)]


def lacking(target: Target, config: CacheConfig, ops: Sequence[Op]) -> list[str]:
    """List what the trace needs and the target does not promise.

    A target that names no page sizes of its own takes any.
    """
    page_sizes = getattr(target, "page_sizes", None)
    promised = {*target.capabilities, *(f"option {name}" for name in options_of(target))}
    promised |= {f"page_size {size}" for size in page_sizes or (config.page_size,)}
    return [name for name in requirements_of(config, ops) if name not in promised]
