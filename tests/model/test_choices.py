"""The oracle reports its own choices: the test of `tests/choices.py`."""

from __future__ import annotations

import pytest
import torch
from tests.choices import MARGIN, Choices
from torch import Tensor
from torch.nn import functional as F


def chosen(scores: Tensor, k: int) -> tuple[list[list[int]], int]:
    """The chosen columns, and the number of rows before the first unclear one."""
    with Choices(len(scores)) as choices:
        indices = scores.topk(k, dim=-1).indices
    return indices.tolist(), choices.num_clear


def test_equal_scores_go_to_the_lower_index_and_are_unclear() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.5], [1.0, 2.0, 2.0, 2.0], [9.0, 5.0, 1.0, 0.0]])
    assert chosen(scores, 2) == ([[0, 2], [1, 2], [0, 1]], 1)


@pytest.mark.parametrize(("gap", "num_clear"), [(0.5, 0), (1.5, 2)])
def test_a_choice_is_clear_when_it_does_not_hang_by_less_than_the_margin(
    gap: float, num_clear: int
) -> None:
    scores = torch.tensor([[4.0, 2.0, 2.0 - gap * MARGIN * 4, 1.0]] * 2, dtype=torch.float64)
    assert chosen(scores, 2)[1] == num_clear
    assert chosen(scores, 4)[1] == 2, "all of them is no choice"


def test_what_is_masked_is_no_choice() -> None:
    lowest = torch.finfo(torch.float64).min
    scores = torch.tensor([[1.0, lowest, lowest, lowest]], dtype=torch.float64)
    assert chosen(scores, 2)[1] == 1


@pytest.mark.parametrize(("product", "num_clear"), [(-1.0, 1), (-1e-7, 0)])
def test_scores_that_relu_makes_zero_are_clear_unless_by_a_hair(
    product: float, num_clear: int
) -> None:
    products = torch.tensor([[[[1.0, product, -2.0, -3.0]]]], dtype=torch.float64)
    with Choices(1) as choices:
        F.relu(products)[0, :, 0].topk(2)
    assert choices.num_clear == num_clear
