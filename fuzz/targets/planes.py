"""Fingerprints spelled as the bits of a KV pool: how a target with the capability ``kv`` writes and reads them.

KV carries one 32-bit fingerprint a slot. Each plane (a layer's K or V) holds it as often as it fits, as
bits, xored with a salt that differs from plane to plane and word to word; so a plane that is stale,
swapped or shifted is told from the others.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlockstep.fuzz.config import CacheConfig

Words = NDArray[np.uint32]


class Planes:
    """The spelling for the pool of one config, on the host."""

    def __init__(self, config: CacheConfig) -> None:
        self._layers = config.layers
        self._salts = _salts(config)
        self._multipliers = self._salts | np.uint32(1)
        self._heads = (config.kv_heads, config.head_dim)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._bits = torch.int32 if config.dtype == "float32" else torch.int16
        self._host_bits_type = np.int32 if config.dtype == "float32" else np.int16
        self._cut_word = config.dtype != "float32" and config.kv_heads * config.head_dim % 2 == 1

    def spell(self, values: Words) -> Tensor:
        """Spell fingerprints [n] as KV [K or V, layers, n, kv_heads, head_dim]."""
        bits = (self._salts ^ values[:, None]).view(self._host_bits_type)
        kv = torch.from_numpy(bits).view(self._dtype)[..., : self._heads[0] * self._heads[1]]
        return kv.reshape(*kv.shape[:3], *self._heads)

    def host_bits(self, kv: Tensor) -> NDArray[Any]:
        """Bring KV [..., kv_heads, head_dim] to the host as integers [..., elements]."""
        host: NDArray[Any] = kv.flatten(-2).view(self._bits).cpu().numpy()
        return host

    def read(self, bits: NDArray[Any]) -> list[int]:
        """Read fingerprints back from the bits of KV [K or V, layers, n, elements].

        Where the planes disagree, as in a slot that was never written, give a negative number that depends on
        every bit of the slot, so that any change of it shows; `plane_of` tells the first plane that spells
        another fingerprint than plane 0 begins with.
        """
        if self._cut_word:
            bits = np.pad(bits, ((0, 0), (0, 0), (0, 0), (0, 1)))
        words = np.ascontiguousarray(bits).view(np.uint32) ^ self._salts
        values = words[0, 0, :, 0].copy()
        words ^= values[:, None]
        if self._cut_word:
            words[..., -1] &= np.uint32(0xFFFF)
        found = values.astype(np.int64)
        torn = np.flatnonzero(words.any(axis=(0, 1, 3)))
        if torn.size:
            words = words[:, :, torn]
            bits_sum = values[torn] + (words * self._multipliers).sum(axis=(0, 1, 3), dtype=np.uint32)
            # of planes that disagree the first one: K and V of layer 0, K and V of layer 1, and so on
            disagree: NDArray[Any] = np.any(words, axis=3)
            first = disagree.swapaxes(0, 1).reshape(-1, torn.size).argmax(axis=0)
            found[torn] = -1 - first - 2 * self._layers * bits_sum.astype(np.int64)
        read: list[int] = found.tolist()
        return read


def plane_of(value: int, layers: int) -> int:
    """Tell from a negative reading which plane disagrees first: K and V of layer 0, K and V of layer 1, and so on."""
    return (-1 - value) % (2 * layers)


def _salts(config: CacheConfig) -> Words:
    """Give 32 bits for each word of each plane: [K or V, layers, 1, words]."""
    elements = config.kv_heads * config.head_dim
    n_words = elements if config.dtype == "float32" else (elements + 1) // 2
    plane = np.arange(2 * config.layers, dtype=np.uint32).reshape(config.layers, 2).T
    word = np.arange(n_words, dtype=np.uint32)
    # Odd multipliers keep the salts of all planes apart, and those of neighbouring words.
    salts = plane[:, :, None, None] * np.uint32(0x9E3779B1) + word * np.uint32(0x85EBCA6B) + np.uint32(0x27D4EB2F)
    return np.ascontiguousarray(salts)
