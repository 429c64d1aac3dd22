"""The chunk scan's loop for the CPU: the decayed scores of a block's tokens.

Formulas and names are those of `ssd_chunk_scan`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman_kernels._compiled import Loop, exp, prange


def _decayed(log_decay: Any, seen: Any, scores: Any) -> None:
    """Half of the square is above the diagonal: nothing is computed there."""
    blocks, heads, chunk_len = log_decay.shape
    heads_per_group, number = heads // seen.shape[1], scores.dtype.type
    for job in prange(blocks * heads):
        block, head = job // heads, job % heads
        decay = log_decay[block, head]
        for t in range(chunk_len):
            products, out = seen[block, head // heads_per_group, t], scores[block, head, t]
            for s in range(t + 1):
                # The difference is taken in float64: of two long sums only it is small.
                out[s] = exp(number(decay[t] - decay[s])) * products[s]
            for s in range(t + 1, chunk_len):
                out[s] = 0


_decayed_loop = Loop(_decayed)


def decayed_scores_compiled(log_decay: Tensor, seen: Tensor) -> Tensor:
    blocks, heads, chunk_len = log_decay.shape
    scores = torch.empty(blocks, heads, chunk_len, chunk_len, dtype=seen.dtype)
    # The number of blocks must not choose between the loop's versions: bits could differ.
    elements = heads * chunk_len * chunk_len
    _decayed_loop(elements, log_decay.numpy(), seen.numpy(), scores.numpy())
    return scores
