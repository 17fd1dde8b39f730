"""The nine expected "no" of SPEC section 5. Whoever raises one has changed nothing.

Messages say what was asked and what is available: ``3 pages asked, 2 free and 0 evictable``.
"""


class Refused(Exception):
    """An operation that is not possible now."""

    @property
    def kind(self) -> str:
        """The name that both sides compare: ``OutOfPages``."""
        return type(self).__name__


class EmptyBatch(Refused):
    """An ``alloc`` of nothing."""


class DuplicateInBatch(Refused):
    """One request stands twice in a batch."""


class UnknownRequest(Refused):
    """The name is not live."""


class InFlight(Refused):
    """The request's pass has not landed."""


class WrongState(Refused):
    """The operation is not allowed in the request's state."""


class BadArgument(Refused):
    """A number or a token list that does not fit the request."""


class ContextTooLong(Refused):
    """More positions than a row has."""


class OutOfRows(Refused):
    """No row left for one more request."""


class OutOfPages(Refused):
    """Free and evictable pages do not cover the need."""
