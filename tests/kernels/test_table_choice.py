"""Experts by a table of token ids: on a card in one launch, against Python's own arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ferryman_kernels.elementwise.expert_choice import Choice, ExpertRule, Measure, ShareSum
from ferryman_kernels.elementwise.table_choice import (
    look_up_experts,
    look_up_experts_reference,
    look_up_experts_triton,
)

EXPERTS, PER_TOKEN, IDS = 10, 3, 50
RULES = {
    "root of softplus": ExpertRule(
        PER_TOKEN, Measure.SQRT_SOFTPLUS, sum=ShareSum(added=1e-20), scaling=1.5
    ),
    "sigmoid": ExpertRule(PER_TOKEN, Measure.SIGMOID),
}
RUNS = [look_up_experts, look_up_experts_reference, look_up_experts_triton]
Run = Callable[[Tensor, Tensor, Tensor, ExpertRule, torch.dtype], Choice]


def table() -> Tensor:
    """Distinct experts of each id, in no order."""
    return torch.stack([torch.randperm(EXPERTS)[:PER_TOKEN] for _ in range(IDS)])


def naive_shares(scores: list[float], rule: ExpertRule) -> list[float]:
    if rule.measure is Measure.SIGMOID:
        return [1 / (1 + math.exp(-score)) for score in scores]
    roots = [math.sqrt(math.log1p(math.exp(score))) for score in scores]
    return [1.5 * root / (sum(roots) + 1e-20) for root in roots]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 4e-7), (torch.float64, 1e-14)])
def test_experts_are_those_of_the_id_and_share_by_their_scores(
    run: Run, name: str, dtype: torch.dtype, error: float, device: torch.device
) -> None:
    place = device if run is look_up_experts_triton else torch.device("cpu")
    rule, experts, ids = RULES[name], table(), torch.randint(0, IDS, (7,))
    scores = 4 * torch.randn(7, EXPERTS, dtype=dtype)
    scores[3] += 40  # softplus is its argument there
    scores[4] -= 30  # and exp of it there
    shares, chosen = run(scores.to(place), ids.to(place), experts.to(place), rule, dtype)
    assert shares.dtype is dtype
    assert torch.equal(chosen.cpu(), experts[ids])
    for row, token_id, got in zip(scores, ids, shares, strict=True):
        right = naive_shares([float(row[index]) for index in experts[token_id]], rule)
        assert got.tolist() == pytest.approx(right, rel=error, abs=1e-30)


@pytest.mark.parametrize("run", RUNS)
def test_a_token_has_its_own_bits_among_any_others(run: Run, device: torch.device) -> None:
    place = device if run is look_up_experts_triton else torch.device("cpu")
    rule, experts = RULES["root of softplus"], table().to(place)
    scores, ids = torch.randn(6, 2 * EXPERTS).to(place), torch.randint(0, IDS, (6,)).to(place)
    shares, _ = run(scores[:, EXPERTS:], ids, experts, rule, torch.bfloat16)
    for index in range(6):
        row = scores[index : index + 1, EXPERTS:].contiguous()
        alone, _ = run(row, ids[index : index + 1], experts, rule, torch.bfloat16)
        assert torch.equal(alone[0], shares[index])
    none = run(scores[:0, EXPERTS:], ids[:0], experts, rule, torch.bfloat16)
    assert none[1].shape == (0, PER_TOKEN)
