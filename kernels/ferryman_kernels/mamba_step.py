"""One decode step of a Mamba-2 mixer between its two products, without the gate.

    x, B, C = silu(conv(xBC))                                        as `causal_conv_decode`
    dt      = clamp(softplus(dt + dt_bias))
    state   ← exp(dt·A)·state + dt·(x ⊗ B),  y = state·C + D·x       as `selective_state_update`

On a CPU all of it is one loop: at one request the launches of its parts took longer than they
computed. x, B and C are rounded to the model's dtype in between, as by the parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._causal_conv_compiled import step_row
from ferryman_kernels._compiled import Loop, as_array, as_flat, narrow, prange, serves, silu, wide
from ferryman_kernels.causal_conv import causal_conv_decode
from ferryman_kernels.ssd_decode import advance_head, selective_state_update


class StepWeights(NamedTuple):
    """`conv_weight` [conv_dim, width], `conv_bias` [conv_dim] or None, `A`, `D` and `dt_bias`
    [ssm_heads], all in the accumulation dtype; `dt_limit` bounds dt after its softplus."""

    conv_weight: Tensor
    conv_bias: Tensor | None
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    dt_limit: tuple[float, float]

    def time_steps(self, dt: Tensor) -> Tensor:
        """dt [tokens, ssm_heads] after its bias, softplus and clamp, in the accumulation dtype."""
        return F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias).clamp_(*self.dt_limit)


def mamba_step_reference(
    mixed: Tensor,
    dt: Tensor,
    weights: StepWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """One operation after the other; on a card each is a kernel."""
    _, heads, head_dim, state_dim = ssm_states.shape
    inner_dim, places = heads * head_dim, (slots, into)
    taps = weights.conv_weight, weights.conv_bias
    convolved = causal_conv_decode(mixed, conv_states, *taps, *places)
    group_dim = (mixed.shape[1] - inner_dim) // 2
    x, B, C = convolved.split_with_sizes((inner_dim, group_dim, group_dim), dim=1)
    x = x.view(-1, heads, head_dim)
    B, C = (part.view(len(part), -1, state_dim) for part in (B, C))
    steps = weights.time_steps(dt)
    return selective_state_update(ssm_states, x, steps, weights.A, B, C, weights.D, *places)


def _step_heads(
    mixed: Any,
    stride_mixed: int,
    dt: Any,
    conv_states: Any,
    stride_conv: int,
    weight: Any,
    bias: Any,
    states: Any,
    stride_slot: int,
    A: Any,
    D: Any,
    dt_bias: Any,
    bounds: Any,
    slots: Any,
    into: Any,
    state_dim: int,
    y: Any,
) -> None:
    requests, heads, head_dim = y.shape
    conv_dim, inner_dim, size = weight.shape[0], heads * head_dim, head_dim * state_dim
    groups = (conv_dim - inner_dim) // (2 * state_dim)
    convolved = np.empty((requests, conv_dim), weight.dtype)
    for request in prange(requests):
        row = mixed[request * stride_mixed : request * stride_mixed + conv_dim]
        at = slots[request], into[request]
        total = step_row(row, conv_states, stride_conv, weight, bias, *at)
        out = convolved[request]
        for c in range(conv_dim):
            out[c] = silu(total[c])
        for c in range(conv_dim):
            out[c] = wide(narrow(out[c], mixed))
    low, high, threshold = bounds
    for job in prange(requests * heads):
        request, head = job // heads, job % heads
        raw = wide(dt[request, head]) + dt_bias[head]
        step = raw if raw > threshold else np.log1p(np.exp(raw))
        step = low if step < low else (high if step > high else step)
        row = convolved[request]
        first = inner_dim + head * groups // heads * state_dim
        b = row[first : first + state_dim]
        c = row[first + groups * state_dim : first + (groups + 1) * state_dim]
        x = row[head * head_dim : (head + 1) * head_dim]
        old = slots[request] * stride_slot + head * size if slots[request] >= 0 else -1
        new = into[request] * stride_slot + head * size if into[request] >= 0 else -1
        advance_head(states, old, new, x, step, A[head], b, c, D[head], y[request, head])


_step_loop = Loop(_step_heads)
SOFTPLUS_THRESHOLD = 20.0
"""Above it softplus is the identity, as torch has it."""


def mamba_step_compiled(
    mixed: Tensor,
    dt: Tensor,
    weights: StepWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    assert ssm_states[0].is_contiguous(), ssm_states.stride()
    assert conv_states[0].is_contiguous(), conv_states.stride()
    assert mixed.stride(1) == 1, mixed.stride()
    taps, A = as_array(weights.conv_weight), as_array(weights.A)
    number = A.dtype.type
    shift = np.empty(0, A.dtype) if weights.conv_bias is None else weights.conv_bias.numpy()
    bounds = *map(number, weights.dt_limit), number(SOFTPLUS_THRESHOLD)
    y = torch.empty(len(mixed), *ssm_states.shape[1:3], dtype=mixed.dtype)
    _step_loop(
        ssm_states[0].numel() * len(mixed),
        as_flat(mixed), mixed.stride(0), as_array(dt), as_flat(conv_states), conv_states.stride(0),
        taps, shift, as_flat(ssm_states), ssm_states.stride(0), A, as_array(weights.D),
        as_array(weights.dt_bias), bounds, slots.numpy(), into.numpy(), ssm_states.shape[3],
        as_array(y),
    )  # fmt: skip
    return y


def mamba_step(
    mixed: Tensor,
    dt: Tensor,
    weights: StepWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """y [requests, ssm_heads, ssm_head_dim] of a token of each request; states at `slots`
    [requests] advance into the slots `into`.

    `mixed` [requests, conv_dim] is x, B and C before the convolution, `dt` [requests, ssm_heads].
    The states are strided views, [slots, conv_dim, width - 1] and [slots, ssm_heads, ssm_head_dim,
    ssm_state]. A negative slot reads as cleared, and a negative target is not written. No request
    of a call may read a slot that another one writes.
    """
    requests, conv_dim = mixed.shape
    heads, width = ssm_states.shape[1], weights.conv_weight.shape[1]
    assert dt.shape == (requests, heads), dt.shape
    assert slots.shape == into.shape == (requests,), (slots.shape, into.shape, requests)
    assert weights.conv_weight.shape == (conv_dim, width), weights.conv_weight.shape
    assert conv_states.shape[1:] == (conv_dim, width - 1), conv_states.shape
    assert weights.A.shape == weights.D.shape == weights.dt_bias.shape == (heads,)
    precise = (weights.conv_weight, weights.A, weights.D, weights.dt_bias, ssm_states)
    is_alike = all(each.dtype is ssm_states.dtype for each in precise)
    is_wide = is_alike and ssm_states.dtype in (torch.float32, torch.float64)
    run = mamba_step_compiled if is_wide and serves(mixed, ssm_states) else mamba_step_reference
    return run(mixed, dt, weights, conv_states, ssm_states, slots, into)
