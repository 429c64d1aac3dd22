"""The arithmetic of the loops over tiles (AMX), held on processors that have none.

An order of sums in numpy stands for the bits. The loops' own code, on tiles in numpy, has them on
every processor; where there are tiles, so does the compiled one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.kernels.tile_processor import (
    Processor,
    lent,
    narrowed,
    needs_tiles,
    on_each_processor,
    on_tiles,
    sums_of_block,
    tiled_product,
)
from torch import Tensor

from ferryman_kernels.cpu._tiles import aligned_words, tile_configuration
from ferryman_kernels.products import (
    _packed_product_compiled,
    _panel_sums,
    _tiled_product_compiled,
)
from ferryman_kernels.products.packed_product import (
    pack_panels,
    packed_grouped_product,
    packed_product,
    stack_panels,
)

numba = pytest.importorskip("numba")


def drawn(tokens: int, out_dim: int, in_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias. A sum cancels to little but its roundings, so that an order shows;
    some numbers are below the normal ones, which are zero for tiles."""
    generator = torch.Generator().manual_seed(tokens + out_dim + in_dim)
    half = -(-in_dim // 2)
    x, weight = torch.randn(tokens, half), torch.randn(out_dim, half, generator=generator)
    x = torch.randn(tokens, half, generator=generator) * torch.exp(
        2 * torch.randn(tokens, half, generator=generator)
    )
    x[:, ::7] = 2.0**-130
    order = torch.randperm(2 * half, generator=generator)
    x, weight = torch.cat([x, x], 1)[:, order], torch.cat([weight, -weight], 1)[:, order]
    bias = torch.randn(out_dim, generator=generator) / 1024
    parts = (x[:, :in_dim], weight[:, :in_dim], bias)
    x, weight, bias = (part.bfloat16().contiguous() for part in parts)
    return x, weight, bias


def bits(tensor: Tensor) -> NDArray[np.uint16]:
    found: NDArray[np.uint16] = tensor.view(torch.int16).numpy().view(np.uint16)
    return found


def expected(x: Tensor, weight: Tensor, bias: Tensor) -> NDArray[np.uint16]:
    """By the order of tiles, zeros behind the last input."""
    rest = -x.shape[1] % 32
    inputs, outputs = (bits(torch.nn.functional.pad(each, (0, rest))) for each in (x, weight))
    return tiled_product(inputs, outputs, bits(bias))


def test_a_block_adds_the_firsts_the_seconds_and_then_both() -> None:
    """Literal numbers: 2^24 swallows a 1 that is added to it alone."""
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [2.0**24, 1.0, 1.0, 1.0, -(2.0**24), 1.0]
    ones = np.ones((1, 32), np.float32)
    # firsts: 2^24, then 2^24 + 1 = 2^24, then 0; seconds: 3
    assert sums_of_block(x, ones)[0, 0] == 3.0
    in_order = np.float32(0)
    for number in x[0]:
        in_order = np.float32(in_order + number)
    assert in_order == 1.0, "another order has another sum"


def test_numbers_are_rounded_to_the_nearest_and_then_the_even_bfloat16() -> None:
    numbers = torch.tensor([1.0, 1.00390625, 1.01171875, -3.3, 0.1, 2.0**-130])
    right = numbers.bfloat16()
    right[-1] = 0
    assert narrowed(numbers.numpy()).tolist() == bits(right).tolist()


@pytest.mark.parametrize(("out_dim", "in_dim"), [(64, 32), (100, 70), (300, 700)])
@pytest.mark.parametrize("tokens", [1, 17, 40])
def test_the_loop_of_many_tokens_has_the_order_of_tiles(
    tokens: int, out_dim: int, in_dim: int
) -> None:
    """Runs of a half of a panel, slices of tokens, groups of halves: none shows in a sum."""
    x, weight, bias = drawn(tokens, out_dim, in_dim)
    panels = pack_panels(weight)
    padded = torch.nn.functional.pad(x, (0, -in_dim % 32))
    # The loop reads whole pairs of tokens and whole halves of panels.
    behind = torch.zeros(64, padded.shape[1], dtype=torch.bfloat16)
    inputs = torch.cat([padded, behind])
    y = np.zeros(tokens * out_dim, np.uint16)
    with on_tiles(_tiled_product_compiled):
        _tiled_product_compiled._product(
            np.zeros(0, np.uint16), panels.address, panels.panel_bytes, bias.data_ptr(), out_dim,
            inputs.data_ptr(), inputs.stride(0) * 2, inputs.shape[1] // 32, tokens, y.ctypes.data,
            out_dim, 3,
        )  # fmt: skip
    assert np.array_equal(y.reshape(tokens, out_dim), expected(x, weight, bias))


@pytest.mark.parametrize("in_dim", [32, 192])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33, 50])
def test_the_loop_of_few_tokens_has_the_order_of_tiles(tokens: int, in_dim: int) -> None:
    x, weight, bias = drawn(tokens, 64, in_dim)
    panels = pack_panels(weight)
    sums = aligned_words(64 * (tokens + 64)).view(np.float32)
    config: Any = tile_configuration(0, 0)
    with on_tiles(_panel_sums):
        _panel_sums._sums_by_tiles(
            panels.address, in_dim // 32, x.data_ptr(), x.stride(0) * 2, tokens, config,
            sums.ctypes.data,
        )  # fmt: skip
    found = sums[: 64 * tokens].reshape(tokens, 64) + bias.float().numpy()
    assert np.array_equal(narrowed(found), expected(x, weight, bias))


@contextmanager
def on_numpy_tiles() -> Iterator[None]:
    """As on a processor that has tiles, with its loops' choices, which types make."""
    modules = _packed_product_compiled, _panel_sums, _tiled_product_compiled
    with on_tiles(*modules) as processor, lent(processor), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_packed_product_compiled, "has_tiles", lambda: True)
        for name in ("keep_configuration", "put_back", "sums_of"):
            chosen = getattr(_panel_sums, f"_{name}")(*[numba.types.none] * 2)
            patch.setattr(_panel_sums, name, chosen)
        yield


@on_each_processor(on_numpy_tiles)
@pytest.mark.parametrize(
    ("tokens", "shape"),
    [
        (1, (100, 70)),
        (17, (100, 70)),
        (130, (100, 70)),
        (207, (100, 70)),
        (192, (256, 160)),
        (207, (256, 160)),
        (290, (64, 32)),
    ],
    ids=str,
)
def test_whole_products_have_that_order(
    tokens: int, shape: tuple[int, int], processor: Processor
) -> None:
    """Few tokens, many from 192 and 256 outputs on, and a second slice of few from 257 on."""
    x, weight, bias = drawn(tokens, *shape)
    panels = pack_panels(weight)
    with processor():
        found = packed_product(x, panels, bias)
    assert np.array_equal(bits(found), expected(x, weight, bias))


@needs_tiles
@pytest.mark.parametrize("tokens", [16, 33, 207])
def test_the_processors_tiles_have_it_over_two_runs_of_a_panel(tokens: int) -> None:
    x, weight, bias = drawn(tokens, 300, 700)
    found = packed_product(x, pack_panels(weight), bias)
    assert np.array_equal(bits(found), expected(x, weight, bias))


@on_each_processor(on_numpy_tiles)
def test_products_with_chosen_experts_have_it(processor: Processor) -> None:
    tokens, experts, out_dim = 21, 3, 100
    x, weight, bias = drawn(tokens, experts * out_dim, 70)
    weights, biases = weight.view(experts, out_dim, 70).unbind(), bias.view(experts, out_dim)
    stack = stack_panels([pack_panels(each) for each in weights], biases)
    chosen = torch.stack([torch.zeros(tokens).long(), torch.arange(tokens) % 2 * 2], 1)
    each = [expected(x, *parts) for parts in zip(weights, biases, strict=True)]
    right = [each[expert][token] for token in range(tokens) for expert in chosen[token].tolist()]
    with processor():
        found = packed_grouped_product(x, stack, chosen)
    assert np.array_equal(bits(found), right)
