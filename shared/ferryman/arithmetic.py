"""The arithmetic of a state: all that decides its bits, besides the model and the tokens.

    processor / loops / numbers / kernel revision / ranks
    cpu/amx-bf16.sapphirerapids/bfloat16/r2965f0ee/tp1

It stands in the state manifest. So it is compared at every hand-off, it enters the root of all page
keys, and state of another arithmetic is never found: not on a device, not in a tier, not at a peer.

Where reuse is exact in values alone, the manifest has ANY_ARITHMETIC, and all of it is shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

ANY_ARITHMETIC = "any"


class Exactness(StrEnum):
    """The degree to which an answer that reuses state equals one that computes all anew."""

    BITS = "bits"
    """The same bits: whatever was reused, batched or resumed."""
    VALUES = "values"
    """The same state at the same position, but for rounding."""

    @classmethod
    def under(cls, arithmetic: str) -> Exactness:
        """The level of state that was made under `arithmetic`, by a manifest's field."""
        return cls.VALUES if arithmetic in ("", ANY_ARITHMETIC) else cls.BITS

    @classmethod
    def least(cls, levels: Iterable[Exactness]) -> Exactness:
        """The level that all of several answers or workers have."""
        of_all = set(levels)
        return cls.BITS if of_all == {cls.BITS} else cls.VALUES

    @classmethod
    def over(cls, arithmetics: Iterable[str]) -> Exactness:
        """The level of an answer whose parts were computed under `arithmetics`, one after the
        other: bits of two arithmetics together are those of neither."""
        used = set(arithmetics)
        return cls.under(used.pop()) if len(used) == 1 else cls.VALUES


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One arithmetic; its text is what a manifest has.

    `loops` are those that the processor takes, with its class; `numbers` the dtype in which they
    compute; `revision` that of the kernels. Sums over ranks are taken in the order of ranks, so
    another number of them has other bits.
    """

    processor: str
    loops: str
    numbers: str
    revision: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.processor}/{self.loops}/{self.numbers}/r{self.revision}/tp{self.num_ranks}"
