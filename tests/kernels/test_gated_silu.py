"""silu(gate) · up of one product's rows against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ferryman_kernels.elementwise.gates.gated_silu import (
    gated_silu,
    gated_silu_reference,
    gated_silu_triton,
)

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-7}
ROWS = st.tuples(st.integers(0, 5), st.integers(1, 90), st.integers(0, 9))
"""Tokens, channels, and numbers beside a row in memory."""


@given(ROWS, st.sampled_from(list(TOLERANCE)))
@settings(max_examples=60, deadline=None)
def test_each_channel_is_opened_by_its_gate(rows: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, dim, beside = rows
    x = (4 * torch.randn(tokens, 2 * dim + beside)).to(dtype)[:, : 2 * dim]
    gate, up = x.double().chunk(2, dim=1)
    rtol = TOLERANCE[dtype]
    for run in (gated_silu, gated_silu_reference):
        found = run(x)
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), F.silu(gate) * up, rtol=rtol, atol=1e-30)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_closed_gates_give_zero_and_not_a_number_stays(dtype: torch.dtype) -> None:
    gate = torch.tensor([-torch.inf, -1e4, torch.nan, 0.0, 1e4])
    x = torch.cat((gate, torch.full((5,), 2.0))).to(dtype)[None]
    found = gated_silu(x)[0].tolist()
    assert abs(found[1]) < 1e-30
    assert found[3] == 0
    assert found[4] == 2 * x[0, 4].item()
    assert found[2] != found[2], "NaN"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "dim", "beside"), [(1, 7, 0), (3, 96, 5), (2, 1100, 0)])
def test_a_card_opens_them_in_one_kernel(
    dtype: torch.dtype, tokens: int, dim: int, beside: int, device: torch.device
) -> None:
    x = (4 * torch.randn(tokens, 2 * dim + beside)).to(device, dtype)[:, : 2 * dim]
    x[0, :2] = torch.tensor([-1e4, torch.nan])
    x[0, dim] = 2
    with np.errstate(over="ignore"):  # the interpreter is numpy
        found = gated_silu_triton(x)
    assert found.dtype is dtype
    assert found[0, 1].isnan()
    gate, up = x.double().chunk(2, dim=1)
    # The interpreter cuts what the compiler rounds to bfloat16.
    rtol = 2 * TOLERANCE[dtype]
    expected = F.silu(gate) * up
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=1e-30, equal_nan=True)


def test_rows_of_other_shapes_take_torchs_operations() -> None:
    x = torch.randn(2, 3, 8)
    assert gated_silu(x).equal(gated_silu_reference(x))
