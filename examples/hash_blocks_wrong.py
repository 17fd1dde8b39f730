"""The cache of hash-chained blocks with one bug each, as engines have had them, and the targets that bring them in.

Each but the last, which has none, must be caught.
"""

from collections.abc import Sequence as Seq

from examples.hash_blocks import Content, HashBlockCache, Sequence
from examples.hash_blocks_target import HashBlockTarget


class CacheWithoutNamespaces(HashBlockCache):
    def hash_of(self, content: Content) -> bytes:
        return super().hash_of(content._replace(namespace=None))


class HashesTokensAlone(HashBlockTarget):
    """The hash leaves out the namespace: one adapter is served the KV of another."""

    cache_type = CacheWithoutNamespaces


class CacheWithStaleTable(HashBlockCache):
    def publish(self, sequence: Sequence, tokens: Seq[int]) -> None:
        row = self.block_table[sequence.row].copy()
        super().publish(sequence, tokens)
        self.block_table[sequence.row] = row


class KeepsDuplicateInRow(HashBlockTarget):
    """Of two equal blocks the younger is dropped, but the block table goes on naming it."""

    cache_type = CacheWithStaleTable


class CacheThatMissesTails(HashBlockCache):
    def finish(self, sequence: Sequence) -> None:
        sequence.blocks = sequence.blocks[: sequence.n_cached + 1]
        super().finish(sequence)


class LeaksTail(HashBlockTarget):
    """The end of a sequence drops its shared blocks and one more; what rejected drafts took beyond that stays held."""

    cache_type = CacheThatMissesTails


class CacheThatDropsForward(HashBlockCache):
    def finish(self, sequence: Sequence) -> None:
        sequence.blocks.reverse()
        super().finish(sequence)


class ReusesHeadFirst(HashBlockTarget):
    """A sequence drops its blocks first one first, so the beginning of a prefix is reused before its end."""

    cache_type = CacheThatDropsForward


class DeclaresNothing(HashBlockTarget):
    """No bug: that each block is a node of its own is then a difference like any other."""

    allowances = frozenset[str]()
