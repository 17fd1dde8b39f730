"""The page allocator (SPEC section 1): one dict says who owns a page, so no page can have two owners.

A page without an entry is free. Page 0 is padding: it is never free and never owned.
"""

from enum import Enum


class Tree(Enum):
    """The owner of a published page; every other owner is a request's name."""

    TREE = "tree"


TREE = Tree.TREE
Owner = str | Tree


class Pages:
    """Owners and generations of pages ``1..n_pages``.

    >>> pages = Pages(3)
    >>> pages.take(2, "r0")
    >>> pages.free()
    [1, 3]
    >>> pages.publish(2)
    >>> pages.give_back(2)
    >>> pages.n_free, pages.generations
    (3, [0, 0, 1, 0])
    """

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.owners: dict[int, Owner] = {}
        self.generations = [0] * (n_pages + 1)

    @property
    def n_free(self) -> int:
        return self.n_pages - len(self.owners)

    def free(self) -> list[int]:
        """List the free pages, lowest first."""
        return [page for page in range(1, self.n_pages + 1) if page not in self.owners]

    def take(self, page: int, request: str) -> None:
        assert 1 <= page <= self.n_pages, f"page {page} is not usable"
        assert page not in self.owners, f"page {page} is taken"
        self.owners[page] = request

    def publish(self, page: int) -> None:
        """Hand a request's page to the tree. It was not given back, so its generation stays."""
        assert self.owners.get(page, TREE) is not TREE, f"page {page} is not a request's"
        self.owners[page] = TREE

    def give_back(self, page: int) -> None:
        del self.owners[page]
        self.generations[page] += 1
