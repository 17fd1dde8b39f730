"""The refusals of the cache: an expected "no" that changed nothing, one class a reason.

They stand in order of precedence: when several reasons hold at once, the first one is given. Anything
else that a cache raises is a mistake inside it.
"""


class Refused(Exception):
    """The operation was not done and nothing has changed."""


class EmptyBatch(Refused):
    """An ``alloc`` of nothing."""


class DuplicateInBatch(Refused):
    """One request stands twice in a batch."""


class UnknownRequest(Refused):
    """The cache holds nothing under this name."""


class InFlight(Refused):
    """The request's pass has not landed."""


class WrongState(Refused):
    """The operation is not allowed in the request's state."""


class BadArgument(Refused):
    """A number or token buffer that no state would allow."""


class ContextTooLong(Refused):
    """More positions than a row has."""


class OutOfRows(Refused):
    """No row left for one more request."""


class OutOfPages(Refused):
    """Free and evictable pages do not cover the need."""
