"""The inputs of a gated delta rule in one launch: the bits of its parts, and float64 by Python."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.like_a_card import on_a_card
from tests.kernels.one_kernel import noted_kernels
from torch import Tensor

from ferryman_kernels.elementwise.rms_norm import rms_norm_triton
from ferryman_kernels.recurrence.delta_inputs import UnitsAndRates
from ferryman_kernels.recurrence.delta_step import DeltaWeights
from ferryman_kernels.recurrence.loops.unit_heads import LENGTH_EPS

BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6}
SIZES = {"Qwen's heads": (16, 32, 128), "heads of an odd size": (3, 6, 20), "one": (1, 1, 8)}
"""Heads of keys and of values, and channels of a key."""
V_DIM = 8


def weights_of(size: str, dtype: torch.dtype, device: torch.device) -> DeltaWeights:
    k_heads, v_heads, k_dim = SIZES[size]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return DeltaWeights(
        torch.zeros(2 * k_heads * k_dim + v_heads * V_DIM, 4, dtype=wide, device=device),
        torch.full((k_dim,), k_dim**-0.5, dtype=wide, device=device),
        torch.rand(v_heads, dtype=wide).to(device),
        torch.randn(v_heads, dtype=wide).to(device),
        2.0,
    )


def rows_of(
    size: str, dtype: torch.dtype, tokens: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution's output, and a and b as parts of a product's rows; some steps are large."""
    k_heads, v_heads, k_dim = SIZES[size]
    mixed = torch.randn(tokens, 2 * k_heads * k_dim + v_heads * V_DIM)
    rates = 4 * torch.randn(tokens, 8 + 2 * v_heads)
    rates[0, 8], rates[0, -1] = 30.0, -50.0
    rates[1, 8] = -60.0
    a, b = rates.to(device, dtype)[:, 8:].split_with_sizes((v_heads, v_heads), dim=1)
    return mixed.to(device, dtype), a, b


def inputs(
    weights: DeltaWeights, size: str, rows: tuple[Tensor, Tensor, Tensor]
) -> tuple[UnitsAndRates, Tensor]:
    with on_a_card():
        q, k, v, g, beta = weights.inputs(*rows, SIZES[size][1], V_DIM)
    return UnitsAndRates(q, k, g, beta), v


def by_parts(
    weights: DeltaWeights, size: str, rows: tuple[Tensor, Tensor, Tensor]
) -> UnitsAndRates:
    """The kernel of norms and torch's functions, as a card computed them one by one; softplus and
    sigmoid are rounded from float64."""
    (mixed, a, b), (k_heads, _, k_dim), wide = rows, SIZES[size], weights.unit.dtype
    keys = mixed[:, : 2 * k_heads * k_dim].to(wide).reshape(-1, k_dim)
    units = rms_norm_triton(keys, weights.unit, LENGTH_EPS / k_dim)
    q, k = units.view(len(mixed), 2, k_heads, k_dim).unbind(1)
    steps = a.to(wide) + weights.dt_bias
    soft = torch.nn.functional.softplus(steps.double()).to(wide)
    beta = b.double().sigmoid().to(wide) * weights.max_rate
    return UnitsAndRates(q * k_dim**-0.5, k, soft * -weights.decay, beta)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("size", SIZES)
def test_one_launch_has_the_bits_of_the_parts(
    size: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Rates in float64 are within a bit: nothing wider is there to round from."""
    weights, rows = weights_of(size, dtype, device), rows_of(size, dtype, 5, device)
    ours, v = inputs(weights, size, rows)
    theirs = by_parts(weights, size, rows)
    assert torch.equal(ours.q, theirs.q)
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(v.flatten(1), rows[0][:, -v.shape[1] * V_DIM :])
    if dtype == torch.float64:
        torch.testing.assert_close(ours.g, theirs.g, rtol=5e-16, atol=0)
        torch.testing.assert_close(ours.beta, theirs.beta, rtol=5e-16, atol=0)
    else:
        assert torch.equal(ours.g, theirs.g)
        assert torch.equal(ours.beta, theirs.beta)


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_lengths_and_rates_are_those_of_python_s_numbers(
    dtype: torch.dtype, device: torch.device
) -> None:
    size = "heads of an odd size"
    weights, rows = weights_of(size, dtype, device), rows_of(size, dtype, 3, device)
    ours, _ = inputs(weights, size, rows)
    (mixed, a, b), (k_heads, v_heads, k_dim) = (
        (part.double().tolist() for part in rows),
        SIZES[size],
    )
    bound = BOUNDS[dtype]
    for token in range(3):
        for head in range(2 * k_heads):
            row = mixed[token][head * k_dim : (head + 1) * k_dim]
            length = math.sqrt(sum(x * x for x in row) + LENGTH_EPS)
            scale = (k_dim**-0.5 if head < k_heads else 1.0) / length
            units = (ours.q if head < k_heads else ours.k)[token, head % k_heads].tolist()
            assert units == pytest.approx([x * scale for x in row], rel=bound, abs=bound)
        for head in range(v_heads):
            step = a[token][head] + weights.dt_bias[head].item()
            soft = step if step > 30 else math.log1p(math.exp(step))
            g = -weights.decay[head].item() * soft
            assert ours.g[token, head].item() == pytest.approx(g, rel=bound)
            beta = 2.0 / (1.0 + math.exp(-b[token][head]))
            assert ours.beta[token, head].item() == pytest.approx(beta, rel=bound)


def test_a_token_has_its_bits_alone_and_by_one_compiled_kernel(device: torch.device) -> None:
    size = "Qwen's heads"
    weights, rows = (
        weights_of(size, torch.bfloat16, device),
        rows_of(size, torch.bfloat16, 9, device),
    )
    whole, _ = inputs(weights, size, rows)
    with noted_kernels() as compiled:
        for token in range(9):
            mixed, a, b = (part[token : token + 1] for part in rows)
            alone, _ = inputs(weights, size, (mixed, a, b))
            for part, expected in zip(alone, whole, strict=True):
                assert torch.equal(part[0], expected[token])
    assert len(compiled) == 1, compiled
