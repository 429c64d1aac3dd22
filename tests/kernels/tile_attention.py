"""Attention in bfloat16 in the order of tiles, in numpy: an oracle of the loops' bits.

splits      a row's keys are cut at multiples of 512, counted from position 0
scores      blocks of 32 channels in rising order; of a block the first numbers of its pairs,
            the second ones, then both
weights     exp(scale · score - peak) in float32; their sum has sixteen lanes, which are those
            of the split; rounded to bfloat16 for the values
values      blocks of 32 keys in rising order, which begin at multiples of 32
answer      the splits in rising order, the sink last; rounded to bfloat16 once
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tests.kernels.tile_processor import tiled_sums
from tests.kernels.vector_parts import Floats, exps, folded, fused, rounded

Halves = NDArray[np.uint16]

SPLIT, BLOCK, LANES = 512, 32, 16
NONE = np.float32(-np.inf)


class SoftWeights(NamedTuple):
    """Weights of keys, the peak of their scores and their sum, of each head."""

    weights: Floats
    peaks: Floats
    norms: Floats


class Softening(NamedTuple):
    """The numbers between scores and weights; a cap of 0 is none."""

    scale: float
    cap: float = 0.0


def softened(scores: Floats, first: int, softening: Softening) -> SoftWeights:
    """The weights of the keys of a split from `first` on, by scores [heads, keys]."""
    scale, cap = np.float32(softening.scale), np.float32(softening.cap)
    if cap > 0:
        swing = exps(2 * (scores * scale) / cap) + np.float32(1)
        scores, scale = cap - 2 * cap / swing, np.float32(1)
    (heads, count), before = scores.shape, first % LANES
    behind = -(before + count) % LANES
    lanes = np.pad(scores, ((0, 0), (before, behind)), constant_values=NONE)
    peaks = (lanes * scale).max(1)
    base = np.where(peaks == NONE, np.float32(0), -peaks)[:, None]
    weights = exps(fused(lanes, scale, base))
    norms = np.zeros((heads, LANES), np.float32)
    for vector in range(0, lanes.shape[1], LANES):
        norms = norms + weights[:, vector : vector + LANES]
    totals = np.array([folded(norm, np.add) for norm in norms])
    return SoftWeights(weights[:, before : before + count], peaks, totals)


class AttendedSplit(NamedTuple):
    """The weighted values [heads, value_dim] of a split, and what joins them to others."""

    mixed: Floats
    peaks: Floats
    norms: Floats


def attended_split(
    q: Halves, keys: Halves, values: Halves, seen: tuple[int, int], softening: Softening
) -> AttendedSplit:
    """Queries q [heads, dim] over the keys of a split from seen[0] to seen[1], counted from its
    first one; keys [keys, dim] and values [keys, value_dim] are those alone."""
    low, high = seen
    assert 0 <= low < high <= SPLIT, seen
    soft = softened(tiled_sums(q, keys), low, softening)
    before = low % BLOCK
    weights = np.pad(rounded(soft.weights), ((0, 0), (before, 0)))
    mixed = tiled_sums(weights, np.pad(values, ((before, 0), (0, 0))).T)
    return AttendedSplit(mixed, soft.peaks, soft.norms)


def joined(splits: list[AttendedSplit], sinks: Floats) -> Floats:
    """The answer [heads, value_dim] of a token's splits, before it is rounded."""
    tops = sinks
    for split in splits:
        tops = np.where(split.peaks > tops, split.peaks, tops)
    norms, mixed = np.zeros_like(tops), np.zeros_like(splits[0].mixed)
    for split in splits:
        shares = exps(split.peaks - tops)
        norms = norms + shares * split.norms
        mixed = mixed + shares[:, None] * split.mixed
    return mixed / (norms + exps(sinks - tops))[:, None]


def attention(
    q: Halves, keys: Halves, values: Halves, seen: tuple[int, int], softening: Softening,
    sinks: Floats | None = None,
) -> Halves:  # fmt: skip
    """A token's heads q [heads, dim] over the keys at the positions from seen[0] to seen[1]."""
    splits, (low, end) = [], seen
    while low < end:
        base = low // SPLIT * SPLIT
        high = min(end, base + SPLIT)
        part = slice(low, high)
        of_split = (low - base, high - base)
        splits.append(attended_split(q, keys[part], values[part], of_split, softening))
        low = high
    return rounded(joined(splits, np.full(len(q), NONE) if sinks is None else sinks))
