"""One decode step of a Mamba-2 mixer between its two products, without the gate.

    x, B, C = silu(conv(xBC))                                        as `causal_conv_decode`
    dt      = clamp(softplus(dt + dt_bias))
    state   ← exp(dt·A)·state + dt·(x ⊗ B),  y = state·C + D·x       as `selective_state_update`

On a CPU all of it is one loop: at one request the launches of its parts took longer than they
computed. On a card it is two kernels: dt is computed where the state is updated. x, B and C are
rounded to the model's dtype in between, as by the parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.cpu._compiled import Loop, part, prange, row_like, serves, wide
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.recurrence._causal_conv_compiled import step_rounded
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode, causal_conv_decode_triton
from ferryman_kernels.recurrence.ssd_decode import (
    StateInputs,
    advance_head,
    raw_state_update_triton,
    selective_state_update,
)


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
    """One operation after the other."""
    taps = weights.conv_weight, weights.conv_bias
    convolved = causal_conv_decode(mixed, conv_states, *taps, slots, into)
    steps = weights.time_steps(dt)
    given = _state_inputs(convolved, steps, weights, ssm_states)
    return selective_state_update(*given, slots, into)


def mamba_step_triton(
    mixed: Tensor,
    dt: Tensor,
    weights: StepWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    taps = weights.conv_weight, weights.conv_bias
    convolved = causal_conv_decode_triton(mixed, conv_states, *taps, slots, into)
    given = _state_inputs(convolved, dt, weights, ssm_states)
    return raw_state_update_triton(given, weights.dt_bias, weights.dt_limit, slots, into)


def _state_inputs(
    convolved: Tensor, dt: Tensor, weights: StepWeights, ssm_states: Tensor
) -> StateInputs:
    """The arguments of the state update, from the convolution's output [requests, conv_dim]."""
    _, heads, head_dim, state_dim = ssm_states.shape
    inner_dim = heads * head_dim
    group_dim = (convolved.shape[1] - inner_dim) // 2
    x, B, C = convolved.split_with_sizes((inner_dim, group_dim, group_dim), dim=1)
    x = x.view(-1, heads, head_dim)
    B, C = (each.view(len(each), -1, state_dim) for each in (B, C))
    return ssm_states, x, dt, weights.A, B, C, weights.D


@part
def softplus(raw: Any, threshold: Any) -> Any:
    """log(1 + exp(raw)); raw itself above the threshold."""
    return raw if raw > threshold else np.log1p(np.exp(raw))


def _step_heads(
    like: Any, floats: Any, mixed: int, stride_mixed: int, dt: int, stride_dt: int,
    conv_states: int, stride_conv: int, weight: int, bias: int, ssm_states: int, stride_ssm: int,
    A: int, D: int, dt_bias: int, low: float, high: float, slots: Any, into: Any, y: int,
    conv_size: Any, ssm_size: Any,
) -> None:  # fmt: skip
    """Tensors are addresses with strides of requests in elements; a bias of 0 stands for none.

    `like` and `floats` are empty rows of the model's dtype and of the accumulation's; the sizes of
    the states are (conv_dim, width) and (heads, head_dim, state_dim).
    """
    (conv_dim, width), (heads, head_dim, state_dim) = conv_size, ssm_size
    requests, inner_dim, number = len(slots), heads * head_dim, floats.dtype.type
    groups = (conv_dim - inner_dim) // (2 * state_dim)
    convolved = np.empty((requests, conv_dim), floats.dtype)
    for request in prange(requests):
        row = row_at(mixed + request * stride_mixed * like.itemsize, like)[:conv_dim]
        taps = row_at(weight, floats)[: conv_dim * width].reshape(conv_dim, width)
        shift = row_at(bias, floats)[: conv_dim if bias != 0 else 0]
        states = row_at(conv_states, like)
        given = stride_conv, taps, shift, slots[request], into[request]
        step_rounded(row, states, *given, convolved[request])
    for job in prange(requests * heads):
        request, head = job // heads, job % heads
        raw = wide(row_at(dt, like)[request * stride_dt + head]) + row_at(dt_bias, floats)[head]
        step = softplus(raw, number(SOFTPLUS_THRESHOLD))
        step = number(low) if step < number(low) else step
        step = number(high) if step > number(high) else step
        row = convolved[request]
        first = inner_dim + head * groups // heads * state_dim
        b = row[first : first + state_dim]
        c = row[first + groups * state_dim : first + (groups + 1) * state_dim]
        x = row[head * head_dim : (head + 1) * head_dim]
        at = head * head_dim * state_dim
        old = slots[request] * stride_ssm + at if slots[request] >= 0 else -1
        new = into[request] * stride_ssm + at if into[request] >= 0 else -1
        out = row_at(y, like)[job * head_dim : (job + 1) * head_dim]
        a, d = row_at(A, floats)[head], row_at(D, floats)[head]
        advance_head(row_at(ssm_states, floats), old, new, x, step, a, b, c, d, out)


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
    sizes = weights.conv_weight.shape, ssm_states.shape[1:]
    _, head_dim, state_dim = sizes[1]
    assert ssm_states.stride()[1:] == (head_dim * state_dim, state_dim, 1), ssm_states.stride()
    assert conv_states.stride()[1:] == (conv_states.shape[2], 1), conv_states.stride()
    assert mixed.stride(1) == dt.stride(1) == 1, (mixed.stride(), dt.stride())
    assert all(each.is_contiguous() for each in weights[:5] if each is not None), "as loaded"
    bias = weights.conv_bias
    y = torch.empty(len(mixed), *sizes[1][:2], dtype=mixed.dtype)
    _step_loop(
        len(mixed) * sizes[1].numel(),
        row_like(mixed.dtype), row_like(ssm_states.dtype), mixed.data_ptr(), mixed.stride(0),
        dt.data_ptr(), dt.stride(0), conv_states.data_ptr(), conv_states.stride(0),
        weights.conv_weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        ssm_states.data_ptr(), ssm_states.stride(0), weights.A.data_ptr(), weights.D.data_ptr(),
        weights.dt_bias.data_ptr(), *map(float, weights.dt_limit), slots.numpy(), into.numpy(),
        y.data_ptr(), *map(tuple, sizes),
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
    bias = weights.conv_bias
    assert bias is None or bias.shape == (conv_dim,), (bias.shape, conv_dim)
    group_dims = conv_dim - heads * ssm_states.shape[2]
    assert group_dims > 0 == group_dims % (2 * ssm_states.shape[3]), (conv_dim, ssm_states.shape)
    assert heads % (group_dims // (2 * ssm_states.shape[3])) == 0, (conv_dim, ssm_states.shape)
    assert conv_states.dtype == mixed.dtype == dt.dtype, (conv_states.dtype, mixed.dtype, dt.dtype)
    # The first question, as in every launcher.
    if mixed.is_cuda:
        return mamba_step_triton(mixed, dt, weights, conv_states, ssm_states, slots, into)
    has_loop = _has_loop(mixed, weights, ssm_states)
    run = mamba_step_compiled if has_loop else mamba_step_reference
    return run(mixed, dt, weights, conv_states, ssm_states, slots, into)


def _has_loop(mixed: Tensor, weights: StepWeights, ssm_states: Tensor) -> bool:
    wide = ssm_states.dtype
    precise = [weight for weight in weights[:5] if weight is not None]
    is_wide = wide in (torch.float32, torch.float64) and all(w.dtype is wide for w in precise)
    return is_wide and serves(mixed, ssm_states)
