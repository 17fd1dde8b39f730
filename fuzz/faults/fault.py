"""What a fault is: a bug planted by hand, with a story. There are two kinds, which differ in how it is planted.

A `SourceFault` edits one place of the source of `gpu_impl`, in a copy. A `PatchFault` puts code of ours around
methods of an engine that is installed and stays as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlockstep.fuzz.faults.sglang_patching import Patch

KINDS = (
    "two things share a key, or one thing has two keys",
    "exit path that forgets to release",
    "watermark drift",
    "same thing freed twice",
    "stale entry in a side table after recycling",
    "promise of capacity broken, or no progress",
    "lock or pin not balanced",
    "page versus token units",
    "component or tier not valid together",
    "reuse while a reader or writer is still in flight",
    "window between match and use",
    "split or re-key loses something",
    "published before written",
    "depth, cost, retained memory",
    "counter drift without real damage",
    "insert and match disagree, row not remapped",
    "replicas or ranks diverge",
)
"""The kinds of public bugs that recur, the most frequent first; the last two are rarer but show others' damage."""

NEEDS = (
    "two features together",
    "three requests",
    "page reused by a third request",
    "balanced totals with two owners",
    "off by one only at kP",
    "only the second chunk",
    "only after a split of a locked edge",
    "only after reset",
    "only when the pool is exactly full",
)
"""What it takes to see a bug that is hard to see: without it, nothing that the cache does or shows is wrong.

"Page reused by a third request": the mistake harms only once another request holds what it confuses. "Balanced totals":
a wrong free that a wrong keep makes up for, so that sums show nothing. "kP": a length that is a multiple of the page
size. "Second chunk": a later pass of an admission, or its second publication.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A bug planted by hand. ``kind`` is one of KINDS, and ``needs``, if any, are of NEEDS.

    ``bug`` names a public one where the fault is modelled on it.
    """

    name: str
    story: str  # one sentence a newcomer understands
    kind: str
    laws: tuple[str, ...]  # the one or two violation classes that may name it; Divergence stands for all of its kind
    needs: tuple[str, ...] = ()
    bug: str | None = None  # project and number
    lane: str = "torch"  # the lane on which it is looked for; a fault in kernel source needs "interpret"
    target: str = "gpu_impl"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFault(Fault):
    """One edit of the source of `gpu_impl`. ``old`` stands exactly once in ``module`` and becomes ``new``."""

    module: str  # file name within the target's package
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchFault(Fault):
    """Code of ours around methods of SGLang. ``plant`` says around which, once SGLang is imported."""

    plant: "Callable[[Patch], None]"
    hides_behind: str | None = None  # the allowance that lets the target differ just where the fault is
