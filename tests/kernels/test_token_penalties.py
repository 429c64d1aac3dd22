"""Penalties on a card: the bits of torch's operations on the processor, in two launches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ferryman.model.sampling.sampler import penalise
from ferryman_kernels.elementwise import token_penalties
from ferryman_kernels.elementwise.token_penalties import (
    EarlierTokens,
    PenaltyStrengths,
    penalise_triton,
)

DRAWS, LONGEST = 5, 70


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a hundred numbers have several programs then."""
    monkeypatch.setattr(token_penalties, "BLOCK", 32)


def some_past(vocab: int) -> EarlierTokens:
    """Places after a row's own tokens hold -1 and tokens of others; some tokens repeat."""
    ids = torch.randint(0, min(vocab, 20), (DRAWS, LONGEST), dtype=torch.int32)
    ids[:, 60:] = -1
    return EarlierTokens(ids, torch.tensor([1, 30, 32, 5, 60]), torch.tensor([1, 59, 32, 33, 60]))


def some_penalties() -> PenaltyStrengths:
    strengths = [[1.0, 0.0, 0.0], [1.3, 0.1, 0.7], [0.7, -1.0, 0.3], [1.1, 0.0, -0.3]]
    return PenaltyStrengths(*torch.tensor([*strengths, [2.0, 0.5, 0.25]]).double().T.contiguous())


def on_card(
    logits: Tensor, past: EarlierTokens, penalties: PenaltyStrengths, device: torch.device
) -> Tensor:
    moved = EarlierTokens(
        *(part.to(device) for part in (past.token_ids, past.prompt_lens, past.lens))
    )
    strengths = penalties.repetition, penalties.presence, penalties.frequency
    return penalise_triton(
        logits.to(device), moved, PenaltyStrengths(*(part.to(device) for part in strengths))
    ).cpu()


@pytest.mark.parametrize("vocab", [20, 31, 32, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_logits_have_the_processor_s_bits(
    vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = (3 * torch.randn(DRAWS, vocab)).to(dtype)
    logits[1, 3] = -torch.inf
    past, penalties = some_past(vocab), some_penalties()
    right = penalise(logits, past, penalties)
    result = on_card(logits, past, penalties, device)
    assert result.dtype == right.dtype
    assert torch.equal(result, right)
    assert not torch.equal(result, logits.to(right.dtype))


def test_a_row_is_penalised_alike_in_something_wider(device: torch.device) -> None:
    logits, past, penalties = torch.randn(DRAWS, 100), some_past(100), some_penalties()
    wider = torch.cat((logits, logits), dim=1)[:, 100:]
    together = on_card(logits, past, penalties, device)
    assert torch.equal(on_card(wider, past, penalties, device), together)


def test_a_row_without_earlier_tokens_stays(device: torch.device) -> None:
    past = EarlierTokens(torch.zeros(DRAWS, 0, dtype=torch.int32), *torch.zeros(2, DRAWS).long())
    logits = torch.randn(DRAWS, 40)
    assert torch.equal(on_card(logits, past, some_penalties(), device), logits)
