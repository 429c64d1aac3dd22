"""The int8 product by tiles against float64, its infinities, and the tiles of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.int8_products import (
    by_tiles,
    check_that_infinity_stays_in_its_token,
    drawn_beside_nan,
)
from tests.kernels.loop_versions import answers_of_one_thread_and_two
from tests.kernels.tile_processor import needs_tiles
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.cpu._compiled import compiled
from ferryman_kernels.cpu._tiles import CONFIG_BYTES, configure, copy_configuration
from ferryman_kernels.products import _int8_panels_compiled
from ferryman_kernels.products.int8_product import int8_panel_product, panels_of_codes

CPU = torch.device("cpu")
ROUNDED_ONCE = 2.0**-8
SHAPES = [(3, 16), (32, 32), (64, 48), (100, 70), (131, 1504)]
"""Outputs and inputs; the last two end within a panel, three within a block of 32 inputs."""


def product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    with by_tiles():
        return int8_panel_product(x, panels_of_codes(codes, CPU), scales)


def test_a_panel_has_the_codes_of_32_outputs_and_zeros_behind_them() -> None:
    codes = torch.arange(40 * 3).view(40, 3).to(torch.int8)
    panels = panels_of_codes(codes, CPU)
    assert panels.shape == (2, 32, 32)
    for output in range(64):
        for i in range(32):
            expected = 3 * output + i if output < 40 and i < 3 else 0
            assert panels[output // 32, i, output % 32] == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 32, 33, 75])
def test_it_is_the_product_with_the_numbers_that_the_codes_stand_for(
    tokens: int, shape: tuple[int, int]
) -> None:
    x, codes, scales = drawn_beside_nan(tokens, shape)
    exact = (x.double() @ codes.double().T) * scales.double()
    found = product(x, codes, scales)
    assert found.dtype is torch.bfloat16
    assert (found.double() - exact).abs().max() <= ROUNDED_ONCE * exact.abs().max()


def test_a_token_is_summed_in_float32_and_rounded_once() -> None:
    """A sum in bfloat16 loses the 1 beside 130,048."""
    x = torch.tensor([[1024.0, 1.0, -1024.0]], dtype=torch.bfloat16)
    codes = torch.tensor([[127, 1, 127]], dtype=torch.int8)
    assert product(x, codes, torch.ones(1, dtype=torch.bfloat16)).item() == 1.0


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    x, codes, scales = drawn_beside_nan(70, (100, 96))
    alone = torch.cat([product(token[None], codes, scales) for token in x])
    for first, count in ((0, 2), (3, 16), (1, 17), (5, 32), (2, 33), (0, 64), (0, 70)):
        found = product(x[first : first + count], codes, scales)
        assert torch.equal(found, alone[first : first + count])


def test_a_token_alone_is_summed_in_the_order_of_tiles() -> None:
    """Each product is taken away elsewhere, so that rounding alone is left, with all of its bits;
    some numbers are too small for tiles."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-128, 128, (64, 384), generator=generator)
    spread = torch.exp(2 * torch.randn(9, 384, generator=generator))
    x = (torch.randn(9, 384, generator=generator) * spread).bfloat16()
    x[:, ::17] = 2.0**-130
    order = torch.randperm(768, generator=generator)
    codes = torch.cat([codes, -codes.clamp(min=-127)], 1).to(torch.int8)[:, order]
    x = torch.cat([x, x], 1)[:, order]
    ones = torch.ones(64, dtype=torch.bfloat16)
    whole = product(x, codes, ones)
    assert torch.equal(torch.cat([product(token[None], codes, ones) for token in x]), whole)
    tiny = torch.full((2, 32), 2.0**-130, dtype=torch.bfloat16)
    assert not product(tiny, codes[:, :32], ones).any()
    assert not product(tiny[:1], codes[:, :32], ones).any()


@needs_tiles
@pytest.mark.parametrize("tokens", [1, 33])
def test_threads_do_not_change_a_bit(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = drawn_beside_nan(tokens, (131, 96))
    loop = _int8_panels_compiled._product_loop
    one, two = answers_of_one_thread_and_two(monkeypatch, loop, lambda: product(*drawing))
    assert torch.equal(one, two)


@pytest.mark.parametrize("others", [1, 33])
@pytest.mark.parametrize("in_dim", [16, 32])
def test_infinity_and_not_a_number_stay_in_their_token(others: int, in_dim: int) -> None:
    check_that_infinity_stays_in_its_token(product, others, in_dim)


@needs_tiles
def test_the_tiles_of_others_are_configured_as_before() -> None:
    """Three rows in each tile: oneDNN, for one, may count on what it configured."""
    theirs, found = np.zeros(CONFIG_BYTES, np.uint8), np.zeros(CONFIG_BYTES, np.uint8)
    theirs[0], theirs[16:32:2], theirs[48:56] = 1, 64, 3
    try:
        _configured(theirs)
        product(*drawn_beside_nan(33, (64, 64)))
        _copied_configuration(found)
    finally:
        _configured(np.zeros(CONFIG_BYTES, np.uint8))
    assert found.tolist() == theirs.tolist()


@compiled
def _configured(config: Any) -> None:
    configure(config)


@compiled
def _copied_configuration(config: Any) -> None:
    copy_configuration(config)


@needs_tiles
def test_products_of_onednn_in_between_are_as_without() -> None:
    drawing = drawn_beside_nan(20, (64, 64))
    x, weight = torch.ones(20, 64, dtype=torch.bfloat16), torch.eye(64, dtype=torch.bfloat16)
    first, found = product(*drawing), []
    for _ in range(3):
        found.append(F.linear(x, weight))
        assert torch.equal(product(*drawing), first)
    assert all(torch.equal(each, x) for each in found)
