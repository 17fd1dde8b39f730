"""What a fault is: one small edit of a target's source, with a story."""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Fault:
    """A bug planted by hand. ``old`` stands exactly once in ``module`` and becomes ``new``.

    ``kind`` is one of KINDS; ``bug`` names one where the fault is modelled on it.
    """

    name: str
    story: str  # one sentence a newcomer understands
    kind: str
    module: str  # file name within the target's package
    old: str
    new: str
    laws: tuple[str, ...]  # the one to three violation classes that may name it; Divergence stands for all of its kind
    bug: str | None = None  # project and number
    lane: str = "torch"  # the lane on which it is looked for; a fault in kernel source needs "interpret"
    target: str = "gpu_impl"
