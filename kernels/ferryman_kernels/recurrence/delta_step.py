"""One decode step of a gated delta net between its two products, without the gate.

    q, k, v = silu(conv(qkv));   q, k of length one in each head, q / √k_dim        as by the norm
    g, β    = -decay·softplus(a + dt_bias), max_rate·sigmoid(b)
    state, y by the gated delta rule                                          as `delta_decode`

On a CPU all of it is one loop: at one request its parts, some twenty operations, took longer to
launch than to compute. q, k and v are rounded to the model's dtype behind the convolution, as by
the parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.cpu._compiled import Loop, part, prange, row_like, serves, wide
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.elementwise.rms_norm import rms_norm
from ferryman_kernels.recurrence._causal_conv_compiled import step_rounded
from ferryman_kernels.recurrence._delta_decode_compiled import advance_value_head
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode
from ferryman_kernels.recurrence.delta_decode import delta_decode
from ferryman_kernels.recurrence.mamba_step import SOFTPLUS_THRESHOLD, softplus

LENGTH_EPS = 1e-6
"""Added to the squared length of a key before the division by the length."""


class DeltaWeights(NamedTuple):
    """`conv_weight` [conv_dim, width], `unit` [k_dim], all 1/√k_dim, `decay` (exp(A_log)) and
    `dt_bias` [v_heads], all in the accumulation dtype; β is below `max_rate`."""

    conv_weight: Tensor
    unit: Tensor
    decay: Tensor
    dt_bias: Tensor
    max_rate: float

    def rates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The log decay g, at most 0, and β, in the accumulation dtype; all [tokens, v_heads]."""
        dtype = self.decay.dtype
        g = F.softplus(a.to(dtype) + self.dt_bias) * -self.decay
        return g, b.to(dtype).sigmoid() * self.max_rate

    def heads(self, mixed: Tensor, v_heads: int, v_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [tokens, k_heads, k_dim] of length 1/√k_dim and 1, in the accumulation dtype, and
        v [tokens, v_heads, v_dim], of the convolution's output [tokens, conv_dim].

        x / √(Σx² + eps) is the norm of root mean squares with eps / k_dim, divided by √k_dim.
        """
        dim, value_dim = len(self.unit), v_heads * v_dim
        keys, v = mixed.split_with_sizes((mixed.shape[1] - value_dim, value_dim), dim=1)
        rows = keys.to(self.unit.dtype).reshape(-1, dim)
        units = rms_norm(rows, self.unit, LENGTH_EPS / dim).view(len(mixed), 2, -1, dim)
        q, k = units.unbind(1)
        return q * dim**-0.5, k, v.reshape(-1, v_heads, v_dim)


def delta_step_reference(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """One operation after the other; on a card each is a kernel."""
    _, v_heads, _, v_dim = ssm_states.shape
    convolved = causal_conv_decode(mixed, conv_states, weights.conv_weight, None, slots, into)
    q, k, v = weights.heads(convolved, v_heads, v_dim)
    return delta_decode(ssm_states, q, k, v, *weights.rates(a, b), slots, into)


@part
def set_length(row: Any, length: Any, eps: Any) -> None:
    """row ← length · row / √(Σ row² + eps)."""
    total = eps
    for c in range(row.shape[0]):
        total += row[c] * row[c]
    scale = length / np.sqrt(total)
    for c in range(row.shape[0]):
        row[c] = row[c] * scale


def _step_heads(
    like: Any, floats: Any, mixed: int, stride_mixed: int, a: int, stride_a: int, b: int,
    stride_b: int, conv_states: int, stride_conv: int, weight: int, ssm_states: int,
    stride_ssm: int, decay: int, dt_bias: int, max_rate: float, slots: Any, into: Any, y: int,
    conv_size: Any, ssm_size: Any,
) -> None:  # fmt: skip
    """Tensors are addresses with strides of requests in elements. `like` and `floats` are empty
    rows of the model's dtype and of the accumulation's; the sizes of the states are (conv_dim,
    width) and (v_heads, k_dim, v_dim)."""
    (conv_dim, width), (v_heads, k_dim, v_dim) = conv_size, ssm_size
    requests, number = len(slots), floats.dtype.type
    key_dim = (conv_dim - v_heads * v_dim) // 2
    convolved = np.empty((requests, conv_dim), floats.dtype)
    for request in prange(requests):
        row = row_at(mixed + request * stride_mixed * like.itemsize, like)[:conv_dim]
        taps = row_at(weight, floats)[: conv_dim * width].reshape(conv_dim, width)
        none, states = row_at(weight, floats)[:0], row_at(conv_states, like)
        out = convolved[request]
        step_rounded(row, states, stride_conv, taps, none, slots[request], into[request], out)
        # Once for each key head here; value heads share them below.
        shortened, one = number(1) / np.sqrt(number(k_dim)), number(1)
        for first in range(0, 2 * key_dim, k_dim):
            length = shortened if first < key_dim else one
            set_length(out[first : first + k_dim], length, number(LENGTH_EPS))
    for job in prange(requests * v_heads):
        request, head = job // v_heads, job % v_heads
        raw = wide(row_at(a, like)[request * stride_a + head]) + row_at(dt_bias, floats)[head]
        soft = softplus(raw, number(SOFTPLUS_THRESHOLD))
        kept = np.exp(-soft * row_at(decay, floats)[head])
        open_by = wide(row_at(b, like)[request * stride_b + head])
        rate = number(max_rate) / (number(1) + np.exp(-open_by))
        row, at = convolved[request], head * (key_dim // k_dim) // v_heads * k_dim
        query, key = row[at : at + k_dim], row[key_dim + at : key_dim + at + k_dim]
        value = row[2 * key_dim + head * v_dim : 2 * key_dim + (head + 1) * v_dim]
        size = k_dim * v_dim
        old = slots[request] * stride_ssm + head * size if slots[request] >= 0 else -1
        new = into[request] * stride_ssm + head * size if into[request] >= 0 else -1
        out = row_at(y, like)[job * v_dim : (job + 1) * v_dim]
        states = row_at(ssm_states, floats)
        advance_value_head(states, old, new, query, key, value, kept, rate, out)


_step_loop = Loop(_step_heads)


def delta_step_compiled(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    sizes = weights.conv_weight.shape, ssm_states.shape[1:]
    v_heads, k_dim, v_dim = sizes[1]
    assert ssm_states.stride()[1:] == (k_dim * v_dim, v_dim, 1), ssm_states.stride()
    assert conv_states.stride()[1:] == (conv_states.shape[2], 1), conv_states.stride()
    assert mixed.stride(1) == a.stride(1) == b.stride(1) == 1, (mixed.stride(), a.stride())
    assert all(each.is_contiguous() for each in weights[:4]), "as loaded"
    y = torch.empty(len(mixed), v_heads, v_dim, dtype=mixed.dtype)
    _step_loop(
        len(mixed) * sizes[1].numel(),
        row_like(mixed.dtype), row_like(ssm_states.dtype), mixed.data_ptr(), mixed.stride(0),
        a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), conv_states.data_ptr(),
        conv_states.stride(0), weights.conv_weight.data_ptr(), ssm_states.data_ptr(),
        ssm_states.stride(0), weights.decay.data_ptr(), weights.dt_bias.data_ptr(),
        float(weights.max_rate), slots.numpy(), into.numpy(), y.data_ptr(), *map(tuple, sizes),
    )  # fmt: skip
    return y


def delta_step(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """y [requests, v_heads, v_dim] of a token of each request; states at `slots` [requests] advance
    into the slots `into`.

    `mixed` [requests, conv_dim] is q, k and v before the convolution, `a` and `b` [requests,
    v_heads]. The states are strided views, [slots, conv_dim, width - 1] and [slots, v_heads, k_dim,
    v_dim]. A negative slot reads as cleared, and a negative target is not written. No request of a
    call may read a slot that another one writes.
    """
    (requests, conv_dim), (v_heads, k_dim, v_dim) = mixed.shape, ssm_states.shape[1:]
    width = weights.conv_weight.shape[1]
    assert a.shape == b.shape == (requests, v_heads), (a.shape, b.shape)
    assert slots.shape == into.shape == (requests,), (slots.shape, into.shape, requests)
    assert weights.conv_weight.shape == (conv_dim, width), weights.conv_weight.shape
    assert conv_states.shape[1:] == (conv_dim, width - 1), conv_states.shape
    assert weights.decay.shape == weights.dt_bias.shape == (v_heads,), weights.decay.shape
    assert (conv_dim - v_heads * v_dim) % (2 * k_dim) == 0, (conv_dim, ssm_states.shape)
    assert v_heads % ((conv_dim - v_heads * v_dim) // (2 * k_dim)) == 0, (conv_dim, v_heads)
    assert conv_states.dtype == mixed.dtype == a.dtype == b.dtype, (conv_states.dtype, mixed.dtype)
    # The first question, as in every launcher: on a card each part is a kernel of its own.
    has_loop = not mixed.is_cuda and _has_loop(mixed, weights, ssm_states)
    run = delta_step_compiled if has_loop else delta_step_reference
    return run(mixed, a, b, weights, conv_states, ssm_states, slots, into)


def _has_loop(mixed: Tensor, weights: DeltaWeights, ssm_states: Tensor) -> bool:
    dtype = ssm_states.dtype
    is_wide = dtype in (torch.float32, torch.float64) and all(w.dtype is dtype for w in weights[:4])
    return is_wide and serves(mixed, ssm_states)
