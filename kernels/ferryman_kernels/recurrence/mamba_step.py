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

from ferryman_kernels.cpu._compiled import STRICT, Loop, prange, row_like, serves
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode, causal_conv_decode_triton
from ferryman_kernels.recurrence.loops._causal_conv_compiled import step_rounded
from ferryman_kernels.recurrence.loops._gates_compiled import (
    fill_time_steps,
    has_row_loops,
    time_steps_compiled,
)
from ferryman_kernels.recurrence.loops._ssd_compiled import scan_head
from ferryman_kernels.recurrence.loops.runs import decode_runs
from ferryman_kernels.recurrence.ssd_decode import (
    StateInputs,
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
        if has_row_loops(dt, self.dt_bias):
            return time_steps_compiled(dt, self.dt_bias, self.dt_limit)
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
    given = state_inputs(convolved, steps, weights, ssm_states)
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
    given = state_inputs(convolved, dt, weights, ssm_states)
    return raw_state_update_triton(given, weights.dt_bias, weights.dt_limit, slots, into)


def state_inputs(
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


def _step(
    like: Any, floats: Any, mixed_rows: Any, dt_rows: Any, conv_slots: Any, weight: int, bias: int,
    states: Any, A: Any, D: Any, dt_bias: Any, limits: Any, runs: Any, y: int, sizes: Any,
) -> None:  # fmt: skip
    """Tensors are addresses, of requests and slots with the numbers from one to the next; a bias
    of 0 stands for none. `like` and `floats` are empty rows of the model's dtype and of the
    accumulation's; the sizes are (conv_dim, width) and (heads, groups, (head_dim, state_dim))."""
    (conv_dim, width), (heads, groups, (head_dim, state_dim)) = sizes
    # A shared loop takes numbers and arrays, no tuples.
    (mixed, step_mixed), (dt, step_dt), (conv_states, conv_size) = mixed_rows, dt_rows, conv_slots
    (first_slot, slot_size), (sources, firsts, tokens, counts, kept) = states, runs
    requests, number, of_floats = len(sources), floats.dtype.type, floats.itemsize
    low, high = number(limits[0]), number(limits[1])
    convolved, steps = (
        np.empty((requests, conv_dim), floats.dtype),
        np.empty((requests, heads), floats.dtype),
    )
    for request in prange(requests):
        row = row_at(mixed + request * step_mixed * like.itemsize, like)[:conv_dim]
        taps = row_at(weight, floats)[: conv_dim * width].reshape(conv_dim, width)
        shift = row_at(bias, floats)[: conv_dim if bias != 0 else 0]
        given = conv_size, taps, shift, sources[request], kept[request]
        step_rounded(row, row_at(conv_states, like), *given, convolved[request])
        raw = row_at(dt + request * step_dt * like.itemsize, like)
        fill_time_steps(raw, dt_bias, low, high, steps[request])
    # As in prefill from here on, but that the convolution's output is wide already.
    group_dim = groups * state_dim
    for job in prange(requests * heads):
        x = np.intp(convolved.ctypes.data)  # taken here, where the loop keeps the array alive
        B = x + heads * head_dim * of_floats
        rows = (x, conv_dim), (B, conv_dim), (B + group_dim * of_floats, conv_dim)
        scan_head(
            job, floats, floats, rows, steps, (A, D), (first_slot, slot_size),
            (sources, firsts, tokens, counts, kept), (y, like),
            (heads, groups, (head_dim, state_dim)),
        )  # fmt: skip


_step_loop = Loop(_step, STRICT)


def mamba_step_compiled(
    mixed: Tensor,
    dt: Tensor,
    weights: StepWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    conv_dim, width = weights.conv_weight.shape
    heads, head_dim, state_dim = ssm_states.shape[1:]
    assert ssm_states.stride()[1:] == (head_dim * state_dim, state_dim, 1), ssm_states.stride()
    assert conv_states.stride()[1:] == (conv_states.shape[2], 1), conv_states.stride()
    assert mixed.stride(1) == dt.stride(1) == 1, (mixed.stride(), dt.stride())
    assert all(each.is_contiguous() for each in weights[:5] if each is not None), "as loaded"
    bias, groups = weights.conv_bias, (conv_dim - heads * head_dim) // (2 * state_dim)
    y = torch.empty(len(mixed), heads, head_dim, dtype=mixed.dtype)
    _step_loop(
        len(mixed) * ssm_states.shape[1:].numel(),
        row_like(mixed.dtype), row_like(ssm_states.dtype),
        *((each.data_ptr(), each.stride(0)) for each in (mixed, dt, conv_states)),
        weights.conv_weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        (ssm_states.data_ptr(), ssm_states.stride(0)), weights.A.numpy(), weights.D.numpy(),
        weights.dt_bias.numpy(), tuple(map(float, weights.dt_limit)),
        tuple(decode_runs(slots, into)), y.data_ptr(),
        ((conv_dim, width), (heads, groups, (head_dim, state_dim))),
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
