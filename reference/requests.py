"""One request: what it asked for, its state, its three lengths and the lock it holds (SPEC section 2)."""

from dataclasses import dataclass, field
from typing import Literal

from kvlockstep.reference.intervals import OwnershipInterval, ownership_intervals
from kvlockstep.reference.keys import Namespace
from kvlockstep.reference.tree import Vertex

State = Literal["NEW", "MATCHED", "RUNNING", "IN_FLIGHT"]


@dataclass(slots=True, eq=False)
class Request:
    """A live request. Only a MATCHED, RUNNING or IN_FLIGHT one has an anchor, which is its lock.

    With pages of 2, tokens ``a b c d e``, ``a b`` found in the tree, ``c`` computed and a pass over
    ``d`` in flight: lengths 2, 3 and 4.
    """

    request: str
    tokens: list[int]
    namespace: Namespace
    priority: int = 0
    private: bool = False
    state: State = "NEW"
    protected_len: int = 0
    committed_len: int = 0
    allocated_len: int = 0
    inserted_len: int = 0  # length of the last publication of this admission
    anchor: Vertex | None = None
    row: int | None = None
    in_flight_n: int = 0  # positions of the pass in flight
    drafts: list[int] = field(default_factory=list)  # those of the pass in flight
    abort_pending: bool = False
    prompt_len: int = field(init=False)  # tokens at submit

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def uncomputed(self) -> int:
        """Known tokens without KV: ``L`` of SPEC section 5."""
        return len(self.tokens) - self.committed_len

    @property
    def known_in_flight(self) -> int:
        """Known tokens of the pass in flight: ``K`` of SPEC section 5."""
        return self.in_flight_n - len(self.drafts)

    def intervals(self) -> list[OwnershipInterval]:
        """Who owns which positions of the row."""
        return ownership_intervals(self.protected_len, self.committed_len, self.allocated_len)

    def back_to_new(self) -> None:
        """Forget everything but the tokens and what was asked for."""
        self.state = "NEW"
        self.protected_len = self.committed_len = self.allocated_len = self.inserted_len = 0
        self.anchor = None
        self.row = None
