"""The delta rule's loop for the CPU; formulas and names are those of `delta_decode`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._compiled import Loop, as_array, as_flat, prange


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
    """Two passes over a head's state: its products with k and q, then its update in the target
    slot.

    y = q·decayed + (q·k)·fed, so the first pass reads all that y needs from the state. It takes
    four rows at a time, because with single rows most of the time went into the two sums. A state
    that stays in its slot has its own loop: on overlapping slices the other loop runs element by
    element, 5 times as slow.
    """
    requests, heads, v_dim = v.shape
    per_key, k_dim = heads // k.shape[1], k.shape[2]
    size, whole = k_dim * v_dim, k_dim // 4 * 4
    for job in prange(requests * heads):
        request, head = job // heads, job % heads
        key, query = k[request, head // per_key], q[request, head // per_key]
        value, out = v[request, head], y[request, head]
        decay, rate = np.exp(g[request, head]), beta[request, head]
        known, seen = np.zeros(v_dim, y.dtype), np.zeros(v_dim, y.dtype)
        src, dst = slots[request], into[request]
        old, new = src * stride_slot + head * size, dst * stride_slot + head * size
        if src >= 0:
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
        match = y.dtype.type(0)
        for row in range(k_dim):
            match += query[row] * key[row]
        for n in range(v_dim):
            known[n] = rate * (value[n] - decay * known[n])  # known now holds fed
            out[n] = decay * seen[n] + match * known[n]
        if dst >= 0 and dst != src:
            if src < 0:
                states[new : new + size] = 0
                old = new
            for row in range(k_dim):
                state = states[old + row * v_dim : old + (row + 1) * v_dim]
                target = states[new + row * v_dim : new + (row + 1) * v_dim]
                for n in range(v_dim):
                    target[n] = decay * state[n] + key[row] * known[n]
        elif dst >= 0:
            for row in range(k_dim):
                state = states[new + row * v_dim : new + (row + 1) * v_dim]
                for n in range(v_dim):
                    state[n] = decay * state[n] + key[row] * known[n]


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
