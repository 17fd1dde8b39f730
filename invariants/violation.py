"""The base of every violation, and how its text is laid out.

One subclass a check, defined beside the check. The class name is the stable identity of a failure;
``roles`` go into its cause signature, so they name kinds of owner ("free", "tree", "request") and
never a particular page or request.
"""


class Violation(AssertionError):
    """A check failed: always a bug, in the implementation or in the model.

    The first line states the rule with its numbers, expected before got; ``facts`` follow, one a
    line, aligned::

        PageOwnedTwice: page 3 has 2 owners, expected 1
          owner     node 3, positions [4, 8)
          owner     request r2, positions [6, 7)
    """

    def __init__(self, headline: str, facts: list[tuple[str, str]] | None = None, roles: tuple[str, ...] = ()) -> None:
        self.headline = headline
        self.facts = facts or []
        self.roles = roles
        super().__init__(headline)

    def __str__(self) -> str:
        width = max([9, *(len(name) for name, _ in self.facts)])
        lines = [f"{type(self).__name__}: {self.headline}"]
        lines += [f"  {name:<{width}} {text}" for name, text in self.facts]
        return "\n".join(lines)


class Divergence(Violation):
    """Model and implementation differ, and no law says which of them is wrong."""
