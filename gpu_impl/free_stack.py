"""Which pages (or rows) are free, and how often each has been given back.

The free ones are a stack in one integer buffer: taking and giving back copy only what moves, never
the rest. What was given back last is taken first, while its memory may still be in a cache.
Number 0 is padding and never enters the stack.
"""

from array import array


class FreeStack:
    """The free ones of the numbers ``1..n``, and the generation of each.

    >>> pages = FreeStack(3)
    >>> pages.take(2)
    array('i', [1, 2])
    >>> pages.give_back(array("i", [1]))
    >>> pages.free, pages.generations
    (array('i', [3, 1]), array('q', [0, 1, 0, 0]))
    """

    def __init__(self, n: int) -> None:
        self.free = array("i", range(n, 0, -1))
        self.generations = array("q", bytes(8 * (n + 1)))

    def __len__(self) -> int:
        return len(self.free)

    def take(self, n: int) -> "array[int]":
        """Take ``n`` of the free ones. Before: there are as many."""
        start = len(self.free) - n
        assert start >= 0, f"{n} taken, {len(self.free)} free"
        taken = self.free[start:]
        taken.reverse()
        del self.free[start:]
        return taken

    def give_back(self, numbers: "array[int]") -> None:
        """Make ``numbers`` free; whoever remembers one with its old generation can tell."""
        generations = self.generations
        for number in numbers:
            generations[number] += 1
        self.free.extend(numbers)
