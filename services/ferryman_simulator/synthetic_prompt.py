"""Tokens made from names: equal names give equal tokens, so equal page keys.

A trace does not hold the prompts, only the names of their parts, which tell shared parts. A part's
tokens depend on its name and their place in it; page keys are chained, so sharing ends at the first
different name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ferryman.cache.keys import TokenIds, as_token_ids

# Constants of splitmix64 (Steele, Lea and Flood, 2014): a bijection in which every bit counts.
_STRIDE, _MIX_1, _MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
_LOW_HALF = np.uint64(0xFFFFFFFF)
# Names for parts that no other request has: above all names in a trace.
OWN_NAMES = 1 << 62


@dataclass(frozen=True, slots=True)
class SyntheticPrompt:
    """The first `lengths[i]` tokens of each part `names[i]`, in order."""

    names: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def first(self, num_tokens: int) -> SyntheticPrompt:
        """The first `num_tokens` of it, or all when it has fewer."""
        names, lengths, left = [], [], num_tokens
        for name, length in zip(self.names, self.lengths, strict=True):
            if left <= 0:
                break
            names.append(name)
            lengths.append(min(length, left))
            left -= length
        return SyntheticPrompt(tuple(names), tuple(lengths))

    def then(self, other: SyntheticPrompt) -> SyntheticPrompt:
        return SyntheticPrompt(self.names + other.names, self.lengths + other.lengths)

    def token_ids(self) -> TokenIds:
        """Its tokens [num_tokens], any u32."""
        lengths = np.array(self.lengths, dtype=np.int64)
        names = np.repeat(np.array(self.names, dtype=np.uint64), lengths)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        places = (np.arange(len(names)) - starts + 1).astype(np.uint64)
        with np.errstate(over="ignore"):
            mixed = names * _STRIDE + places * _MIX_1
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
        return as_token_ids((mixed ^ (mixed >> np.uint64(31))) & _LOW_HALF)


def blocks(names: Sequence[int], block_tokens: int, num_tokens: int) -> SyntheticPrompt:
    """The first `num_tokens` tokens of whole blocks."""
    every = SyntheticPrompt(tuple(names), (block_tokens,) * len(names))
    return every.first(num_tokens)


def own(owner: int, num_tokens: int) -> SyntheticPrompt:
    """Tokens that no other request has; `owner` counts requests."""
    return SyntheticPrompt((OWN_NAMES + owner,), (num_tokens,))
