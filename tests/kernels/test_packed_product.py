"""The loop over a packed weight against float64, and the recognition of its layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ferryman_kernels.cpu._lanes import HAS_DOTS
from ferryman_kernels.products import _packed_product_compiled
from ferryman_kernels.products.packed_product import (
    Panels,
    packed_grouped_product,
    packed_product,
    packed_product_reference,
    panels_of,
    stack_panels,
)

BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 2.0**-8}
"""Of the largest output: sums of 1,500 float32 products; half in the last place of a bfloat16."""
SHAPES = [(3, 16), (64, 32), (65, 34), (100, 70), (131, 1500)]


@pytest.fixture(params=[False, True], ids=["widened", "by the processor's dots"])
def multiplied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways to multiply bfloat16; float32 has one."""
    if request.param and not HAS_DOTS:
        pytest.skip("this processor has no bfloat16 instructions")
    monkeypatch.setattr(_packed_product_compiled, "HAS_DOTS", request.param)


def drawn(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, the weight and its bias; x is a part of something wider."""
    generator = torch.Generator().manual_seed(tokens * shape[0] + shape[1])
    out_dim, in_dim = shape
    x = torch.randn(tokens, 2 * in_dim, generator=generator).to(dtype)[:, in_dim:]
    weight = torch.randn(out_dim, in_dim, generator=generator).to(dtype)
    return x, weight, torch.randn(out_dim, generator=generator).to(dtype)


def packed(weight: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return found


def panels(weight: Tensor) -> Panels:
    found = panels_of(packed(weight), weight)
    if found is None:
        pytest.skip("this processor's layout of a packed weight is another")
    return found


@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 13, 32])
def test_it_is_the_product_and_the_bias(
    dtype: torch.dtype, shape: tuple[int, int], tokens: int
) -> None:
    x, weight, bias = drawn(shape, tokens, dtype)
    exact = packed_product_reference(x.double(), weight, bias)
    found = packed_product(x, panels(weight), bias)
    assert found.dtype is dtype
    assert (found.double() - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max()


@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_token_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    x, weight, bias = drawn((100, 70), 33, dtype)
    own = panels(weight)
    alone = torch.cat([packed_product(token[None], own, bias) for token in x])
    for tokens in (2, 3, 5, 6, 7, 13, 33):
        assert torch.equal(packed_product(x[:tokens], own, bias), alone[:tokens])


@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_infinities_and_not_a_number_keep_their_meaning(dtype: torch.dtype) -> None:
    x = torch.ones(1, 32, dtype=dtype)
    x[0, 5] = torch.inf
    weight = torch.ones(4, 32, dtype=dtype)
    weight[0, 5], weight[1, 5], weight[2, 6] = 0, -3, torch.nan
    found = packed_product(x, panels(weight), torch.empty(0, dtype=dtype))[0]
    assert found.isnan().tolist() == [True, False, True, False]
    assert found[[1, 3]].tolist() == [-torch.inf, torch.inf]


@pytest.mark.skipif(not HAS_DOTS, reason="this processor has no bfloat16 instructions")
def test_the_processors_dots_have_the_bits_of_widened_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight, bias = drawn((131, 1500), 5, torch.bfloat16)
    by_dots = packed_product(x, panels(weight), bias)
    monkeypatch.setattr(_packed_product_compiled, "HAS_DOTS", False)
    assert torch.equal(packed_product(x, panels(weight), bias), by_dots)


@pytest.mark.usefixtures("multiplied")
def test_a_number_below_the_normal_ones_counts_as_itself_or_as_zero() -> None:
    weight, tiny = torch.ones(1, 32, dtype=torch.bfloat16), 2.0**-130
    x = torch.full((1, 32), tiny, dtype=torch.bfloat16)
    found = packed_product(x, panels(weight), torch.empty(0, dtype=torch.bfloat16))
    assert found.item() in (0.0, 32 * tiny)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("place", [(0, 0), (99, 69)], ids=["first corner", "last corner"])
def test_memory_that_is_not_the_weight_has_no_panels(
    dtype: torch.dtype, place: tuple[int, int]
) -> None:
    _, weight, _ = drawn((100, 70), 1, dtype)
    panels(weight)
    other = weight.clone()
    other[place] += 1
    assert panels_of(packed(weight), other) is None


def test_memory_of_another_size_has_no_panels() -> None:
    assert panels_of(packed(torch.zeros(64, 64)), torch.zeros(64, 96)) is None


def test_an_odd_number_of_inputs_has_no_panels() -> None:
    weight = torch.zeros(64, 33, dtype=torch.bfloat16)
    assert panels_of(packed(weight), weight) is None


@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(65, 34), (100, 70)], ids=str)
@pytest.mark.parametrize(("rows", "per_row"), [(1, 1), (1, 3), (9, 2)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_grouped_product_is_each_row_times_its_chosen_experts(
    dtype: torch.dtype, shape: tuple[int, int], rows: int, per_row: int, has_bias: bool
) -> None:
    drawing = [drawn(shape, 1 + expert, dtype) for expert in range(5)]
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
    # Expert 3 is never chosen, and expert 1 by most.
    chosen = torch.tensor([[1, 0, 4], [2, 1, 0], [1, 4, 0]]).repeat(3, 1)[:rows, :per_row]
    biases = torch.stack([bias for *_, bias in drawing])
    stack = stack_panels(
        [panels(weight) for _, weight, _ in drawing],
        biases if has_bias else torch.empty(1, 0, dtype=dtype),
    )
    found = packed_grouped_product(x, stack, chosen.contiguous())
    weights = torch.stack([weight for _, weight, _ in drawing]).double()[chosen]
    exact = torch.einsum("rkoi,ri->rko", weights, x.double()).flatten(0, 1)
    if has_bias:
        exact += biases.double()[chosen].flatten(0, 1)
    assert found.dtype is dtype
    assert (found.double() - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max()
