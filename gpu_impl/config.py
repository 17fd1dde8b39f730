"""Sizes and switches of one cache."""

from dataclasses import dataclass

from .victims import POLICIES

KEY_UNITS = ("token", "bigram")
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Element types of the KV pool; none is computed with here, only moved."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a cache is built for. Row 0 and page 0 are padding and come on top of the counts."""

    page_size: int = 16  # tokens
    n_pages: int = 1024  # usable pages 1..n_pages
    n_rows: int = 64  # usable rows 1..n_rows
    max_context_len: int = 4096  # tokens; need not be a multiple of page_size
    policy: str = "lru"
    key_units: str = "token"
    prefix_sharing: bool = True
    layers: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("page_size", "n_pages", "n_rows", "max_context_len", "layers", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name, allowed in (("policy", tuple(POLICIES)), ("key_units", KEY_UNITS), ("dtype", tuple(ITEM_BYTES))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.n_slots > 2**31:
            raise ValueError(f"n_pages: slots are int32, {self.n_slots} do not fit")

    @property
    def n_slots(self) -> int:
        """Slots of the pool, the padding page's included."""
        return (self.n_pages + 1) * self.page_size

    @property
    def bigram(self) -> bool:
        """Whether a key unit is a pair of neighbouring tokens."""
        return self.key_units == "bigram"
