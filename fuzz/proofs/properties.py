"""Properties for Hypothesis, each with a fault planted, to see what the symbolic backend finds and the random one not.

    python -m kvlockstep.fuzz.proofs.properties NAME SUBJECT BACKEND SECONDS SEED

runs one of them in a process of its own, with the ``fault`` or ``sound``, on the backend ``hypothesis`` (random) or
``crosshair`` (symbolic), until it fails or time is up, and prints what came of it: ``found`` or ``nothing``, the
examples, the seconds.

The ranges are those of a real engine: contexts of millions of tokens, a vocabulary of 151,936. Where few small numbers
are the whole range, the random backend finds such faults too.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from kvlockstep.fuzz.proofs.faults import Page, child_by_key, intervals_unless_grown, search_one_byte_more
from kvlockstep.fuzz.proofs.implementation import MOST_SHARED_PAGES, Search, shared_by
from kvlockstep.gpu_impl.tree import TOKEN_BYTES, PrefixTree
from kvlockstep.reference.intervals import OwnershipInterval, ownership_intervals


class TimeUp(BaseException):
    """Ends a run from inside; Hypothesis takes an Exception for a failure."""


# Split point: the end of the longest common prefix in whole pages, found by halving.


def split_point(search: Search) -> Callable[..., None]:
    def holds(edge_pages: int, key_pages: int, page_size: int, beyond: int, bigram: bool) -> None:
        agrees = (page_size + bigram) * TOKEN_BYTES + beyond
        shared = shared_by(search, edge_pages, key_pages, page_size, agrees, 0, bigram)
        assert (shared * page_size + bigram) * TOKEN_BYTES <= agrees
        longest = shared == edge_pages or shared == key_pages
        assert longest or ((shared + 1) * page_size + bigram) * TOKEN_BYTES > agrees

    pages = st.integers(1, MOST_SHARED_PAGES)
    return given(pages, pages, st.integers(16, 1024), st.integers(0, 2**16), st.booleans())(holds)


# Child lookup: a child is found by its first page, whatever another page's key looks like.


def child_by_page(children: Sequence[Page], page: Page) -> int | None:
    """Find the child that begins with a page, by comparing tokens."""
    for child, (first, second) in enumerate(children):
        if first == page[0] and second == page[1]:
            return child
    return None


def child_lookup(find: Callable[[Sequence[Page], Page], int | None]) -> Callable[..., None]:
    def holds(first: int, second: int, other_first: int, other_second: int) -> None:
        same = first == other_first and second == other_second
        assert (find([(first, second)], (other_first, other_second)) is not None) == same

    token = st.integers(0, 151_935)
    return given(token, token, token, token)(holds)


# Interval partition: the intervals of a row cover it, one after the other.


def interval_partition(cut_row: Callable[[int, int, int], list[OwnershipInterval]]) -> Callable[..., None]:
    def holds(protected_len: int, computed: int, opened: int) -> None:
        at = 0
        for start, end, _ in cut_row(protected_len, protected_len + computed, protected_len + computed + opened):
            assert start == at and start < end
            at = end
        assert at == protected_len + computed + opened

    length = st.integers(0, 2**22)
    return given(length, length, length)(holds)


PROPERTIES: dict[str, tuple[Callable[[Any], Callable[..., None]], Any, Any]] = {
    "split point": (split_point, PrefixTree._shared_pages, search_one_byte_more),
    "child lookup": (child_lookup, child_by_page, child_by_key),
    "interval partition": (interval_partition, ownership_intervals, intervals_unless_grown),
}
"""Name: the property of a subject, the sound subject, the one with the fault."""


def run(name: str, with_fault: bool, backend: str, seconds: float, first: int) -> tuple[bool, int, float]:
    """Tell whether it failed in ``seconds``, and the examples and seconds it took."""
    make, sound, faulty = PROPERTIES[name]
    prop = make(faulty if with_fault else sound)
    inner = prop.hypothesis.inner_test  # type: ignore[attr-defined]
    began = time.monotonic()
    n_examples = 0

    def counted(*args: object, **kwargs: object) -> None:
        nonlocal n_examples
        if time.monotonic() - began > seconds:
            raise TimeUp
        n_examples += 1
        inner(*args, **kwargs)

    prop.hypothesis.inner_test = counted  # type: ignore[attr-defined]
    budget = settings(
        backend=backend,
        max_examples=10**9,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        seed(first)(budget(prop))()
    except TimeUp:
        return False, n_examples, time.monotonic() - began
    except AssertionError:
        return True, n_examples, time.monotonic() - began
    return False, n_examples, time.monotonic() - began


if __name__ == "__main__":
    name, subject, backend, seconds, first = sys.argv[1:]
    found, n_examples, took = run(name, subject == "fault", backend, float(seconds), int(first))
    print("found" if found else "nothing", n_examples, f"{took:.1f}", sep="\t")  # noqa: T201
