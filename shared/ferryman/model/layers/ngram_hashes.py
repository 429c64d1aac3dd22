"""The hashes of n-grams: which row of each table the last tokens of a text name (Qwen 4).

h_n    = id[0]·m[0] ⊕ id[1]·m[1] ⊕ … ⊕ id[n-1]·m[n-1]          id[k] is that of k tokens ago
row    = first[head] + h_n mod rows[head]                       for each head of n-grams of n tokens

The multipliers m are odd and so small that products do not overflow 63 bits. Rows of a head are the
next prime numbers from a least one on, other ones for each head of each layer, so that n-grams that
share a row in one table do not in the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from itertools import count as whole_numbers
from math import isqrt

import torch
from torch import Tensor

from ferryman.model.shapes.ngram_shapes import NgramShape

WORD = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
"""The numbers of SplitMix64 (Steele, Lea & Flood 2014)."""
SEED_OF_LAYER = 10007


@dataclass(frozen=True, slots=True)
class NgramHashes:
    """`multipliers` of the ids [order], and the `rows` and `firsts` of each head's table [heads of
    all n-grams], int64."""

    multipliers: Tensor
    rows: Tensor
    firsts: Tensor

    def __call__(self, ids: Sequence[Tensor]) -> Tensor:
        """The rows [tokens, heads of all n-grams] for ids [tokens] of this token, the one before it
        and so on."""
        by_order = self.rows.view(len(ids) - 1, -1)
        mixed, parts = ids[0] * self.multipliers[0], []
        for earlier, factor, rows in zip(ids[1:], self.multipliers[1:], by_order, strict=True):
            mixed = mixed ^ (earlier * factor)
            parts.append(torch.remainder(mixed[:, None], rows))
        return torch.cat(parts, dim=1) + self.firsts


def rows_of_heads(shape: NgramShape) -> tuple[range, ...]:
    """The rows of each head's table in the joint one of a layer."""
    seen = shape.number * shape.all_heads
    counts = list(islice(_primes_from(shape.least_rows), seen, seen + shape.all_heads))
    ends = accumulate(counts)
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def multipliers_of(shape: NgramShape) -> list[int]:
    """The odd numbers by which ids are multiplied, that of the token itself first."""
    half = max(1, ((1 << 63) - 1) // shape.vocab_size // 2)
    start = shape.seed + SEED_OF_LAYER * shape.number
    return [2 * (scrambled(start + STEP * k) % half) + 1 for k in range(1, shape.order + 1)]


def scrambled(state: int) -> int:
    """The number that SplitMix64 draws in this state."""
    value = (state + STEP) & WORD
    for shift, factor in FACTORS:
        value = ((value ^ (value >> shift)) * factor) & WORD
    return value ^ (value >> LAST_SHIFT)


def _primes_from(least: int) -> Iterator[int]:
    return (number for number in whole_numbers(max(least, 2)) if _is_prime(number))


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, isqrt(number) + 1))
