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

from ferryman_kernels.cpu._compiled import STRICT, Loop, prange, row_like, serves
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.elementwise.rms_norm import rms_norm
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode
from ferryman_kernels.recurrence.delta_decode import delta_decode
from ferryman_kernels.recurrence.delta_inputs import delta_inputs
from ferryman_kernels.recurrence.loops._causal_conv_compiled import step_rounded
from ferryman_kernels.recurrence.loops._delta_compiled import scan_head
from ferryman_kernels.recurrence.loops._gates_compiled import (
    delta_gates_compiled,
    fill_delta_gates,
    has_row_loops,
)
from ferryman_kernels.recurrence.loops.runs import decode_runs
from ferryman_kernels.recurrence.loops.unit_heads import (
    LENGTH_EPS,
    set_lengths,
    unit_heads_compiled,
)


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
        if has_row_loops(a, self.decay):
            return delta_gates_compiled(a, b, self.dt_bias, self.decay, self.max_rate)
        g = F.softplus(a.to(dtype) + self.dt_bias) * -self.decay
        return g, b.to(dtype).sigmoid() * self.max_rate

    def heads(self, mixed: Tensor, v_heads: int, v_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [tokens, k_heads, k_dim] of length 1/√k_dim and 1, in the accumulation dtype, and
        v [tokens, v_heads, v_dim], of the convolution's output [tokens, conv_dim].

        x / √(Σx² + eps) is the norm of root mean squares with eps / k_dim, divided by √k_dim.
        """
        dim, value_dim = len(self.unit), v_heads * v_dim
        keys, v = mixed.split_with_sizes((mixed.shape[1] - value_dim, value_dim), dim=1)
        if has_row_loops(mixed, self.unit):
            q, k = unit_heads_compiled(keys, dim).view(len(mixed), 2, -1, dim).unbind(1)
            return q, k, v.reshape(-1, v_heads, v_dim)
        rows = keys.to(self.unit.dtype).reshape(-1, dim)
        units = rms_norm(rows, self.unit, LENGTH_EPS / dim).view(len(mixed), 2, -1, dim)
        q, k = units.unbind(1)
        return q * dim**-0.5, k, v.reshape(-1, v_heads, v_dim)

    def inputs(
        self, mixed: Tensor, a: Tensor, b: Tensor, v_heads: int, v_dim: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k and v of `heads`, g and β of `rates`: on a card by one launch."""
        if not mixed.is_cuda:
            return *self.heads(mixed, v_heads, v_dim), *self.rates(a, b)
        value_dim = v_heads * v_dim
        keys, v = mixed.split_with_sizes((mixed.shape[1] - value_dim, value_dim), dim=1)
        scales = self.unit, self.decay, self.dt_bias, self.max_rate
        q, k, g, beta = delta_inputs(keys, a, b, *scales, LENGTH_EPS / len(self.unit))
        return q, k, v.reshape(-1, v_heads, v_dim), g, beta


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
    inputs = weights.inputs(convolved, a, b, v_heads, v_dim)
    return delta_decode(ssm_states, *inputs, slots, into)


def _step(
    like: Any, floats: Any, mixed_rows: Any, a_rows: Any, b_rows: Any, conv_slots: Any, weight: int,
    states: Any, decay: Any, dt_bias: Any, max_rate: float, runs: Any, y: int, sizes: Any,
) -> None:  # fmt: skip
    """Tensors are addresses, of requests and slots with the numbers from one to the next. `like`
    and `floats` are empty rows of the model's dtype and of the accumulation's; the sizes are
    (conv_dim, width) and (v_heads, k_heads, (k_dim, v_dim))."""
    (conv_dim, width), (v_heads, k_heads, (k_dim, v_dim)) = sizes
    # A shared loop takes numbers and arrays, no tuples.
    (mixed, step_mixed), (a, step_a), (b, step_b) = mixed_rows, a_rows, b_rows
    (conv_states, conv_size), (first_slot, slot_size) = conv_slots, states
    sources, firsts, tokens, counts, kept = runs
    requests, number, of_floats = len(sources), floats.dtype.type, floats.itemsize
    key_dim = k_heads * k_dim
    convolved = np.empty((requests, conv_dim), floats.dtype)
    g, beta = (
        np.empty((requests, v_heads, 1), floats.dtype),
        np.empty((requests, v_heads), floats.dtype),
    )
    for request in prange(requests):
        row = row_at(mixed + request * step_mixed * like.itemsize, like)[:conv_dim]
        taps = row_at(weight, floats)[: conv_dim * width].reshape(conv_dim, width)
        given, slots = (conv_size, taps, taps[0, :0]), (sources[request], kept[request])
        step_rounded(row, row_at(conv_states, like), *given, *slots, convolved[request])
        set_lengths(convolved[request], key_dim, k_dim)
        raw = row_at(a + request * step_a * like.itemsize, like)
        opened = row_at(b + request * step_b * like.itemsize, like)
        rates = g[request, :, 0], beta[request]
        fill_delta_gates(raw, opened, dt_bias, decay, number(max_rate), *rates)
    # As in prefill from here on, but that the convolution's output is wide already.
    for job in prange(requests * v_heads):
        q = np.intp(convolved.ctypes.data)  # taken here, where the loop keeps the array alive
        k = q + key_dim * of_floats
        rows = (q, conv_dim), (k, conv_dim), (k + key_dim * of_floats, conv_dim)
        scan_head(
            job, floats, floats, rows, g, beta, (first_slot, slot_size),
            (sources, firsts, tokens, counts, kept), (y, like),
            (v_heads, k_heads, (k_dim, v_dim)),
        )  # fmt: skip


_step_loop = Loop(_step, STRICT)


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
    conv_dim, width = weights.conv_weight.shape
    v_heads, k_dim, v_dim = ssm_states.shape[1:]
    assert ssm_states.stride()[1:] == (k_dim * v_dim, v_dim, 1), ssm_states.stride()
    assert conv_states.stride()[1:] == (conv_states.shape[2], 1), conv_states.stride()
    assert mixed.stride(1) == a.stride(1) == b.stride(1) == 1, (mixed.stride(), a.stride())
    assert all(each.is_contiguous() for each in weights[:4]), "as loaded"
    k_heads = (conv_dim - v_heads * v_dim) // (2 * k_dim)
    y = torch.empty(len(mixed), v_heads, v_dim, dtype=mixed.dtype)
    _step_loop(
        len(mixed) * ssm_states.shape[1:].numel(),
        row_like(mixed.dtype), row_like(ssm_states.dtype),
        *((each.data_ptr(), each.stride(0)) for each in (mixed, a, b, conv_states)),
        weights.conv_weight.data_ptr(), (ssm_states.data_ptr(), ssm_states.stride(0)),
        weights.decay.numpy(), weights.dt_bias.numpy(), float(weights.max_rate),
        tuple(decode_runs(slots, into)), y.data_ptr(),
        ((conv_dim, width), (v_heads, k_heads, (k_dim, v_dim))),
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
