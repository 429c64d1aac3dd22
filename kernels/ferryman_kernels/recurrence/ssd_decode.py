"""Selective state update: one decode step of a Mamba-2 layer (Dao & Gu 2024).

    state ← exp(dt·A)·state + dt·(x ⊗ B)          [requests, ssm_heads, ssm_head_dim, ssm_state]
    y     = state·C + D·x                          [requests, ssm_heads, ssm_head_dim]

`dt` already includes its bias, softplus and clamp; `A` is negative; heads share B and C by group.
On a card the kernel computes those of a raw dt too (`mamba_step`).
The state is read at `slots` and written at `into`: the same slots in plain decoding, other slots
where the old state must survive a draft that may be rejected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, next_power_of_two, tl
from ferryman_kernels.recurrence.loops._ssd_compiled import has_ssd_loop, ssd_scan_compiled
from ferryman_kernels.recurrence.loops.runs import decode_runs

BLOCK_DIM = 16
"""Rows of a head's state that one program holds."""

StateInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""ssm_states, x, dt, A, B, C, D, as `selective_state_update` takes them."""


def selective_state_update_reference(
    ssm_states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    wide = ssm_states.dtype
    per_group = x.shape[1] // B.shape[1]
    B = B.to(wide).repeat_interleave(per_group, 1)
    C = C.to(wide).repeat_interleave(per_group, 1)
    cleared, kept = slots < 0, into >= 0
    decay = (dt.to(wide) * A.to(wide)).exp()
    fed = (dt.to(wide)[..., None] * x.to(wide))[..., None] * B[:, :, None, :]
    # No product with zero: what another request has in the first slot may be no number.
    old = ssm_states[slots.clamp(min=0)].masked_fill(cleared[:, None, None, None], 0)
    state = decay[..., None, None] * old + fed
    ssm_states[into[kept]] = state[kept]
    y = (state @ C[..., None]).squeeze(-1) + D.to(wide)[:, None] * x.to(wide)
    return y.to(x.dtype)


@Kernel
def _selective_state_update_kernel(
    ssm_states_ptr: tl.tensor,
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    into_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_slot: int,
    stride_x_request: int,
    stride_dt_request: int,
    stride_b_request: int,
    stride_c_request: int,
    heads_per_group: int,
    head_dim: int,
    state_dim: int,
    RAW_DT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
) -> None:
    """Some rows of one head's state of one request. A raw dt still lacks its bias, softplus and
    bounds."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    target = tl.load(into_ptr + request).to(tl.int64)
    wide = ssm_states_ptr.dtype.element_ty
    offs_dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    offs_state = tl.arange(0, BLOCK_STATE)
    mask_dim, mask_state = offs_dim < head_dim, offs_state < state_dim
    held = (offs_dim < tl.where(slot >= 0, head_dim, 0))[:, None] & mask_state[None, :]
    kept = (offs_dim < tl.where(target >= 0, head_dim, 0))[:, None] & mask_state[None, :]

    rows = (head * head_dim + offs_dim) * state_dim
    state_at = ssm_states_ptr + rows[:, None] + offs_state[None, :]
    x_at = request * stride_x_request + head * head_dim + offs_dim
    group_at = (head // heads_per_group) * state_dim + offs_state
    state = tl.load(state_at + slot * stride_slot, mask=held, other=0.0)
    x = tl.load(x_ptr + x_at, mask=mask_dim, other=0.0).to(wide)
    dt = tl.load(dt_ptr + request * stride_dt_request + head).to(wide)
    if RAW_DT:
        raw = dt + tl.load(dt_bias_ptr + head).to(wide)
        # log(1 + small), without losing what the sum rounds away (Kahan). Above 20 it is raw.
        small = tl.exp(tl.where(raw > 20.0, 0.0, raw))
        one_more = 1.0 + small
        lost = one_more == 1.0
        ratio = small / tl.where(lost, 1.0, one_more - 1.0)
        soft = tl.where(lost, small, tl.log(one_more) * ratio)
        dt = tl.where(raw > 20.0, raw, soft)
        # In this form what is no number stays none.
        dt = tl.where(dt < LOW, dt * 0.0 + LOW, dt)
        dt = tl.where(dt > HIGH, HIGH, dt)
    a, d = tl.load(a_ptr + head).to(wide), tl.load(d_ptr + head).to(wide)
    b = tl.load(b_ptr + request * stride_b_request + group_at, mask=mask_state, other=0.0).to(wide)
    c = tl.load(c_ptr + request * stride_c_request + group_at, mask=mask_state, other=0.0).to(wide)

    state = tl.exp(dt * a) * state + (dt * x)[:, None] * b[None, :]
    tl.store(state_at + target * stride_slot, state, mask=kept)
    y = tl.sum(state * c[None, :], axis=1) + d * x
    y_at = (request * tl.num_programs(1) + head) * head_dim + offs_dim
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask_dim)


def selective_state_update_triton(
    ssm_states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    return _launch((ssm_states, x, dt, A, B, C, D), None, (0.0, 0.0), slots, into)


def raw_state_update_triton(
    given: StateInputs,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """As the state update, of a dt without its bias [ssm_heads], softplus and bounds."""
    return _launch(given, dt_bias, dt_limit, slots, into)


def _launch(
    given: StateInputs,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    ssm_states, x, dt, A, B, C, D = given
    requests, ssm_heads, ssm_head_dim = x.shape
    ssm_state = B.shape[2]
    assert ssm_states.stride()[1:] == (ssm_head_dim * ssm_state, ssm_state, 1), ssm_states.stride()
    assert x.stride()[1:] == (ssm_head_dim, 1), x.stride()
    assert B.stride()[1:] == C.stride()[1:] == (ssm_state, 1), (B.stride(), C.stride())
    assert dt.stride(1) == A.stride(0) == D.stride(0) == 1, dt.stride()
    assert slots.stride(0) == into.stride(0) == 1, (slots.stride(), into.stride())
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(BLOCK_DIM, next_power_of_two(ssm_head_dim))
    low, high = map(float, dt_limit)
    _selective_state_update_kernel[requests, ssm_heads, cdiv(ssm_head_dim, block)](
        ssm_states, x, dt, A, B, C, D, A if dt_bias is None else dt_bias, slots, into, y,
        ssm_states.stride(0), x.stride(0), dt.stride(0), B.stride(0), C.stride(0),
        ssm_heads // B.shape[1], ssm_head_dim, ssm_state,
        RAW_DT=dt_bias is not None, LOW=low, HIGH=high,
        BLOCK_DIM=block, BLOCK_STATE=next_power_of_two(ssm_state), num_warps=4,
    )  # fmt: skip
    return y


def selective_state_update(
    ssm_states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """Advances the states at `slots` [requests] by one token into `into`, and returns y.

    `x` [requests, ssm_heads, ssm_head_dim], `dt` [requests, ssm_heads], `B` and `C` [requests,
    ssm_groups, ssm_state]; the states are a strided view [slots, ssm_heads, ssm_head_dim,
    ssm_state]. A negative slot reads as cleared, and a negative target is not written. No request
    of a call may read a slot that another one writes.
    """
    requests, ssm_heads, ssm_head_dim = x.shape
    assert ssm_states.shape[1:] == (ssm_heads, ssm_head_dim, B.shape[2]), ssm_states.shape
    assert dt.shape == (requests, ssm_heads), dt.shape
    assert slots.shape == into.shape == (requests,), (slots.shape, into.shape, requests)
    assert A.shape == D.shape == (ssm_heads,), (A.shape, D.shape)
    assert B.shape == C.shape, (B.shape, C.shape)
    assert ssm_heads % B.shape[1] == 0, (B.shape, C.shape)
    if x.is_cuda:
        return selective_state_update_triton(ssm_states, x, dt, A, B, C, D, slots, into)
    if has_ssd_loop(x, dt, A, B, C, D, ssm_states):
        return ssd_scan_compiled(x, dt, A, B, C, D, ssm_states, decode_runs(slots, into))
    return selective_state_update_reference(ssm_states, x, dt, A, B, C, D, slots, into)
