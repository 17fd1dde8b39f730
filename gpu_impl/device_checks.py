"""The charter's three laws, checked on the device over the live row table, without a wait.

`check_device` uploads what the host keeps (free lists, edges, paths, what each request may write) in one copy,
launches the kernels of `check_kernels.py`, and returns a `Report` that stays on the device until its reader
asks for it::

    step = cache.alloc(batch)
    report = check_device(cache, [item.request for item in batch], step)  # returns at once
    ...
    for finding in report.findings():  # waits; an engine asks every few hundred steps, or in an idle moment
        log.error("%s", finding)

1. *One owner.* The free list and the edges claim the pages that they list. What a request holds beyond its
   protected part is claimed by **the row table**, slot by slot, so that a row that names a wrong page is seen; the
   slack of its last page comes with the page. Pages claimed twice and pages not claimed are counted; rows too.
2. *Canonical path.* Each row is compared with the edges of the path that its request locks.
3. *Write set.* Each write slot of a batch stands there once, is the one that its row names at that position, and
   lies on a page that its request alone owns.

With pages of 2: the tree owns page 1, ``r1`` has locked it and its row reads 2 3 6. Position 2 is beyond its
protected part, so ``r1`` claims page 3 (slots 6 7). Did the row read 2 3 4, page 3 would be lost, and page 2 have
two owners if it is free.

What it costs on the device, at the bandwidth of the memory (its caches do better), for 4 million slots and 4,096
rows of 1,024 positions, half of them protected; the tails and the tree hold half the pool each, and every request
writes one slot:

>>> state = {"n_rows": 4096, "n_tail_positions": 2**21, "n_path_positions": 2**21, "n_writes": 4096}
>>> for page_size in (16, 1):
...     n_pages = 2**22 // page_size
...     n = bytes_touched(page_size, n_pages, n_listed=n_pages // 2, **state)
...     print(f"P={page_size}: {n / 1e6:.1f} MB, {n / 3.35e6:.0f} us at 3.35 TB/s (H100), {n / 2e6:.0f} us at 2 TB/s")
P=16: 22.7 MB, 7 us at 3.35 TB/s (H100), 11 us at 2 TB/s
P=1: 101.4 MB, 30 us at 3.35 TB/s (H100), 51 us at 2 TB/s

Beside it stand seven launches and five fills, of some microseconds each, the upload of 4 bytes a listed page (0.5 MB
and 8 MB here), and the walk over nodes and paths on the host, in Python: this is what bounds how often it can run.
None of these times is measured.

Not verified here: the bytes in the pool, slots within a page (law 4), lock counts, and that a path spells the
tokens of its request. Positions of all paths, or of all tails, that are 2**31 or more are an OverflowError; pages
must be fewer than 2**30.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .cache import MATCHED, Allocation, KvCache, Request
from .tree import ROOT, TOKEN_BYTES

NOWHERE = (1 << 63) - 1
"""Stands in a report where a defect was not found."""


class Defect(IntEnum):
    """What is counted, in the order of a report."""

    PAGE_OUT_OF_RANGE = 0  # of claims: a page can count more than once
    PAGE_OWNED_TWICE = 1
    PAGE_LOST = 2
    ROW_OUT_OF_RANGE = 3
    ROW_OWNED_TWICE = 4
    ROW_LOST = 5
    REQUEST_WITHOUT_ROW = 6
    LENGTH_OFF_PATH = 7
    ROW_OFF_PATH = 8
    WRITE_SLOT_REPEATED = 9
    WRITE_SLOT_OFF_ROW = 10
    WRITE_SLOT_PADDING = 11
    WRITE_SLOT_FREE = 12
    WRITE_SLOT_OF_TREE = 13
    WRITE_SLOT_OF_OTHER = 14
    PADDING_PAGE_OWNED = 15  # of claims
    PADDING_ROW_OWNED = 16


_SAYS = {
    Defect.PAGE_OUT_OF_RANGE: (1, "claims of pages that the pool does not have", "page"),
    Defect.PAGE_OWNED_TWICE: (1, "pages with two owners", "page"),
    Defect.PAGE_LOST: (1, "pages without an owner", "page"),
    Defect.ROW_OUT_OF_RANGE: (1, "claims of rows that the table does not have", "row"),
    Defect.ROW_OWNED_TWICE: (1, "rows with two owners", "row"),
    Defect.ROW_LOST: (1, "rows without an owner", "row"),
    Defect.REQUEST_WITHOUT_ROW: (1, "requests that run without a row", "request"),
    Defect.LENGTH_OFF_PATH: (2, "requests whose protected length is not that of their path", "request"),
    Defect.ROW_OFF_PATH: (2, "cells of rows that do not name the canonical slot", "cell"),
    Defect.WRITE_SLOT_REPEATED: (3, "write slots that stood in the batch already", "slot"),
    Defect.WRITE_SLOT_OFF_ROW: (3, "write slots that are not the ones their row names", "slot"),
    Defect.WRITE_SLOT_PADDING: (3, "write slots on the padding page", "slot"),
    Defect.WRITE_SLOT_FREE: (3, "write slots on free pages", "slot"),
    Defect.WRITE_SLOT_OF_TREE: (3, "write slots on pages of the tree", "slot"),
    Defect.WRITE_SLOT_OF_OTHER: (3, "write slots on pages of another request, or of nobody", "slot"),
    Defect.PADDING_PAGE_OWNED: (9, "claims of the padding page", "page"),
    Defect.PADDING_ROW_OWNED: (9, "claims of the padding row", "row"),
}
"""Of each defect the law, what is counted, and what is told of the first place."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of defect. ``place`` is the least page, row or slot where it is, or as ``where`` says."""

    law: int
    defect: Defect
    n: int
    place: int
    where: str

    def __str__(self) -> str:
        return f"law {self.law}: {self.n} {_SAYS[self.defect][1]}, the first at {self.where}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found, on the device."""

    numbers: Tensor  # int64 [2 * len(Defect)]: of each defect how often, and the least place
    width: int  # positions of a row, to tell a cell
    requests: tuple[str, ...]  # their names, by number

    def findings(self) -> list[Finding]:
        """Read the report; waits for the device. Empty where all is well."""
        numbers = self.numbers.tolist()
        found = []
        for defect, (law, _, thing) in _SAYS.items():
            n, place = numbers[2 * defect : 2 * defect + 2]
            if n:
                where = f"{thing} {place}"
                if thing == "cell":
                    where = f"row {place // self.width}, position {place % self.width}"
                elif thing == "request":
                    where = f"request {self.requests[place]}"
                found.append(Finding(law, defect, n, place, where))
        return found


def check_device(
    cache: KvCache, batch: Sequence[str] = (), allocation: Allocation | None = None, lane: str | None = None
) -> Report:
    """Check the laws on a cache as it is now, and on the write set of a batch that was allocated just now.

    ``batch`` names the requests of ``allocation``, in its order. The checks run on the lane of the cache; where
    that is on the CPU, ``lane`` may name the other one.
    Changes nothing, copies nothing to the host, waits for nothing.
    """
    from .check_kernels import check_kernels_of  # imports Triton, so it comes after the choice of the lane

    run = check_kernels_of(lane or cache.lane)
    row_table, page_size = cache.device.row_table, cache.config.page_size
    state = _HostState(cache)
    writes = state.writes(batch, allocation)
    rows = cache.free_rows.free + state.rows
    sections = (state.listed, rows, state.tails.table(), state.paths.table(), writes.table())
    on_device = cache.device.upload(sum(sections[1:], sections[0]))
    listed, rows_listed, tails, paths, written = torch.split(on_device, [len(section) for section in sections])

    report = torch.zeros(2 * len(Defect), dtype=torch.int64, device=row_table.device)
    report[1::2] = NOWHERE
    for defect, numbers in state.known.items():
        if numbers:
            report[2 * defect], report[2 * defect + 1] = len(numbers), numbers[0]
    marks = torch.zeros(cache.config.n_pages + 2, dtype=torch.int32, device=row_table.device)
    run.claim_pages(report, marks, listed)
    run.claim_tails(report, marks, row_table, tails.view(3, -1), state.tails.total, state.first_id, page_size)
    run.count_pages(report, marks)
    row_marks = torch.zeros(cache.config.n_rows + 2, dtype=torch.int32, device=row_table.device)
    run.claim_rows(report, row_marks, rows_listed)
    run.count_rows(report, row_marks)
    run.check_paths(report, row_table, listed[state.n_free :], paths.view(4, -1), state.paths.total, page_size)
    if allocation is not None:
        run.check_writes(
            report,
            marks,
            row_table,
            allocation.write_set,
            written.view(7, -1),
            writes.total,
            state.n_free,
            len(state.listed),
            page_size,
        )
    return Report(report, row_table.shape[1], tuple(cache.requests))


class _Runs:
    """Runs of positions: ``end`` and ``shift`` (`kernels.py` says what they are), and further lines."""

    def __init__(self, n_lines: int) -> None:
        self._lines = [array("i") for _ in range(n_lines)]
        self.total = 0

    def add(self, start: int, length: int, *fields: int) -> None:
        """Add positions ``[start, start + length)``, perhaps none."""
        shift = start - self.total
        self.total += length
        for line, number in zip(self._lines, (self.total, shift, *fields), strict=True):
            line.append(number)

    def table(self) -> "array[int]":
        return sum(self._lines[1:], self._lines[0])


class _HostState:
    """What the host keeps, in flat arrays: who lists which pages and rows, and which cells of rows are whose.

    Nothing is taken for granted that a law says: a path may lead nowhere, a row may not exist. No cell outside of
    the row table is named.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._width = cache.config.max_context_len
        self._numbers = {name: number for number, name in enumerate(cache.requests)}
        self._edges: dict[int, tuple[int, int, int]] = {}  # of a node: where its pages are, how many, how many units
        self._paths: dict[int, list[int] | None] = {}  # of an anchor
        tree_pages = self._walk()
        self.n_free = len(cache.free_pages)
        self.listed = cache.free_pages.free + tree_pages
        self.first_id = len(self.listed) + 1  # of request 0
        self.rows = array("i", [live.row for live in cache.requests.values() if live.row is not None])
        self.tails = _Runs(3)  # end, shift, row: one run a request
        self.paths = _Runs(4)  # end, shift, page_shift, row: one run an edge of a path
        self.known: dict[Defect, list[int]] = {Defect.REQUEST_WITHOUT_ROW: [], Defect.LENGTH_OFF_PATH: []}
        for number, live in enumerate(cache.requests.values()):
            self._add_request(number, live)

    def _walk(self) -> "array[int]":
        """Collect the pages of every node that the root leads to."""
        tree, bigram = self._cache.tree, self._cache.config.bigram
        pages = array("i")
        todo = [ROOT]
        while todo:
            for node in (tree.children[todo.pop()] or {}).values():
                n_pages = len(tree.pages[node]) // TOKEN_BYTES
                self._edges[node] = len(pages), n_pages, len(tree.edge[node]) // TOKEN_BYTES - bigram
                pages.frombytes(tree.pages[node])
                todo.append(node)
        return pages

    def _path(self, anchor: int) -> list[int] | None:
        """List the nodes from the root down to ``anchor``; None where its parents do not lead there."""
        if anchor not in self._paths:
            path: list[int] = []
            node = anchor
            while node in self._edges and len(path) < len(self._edges):
                path.append(node)
                node = self._cache.tree.parent[node]
            self._paths[anchor] = path[::-1] if node == ROOT else None
        return self._paths[anchor]

    def _add_request(self, number: int, live: Request) -> None:
        page_size = self._cache.config.page_size
        path = self._path(live.anchor)
        path_len = -1 if path is None else sum([self._edges[node][2] for node in path])
        row, named_len = self._row_of(live)
        if path_len != live.protected_len or (live.row is not None and path_len > live.allocated_len):
            self.known[Defect.LENGTH_OFF_PATH].append(number)
        if live.row is None and live.state != MATCHED:
            self.known[Defect.REQUEST_WITHOUT_ROW].append(number)
        start = live.protected_len // page_size * page_size
        self.tails.add(start, max(0, named_len - start), row)
        start = 0
        for node in path or ():
            first, n_pages, _ = self._edges[node]
            length = max(0, min(n_pages * page_size, named_len - start))
            self.paths.add(start, length, first - start // page_size, row)
            start += n_pages * page_size

    def _row_of(self, live: Request) -> tuple[int, int]:
        """Give the row of a request and how many of its positions are named there; row 0 and none without one."""
        if live.row is None or not 0 <= live.row <= self._cache.config.n_rows:
            return 0, 0
        return live.row, min(live.allocated_len, self._width)

    def writes(self, batch: Sequence[str], allocation: Allocation | None) -> _Runs:
        """List what each request of a batch was told to write: end, shift, write_shift, row, id, low, high."""
        runs = _Runs(7)
        if allocation is not None:
            n_written = allocation.write_set.shape[0]
            for name, offset, length in zip(batch, allocation.offsets, allocation.lengths, strict=True):
                live = self._cache.requests[name]
                row, named_len = self._row_of(live)
                write_shift = offset - runs.total
                length = max(0, min(length, n_written - offset))
                own = self.first_id + self._numbers[name]
                runs.add(live.committed_len, length, write_shift, row, own, live.protected_len, named_len)
        return runs


def bytes_touched(
    page_size: int,
    n_pages: int,
    n_rows: int,
    n_listed: int,
    n_tail_positions: int,
    n_path_positions: int,
    n_writes: int,
) -> int:
    """Count the bytes that the kernels read and write once each; an atomic operation on a word is both.

    ``n_listed`` pages are free or in the tree; the other counts are sums over all rows.
    """
    word = 4
    marks = 2 * word * n_pages  # set to 0, and counted
    claims = 3 * word * n_listed + word * n_tail_positions + 2 * word * n_tail_positions // page_size
    paths = word * n_path_positions + word * n_path_positions // page_size
    rows = 5 * word * n_rows
    writes = (n_pages + 1) * page_size // 8 + 5 * word * n_writes if n_writes else 0
    return marks + claims + paths + rows + writes
