"""A small paged KV cache of hash-chained blocks, as an engine might have it. It knows nothing of kvlockstep.

A block is hashed together with the hash of the block before it, so a hash names a whole prefix. Blocks that nobody
holds stay in the cache, in a queue that new blocks are taken from: those without content in front, the others in the
order in which they were dropped. A sequence drops its blocks last one first, so a block never leaves before those
that follow it.

Start at `HashBlockCache`: `admit`, then `grow` and `publish` in turn, then `finish`.
"""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Content(NamedTuple):
    """What the hash of a block is taken of."""

    parent: bytes | None  # hash of the block before it
    namespace: object  # adapter, salt, images: whatever the KV depends on besides the tokens
    tokens: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Block:
    number: int
    ref_count: int = 0  # sequences that hold it
    hash: bytes | None = None  # only while the cache can find it
    content: Content | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One request as the cache sees it: its blocks in order, of which the first ``n_cached`` are shared."""

    namespace: object
    shares: bool
    blocks: list[Block] = field(default_factory=list)
    n_cached: int = 0
    row: int | None = None


class HashBlockCache:
    """Blocks ``1..n_blocks`` and rows ``1..n_rows``; block 0 and row 0 are padding."""

    def __init__(
        self, n_blocks: int, block_size: int, n_rows: int, max_len: int, layers: int = 1, sharing: bool = True
    ) -> None:
        self.block_size = block_size
        self.sharing = sharing
        self.blocks = [Block(number) for number in range(n_blocks + 1)]
        self.queue = OrderedDict((block.number, block) for block in self.blocks[1:])
        self.cached: dict[bytes, Block] = {}
        self.n_reusable = 0  # cached blocks in the queue
        self.free_rows = list(range(n_rows, 0, -1))
        self.block_table = np.zeros((n_rows + 1, -(-max_len // block_size)), np.int32)
        self.kv = np.zeros((layers, 2, n_blocks + 1, block_size), np.uint32)

    # Sequences

    def lookup(self, tokens: Seq[int], namespace: object) -> list[Block]:
        """Find the blocks of the longest cached prefix. One token is left to compute."""
        found: list[Block] = []
        for content in self._contents(None, namespace, tokens[:-1], 0):
            block = self.cached.get(self.hash_of(content))
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, tokens: Seq[int], namespace: object, shares: bool = True) -> Sequence:
        """Begin a sequence, and hold what is cached of it."""
        sequence = Sequence(namespace, shares and self.sharing)
        if sequence.shares:
            sequence.blocks = self.lookup(tokens, namespace)
            for block in sequence.blocks:
                self._hold(block)
        sequence.n_cached = len(sequence.blocks)
        return sequence

    def missing(self, sequence: Sequence, length: int) -> int:
        """Count the blocks to take so that ``length`` tokens fit."""
        return max(0, -(-length // self.block_size) - len(sequence.blocks))

    def grow(self, sequence: Sequence, length: int) -> list[int]:
        """Make room for ``length`` tokens; return the numbers of the blocks whose content had to go.

        Before: a row is free or held, and the queue has the blocks that are missing.
        """
        if sequence.row is None:
            sequence.row = self.free_rows.pop()
            self.block_table[sequence.row, : len(sequence.blocks)] = [block.number for block in sequence.blocks]
        evicted = []
        for _ in range(self.missing(sequence, length)):
            block = next(iter(self.queue.values()))
            if block.hash is not None:
                self._forget(block)
                evicted.append(block.number)
            self._hold(block)
            self.block_table[sequence.row, len(sequence.blocks)] = block.number
            sequence.blocks.append(block)
        return evicted

    def publish(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Let others find the full blocks of ``tokens``, which are computed. Of two equal blocks the older is kept."""
        if not sequence.shares:
            return
        first = sequence.n_cached
        parent = sequence.blocks[first - 1].hash if first else None
        for i, content in enumerate(self._contents(parent, sequence.namespace, tokens, first), first):
            self._publish_block(sequence, i, content)
            sequence.n_cached = i + 1

    def finish(self, sequence: Sequence) -> None:
        """End a sequence. What was published stays."""
        for block in reversed(sequence.blocks):
            self._drop(block)
        if sequence.row is not None:
            self.free_rows.append(sequence.row)

    # Room

    def evict(self, n_blocks: int) -> list[int]:
        """Empty up to ``n_blocks`` cached blocks that nobody holds; return their numbers."""
        victims = [block for block in self.queue.values() if block.hash is not None][:n_blocks]
        for block in victims:
            self._forget(block)
        return [block.number for block in victims]

    def clear(self) -> None:
        """Forget everything. Before: there is no sequence."""
        self.evict(len(self.cached))

    # KV

    def slots(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Name the slots of a range of positions, block by block."""
        assert sequence.row is not None, "slots are named by a row"
        slots: list[int] = self._row_slots(sequence.row, np.arange(start, end)).tolist()
        return slots

    def write(self, slots: Seq[int], planes: NDArray[np.uint32]) -> None:
        """Store K and V of each layer, [layers, 2, n], in ``slots``."""
        where = np.asarray(slots, np.int64)
        self.kv[:, :, where // self.block_size, where % self.block_size] = planes

    def gather(self, row: int, length: int) -> NDArray[np.uint32]:
        """Read K and V, [layers, 2, length], of a row as attention does."""
        where = self._row_slots(row, np.arange(length))
        return self.kv[:, :, where // self.block_size, where % self.block_size]

    # Parts

    def hash_of(self, content: Content) -> bytes:
        return blake2b(repr(tuple(content)).encode(), digest_size=16).digest()

    def _contents(self, parent: bytes | None, namespace: object, tokens: Seq[int], first: int) -> Iterator[Content]:
        """Chain the full blocks of ``tokens`` from block ``first`` on."""
        for start in range(first * self.block_size, len(tokens) - self.block_size + 1, self.block_size):
            content = Content(parent, namespace, tuple(tokens[start : start + self.block_size]))
            yield content
            parent = self.hash_of(content)

    def _publish_block(self, sequence: Sequence, i: int, content: Content) -> None:
        block, key = sequence.blocks[i], self.hash_of(content)
        canonical = self.cached.get(key)
        if canonical is None:
            block.hash, block.content = key, content
            self.cached[key] = block
            return
        self._hold(canonical)
        self._drop(block)
        sequence.blocks[i] = canonical
        self.block_table[sequence.row, i] = canonical.number

    def _hold(self, block: Block) -> None:
        if block.ref_count == 0:
            del self.queue[block.number]
            self.n_reusable -= block.hash is not None
        block.ref_count += 1

    def _drop(self, block: Block) -> None:
        block.ref_count -= 1
        if block.ref_count == 0:
            self.queue[block.number] = block
            self.n_reusable += block.hash is not None
            if block.hash is None:
                self.queue.move_to_end(block.number, last=False)

    def _forget(self, block: Block) -> None:
        """Take a block that nobody holds out of the cache."""
        assert block.hash is not None, f"block {block.number} is cached"
        del self.cached[block.hash]
        block.hash = block.content = None
        self.n_reusable -= 1
        self.queue.move_to_end(block.number, last=False)

    def _row_slots(self, row: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        numbers: NDArray[np.int64] = self.block_table[row, positions // self.block_size].astype(np.int64)
        return numbers * self.block_size + positions % self.block_size
