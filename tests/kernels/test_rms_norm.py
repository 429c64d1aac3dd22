"""RMS norm against the formula written out in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.elementwise.rms_norm import (
    add_rms_norm,
    add_rms_norm_triton,
    gated_rms_norm,
    gated_rms_norm_reference,
    gated_rms_norm_triton,
    grouped_rms_norm,
    rms_norm,
    rms_norm_reference,
    rms_norm_then_gate,
    rms_norm_then_gate_reference,
    rms_norm_then_gate_triton,
    rms_norm_triton,
    scaled_sum,
)

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3}
CPU = torch.device("cpu")


def _naive(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, groups: int) -> Tensor:
    rows = []
    for i in range(len(x)):
        h = [float(v) for v in x[i]]
        if gate is not None:
            h = [v * g / (1 + math.exp(-g)) for v, g in zip(h, gate[i].tolist(), strict=True)]
        size = len(h) // groups
        parts = [h[first : first + size] for first in range(0, len(h), size)]
        scales = [1 / math.sqrt(sum(v * v for v in part) / size + eps) for part in parts]
        rows.append([v * scales[n // size] * float(weight[n]) for n, v in enumerate(h)])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [8, 96, 100])
@pytest.mark.parametrize("run", [rms_norm, rms_norm_reference, rms_norm_triton])
def test_a_row_is_divided_by_its_root_mean_square(
    run: Callable[..., Tensor], dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    place = device if run is rms_norm_triton else CPU
    x, weight = torch.randn(5, dim + 3).to(dtype)[:, :dim], torch.randn(dim).to(dtype)
    y = run(x.to(place), weight.to(place), 1e-5)
    assert y.dtype == dtype
    expected = _naive(x, None, weight, 1e-5, groups=1)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=1e-12)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("run", [grouped_rms_norm, rms_norm_reference, rms_norm_triton])
def test_groups_of_a_row_are_divided_each_by_their_own_root(
    run: Callable[..., Tensor], groups: int, dtype: torch.dtype, device: torch.device
) -> None:
    place = device if run is rms_norm_triton else CPU
    dim = 21 * groups
    x, weight = torch.randn(5, dim + 3).to(dtype)[:, :dim], torch.randn(dim).to(dtype)
    y = run(x.to(place), weight.to(place), 1e-5, groups)
    assert y.dtype == dtype
    expected = _naive(x, None, weight, 1e-5, groups)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=1e-12)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("run", [gated_rms_norm, gated_rms_norm_reference, gated_rms_norm_triton])
def test_a_gated_row_is_normed_group_by_group(
    run: Callable[..., Tensor], groups: int, dtype: torch.dtype, device: torch.device
) -> None:
    place = device if run is gated_rms_norm_triton else CPU
    x, gate = torch.randn(2, 5, 48).to(dtype)
    weight = torch.randn(48).to(dtype)
    wide = torch.cat((gate, x), dim=1).to(place)  # rows of a split product are not contiguous
    y = run(wide[:, 48:], wide[:, :48], weight.to(place), 1e-5, groups)
    expected = _naive(x, gate, weight, 1e-5, groups)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


ROWS = st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(1, 70), st.integers(0, 9))
"""Tokens, groups, channels of a group, and channels beside a row in memory."""


@given(ROWS, st.sampled_from(list(TOLERANCE)), st.sampled_from((1.0, 0.246, -3.0)))
@settings(max_examples=60, deadline=None)
def test_a_sum_and_its_norm_are_those_of_two_operations(
    rows: tuple[int, int, int, int], dtype: torch.dtype, scale: float
) -> None:
    (tokens, groups, length, beside), precise = rows, wide_dtype(dtype)
    dim = groups * length
    x, added = torch.randn(2, tokens, dim + beside, dtype=precise).to(dtype)[:, :, :dim]
    weight = torch.randn(dim, dtype=precise)
    total, y = add_rms_norm(x, added, scale, weight, 1e-5)
    exact = x.double() + scale * added.double()
    assert total.dtype == y.dtype == dtype
    torch.testing.assert_close(total.double(), exact, rtol=TOLERANCE[dtype], atol=1e-6)
    if dtype == torch.float64:
        torch.testing.assert_close(total, exact, rtol=1e-15, atol=1e-15)
    assert torch.equal(total, scaled_sum(x, added, scale))
    # The norm is that of the sum as it was rounded.
    _assert_close(y, _naive(total, None, weight, 1e-5, 1).view(y.shape))


@given(ROWS, st.sampled_from(list(TOLERANCE)))
@settings(max_examples=60, deadline=None)
def test_gates_open_before_or_behind_the_norm_of_each_group(
    rows: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    tokens, groups, length, beside = rows
    dim = groups * length
    x, gate = torch.randn(2, tokens, dim + beside).to(dtype)[:, :, :dim]
    weight = torch.randn(dim, dtype=wide_dtype(dtype))
    found = gated_rms_norm(x, gate, weight, 1e-5, groups)
    expected = _naive(x, gate, weight, 1e-5, groups).view(x.shape)
    _assert_close(found, expected)
    found = rms_norm_then_gate(x, gate, weight, 1e-5, groups)
    normed = _naive(x, None, weight, 1e-5, groups).view(x.shape)
    expected = normed * torch.nn.functional.silu(gate.double())
    _assert_close(found, expected)
    again = rms_norm_then_gate_reference(x, gate, weight, 1e-5, groups)
    _assert_close(again, expected)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("scale", [1.0, 0.246])
@pytest.mark.parametrize("dim", [8, 100])
def test_a_card_adds_and_norms_in_one_kernel(
    dim: int, scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    x, added = torch.randn(2, 5, dim + 3, dtype=wide_dtype(dtype)).to(dtype)[:, :, :dim]
    weight = torch.randn(dim, dtype=wide_dtype(dtype))
    given = x.to(device), added.to(device), scale, weight.to(device), 1e-5
    total, y = (each.cpu() for each in add_rms_norm_triton(*given))
    assert total.dtype == y.dtype == dtype
    _assert_close(total, x.double() + scale * added.double())
    _assert_close(y, _naive(total, None, weight, 1e-5, 1))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("groups", [1, 4])
def test_a_card_norms_and_then_gates_in_one_kernel(
    groups: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, gate = torch.randn(2, 5, 50).to(dtype)[:, :, :48]
    weight = torch.randn(48, dtype=wide_dtype(dtype))
    given = x.to(device), gate.to(device), weight.to(device), 1e-5, groups
    found = rms_norm_then_gate_triton(*given).cpu()
    normed = _naive(x, None, weight, 1e-5, groups)
    _assert_close(found, normed * torch.nn.functional.silu(gate.double()))


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 3e-7])
def test_a_card_adds_eps_in_float64_beside_small_numbers(eps: float, device: torch.device) -> None:
    """Triton takes a Python float that is an argument as a float32: 4e-8 of the answer."""
    x, added = 1e-6 * torch.randn(2, 3, 48, dtype=torch.float64)
    weight = torch.randn(48, dtype=torch.float64)
    place = [each.to(device) for each in (x, added, weight)]
    total, y = add_rms_norm_triton(place[0], place[1], 0.246, place[2], eps)
    _assert_exact(total, x + 0.246 * added)
    _assert_exact(y, _naive(total.cpu(), None, weight, eps, 1))
    _assert_exact(rms_norm_triton(place[0], place[2], eps), _naive(x, None, weight, eps, 1))


def _assert_exact(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=0.0)


def _assert_close(found: Tensor, expected: Tensor) -> None:
    atol = 1e-12 if found.dtype == torch.float64 else 1e-6
    rtol = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)
