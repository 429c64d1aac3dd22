"""The sum of a token's experts against float64."""

from __future__ import annotations

import pytest
import torch

from ferryman_kernels.products.weighted_sum import weighted_sum

BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("tokens", "count", "dim"), [(1, 1, 7), (1, 6, 100), (5, 3, 64), (0, 2, 8)]
)
def test_it_is_the_sum_of_the_rows_by_their_shares(
    dtype: torch.dtype, tokens: int, count: int, dim: int
) -> None:
    generator = torch.Generator().manual_seed(tokens + dim)
    # Both are parts of something wider.
    x = torch.randn(tokens, count, 2 * dim, generator=generator).to(dtype)[..., dim:]
    shares = torch.rand(tokens, 2 * count, generator=generator).to(dtype)[:, count:]
    exact = (x.double() * shares.double()[:, :, None]).sum(1)
    found = weighted_sum(x, shares)
    assert found.dtype is dtype
    assert found.shape == (tokens, dim)
    assert ((found.double() - exact).abs() <= BOUNDS[dtype] * count).all()


def test_a_share_of_zero_does_not_hide_what_is_no_number() -> None:
    x = torch.tensor([[[1.0, torch.inf], [2.0, 3.0]]])
    found = weighted_sum(x, torch.tensor([[0.0, 1.0]]))
    assert found[0, 0] == 2
    assert found[0, 1].isnan()
