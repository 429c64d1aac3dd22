"""The experts of each token and their shares, from a router's scores [tokens, experts].

    measure  = softmax(score) over all experts, sigmoid(score) or √softplus(score)
    rank     = measure + bias, or score + bias;  the score itself where there is no bias
    groups   = those of the experts' equal groups whose best ranks have the greatest sums
    chosen   = the greatest ranks within these groups
    share    = measure of the chosen, or a softmax over the scores of the chosen alone
    share    = scaling · scale of the expert · share / max(Σ share + added, least)

A sum, a scaling and scales are there if the rule has them. Experts that are chosen one by one
(Phi-3.5-MoE) share a token with those whose scores are near:

    share    = 1 / Σ_{near} exp(score − best);  near = those not yet chosen whose
               (best − score) / max(|score|, best) is at most 2 · jitter

On a card each is one launch, one warp a token, and so is a softmax over the chosen on a CPU. The
lowest index of equal ranks wins there; torch, which makes all other choices on a CPU, leaves that
open. Measures and quotients are computed in float64 on a card and rounded once, so they do not
depend on a library's exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import next_power_of_two, wide_type, with_whole_rows
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.elementwise._expert_choice_compiled import (
    MOST_CHOSEN,
    choose_by_softmax_compiled,
)
from ferryman_kernels.elementwise._expert_choice_triton import (
    choose_kernel,
    choose_one_by_one_kernel,
)
from ferryman_kernels.elementwise.activations import sigmoid, softplus


class Measure(IntEnum):
    """The function that makes shares of scores. A bias is added to what it makes of all experts; to
    their scores, where it is taken of the chosen alone."""

    SOFTMAX_OF_CHOSEN = 0
    SOFTMAX = 1
    SIGMOID = 2
    SIGMOID_OF_CHOSEN = 3
    SQRT_SOFTPLUS = 4


SIGMOIDS = (Measure.SIGMOID, Measure.SIGMOID_OF_CHOSEN)


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts are chosen from `per_token` of `count` groups; the `best_experts` best ranks of a
    group, added up, rank the group."""

    count: int = 1
    per_token: int = 1
    best_experts: int = 1


@dataclass(frozen=True, slots=True)
class ShareSum:
    """Shares are divided by their sum plus `added`, and by `least` if that is more."""

    added: float = 0.0
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """The choice of `per_token` experts and their shares; without `sum` shares are not divided."""

    per_token: int
    measure: Measure
    groups: ExpertGroups = ExpertGroups()
    sum: ShareSum | None = None
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertNumbers:
    """Learnt numbers of the experts, both [experts] in the dtype that sums are made in: `bias`
    is added to ranks, `scales` multiply shares."""

    bias: Tensor | None = None
    scales: Tensor | None = None


NO_NUMBERS = ExpertNumbers()
Choice = tuple[Tensor, Tensor]
"""Shares, and the indices of the chosen experts in int64, both [tokens, per_token]."""


def choose_experts_reference(
    scores: Tensor, rule: ExpertRule, numbers: ExpertNumbers, dtype: torch.dtype
) -> Choice:
    wide = scores.to(wide_dtype(scores.dtype))
    shares, chosen = _best(wide, rule, numbers.bias)
    shares = scaled(shares, rule)
    if numbers.scales is not None:
        shares = shares * numbers.scales[chosen]
    return shares.to(dtype), chosen


def _best(scores: Tensor, rule: ExpertRule, bias: Tensor | None) -> Choice:
    """The greatest ranks' shares before they are divided, and their experts."""
    if rule.measure is Measure.SOFTMAX_OF_CHOSEN:
        best, chosen = scores.topk(rule.per_token, dim=-1)
        return best.softmax(dim=-1), chosen
    if rule.measure is Measure.SIGMOID_OF_CHOSEN and bias is not None:
        chosen = (scores + bias).topk(rule.per_token, dim=-1).indices
        return sigmoid(scores.gather(1, chosen)), chosen
    if rule.measure in SIGMOIDS and bias is None:
        best, chosen = scores.topk(rule.per_token, dim=-1)
        return sigmoid(best), chosen
    measures = measured(scores, rule.measure)
    ranks = measures if bias is None else measures + bias
    if rule.groups.count > 1:
        ranks = _in_best_groups(ranks, rule.groups)
    best, chosen = ranks.topk(rule.per_token, dim=-1)
    return best if bias is None else measures.gather(1, chosen), chosen


def measured(scores: Tensor, measure: Measure) -> Tensor:
    """The measures of `scores`, [tokens, experts] each; sigmoids for SIGMOID_OF_CHOSEN."""
    if measure in SIGMOIDS:
        return sigmoid(scores)
    if measure is Measure.SQRT_SOFTPLUS:
        return softplus(scores).sqrt_()
    return scores.softmax(dim=-1)


def _in_best_groups(ranks: Tensor, groups: ExpertGroups) -> Tensor:
    """The ranks, -inf outside the groups that a token goes to."""
    grouped = ranks.view(len(ranks), groups.count, -1)
    merits = grouped.topk(groups.best_experts, dim=-1).values.sum(-1)
    best = merits.topk(groups.per_token, dim=-1).indices
    outside = torch.ones_like(merits, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside[:, :, None], -torch.inf).flatten(1)


def scaled(shares: Tensor, rule: ExpertRule) -> Tensor:
    """Shares [tokens, per_token], divided by their sum if the rule has one, and scaled."""
    if rule.sum is not None:
        shares = shares / _divisor(shares, rule.sum)
    return shares if rule.scaling == 1.0 else shares * rule.scaling


def _divisor(shares: Tensor, rule: ShareSum) -> Tensor:
    """The number [tokens, 1] that `shares` [tokens, per_token] are divided by."""
    total = shares.sum(-1, keepdim=True)
    if rule.added:
        total = total + rule.added
    return total.clamp(min=rule.least) if rule.least else total


def choose_experts_triton(
    scores: Tensor, rule: ExpertRule, numbers: ExpertNumbers, dtype: torch.dtype
) -> Choice:
    scores = with_whole_rows(scores)
    (tokens, experts), groups = scores.shape, rule.groups
    shares, chosen = room(scores, rule.per_token, dtype)
    total = rule.sum or ShareSum()
    if tokens:
        choose_kernel[tokens,](
            scores, _or_scores(numbers.bias, scores), _or_scores(numbers.scales, scores),
            shares, chosen, scores.stride(0),
            PER_TOKEN=rule.per_token, PLACES=next_power_of_two(rule.per_token),
            GROUPS=groups.count, GROUP_LANES=next_power_of_two(groups.count),
            IN_GROUP=experts // groups.count,
            LANES=next_power_of_two(experts // groups.count),
            GROUPS_CHOSEN=groups.per_token, BEST_EXPERTS=groups.best_experts,
            MEASURE=rule.measure.name, HAS_BIAS=numbers.bias is not None,
            HAS_SCALES=numbers.scales is not None, DIVIDES=rule.sum is not None, ADDED=total.added,
            LEAST=total.least, SCALING=rule.scaling, WIDE=wide_type(scores.dtype), num_warps=1,
        )  # fmt: skip
    return shares, chosen


def _or_scores(numbers: Tensor | None, scores: Tensor) -> Tensor:
    """An address that the kernel takes, and does not read, where there are no numbers."""
    return scores if numbers is None else numbers


def room(scores: Tensor, per_token: int, dtype: torch.dtype) -> Choice:
    """Memory for the choices of `scores` [tokens, experts]."""
    shares = torch.empty(len(scores), per_token, dtype=dtype, device=scores.device)
    return shares, torch.empty_like(shares, dtype=torch.int64)


def choose_experts(
    scores: Tensor, rule: ExpertRule, numbers: ExpertNumbers, dtype: torch.dtype
) -> Choice:
    """The experts of `scores` [tokens, experts], best first, and their shares in `dtype`."""
    experts, groups = scores.shape[1], rule.groups
    assert experts % groups.count == 0, (experts, groups)
    # Without a bias ranks are scores on a card, and shares on a CPU: one of each has their order.
    assert groups.best_experts == 1 or numbers.bias is not None, groups
    assert rule.per_token <= experts // groups.count * groups.per_token, (experts, rule)
    if scores.is_cuda:
        return choose_experts_triton(scores, rule, numbers, dtype)
    if _has_loop(scores, rule, dtype):
        return choose_by_softmax_compiled(
            scores, rule.per_token, rule.scaling, numbers.scales, dtype
        )
    return choose_experts_reference(scores, rule, numbers, dtype)


def _has_loop(scores: Tensor, rule: ExpertRule, dtype: torch.dtype) -> bool:
    is_softmax = rule.measure is Measure.SOFTMAX_OF_CHOSEN and rule.sum is None
    is_short = rule.per_token <= MOST_CHOSEN
    return is_softmax and is_short and serves(scores) and torch.float64 not in (scores.dtype, dtype)


def choose_one_by_one_reference(scores: Tensor, jitter: float, dtype: torch.dtype) -> Choice:
    wide = scores.to(wide_dtype(scores.dtype))
    first_share, first = _best_and_near(wide, wide, jitter)
    left = wide.scatter(1, first, -torch.inf)
    second_share, second = _best_and_near(wide, left, jitter)
    return torch.cat((first_share, second_share), 1).to(dtype), torch.cat((first, second), 1)


def _best_and_near(scores: Tensor, left: Tensor, jitter: float) -> Choice:
    """The best of `left` and its share, each [tokens, 1]."""
    best, chosen = left.max(dim=-1, keepdim=True)
    distance = (best - scores) / scores.abs().clamp(min=best)
    near = left.masked_fill(distance > 2 * jitter, -torch.inf)
    return near.softmax(dim=-1).gather(1, chosen), chosen


def choose_one_by_one_triton(scores: Tensor, jitter: float, dtype: torch.dtype) -> Choice:
    scores = with_whole_rows(scores)
    tokens, experts = scores.shape
    shares, chosen = room(scores, 2, dtype)
    if tokens:
        choose_one_by_one_kernel[tokens,](
            scores, shares, chosen, scores.stride(0), EXPERTS=experts,
            LANES=next_power_of_two(experts), NEAR=2 * jitter, WIDE=wide_type(scores.dtype),
            num_warps=1,
        )  # fmt: skip
    return shares, chosen


def choose_one_by_one(scores: Tensor, jitter: float, dtype: torch.dtype) -> Choice:
    """Two experts of `scores` [tokens, experts], at least two, and their shares in `dtype`."""
    assert scores.shape[1] >= 2, scores.shape
    run = choose_one_by_one_triton if scores.is_cuda else choose_one_by_one_reference
    return run(scores, jitter, dtype)
