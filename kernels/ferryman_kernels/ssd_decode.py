"""Selective state update: one decode step of a Mamba-2 layer (Dao & Gu 2024).

    state ← exp(dt·A)·state + dt·(x ⊗ B)          [requests, ssm_heads, ssm_head_dim, ssm_state]
    y     = state·C + D·x                          [requests, ssm_heads, ssm_head_dim]

`dt` has its bias, softplus and clamp behind it; `A` is negative; heads share B and C by group.
"""

from __future__ import annotations

from torch import Tensor


def selective_state_update_reference(
    ssm_states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    slots: Tensor,
) -> Tensor:
    wide = ssm_states.dtype
    per_group = x.shape[1] // B.shape[1]
    B = B.to(wide).repeat_interleave(per_group, 1)
    C = C.to(wide).repeat_interleave(per_group, 1)
    named = slots >= 0
    decay = (dt.to(wide) * A.to(wide)).exp()
    fed = (dt.to(wide)[..., None] * x.to(wide))[..., None] * B[:, :, None, :]
    old = ssm_states[slots.clamp(min=0)] * named[:, None, None, None]
    state = decay[..., None, None] * old + fed
    ssm_states[slots[named]] = state[named]
    y = (state @ C[..., None]).squeeze(-1) + D.to(wide)[:, None] * x.to(wide)
    return y.to(x.dtype)


def selective_state_update(
    ssm_states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    slots: Tensor,
) -> Tensor:
    """Advance `ssm_states` in place at `slots` [requests] by one token and read y out of it.

    `x` [requests, ssm_heads, ssm_head_dim], `dt` [requests, ssm_heads], `B` and `C` [requests,
    ssm_groups, ssm_state]; the states are a strided view [slots, ssm_heads, ssm_head_dim,
    ssm_state]. A negative slot stands for no request: cleared when read, never written.
    """
    requests, ssm_heads, ssm_head_dim = x.shape
    assert ssm_states.shape[1:] == (ssm_heads, ssm_head_dim, B.shape[2]), ssm_states.shape
    assert dt.shape == (requests, ssm_heads), (dt.shape, slots.shape)
    assert slots.shape == (requests,), (dt.shape, slots.shape)
    assert A.shape == D.shape == (ssm_heads,), (A.shape, D.shape)
    assert B.shape == C.shape, (B.shape, C.shape)
    assert ssm_heads % B.shape[1] == 0, (B.shape, C.shape)
    return selective_state_update_reference(ssm_states, x, dt, A, B, C, D, slots)
