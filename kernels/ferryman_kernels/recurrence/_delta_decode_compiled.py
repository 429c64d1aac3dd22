"""The delta rule's loop for the CPU; formulas and names are those of `delta_decode`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._compiled import Loop, as_array, as_flat, narrow, part, prange


@part
def advance_value_head(
    states: Any,
    old: int,
    new: int,
    query: Any,
    key: Any,
    value: Any,
    decay: Any,
    rate: Any,
    out: Any,
) -> None:
    """One value head of one request: its state is at `old` in `states`, and goes to `new`; -1 for
    none. Two passes: the state's products with k and q, then its update in the target.

    y = q·decayed + (q·k)·fed, so the first pass reads all that y needs from the state. It takes
    four rows at a time, because with single rows most of the time went into the two sums. A state
    that stays in its place has its own loop: on overlapping slices the other loop runs element by
    element, 5 times as slow.
    """
    k_dim, v_dim = key.shape[0], value.shape[0]
    size, whole = k_dim * v_dim, k_dim // 4 * 4
    # Products of the old state with k and q; a cleared one gives zeros.
    known, seen = np.zeros(v_dim, states.dtype), np.zeros(v_dim, states.dtype)
    if old >= 0:
        for row in range(0, whole, 4):
            at = old + row * v_dim
            s0 = states[at : at + v_dim]
            s1 = states[at + v_dim : at + 2 * v_dim]
            s2 = states[at + 2 * v_dim : at + 3 * v_dim]
            s3 = states[at + 3 * v_dim : at + 4 * v_dim]
            k0, k1, k2, k3 = key[row], key[row + 1], key[row + 2], key[row + 3]
            q0, q1, q2, q3 = query[row], query[row + 1], query[row + 2], query[row + 3]
            for n in range(v_dim):
                known[n] += k0 * s0[n] + k1 * s1[n] + k2 * s2[n] + k3 * s3[n]
                seen[n] += q0 * s0[n] + q1 * s1[n] + q2 * s2[n] + q3 * s3[n]
        for row in range(whole, k_dim):
            state = states[old + row * v_dim : old + (row + 1) * v_dim]
            for n in range(v_dim):
                known[n] += key[row] * state[n]
                seen[n] += query[row] * state[n]
    match = states.dtype.type(0)
    for row in range(k_dim):
        match += query[row] * key[row]
    for n in range(v_dim):
        known[n] = rate * (value[n] - decay * known[n])  # known now holds fed
        out[n] = narrow(decay * seen[n] + match * known[n], out)
    if new >= 0 and new != old:
        if old < 0:
            states[new : new + size] = 0
            old = new
        for row in range(k_dim):
            state = states[old + row * v_dim : old + (row + 1) * v_dim]
            target = states[new + row * v_dim : new + (row + 1) * v_dim]
            for n in range(v_dim):
                target[n] = decay * state[n] + key[row] * known[n]
    elif new >= 0:
        for row in range(k_dim):
            state = states[new + row * v_dim : new + (row + 1) * v_dim]
            for n in range(v_dim):
                state[n] = decay * state[n] + key[row] * known[n]


def _advance_heads(
    states: Any,
    stride_slot: int,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    slots: Any,
    into: Any,
    y: Any,
) -> None:
    requests, heads, v_dim = v.shape
    per_key, size = heads // k.shape[1], k.shape[2] * v_dim
    for job in prange(requests * heads):
        request, head = job // heads, job % heads
        query, key = q[request, head // per_key], k[request, head // per_key]
        old = slots[request] * stride_slot + head * size if slots[request] >= 0 else -1
        new = into[request] * stride_slot + head * size if into[request] >= 0 else -1
        decay, rate = np.exp(g[request, head]), beta[request, head]
        given = query, key, v[request, head], decay, rate
        advance_value_head(states, old, new, *given, y[request, head])


_advance_loop = Loop(_advance_heads)


def delta_decode_compiled(
    ssm_states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    assert ssm_states[0].is_contiguous(), ssm_states.stride()
    y = torch.empty(v.shape, dtype=ssm_states.dtype)
    given = [tensor.to(ssm_states.dtype).contiguous().numpy() for tensor in (q, k, v, g, beta)]
    _advance_loop(
        ssm_states[0].numel() * len(v), as_flat(ssm_states), ssm_states.stride(0), *given,
        slots.numpy(), into.numpy(), as_array(y),
    )  # fmt: skip
    return y.to(v.dtype)
