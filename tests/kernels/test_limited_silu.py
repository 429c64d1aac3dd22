"""silu(gate) · up within a limit, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ferryman_kernels.elementwise.gates.limited_silu import (
    limited_silu,
    limited_silu_reference,
    limited_silu_triton,
)

LIMIT = 7.0
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-7}
RUNS = [limited_silu, limited_silu_triton]
CPU = torch.device("cpu")


def exact(gate: float, up: float) -> float:
    opened = gate / (1 + math.exp(-gate))
    return min(opened, LIMIT) * max(-LIMIT, min(up, LIMIT))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 7), (5, 96), (2, 1100)])
@pytest.mark.parametrize("run", RUNS)
def test_both_factors_stay_within_the_limit(
    run: Callable[..., Tensor], dtype: torch.dtype, tokens: int, dim: int, device: torch.device
) -> None:
    place = device if run is limited_silu_triton else CPU
    drawn = torch.randn(tokens, 4 * dim, generator=torch.Generator().manual_seed(dim))
    # Rows of something wider, with numbers on both sides of the limit.
    x = (6 * drawn).to(dtype)[:, 2 * dim :]
    found = run(x.to(place), LIMIT).cpu()
    assert found.dtype is dtype
    gates, ups = x.double().chunk(2, dim=1)
    rows = zip(gates.flatten().tolist(), ups.flatten().tolist(), strict=True)
    expected = torch.tensor([exact(*pair) for pair in rows], dtype=torch.float64)
    # The interpreter cuts what the compiler rounds to bfloat16.
    bound = BOUNDS[dtype] * (2 if run is limited_silu_triton else 1)
    torch.testing.assert_close(found.double().flatten(), expected, rtol=bound, atol=1e-30)
    assert found.abs().max() <= LIMIT**2


@pytest.mark.parametrize("run", [*RUNS, limited_silu_reference])
def test_infinities_are_cut_and_what_is_no_number_stays_none(
    run: Callable[..., Tensor], device: torch.device
) -> None:
    place = device if run is limited_silu_triton else CPU
    x = torch.tensor([[math.inf, 9.0, math.nan, 1.0, 1.0, -math.inf, 1.0, math.nan]])
    with np.errstate(over="ignore", invalid="ignore"):  # the interpreter is numpy
        found = run(x.to(place), LIMIT)[0].cpu()
    assert found[:2].tolist() == [7.0, -49.0]
    assert found[2:].isnan().all()


def test_rows_of_other_shapes_take_torchs_operations() -> None:
    x = torch.randn(2, 3, 8)
    assert limited_silu(x, 0.5).equal(limited_silu_reference(x, 0.5))
