"""The choice of experts by their scores, and a softmax over those of the chosen, for the CPU.

Formulas are those of `expert_choice`. torch takes four operations for it, each of them longer at
one token than all that is computed here.

Of equal scores the lowest index wins, as on a card; NaN is the greatest. Powers are those of
torch's softmax: exp(k·log 2 + r) = 2ᵏ·exp(r) by the polynomial and the two parts of log 2 of
SLEEF's `expf_u10`, added in the order of the chosen and multiplied by 1 / Σ. So shares have the
bits of torch with AVX-512, up to `MOST_CHOSEN` experts. Without it torch adds in another order, or
has another exponential.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._compiled import STRICT, Loop, narrow, part, prange, row_like, wide
from ferryman_kernels.cpu._vectors import fused, row_at

MOST_CHOSEN = 15
"""torch with AVX-512 adds more powers by lanes of 16."""
ELEMENTS_PER_SCORE = 8
"""Elements of other loops that take as long as the rank of a score."""
_LEAST_EXPONENT = np.float32(-104.0)
_LOG2_E = np.float32(1.44269504)
_LOG_2, _REST_OF_LOG_2 = np.float32(0.693145751953125), np.float32(1.42860676533018704e-6)


@part
def _power(x: Any) -> Any:
    """exp of a float32 up to zero; of NaN NaN."""
    k = np.rint(x * _LOG2_E)
    r = fused(k, -_REST_OF_LOG_2, fused(k, -_LOG_2, x))
    p = fused(np.float32(1.98527617612853646e-4), r, np.float32(1.39304355252534151e-3))
    p = fused(p, r, np.float32(8.33336077630519867e-3))
    p = fused(p, r, np.float32(4.16664853692054749e-2))
    p = fused(p, r, np.float32(1.66666671633720398e-1))
    p = fused(p, r, np.float32(0.5))
    p = np.float32(1.0) + fused(r * r, p, r)
    # The processor has no integer for NaN, and no factor below 2⁻¹²⁶.
    exponent = np.int32(k) if x >= _LEAST_EXPONENT else np.int32(0)
    half = exponent >> np.int32(1)
    scaled = p * _power_of_two(half) * _power_of_two(exponent - half)
    return np.float32(0.0) if x < _LEAST_EXPONENT else scaled


@part
def _power_of_two(exponent: Any) -> Any:
    return np.int32((exponent + np.int32(127)) << np.int32(23)).view(np.float32)


@part
def _is_before(a: Any, b: Any) -> Any:
    return a > b or (a != a and b == b)


@part
def _rank(row: Any, ranks: Any, places: Any) -> None:
    """The greatest numbers of `row`, as many as there are `ranks`, by rank, and their places."""
    count, most = 0, len(ranks)
    for index in range(len(row)):
        number = wide(row[index])
        if count == most and not _is_before(number, ranks[most - 1]):
            continue
        at = min(count, most - 1)
        count = min(count + 1, most)
        while at > 0 and _is_before(number, ranks[at - 1]):
            ranks[at], places[at] = ranks[at - 1], places[at - 1]
            at -= 1
        ranks[at], places[at] = number, index


def _choose(
    like: Any, kept: Any, indices: Any, scores: int, stride: int, tokens: int, experts: int,
    per_token: int, scaling: float, scales: Any, shares: int, chosen: int,
) -> None:  # fmt: skip
    """Tensors are addresses but `scales` [experts], or [0] for none; `like`, `kept` and `indices`
    are empty rows of the dtypes of scores, shares and chosen."""
    for token in prange(tokens):
        row = row_at(scores + token * stride * like.itemsize, like)[:experts]
        out = row_at(shares + token * per_token * kept.itemsize, kept)[:per_token]
        places = row_at(chosen + token * per_token * indices.itemsize, indices)[:per_token]
        ranks = np.empty(per_token, np.float32)
        _rank(row, ranks, places)
        total, peak = np.float32(0.0), ranks[0]
        for place in range(per_token):
            ranks[place] = _power(ranks[place] - peak)
            total += ranks[place]
        factor = np.float32(1.0) / total
        for place in range(per_token):
            share = ranks[place] * factor * np.float32(scaling)
            if len(scales) > 0:
                share = share * scales[places[place]]
            out[place] = narrow(share, out)


_choice_loop = Loop(_choose, STRICT)
_NO_SCALES = torch.empty(0)


def choose_by_softmax_compiled(
    scores: Tensor, per_token: int, scaling: float, scales: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Shares in `dtype` and experts of scores [tokens, experts], both in bfloat16 or float32;
    `scales` [experts] in float32."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    tokens, experts = scores.shape
    shares = torch.empty(tokens, per_token, dtype=dtype)
    chosen = torch.empty(tokens, per_token, dtype=torch.int64)
    factors = (_NO_SCALES if scales is None else scales).numpy()
    _choice_loop(
        ELEMENTS_PER_SCORE * tokens * experts,
        row_like(scores.dtype), row_like(dtype), row_like(torch.int64), scores.data_ptr(),
        scores.stride(0), tokens, experts, per_token, scaling, factors, shares.data_ptr(),
        chosen.data_ptr(),
    )  # fmt: skip
    return shares, chosen
