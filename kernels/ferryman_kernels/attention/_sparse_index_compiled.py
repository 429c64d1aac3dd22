"""Index scores of single tokens on the CPU: each key is read once, in its page.

Formulas and names are those of `sparse_index`. One iteration of the shared loop is one token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.cpu._compiled import Loop, as_flat, prange, wide


def _score(
    q: Any,
    weights: Any,
    keys: Any,
    stride_page: int,
    page_size: int,
    page_table: Any,
    rows: Any,
    positions: Any,
    scores: Any,
) -> None:
    """`q` [tokens, index_heads, index_dim], `weights` [tokens, index_heads], in the wide dtype."""
    tokens, heads, dim = q.shape
    for token in prange(tokens):
        pages, line = page_table[rows[token]], scores[token]
        for position in range(positions[token] + 1):
            at = pages[position // page_size] * stride_page + position % page_size * dim
            key = keys[at : at + dim]
            score = q[token, 0, 0] * 0
            for head in range(heads):
                query, wanted = q[token, head], q[token, 0, 0] * 0
                for d in range(dim):
                    wanted += query[d] * wide(key[d])
                if wanted > 0:
                    score += weights[token, head] * wanted
            line[position] = score
        for position in range(positions[token] + 1, len(line)):
            line[position] = -np.inf


_score_loop = Loop(_score)


def index_scores_compiled(
    q: Tensor,
    weights: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
) -> Tensor:
    page_size = index_pages.shape[1]
    assert index_pages[0].is_contiguous(), index_pages.stride()
    dtype, reach = wide_dtype(q.dtype), int(positions.max()) + 1
    scores = torch.empty(len(q), reach, dtype=dtype)
    _score_loop(
        q[0].numel() * len(q) * reach,
        q.to(dtype).contiguous().numpy(), weights.to(dtype).contiguous().numpy(),
        as_flat(index_pages), index_pages.stride(0), page_size, page_table.numpy(), rows.numpy(),
        positions.numpy(), scores.numpy(),
    )  # fmt: skip
    return scores
