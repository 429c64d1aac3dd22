"""Weights in ggml's blocks: the numbers of their layout, kept in the bytes of their file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.gguf_models.test_dequantisation import NAIVE, random_blocks
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.gguf.tensor_types import TYPE_NAMES
from ferryman.model.weights.matrix import join_linear
from ferryman.model.weights.quantisation.gguf_matrix import (
    FORMS,
    BlockLinear,
    DequantisedLinear,
    GgufMatrix,
    gguf_matrix,
)
from ferryman_kernels.products.blocks.block_product import block_rows
from ferryman_kernels.products.packed_product import reads_panels

CPU = torch.device("cpu")
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 2.0**-8, torch.float64: 1e-14}
with_panels = pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")


def content(kind: str, rows: int, columns: int) -> np.ndarray:
    """Random blocks [rows · blocks, block_bytes]."""
    tensor_type = TYPE_NAMES[kind]
    blocks = random_blocks(tensor_type, rows * columns // tensor_type.block_len)
    if kind == "MXFP4":
        blocks[:, 0] = 118 + blocks[:, 0] % 8
    return blocks


def numbers(kind: str, blocks: np.ndarray, rows: int) -> Tensor:
    """The numbers of the layout, read one by one, in float32."""
    every = [NAIVE[kind](b, i) for b in blocks.tolist() for i in range(TYPE_NAMES[kind].block_len)]
    return torch.tensor(np.array(every, np.float32)).view(rows, -1)


def matrix(kind: str, rows: int, columns: int, dtype: torch.dtype) -> tuple[GgufMatrix, Tensor]:
    blocks = content(kind, rows, columns)
    flat = torch.from_numpy(blocks.reshape(-1))
    made = gguf_matrix(kind, flat, rows, columns, dtype=dtype, device=CPU)
    return made, numbers(kind, blocks, rows)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", FORMS)
def test_the_product_is_that_of_the_layouts_numbers(kind: str, dtype: torch.dtype) -> None:
    weight, expected = matrix(kind, 70, 256, dtype)
    assert torch.equal(weight.dequantised(), expected.to(dtype))
    x, bias = torch.randn(3, 256).to(dtype), torch.randn(70).to(dtype)
    linear = weight.linear(bias)
    is_coded = reads_panels(dtype)
    assert isinstance(linear, BlockLinear if is_coded else DequantisedLinear)
    exact = x.double() @ expected.to(dtype).double().T + bias.double()
    assert (linear(x).double() - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max()


@with_panels
@pytest.mark.parametrize("kind", FORMS)
def test_a_weight_takes_at_most_a_tenth_more_than_its_file(kind: str) -> None:
    made, _ = matrix(kind, 64, 512, torch.bfloat16)
    linear = made.linear(None)
    assert isinstance(linear, BlockLinear)
    assert linear.panels.nbytes <= 1.1 * made.blocks.numel()


@with_panels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FORMS)
def test_rows_of_panels_are_those_of_the_numbers(kind: str, dtype: torch.dtype) -> None:
    weight, expected = matrix(kind, 150, 256, dtype)
    rows = torch.tensor([149, 3, 64, 63, 3, 0, *range(0, 150, 7)])
    scaled = weight.scaled(torch.arange(150)[:, None] % 3 * 0.5)
    exact = expected * (torch.arange(150)[:, None] % 3 * 0.5)
    assert torch.equal(block_rows(weight.panels(), rows), expected.to(dtype)[rows])
    assert torch.equal(block_rows(scaled.panels(), rows), exact.to(dtype)[rows])


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q6_K"])
def test_parts_rows_and_joined_rows_are_those_of_the_numbers(kind: str) -> None:
    weight, expected = matrix(kind, 6, 768, torch.float32)
    rows = torch.tensor([4, 0, 5])
    part = weight.narrow(1, 256, 512).narrow(0, 1, 5)
    assert torch.equal(part.dequantised(), expected[1:6, 256:])
    assert torch.equal(weight.with_rows(rows).dequantised(), expected[rows])
    x = torch.randn(2, 768)
    both = join_linear([weight, weight.with_rows(rows)])
    exact = x.double() @ torch.cat([expected, expected[rows]]).double().T
    assert (both(x).double() - exact).abs().max() <= 5e-6 * exact.abs().max()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_factors_multiply_rows_and_follow_them(kind: str) -> None:
    weight, expected = matrix(kind, 6, 256, torch.float32)
    factors = torch.tensor([[0.5], [2.0], [0.25], [4.0], [1.0], [8.0]])
    scaled, rows = weight.scaled(factors), torch.tensor([5, 1])
    both = scaled.with_rows(rows).above([weight])
    exact = torch.cat([(expected * factors)[rows], expected])
    assert torch.equal(both.dequantised(), exact)
    x = torch.randn(2, 256)
    product = x.double() @ exact.double().T
    difference = (both.linear(None)(x).double() - product).abs().max()
    assert difference <= 5e-6 * product.abs().max()


def test_what_is_no_weight_in_blocks_is_refused_by_name() -> None:
    flat = torch.zeros(1000, dtype=torch.uint8)
    for kind, columns, words in (
        ("Q2_K", 256, "Q2_K are not kept in codes"),
        ("Q4_K", 576, "576 inputs are no whole blocks of Q4_K, which has 256 each"),
        ("Q8_0", 64, "has 136 bytes, not 1000"),
    ):
        with pytest.raises(ConfigError, match=words):
            gguf_matrix(kind, flat, 2, columns, dtype=torch.float32, device=CPU)


def test_columns_that_cut_a_block_are_refused() -> None:
    weight, _ = matrix("Q4_K", 2, 512, torch.float32)
    with pytest.raises(ConfigError, match=r"columns 128 to 256 of a weight in Q4_K cut its blocks"):
        weight.narrow(1, 128, 128)
