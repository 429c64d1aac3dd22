"""The int8 product on every path against float64, and its infinities."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from ferryman_kernels.products import int8_product as op
from ferryman_kernels.products.int8_product import int8_product, int8_product_reference

NEVER = sys.maxsize
ROUNDED_ONCE, ROUNDED_TWICE = 2.0**-8, 2.0**-7
"""Halves in the last place of a bfloat16, as parts of the largest number that comes out."""
SHAPES = [(7, 16), (5, 144), (1100, 512)]
"""Outputs and inputs; the last is more than a tile in both dtypes."""


def drawn(tokens: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, codes, scales; x is a part of something wider."""
    generator = torch.Generator().manual_seed(tokens * shape[0])
    x = torch.randn(tokens, 2 * shape[1], generator=generator).to(dtype)[:, shape[1] :]
    codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    return x, codes, (torch.rand(shape[0], generator=generator) + 0.1).to(dtype)


def error(x: Tensor, codes: Tensor, scales: Tensor, found: Tensor) -> float:
    exact = (x.double() @ codes.double().T) * scales.double()
    assert found.dtype is x.dtype
    return float((found.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("shape", SHAPES, ids=["one tile", "with a remainder", "several tiles"])
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize(
    ("dtype", "widened_from", "bound"),
    [
        # A sum is rounded before it is scaled, and after.
        pytest.param(torch.bfloat16, 0, ROUNDED_TWICE, id="bfloat16 widened"),
        pytest.param(torch.bfloat16, NEVER, ROUNDED_ONCE, id="bfloat16 by torch"),
        pytest.param(torch.float32, 0, 1e-6, id="float32"),
    ],
)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "without numba"])
def test_it_is_the_product_with_the_numbers_that_the_codes_stand_for(
    dtype: torch.dtype,
    widened_from: int,
    bound: float,
    tokens: int,
    shape: tuple[int, int],
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiled:
        monkeypatch.setattr(op, "serves", lambda *_: False)
    drawing = drawn(tokens, shape, dtype)
    with torch.inference_mode():
        found = int8_product(*drawing, widened_from=widened_from)
    assert error(*drawing, found) <= bound


def test_the_reference_is_the_formula() -> None:
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    codes, scales = torch.tensor([[127, -128]], dtype=torch.int8), torch.tensor([0.25])
    assert int8_product_reference(x, codes, scales).tolist() == [[95.75], [-80.125]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_token_is_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    """A sum in bfloat16 loses the 1 beside 130,048."""
    x = torch.tensor([[1024.0, 1.0, -1024.0]], dtype=dtype)
    codes = torch.tensor([[127, 1, 127]], dtype=torch.int8)
    assert int8_product(x, codes, torch.ones(1, dtype=dtype), widened_from=0).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 33])
def test_infinity_times_a_code_of_zero_is_not_a_number(dtype: torch.dtype, tokens: int) -> None:
    """The two outputs see the same infinity with a code of 0 and of -3."""
    x = torch.ones(tokens, 16, dtype=dtype)
    x[:, 5] = torch.inf
    codes = torch.ones(2, 16, dtype=torch.int8)
    codes[0, 5], codes[1, 5] = 0, -3
    found = int8_product(x, codes, torch.ones(2, dtype=dtype), widened_from=0)
    assert found[:, 0].isnan().all()
    assert (found[:, 1] == -torch.inf).all()


@pytest.mark.parametrize("in_dim", [16, 32])
def test_infinity_and_not_a_number_stay_in_their_token(in_dim: int) -> None:
    """The first two outputs see the same infinity with a code of 0 and of -3."""
    x = torch.ones(3, in_dim, dtype=torch.bfloat16)
    x[0, 5], x[1, 6] = torch.inf, torch.nan
    codes = torch.ones(3, in_dim, dtype=torch.int8)
    codes[0, 5], codes[1, 5] = 0, -3
    found = int8_product(x, codes, torch.ones(3, dtype=torch.bfloat16), widened_from=NEVER)
    assert found[0, 0].isnan()
    assert found[0, 1:].tolist() == [-torch.inf, torch.inf]
    assert found[1].isnan().all()
    assert found[2].tolist() == [in_dim - 1.0, in_dim - 4.0, float(in_dim)]
