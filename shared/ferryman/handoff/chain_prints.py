"""A chain of page keys as one short field of the lifecycle log: enough to see shared prefixes.

    4:9f86d081e3b0c442…    the first 4 bytes of the keys of pages 4, 8, 12, ... in hex

Keys are salted hashes chained from the model's and the tenant's name on: equal prints mean equal
prefixes of one tenant, and do not reveal the tokens. The step is the smallest power of two with
which there are at most MAX_PRINTS, so the prints of a longer chain are some of those that a shorter
one with the same beginning has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ferryman.cache.keys import PageKey

MAX_PRINTS = 64
PRINT_BYTES = 4
_FORM = re.compile(rf"[1-9][0-9]{{0,9}}:([0-9a-f]{{{2 * PRINT_BYTES}}}){{0,{MAX_PRINTS}}}")


@dataclass(frozen=True, slots=True)
class ChainPrints:
    """Print i belongs to the page that ends at `(i + 1) * step` pages."""

    step: int
    prints: tuple[bytes, ...]

    def coarser(self, step: int) -> ChainPrints:
        """The prints at a larger step, a multiple of this one."""
        assert step % self.step == 0, "steps are powers of two"
        every = step // self.step
        return ChainPrints(step, self.prints[every - 1 :: every])

    def shared_pages(self, other: ChainPrints) -> int:
        """Pages from page 0 that both chains share, rounded down to the larger step of the two."""
        step = max(self.step, other.step)
        shared = 0
        for mine, theirs in zip(
            self.coarser(step).prints, other.coarser(step).prints, strict=False
        ):
            if mine != theirs:
                break
            shared += step
        return shared


def chain_prints(keys: Sequence[PageKey]) -> ChainPrints:
    """The prints of a chain of full pages."""
    step = 1
    while len(keys) // step > MAX_PRINTS:
        step *= 2
    return ChainPrints(step, tuple(key[:PRINT_BYTES] for key in keys[step - 1 :: step]))


def encode_prints(prints: ChainPrints) -> str:
    return f"{prints.step}:{b''.join(prints.prints).hex()}"


def decode_prints(text: str) -> ChainPrints:
    """Inverse of `encode_prints`; ValueError for any other text."""
    if not _FORM.fullmatch(text) or (step := int(text.partition(":")[0])) & (step - 1):
        raise ValueError(f"{text[:40]!r} are no prints of a chain")
    raw = bytes.fromhex(text.partition(":")[2])
    starts = range(0, len(raw), PRINT_BYTES)
    return ChainPrints(step, tuple(raw[at : at + PRINT_BYTES] for at in starts))
