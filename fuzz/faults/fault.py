"""What a fault is: one small edit of a target's source, with a story."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A bug planted by hand. ``old`` stands exactly once in ``module`` and becomes ``new``.

    ``kind`` is one of the kinds of public bugs that recur; ``bug`` names one where the fault is modelled on it.
    """

    name: str
    story: str  # one sentence a newcomer understands
    kind: str
    module: str  # file name within the target's package
    old: str
    new: str
    laws: tuple[str, ...]  # the one or two violation classes that may name it
    bug: str | None = None  # project and number
    lane: str = "torch"  # the lane on which it is looked for; a fault in kernel source needs "interpret"
    target: str = "gpu_impl"
