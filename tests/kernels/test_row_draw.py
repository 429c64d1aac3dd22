"""Draws on a card: the tokens that torch's operations draw, in two launches and a sort."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from ferryman.model.sampling.inverse_cdf import Filters, draw
from ferryman_kernels.elementwise import row_draw
from ferryman_kernels.elementwise.row_draw import draw_rows_triton_

NONE = -1
DRAWN = [5, 1, 7, 0, 8, 3]
"""Rows that are drawn, of nine."""


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few hundred numbers have several blocks then."""
    monkeypatch.setattr(row_draw, "BLOCK", 128)


def some_filters(rng: random.Random, rows: list[int]) -> Filters:
    reals = [
        (rng.random(), rng.choice([0.3, 1.0, 2.5]), rng.choice([1.0, 0.95, 0.5, 1e-9]), min_p)
        for min_p in rng.choices([0.0, 0.05, 1.0], [4, 1, 1], k=len(rows))
    ]
    uniforms, temperatures, top_p, min_p = torch.tensor(reals, dtype=torch.float64).T.contiguous()
    top_k = torch.tensor(rng.choices([0, 1, 5, 100, 300], k=len(rows)))
    return Filters(torch.tensor(rows), uniforms, temperatures, top_k, top_p, min_p)


def moved(filters: Filters, device: torch.device) -> Filters:
    return Filters(*(getattr(filters, field.name).to(device) for field in fields(filters)))


def drawn(logits: Tensor, filters: Filters, device: torch.device, tokens: Tensor) -> list[int]:
    return draw_rows_triton_(
        tokens.to(device), logits.to(device), moved(filters, device), NONE
    ).tolist()


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 200, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("ties", [False, True], ids=["apart", "ties"])
def test_the_tokens_are_those_of_the_processor(
    vocab: int, dtype: torch.dtype, ties: bool, device: torch.device
) -> None:
    rng = random.Random(vocab)
    logits = 3 * torch.randn(9, vocab)
    logits = (logits.round() if ties else logits).to(dtype)
    filters = some_filters(rng, DRAWN)
    wide = logits if dtype == torch.float64 else logits.float()
    right = torch.full((9,), 4)
    right[DRAWN] = draw(wide[DRAWN], filters)
    assert drawn(logits, filters, device, torch.full((9,), 4)) == right.tolist()


def test_a_row_is_drawn_alike_among_any_others_and_in_something_wider(device: torch.device) -> None:
    logits, filters = 3 * torch.randn(9, 500), some_filters(random.Random(2), DRAWN)
    together = drawn(logits, filters, device, torch.zeros(9, dtype=torch.int64))
    wider = torch.cat((logits, logits), dim=1)[:, 500:]
    assert drawn(wider, filters, device, torch.zeros(9, dtype=torch.int64)) == together
    for place, row in enumerate(DRAWN):
        alone = filters.of(torch.tensor([place]))
        first = Filters(torch.tensor([0]), *(getattr(alone, f.name) for f in fields(alone)[1:]))
        token = torch.zeros(1, dtype=torch.int64)
        assert drawn(logits[row, None], first, device, token) == [together[row]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_rows_that_hold_no_numbers_get_some_token_and_change_no_other(
    value: float, device: torch.device
) -> None:
    """An index out of range would read another's memory."""
    logits, filters = torch.randn(9, 300), some_filters(random.Random(3), list(range(9)))
    zeros = torch.zeros(9, dtype=torch.int64)
    right = drawn(logits, filters, device, zeros)
    logits[2], logits[6, 9] = value, value
    tokens = drawn(logits, filters, device, zeros)
    assert all(0 <= token < 300 for token in tokens)
    others = [row for row in range(9) if row not in (2, 6)]
    assert [tokens[row] for row in others] == [right[row] for row in others]


def test_banned_tokens_are_never_drawn(device: torch.device) -> None:
    """A uniform number next to one lies at the end of the kept weight."""
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [3, 150, 299]] = torch.tensor([1.0, 2.0, 0.5])
    real = torch.ones(1, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.int64)
    for uniform, right in ((0.0, 150), (0.99, 299), (1 - 2.0**-53, 299)):
        filters = Filters(zero, real * uniform, real, zero, real, 0 * real)
        assert drawn(logits, filters, device, zero.clone()) == [right]


def test_a_token_that_says_that_its_row_is_spoilt_stays(device: torch.device) -> None:
    logits, filters = torch.randn(9, 300), some_filters(random.Random(4), DRAWN)
    tokens = torch.full((9,), 299)
    tokens[[1, 2]] = NONE
    result = drawn(logits, filters, device, tokens)
    assert [row for row, token in enumerate(result) if token == NONE] == [1, 2]
    assert result[4] == result[6] == 299
