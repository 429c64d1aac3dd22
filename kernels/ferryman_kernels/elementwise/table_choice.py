"""Experts by a table of token ids, and their shares by a router's scores (DeepSeek-V4).

    chosen   = table[token id]                                          [tokens, per_token]
    share    = scaling · measure(score of the chosen) / max(Σ share + added, least)

`expert_choice` has the measures, and the sums that shares are divided by. The choice depends on the
id alone: a router's scores change shares, not experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import next_power_of_two, wide_type, with_whole_rows
from ferryman_kernels.elementwise._expert_choice_triton import look_up_kernel
from ferryman_kernels.elementwise.expert_choice import (
    Choice,
    ExpertRule,
    Measure,
    ShareSum,
    measured,
    room,
    scaled,
)

OF_ONE_SCORE = (Measure.SIGMOID, Measure.SQRT_SOFTPLUS)
"""Measures for which an expert's score is enough."""


def look_up_experts_reference(
    scores: Tensor, token_ids: Tensor, table: Tensor, rule: ExpertRule, dtype: torch.dtype
) -> Choice:
    chosen = table.index_select(0, token_ids)
    best = scores.gather(1, chosen).to(wide_dtype(scores.dtype))
    return scaled(measured(best, rule.measure), rule).to(dtype), chosen


def look_up_experts_triton(
    scores: Tensor, token_ids: Tensor, table: Tensor, rule: ExpertRule, dtype: torch.dtype
) -> Choice:
    scores, total = with_whole_rows(scores), rule.sum or ShareSum()
    shares, chosen = room(scores, rule.per_token, dtype)
    if len(scores):
        look_up_kernel[len(scores),](
            scores, token_ids, table, shares, chosen, scores.stride(0), PER_TOKEN=rule.per_token,
            PLACES=next_power_of_two(rule.per_token), MEASURE=rule.measure.name,
            DIVIDES=rule.sum is not None, ADDED=total.added, LEAST=total.least,
            SCALING=rule.scaling, WIDE=wide_type(scores.dtype), num_warps=1,
        )  # fmt: skip
    return shares, chosen


def look_up_experts(
    scores: Tensor, token_ids: Tensor, table: Tensor, rule: ExpertRule, dtype: torch.dtype
) -> Choice:
    """The experts of `token_ids` [tokens] in `table` [ids, per_token], both int64, and their shares
    in `dtype` by `scores` [tokens, experts], of which the table must have no other."""
    assert token_ids.shape == scores.shape[:1], (token_ids.shape, scores.shape)
    assert table.shape[1] == rule.per_token, (table.shape, rule)
    assert table.dtype is torch.int64, table.dtype
    assert table.is_contiguous(), table.stride()
    assert rule.measure in OF_ONE_SCORE, rule
    run = look_up_experts_triton if scores.is_cuda else look_up_experts_reference
    return run(scores, token_ids, table, rule, dtype)
