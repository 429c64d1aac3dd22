"""The arithmetic of int8 codes by tiles (AMX), held on processors that have none.

The loop's own code, on tiles in numpy, has the bits of an order of sums: those of tiles, each sum
multiplied by its scale and rounded once. One token alone has them by vectors.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.kernels.int8_products import on_numpy_tiles
from tests.kernels.test_order_of_tiles import bits
from tests.kernels.tile_processor import needs_tiles, tiled_sums
from tests.kernels.vector_parts import rounded, widened
from torch import Tensor

from ferryman_kernels.products.int8_product import int8_panel_product, panels_of_codes

CPU = torch.device("cpu")
SHAPES = [(32, 32), (70, 96), (100, 70)]
"""Outputs and inputs; the last ones end within a panel, and within a block of 32 inputs."""


def drawn(tokens: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """x, codes and scales. A sum cancels to little but its roundings, so that an order shows."""
    (out_dim, in_dim), half = shape, shape[1] // 2
    generator = torch.Generator().manual_seed(tokens + out_dim + in_dim)
    x = torch.randn(tokens, half, generator=generator)
    x = x * torch.exp(2 * torch.randn(tokens, half, generator=generator))
    codes = torch.randint(-127, 128, (out_dim, half), generator=generator)
    order = torch.randperm(2 * half, generator=generator)
    x, codes = torch.cat([x, x], 1)[:, order], torch.cat([codes, -codes], 1)[:, order]
    scales = torch.rand(out_dim, generator=generator) + 0.1
    return x.bfloat16(), codes.to(torch.int8), scales.bfloat16()


def expected(x: Tensor, codes: Tensor, scales: Tensor) -> NDArray[np.uint16]:
    """A code is a bfloat16 without a rounding."""
    return rounded(tiled_sums(bits(x), bits(codes.bfloat16())) * widened(bits(scales)))


def found(x: Tensor, codes: Tensor, scales: Tensor) -> NDArray[np.uint16]:
    return bits(int8_panel_product(x, panels_of_codes(codes, CPU), scales))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 32, 33, 49, 70])
def test_the_loop_of_codes_has_the_order_of_tiles(tokens: int, shape: tuple[int, int]) -> None:
    """Codes become pairs for the first 32 tokens; the others find them there."""
    drawing = drawn(tokens, shape)
    with on_numpy_tiles():
        assert np.array_equal(found(*drawing), expected(*drawing))


@needs_tiles
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 17, 33, 70])
def test_the_processors_tiles_have_that_order(tokens: int, shape: tuple[int, int]) -> None:
    drawing = drawn(tokens, shape)
    assert np.array_equal(found(*drawing), expected(*drawing))


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_sum_below_the_normal_numbers_is_zero_by_tiles_and_for_a_token_alone(
    tokens: int,
) -> None:
    """Vectors would keep it, so a token that may have such a sum goes by tiles."""
    x = torch.full((tokens, 32), 2.0**-130, dtype=torch.bfloat16)
    codes, ones = torch.full((32, 32), 3, dtype=torch.int8), torch.ones(32).bfloat16()
    with on_numpy_tiles():
        assert not found(x, codes, ones).any()
