"""Experts' weights in blocks against float64, and a pair's bits with its expert alone."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.test_block_product import (
    BOUNDS,
    FORMS,
    WAYS,
    drawn,
    exact,
    multiplied_by,
    packed,
)
from tests.kernels.test_packed_product import threads_of_torch
from torch import Tensor

from ferryman_kernels.products.blocks.block_product import block_product
from ferryman_kernels.products.blocks.grouped_blocks import (
    BlockStack,
    grouped_blocks,
    grouped_blocks_reference,
    stack_blocks,
)
from ferryman_kernels.products.packed_product import reads_panels

pytestmark = pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")

EXPERTS, ROWS, MANY = 5, 100, 40


def drawn_stack(name: str, dtype: torch.dtype, has_bias: bool = True) -> tuple[BlockStack, Tensor]:
    """Experts that differ by their factors, and their numbers [experts, rows, inputs]."""
    form = FORMS[name]
    parts = drawn(form, ROWS, 32 // form.groups)
    generator = torch.Generator().manual_seed(3)
    factors = torch.rand(EXPERTS, ROWS, generator=generator) + 0.5
    panels = [packed(form, parts, dtype, factors[expert]) for expert in range(EXPERTS)]
    numbers = torch.stack([exact(form, parts, of_expert) for of_expert in factors]).to(dtype)
    biases = torch.randn(EXPERTS, ROWS, generator=generator).to(dtype)
    return stack_blocks(panels, biases if has_bias else biases.new_empty(1, 0)), numbers


def drawn_choice(rows: int, per_row: int) -> Tensor:
    """Expert 4 is chosen by nobody, and expert 0 by half of all rows: of MANY a slice that is
    decoded as a whole, beside others that are decoded run by run."""
    generator = torch.Generator().manual_seed(rows + per_row)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:per_row] for _ in range(rows)])
    chosen[: rows // 2, 0] = 0
    return chosen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", ["4 bits and shifts", "6 bits", "8 bits"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_each_pair_is_the_product_with_its_expert(
    name: str, dtype: torch.dtype, way: str, has_bias: bool
) -> None:
    stack, numbers = drawn_stack(name, dtype, has_bias)
    biases = stack.biases if has_bias else torch.zeros(EXPERTS, ROWS, dtype=dtype)
    for rows in (1, 7, MANY):
        chosen = drawn_choice(rows, 2)
        x = torch.randn(rows, numbers.shape[2], generator=torch.Generator().manual_seed(rows))
        with multiplied_by(way), threads_of_torch(2):
            products = grouped_blocks(x.to(dtype), stack, chosen)
        expected = grouped_blocks_reference(x.to(dtype).double(), numbers, biases, chosen)
        assert products.dtype is dtype
        error = (products.double() - expected).abs().max()
        assert error <= BOUNDS[dtype] * expected.abs().max()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("per_row", [1, 3])
def test_a_pair_has_the_bits_that_it_has_alone(dtype: torch.dtype, way: str, per_row: int) -> None:
    stack, numbers = drawn_stack("4 bits and shifts", dtype)
    chosen = drawn_choice(MANY, per_row)
    x = torch.randn(MANY, numbers.shape[2], generator=torch.Generator().manual_seed(9)).to(dtype)
    with multiplied_by(way):
        together = grouped_blocks(x, stack, chosen).view(MANY, per_row, ROWS)
        for row, experts in enumerate(chosen.tolist()):
            for place, expert in enumerate(experts):
                panels, bias = stack.panels[expert], stack.biases[expert]
                alone = block_product(x[row : row + 1], panels, bias)
                assert torch.equal(together[row, place], alone[0])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("chosen", [[[3], [0], [2]], [[2, 0]]])
def test_experts_with_one_row_each_take_their_own(
    dtype: torch.dtype, chosen: list[list[int]]
) -> None:
    stack, numbers = drawn_stack("8 bits", dtype)
    x = torch.randn(len(chosen), numbers.shape[2], generator=torch.Generator().manual_seed(4))
    products = grouped_blocks(x.to(dtype), stack, torch.tensor(chosen))
    pairs = [(row, expert) for row, experts in enumerate(chosen) for expert in experts]
    for product, (row, expert) in zip(products, pairs, strict=True):
        panels, bias = stack.panels[expert], stack.biases[expert]
        assert torch.equal(product, block_product(x[row : row + 1].to(dtype), panels, bias)[0])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_no_rows_have_no_products(dtype: torch.dtype) -> None:
    stack, numbers = drawn_stack("8 bits", dtype)
    chosen = torch.empty(0, 2, dtype=torch.int64)
    none = grouped_blocks(torch.empty(0, numbers.shape[2], dtype=dtype), stack, chosen)
    assert none.shape == (0, ROWS)
