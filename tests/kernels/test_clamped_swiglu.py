"""gpt-oss's activation in one loop, against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch

from ferryman_kernels.clamped_swiglu import clamped_swiglu, clamped_swiglu_reference

ALPHA, LIMIT = 1.702, 7.0
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 7), (5, 96)])
def test_it_is_the_gate_times_what_it_lets_through(
    dtype: torch.dtype, tokens: int, dim: int
) -> None:
    drawn = torch.randn(tokens, 4 * dim, generator=torch.Generator().manual_seed(dim))
    # Rows of something wider, with numbers on both sides of the limit.
    x = (6 * drawn).to(dtype)[:, 2 * dim :]
    exact = clamped_swiglu_reference(x.double(), ALPHA, LIMIT)
    found = clamped_swiglu(x, ALPHA, LIMIT)
    assert found.dtype is dtype
    assert ((found.double() - exact).abs() <= BOUNDS[dtype] * exact.abs().clamp(min=1e-3)).all()


def test_infinities_are_clamped_and_what_is_no_number_stays_none() -> None:
    x = torch.tensor([[math.inf, -math.inf, math.nan, 1.0, 1.0, -math.inf, 1.0, math.nan]])
    found = clamped_swiglu(x, ALPHA, LIMIT)[0]
    exact = clamped_swiglu_reference(x, ALPHA, LIMIT)[0]
    assert found[0] == pytest.approx(float(exact[0]))
    assert found[2:].isnan().all()
