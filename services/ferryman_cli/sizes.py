"""Sizes as people write them: `512M`, `2G`, or bytes."""

from __future__ import annotations

import re

from ferryman.errors import ConfigError

_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)


def parse_size(flag: str, text: str) -> int:
    """Bytes; an empty text is 0. ConfigError when it is no size."""
    if not text:
        return 0
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{flag} {text}: it should be a size such as 512M, 2G or 1048576")
    return int(float(found[1]) * _FACTORS[found[2].upper()])


def size_text(num_bytes: int) -> str:
    """As `parse_size` reads it, with at most one digit behind the point."""
    for letter in ("T", "G", "M", "K"):
        if num_bytes >= _FACTORS[letter]:
            return f"{num_bytes / _FACTORS[letter]:.1f}".removesuffix(".0") + letter
    return str(num_bytes)
