"""The activation of experts that are cut in one loop, against torch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ferryman_kernels.elementwise.gates.clamped_swiglu import (
    clamped_swiglu,
    clamped_swiglu_reference,
    clamped_swiglu_triton,
)

ALPHA, LIMIT = 1.702, 7.0
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-8}
RUNS = [clamped_swiglu, clamped_swiglu_triton]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 7), (5, 96), (2, 1100)])
@pytest.mark.parametrize(("alpha", "added"), [(ALPHA, 1.0), (1.0, 0.0)], ids=["gpt-oss", "HY V4"])
@pytest.mark.parametrize("run", RUNS)
def test_it_is_the_gate_times_what_it_lets_through(
    run: Callable[..., Tensor],
    alpha: float,
    added: float,
    dtype: torch.dtype,
    tokens: int,
    dim: int,
    device: torch.device,
) -> None:
    place = device if run is clamped_swiglu_triton else torch.device("cpu")
    drawn = torch.randn(tokens, 4 * dim, generator=torch.Generator().manual_seed(dim))
    # Rows of something wider, with numbers on both sides of the limit.
    x = (6 * drawn).to(dtype)[:, 2 * dim :]
    gate, up = x.double().chunk(2, dim=1)
    gate, up = gate.minimum(torch.tensor(LIMIT)), up.clamp(-LIMIT, LIMIT)
    exact = (up + added) * gate / (1 + (-alpha * gate).exp())
    found = run(x.to(place), alpha, LIMIT, added).cpu()
    assert found.dtype is dtype
    # The interpreter cuts what the compiler rounds to bfloat16.
    bound = BOUNDS[dtype] * (2 if run is clamped_swiglu_triton else 1)
    assert ((found.double() - exact).abs() <= bound * exact.abs().clamp(min=1e-3)).all()


@pytest.mark.parametrize("run", RUNS)
def test_infinities_are_clamped_and_what_is_no_number_stays_none(
    run: Callable[..., Tensor], device: torch.device
) -> None:
    place = device if run is clamped_swiglu_triton else torch.device("cpu")
    x = torch.tensor([[math.inf, -math.inf, math.nan, 1.0, 1.0, -math.inf, 1.0, math.nan]])
    with np.errstate(over="ignore", invalid="ignore"):  # the interpreter is numpy
        found = run(x.to(place), ALPHA, LIMIT, 1.0)[0].cpu()
    exact = clamped_swiglu_reference(x, ALPHA, LIMIT, 1.0)[0]
    assert found[0] == pytest.approx(float(exact[0]))
    assert found[2:].isnan().all()
