"""The shape of the cache under test: what stands in a trace's header and what a target is built from."""

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

POLICIES = ("lru", "mru", "fifo", "filo", "lfu", "slru", "priority", "tlru")
"""The seven of SPEC section 5, and one beyond them (docs/spec.md section 9)."""

KEY_UNITS = ("token", "bigram")
DTYPES = ("float16", "bfloat16", "float32")
MAX_SLOTS = 1 << 22
MAX_POOL_BYTES = 1 << 33
MAX_TABLE = 1 << 28
OPTION = r"[a-z][a-z0-9_]{0,39}"
MAX_OPTIONS = 16


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes and switches of one cache. Row 0 and page 0 are padding and come on top of the counts.

    ``kv_heads * head_dim`` times the item size is at least 4 bytes: a slot must hold a 32-bit
    fingerprint in each layer's K and V.

    ``options`` are switches of one target that are on, sorted; what they mean is the target's business.
    """

    page_size: int = 4  # tokens
    n_pages: int = 16  # usable pages 1..n_pages
    n_rows: int = 4  # usable rows 1..n_rows
    max_context_len: int = 64  # tokens; need not be a multiple of page_size
    policy: str = "lru"
    key_units: str = "token"
    prefix_sharing: bool = True
    layers: int = 2
    kv_heads: int = 1
    head_dim: int = 2
    dtype: str = "float16"
    options: tuple[str, ...] = ()

    @property
    def n_slots(self) -> int:
        """Slots of the pool, the padding page's included."""
        return (self.n_pages + 1) * self.page_size

    def excess(self) -> str | None:
        """Say what of this cache is more than a fuzzing machine holds, if anything is.

        A trace with such a config is well formed; but a few bytes of a stranger's file must not fill the memory.
        """
        item_bytes = 4 if self.dtype == "float32" else 2
        pool_bytes = self.n_slots * 2 * self.layers * self.kv_heads * self.head_dim * item_bytes
        for what, value, high in (
            ("slots", self.n_slots, MAX_SLOTS),
            ("bytes of KV", pool_bytes, MAX_POOL_BYTES),
            ("entries of the row table", (self.n_rows + 1) * self.max_context_len, MAX_TABLE),
        ):
            if value > high:
                return f"{value} {what}, at most {high}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Give all fields; no options are left out, so that a trace without them looks the same on every target."""
        data = asdict(self)
        options = data.pop("options")
        return data | {"options": list(options)} if options else data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "CacheConfig":
        """Build from a trace header. Raises ValueError with one line that names the field."""
        known = {f.name: type(f.default) for f in fields(cls)}
        if type(data.get("options")) is list:
            data = data | {"options": tuple(data["options"])}
        for name, value in data.items():
            if name not in known:
                raise ValueError(f"config: unknown field {name!r}")
            if type(value) is not known[name]:
                expected = "list" if name == "options" else known[name].__name__
                raise ValueError(f"config.{name}: expected {expected}, got {type(value).__name__}")
        config = cls(**data)
        config.validate()
        return config

    def is_valid(self) -> bool:
        """Say whether `validate` would let this config through."""
        try:
            self.validate()
        except ValueError:
            return False
        return True

    def validate(self) -> None:
        """Raise ValueError for a cache that cannot exist or would not fit a fuzzing machine."""
        bounds = {
            "page_size": (1, 1024),
            "n_pages": (1, 1 << 20),
            "n_rows": (1, 1 << 14),
            "max_context_len": (1, 1 << 20),
            "layers": (1, 256),
            "kv_heads": (1, 256),
            "head_dim": (1, 1024),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"config.{name}: expected {low}..{high}, got {value}")
        choices = {"policy": POLICIES, "key_units": KEY_UNITS, "dtype": DTYPES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"config.{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        item_bytes = 4 if self.dtype == "float32" else 2
        if self.kv_heads * self.head_dim * item_bytes < 4:
            raise ValueError("config.head_dim: kv_heads * head_dim must hold 4 bytes, a fingerprint, in each K and V")
        if (defect := defect_of_options(self.options)) is not None:
            raise ValueError(f"config.options: {defect}")


def defect_of_options(options: tuple[str, ...]) -> str | None:
    """Say what keeps these from being the names of options, sorted; None if nothing does."""
    if len(options) > MAX_OPTIONS:
        return f"expected at most {MAX_OPTIONS}, got {len(options)}"
    for name in options:
        if not isinstance(name, str) or re.fullmatch(OPTION, name) is None:
            return f"expected names of 1..40 small letters, digits and _, got {name!r}"[:150]
    if list(options) != sorted(set(options)):
        return f"expected each name once, in order, got {', '.join(options)}"[:150]
    return None
