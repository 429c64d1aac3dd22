"""The product with chosen experts in each of its forms, against float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor

from ferryman.model.layers.expert_products import (
    GroupedProduct,
    SeparateProducts,
    load_expert_product,
)
from ferryman.model.layers.experts import ExpertProduct, PanelProduct
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.matrix import PlainMatrix
from ferryman_kernels.products.grouped_product import FloatStack, grouped_product
from ferryman_kernels.products.packed_product import reads_panels

EXPERTS, OUT, INNER, ROWS = 4, 70, 33, 9
DRAWN = torch.Generator().manual_seed(2)
WEIGHTS = torch.randn(EXPERTS, OUT, INNER, generator=DRAWN)
X = torch.randn(ROWS, INNER, generator=DRAWN)
CPU = torch.device("cpu")


def loaded(dtype: torch.dtype) -> ExpertProduct:
    return load_expert_product(CPU, [PlainMatrix(weight, dtype, CPU) for weight in WEIGHTS])


def separate() -> ExpertProduct:
    return SeparateProducts(tuple(make_linear(weight) for weight in WEIGHTS), OUT)


FORMS: Mapping[str, Callable[[], ExpertProduct]] = {
    "panels": partial(loaded, torch.float32),
    "float64": partial(loaded, torch.float64),
    "separate": separate,
    "grouped": lambda: GroupedProduct(FloatStack(WEIGHTS, None), grouped_product),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("per_row", [1, 2, 3])
def test_each_row_is_multiplied_by_the_experts_chosen_for_it(name: str, per_row: int) -> None:
    dtype = torch.float64 if name == "float64" else torch.float32
    chosen = chosen_experts(per_row)
    found = FORMS[name]()(X.to(dtype), chosen)
    expected = torch.einsum("rkoi,ri->rko", WEIGHTS.double()[chosen], X.double()).flatten(0, 1)
    assert found.dtype is dtype
    assert (found.double() - expected).abs().max() < (1e-12 if dtype is torch.float64 else 1e-5)


def chosen_experts(per_row: int) -> Tensor:
    """One expert is chosen by no row."""
    order = [torch.randperm(EXPERTS - 1, generator=DRAWN)[:per_row] for _ in range(ROWS)]
    return torch.stack(order)


@pytest.mark.skipif(not reads_panels(torch.bfloat16), reason="the processor reads no panels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_its_bits_among_any_others(dtype: torch.dtype) -> None:
    product, x, chosen = loaded(dtype), X.to(dtype), chosen_experts(2)
    assert isinstance(product, PanelProduct)
    together = product(x, chosen).view(ROWS, 2, -1)
    for row in range(ROWS):
        alone = product(x[row : row + 1], chosen[row : row + 1])
        assert torch.equal(alone, together[row])
