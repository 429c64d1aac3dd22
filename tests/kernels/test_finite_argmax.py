"""The likeliest token of a row of finite numbers: on a card in one launch, one program a row."""

from __future__ import annotations

import pytest
import torch

from ferryman_kernels.elementwise import finite_argmax as op
from ferryman_kernels.elementwise.finite_argmax import (
    finite_argmax,
    finite_argmax_reference,
    finite_argmax_triton,
)

NONE = -1
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few hundred numbers have several blocks then."""
    monkeypatch.setattr(op, "BLOCK", 128)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 700])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_its_greatest_number_s_place(
    length: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(5, length).to(dtype)
    right = [row.index(max(row)) for row in x.double().tolist()]
    places = finite_argmax_triton(x.to(device), NONE)
    assert places.tolist() == right
    assert places.dtype is torch.int64
    assert finite_argmax(x, NONE).tolist() == right


@pytest.mark.parametrize("places", [(0, 299), (127, 128), (130, 2), (299, 255, 5)], ids=str)
@pytest.mark.parametrize("best", [3.0, 0.0, -0.0, -7.5])
def test_the_lowest_of_equal_places_wins(
    places: tuple[int, ...], best: float, device: torch.device
) -> None:
    x = torch.full((2, 300), best - 1)
    x[1, list(places)] = best
    assert finite_argmax_triton(x.to(device), NONE).tolist() == [0, min(places)]


def test_zeros_of_both_signs_are_equal(device: torch.device) -> None:
    x = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]], device=device)
    assert finite_argmax_triton(x, NONE).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 128, 299])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_number_that_is_none_spoils_its_row_and_no_other(
    value: float, place: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(3, 300).to(dtype)
    x[0, 7] = x[2, 8] = 50
    x[1, place] = value
    for run in (finite_argmax_triton, finite_argmax_reference):
        assert run(x.to(device), NONE).tolist() == [7, NONE, 8]


def test_a_row_without_one_finite_number_is_spoilt(device: torch.device) -> None:
    x = torch.full((1, 300), -torch.inf, device=device)
    assert finite_argmax_triton(x, NONE).tolist() == [NONE]


def test_great_numbers_are_finite(device: torch.device) -> None:
    """The reference sums them, and their sum is not."""
    x = torch.full((1, 300), 3e38, device=device)
    x[0, 0] = -3e38
    assert finite_argmax_triton(x, NONE).tolist() == [1]


def test_rows_of_something_wider_and_in_columns(device: torch.device) -> None:
    x = torch.randn(4, 600).to(device)
    right = x.argmax(dim=-1)
    assert torch.equal(finite_argmax_triton(x.T.contiguous().T, NONE), right)
    assert torch.equal(finite_argmax_triton(x[1:3, 100:420], NONE), x[1:3, 100:420].argmax(-1))


def test_a_row_alone_has_the_place_that_it_has_among_others(device: torch.device) -> None:
    x = torch.randint(0, 4, (9, 333)).to(device, torch.bfloat16)
    x[4, 200] = torch.nan
    alone = [finite_argmax_triton(row[None], NONE).item() for row in x]
    assert finite_argmax_triton(x, NONE).tolist() == alone
    assert alone[4] == NONE
    assert finite_argmax_triton(x[:0], NONE).tolist() == []
