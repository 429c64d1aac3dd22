"""Time steps, decays and rates that recurrences read of their gates, in prefill as in decode.

Each number follows from one number of its token, by libm or by the loops' own `exp`: torch's
vectors have other bits at the end of a tensor than in its middle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    as_flat,
    exp,
    part,
    prange,
    serves,
    wide,
)

SOFTPLUS_THRESHOLD = 20.0
"""Above it softplus is the identity, as torch has it."""


@part
def softplus(raw: Any) -> Any:
    """log(1 + exp(raw)) in the dtype of `raw`, which is a number of the accumulation."""
    return np.log1p(np.exp(raw)) if not raw > SOFTPLUS_THRESHOLD else raw


@part
def time_step(raw: Any, bias: Any, low: Any, high: Any) -> Any:
    """dt after its bias, softplus and bounds; what is no number stays none."""
    step = softplus(raw + bias)
    step = low if step < low else step
    return high if step > high else step


@part
def log_decay(raw: Any, bias: Any, decay: Any) -> Any:
    return softplus(raw + bias) * -decay


@part
def rate(raw: Any, max_rate: Any, one: Any) -> Any:
    """max_rate · sigmoid(raw)."""
    return max_rate / (one + exp(-raw))


@part
def fill_time_steps(raw: Any, bias: Any, low: Any, high: Any, steps: Any) -> None:
    """A token's time steps [ssm_heads], of its numbers `raw`."""
    for head in range(steps.shape[0]):
        steps[head] = time_step(wide(raw[head]), bias[head], low, high)


@part
def fill_delta_gates(
    raw: Any, opened: Any, bias: Any, decay: Any, max_rate: Any, g: Any, beta: Any
) -> None:
    """A token's log decays and rates [v_heads], of its numbers `raw` and `opened`."""
    for head in range(g.shape[0]):
        g[head] = log_decay(wide(raw[head]), bias[head], decay[head])
        beta[head] = rate(wide(opened[head]), max_rate, bias.dtype.type(1))


def _time_steps(dt: Any, stride: int, bias: Any, low: float, high: float, steps: Any) -> None:
    number = bias.dtype.type
    for token in prange(len(steps)):
        fill_time_steps(dt[token * stride :], bias, number(low), number(high), steps[token])


def _delta_gates(
    a: Any, stride_a: int, b: Any, stride_b: int, bias: Any, decay: Any, max_rate: float, g: Any,
    beta: Any,
) -> None:  # fmt: skip
    number = bias.dtype.type
    for token in prange(len(g)):
        raw, opened = a[token * stride_a :], b[token * stride_b :]
        fill_delta_gates(raw, opened, bias, decay, number(max_rate), g[token], beta[token])


_steps_loop, _gates_loop = Loop(_time_steps, STRICT), Loop(_delta_gates, STRICT)
ELEMENTS_PER_GATE = 16
"""A softplus takes about the time of 16 elements of other loops."""


def time_steps_compiled(dt: Tensor, bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """dt [tokens, ssm_heads] after its bias, softplus and clamp, in the dtype of the bias."""
    steps = torch.empty(dt.shape, dtype=bias.dtype)
    low, high = map(float, limits)
    _steps_loop(
        dt.numel() * ELEMENTS_PER_GATE,
        as_flat(dt), dt.stride(0), bias.numpy(), low, high, steps.numpy(),
    )  # fmt: skip
    return steps


def delta_gates_compiled(
    a: Tensor, b: Tensor, bias: Tensor, decay: Tensor, max_rate: float
) -> tuple[Tensor, Tensor]:
    """The log decay g, at most 0, and β, both [tokens, v_heads] in the dtype of the bias."""
    g, beta = (torch.empty(a.shape, dtype=bias.dtype) for _ in range(2))
    _gates_loop(
        2 * a.numel() * ELEMENTS_PER_GATE,
        as_flat(a), a.stride(0), as_flat(b), b.stride(0), bias.numpy(), decay.numpy(),
        float(max_rate), g.numpy(), beta.numpy(),
    )  # fmt: skip
    return g, beta


def has_row_loops(rows: Tensor, weights: Tensor) -> bool:
    """True if loops of gates and of heads' lengths take them; weights are in the sums' dtype."""
    on_processor = not rows.is_cuda and serves(rows, weights)
    return on_processor and weights.dtype is wide_dtype(rows.dtype)
