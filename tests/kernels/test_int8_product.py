"""The int8 product on every path against float64, and its infinities."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.kernels.loop_versions import answers_of_one_thread_and_two
from torch import Tensor

from ferryman_kernels import _int8_digits_compiled, _int8_product_compiled
from ferryman_kernels import int8_product as op
from ferryman_kernels._code_digits import HAS_BYTE_DOTS, MOST_INPUTS
from ferryman_kernels._lanes import HAS_DOTS
from ferryman_kernels.int8_product import int8_product, int8_product_reference

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
        pytest.param(torch.bfloat16, NEVER, ROUNDED_ONCE, id="bfloat16 by pairs or by torch"),
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


needs_pairs = pytest.mark.skipif(not HAS_DOTS, reason="the processor has no bfloat16 instructions")


@needs_pairs
@pytest.mark.parametrize("shape", [(1, 3), (9, 70), (64, 96), (67, 112)], ids=str)
@pytest.mark.parametrize("tokens", [2, 3, 4, 7])
def test_pairs_of_any_shape_are_multiplied(tokens: int, shape: tuple[int, int]) -> None:
    """Numbers beside a row of x are not numbers, and no part of the product."""
    drawing = drawn(tokens, shape, torch.bfloat16)
    wide = torch.full((tokens, 3 * shape[1]), torch.nan, dtype=torch.bfloat16)
    wide[:, shape[1] : 2 * shape[1]] = drawing[0]
    x, codes, scales = wide[:, shape[1] : 2 * shape[1]], *drawing[1:]
    found = int8_product(x, codes, scales, widened_from=NEVER)
    assert error(x, codes, scales, found) <= ROUNDED_ONCE


@needs_pairs
def test_a_token_multiplied_by_pairs_has_the_same_bits_in_every_batch() -> None:
    x, codes, scales = drawn(30, (67, 112), torch.bfloat16)
    whole = int8_product(x, codes, scales, widened_from=NEVER)
    for first, count in ((0, 2), (5, 3), (1, 4), (7, 5), (2, 28)):
        found = int8_product(x[first : first + count], codes, scales, widened_from=NEVER)
        assert torch.equal(found, whole[first : first + count])


@needs_pairs
def test_threads_do_not_change_a_bit_of_products_by_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = drawn(5, (131, 96), torch.bfloat16)
    one, two = answers_of_one_thread_and_two(
        monkeypatch,
        _int8_product_compiled._few_rows_loop,
        lambda: int8_product(*drawing, widened_from=NEVER),
    )
    assert torch.equal(one, two)


needs_bytes = pytest.mark.skipif(not HAS_BYTE_DOTS, reason="the processor multiplies no bytes")


@needs_bytes
@pytest.mark.parametrize(
    "shape", [(1, 64), (33, 63), (5, 65), (70, 129), (40, 1536), (3, MOST_INPUTS)], ids=str
)
@pytest.mark.parametrize("scale", [1.0, 2.0**-90, 2.0**100], ids=["one", "small", "large"])
def test_one_token_by_bytes_is_exact_but_for_one_rounding(
    shape: tuple[int, int], scale: float
) -> None:
    """Numbers between 1/16,384 and the greatest; codes and inputs at both ends are among them."""
    generator = torch.Generator().manual_seed(shape[1])
    x = torch.empty(1, shape[1]).uniform_(1.0, 2.0, generator=generator)
    x *= torch.randint(2, x.shape, generator=generator) * 2 - 1
    x = (x * 2.0 ** -torch.randint(14, x.shape, generator=generator) * scale).bfloat16()
    codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    x[0, 0], x[0, -1] = 1.9921875 * scale, -1.9921875 * scale
    codes[0], codes[-1, ::2] = -128, 127
    ones = torch.ones(shape[0], dtype=torch.bfloat16)
    found = int8_product(x, codes, ones, widened_from=NEVER)
    exact = (x.double() @ codes.double().T).float()
    assert torch.equal(found, exact.bfloat16())


@needs_bytes
def test_small_inputs_lose_less_than_float32_would_beside_the_greatest() -> None:
    x = torch.full((1, 128), 2.0**-20, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    codes = torch.ones(2, 128, dtype=torch.int8)
    codes[1, 0] = 0
    found = int8_product(x, codes, torch.ones(2, dtype=torch.bfloat16), widened_from=NEVER)
    assert found[0, 0] == 1.0
    assert abs(found[0, 1].item() - 127 * 2.0**-20) <= 127 * 2.0**-22


@needs_bytes
@pytest.mark.parametrize("row", [0.0, 2.0**-120, -(2.0**-126)], ids=["zeros", "tiny", "least"])
def test_rows_too_small_for_a_unit_are_multiplied_all_the_same(row: float) -> None:
    x = torch.full((1, 70), row, dtype=torch.bfloat16)
    codes = torch.full((2, 70), -2, dtype=torch.int8)
    found = int8_product(x, codes, torch.ones(2, dtype=torch.bfloat16), widened_from=NEVER)
    assert found.tolist() == [[-140 * row] * 2]


@needs_bytes
def test_threads_do_not_change_a_bit_of_products_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = drawn(1, (131, 200), torch.bfloat16)
    one, two = answers_of_one_thread_and_two(
        monkeypatch, _int8_digits_compiled._loop, lambda: int8_product(*drawing, widened_from=NEVER)
    )
    assert torch.equal(one, two)


@needs_bytes
def test_one_token_beyond_what_sums_of_bytes_hold_is_widened() -> None:
    x = torch.full((1, MOST_INPUTS + 1), 1.0, dtype=torch.bfloat16)
    codes = torch.full((1, MOST_INPUTS + 1), 127, dtype=torch.int8)
    found = int8_product(x, codes, torch.ones(1, dtype=torch.bfloat16), widened_from=NEVER)
    assert found.item() == torch.tensor(127.0 * (MOST_INPUTS + 1)).bfloat16().item()


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
