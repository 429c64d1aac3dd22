"""Gated delta rule: one decode step (Yang, Kautz & Hatamizadeh 2024, Gated DeltaNet).

    decayed = exp(g)·state                              [requests, v_heads, k_dim, v_dim]
    state   ← decayed + k ⊗ β·(v - k·decayed)
    y       = q·state                                   [requests, v_heads, v_dim]

The state is read in one slot and written to another, or the same. v_heads share q and k by group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, next_power_of_two, tl
from ferryman_kernels.recurrence.loops._delta_compiled import delta_scan_compiled, has_delta_loop
from ferryman_kernels.recurrence.loops.runs import decode_runs

BLOCK_DIM = 32
"""Columns of a head's state that one program holds."""


def delta_decode_reference(
    ssm_states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    wide, per_key = ssm_states.dtype, v.shape[1] // k.shape[1]
    q, k = (rows.to(wide).repeat_interleave(per_key, 1) for rows in (q, k))
    # No product with zero: what another request has in the first slot may be no number.
    old = ssm_states[slots.clamp(min=0)].masked_fill((slots < 0)[:, None, None, None], 0)
    decayed = old * g.to(wide).exp()[..., None, None]
    known = (k[..., None, :] @ decayed).squeeze(-2)
    fed = beta.to(wide)[..., None] * (v.to(wide) - known)
    state = decayed + k[..., None] * fed[..., None, :]
    ssm_states[into[into >= 0]] = state[into >= 0]
    return (q[..., None, :] @ state).squeeze(-2).to(v.dtype)


@Kernel
def _delta_decode_kernel(
    ssm_states_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    into_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_slot: int,
    stride_q_request: int,
    stride_k_request: int,
    stride_v_request: int,
    stride_g_request: int,
    stride_beta_request: int,
    heads_per_key: int,
    k_dim: int,
    v_dim: int,
    BLOCK_KEY: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Some columns of one head's state of one request: columns are independent of each other."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    src = tl.load(slots_ptr + request).to(tl.int64)
    dst = tl.load(into_ptr + request).to(tl.int64)
    wide = ssm_states_ptr.dtype.element_ty
    offs_key = tl.arange(0, BLOCK_KEY)
    offs_dim = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask_key, mask_dim = offs_key < k_dim, offs_dim < v_dim
    in_slot = (head * k_dim + offs_key)[:, None] * v_dim + offs_dim[None, :]
    rows_read, rows_written = tl.where(src >= 0, k_dim, 0), tl.where(dst >= 0, k_dim, 0)
    mask_read = (offs_key < rows_read)[:, None] & mask_dim[None, :]
    mask_written = (offs_key < rows_written)[:, None] & mask_dim[None, :]

    key_at = (head // heads_per_key) * k_dim + offs_key
    k = tl.load(k_ptr + request * stride_k_request + key_at, mask=mask_key, other=0.0).to(wide)
    q = tl.load(q_ptr + request * stride_q_request + key_at, mask=mask_key, other=0.0).to(wide)
    v_at = v_ptr + request * stride_v_request + head * v_dim + offs_dim
    v = tl.load(v_at, mask=mask_dim, other=0.0).to(wide)
    g = tl.load(g_ptr + request * stride_g_request + head).to(wide)
    beta = tl.load(beta_ptr + request * stride_beta_request + head).to(wide)
    state = tl.load(ssm_states_ptr + src * stride_slot + in_slot, mask=mask_read, other=0.0)

    state = tl.exp(g) * state
    fed = beta * (v - tl.sum(k[:, None] * state, axis=0))
    state += k[:, None] * fed[None, :]
    tl.store(ssm_states_ptr + dst * stride_slot + in_slot, state, mask=mask_written)
    y = tl.sum(q[:, None] * state, axis=0)
    y_at = y_ptr + (request * tl.num_programs(1) + head) * v_dim + offs_dim
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask_dim)


def delta_decode_triton(
    ssm_states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    requests, v_heads, v_dim = v.shape
    k_heads, k_dim = k.shape[1:]
    assert ssm_states.stride()[1:] == (k_dim * v_dim, v_dim, 1), ssm_states.stride()
    assert q.stride()[1:] == k.stride()[1:] == (k_dim, 1), (q.stride(), k.stride())
    assert v.stride()[1:] == (v_dim, 1), v.stride()
    assert g.stride(1) == beta.stride(1) == 1, (g.stride(), beta.stride())
    assert slots.stride(0) == into.stride(0) == 1, (slots.stride(), into.stride())
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    block = min(BLOCK_DIM, next_power_of_two(v_dim))
    _delta_decode_kernel[requests, v_heads, cdiv(v_dim, block)](
        ssm_states, q, k, v, g, beta, slots, into, y,
        ssm_states.stride(0), q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0),
        v_heads // k_heads, k_dim, v_dim,
        BLOCK_KEY=next_power_of_two(k_dim), BLOCK_DIM=block, num_warps=4,
    )  # fmt: skip
    return y


def delta_decode(
    ssm_states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """Advances the states at `slots` [requests] by one token into the slots `into`; y as `v`.

    `q` and `k` [requests, k_heads, k_dim], normed and scaled by the family; `v` [requests, v_heads,
    v_dim]; `g` (log decay, ≤ 0) and `beta` [requests, v_heads]; the states are a strided view
    [slots, v_heads, k_dim, v_dim]. No row may read a slot that another row writes. A negative slot
    reads as cleared; a negative `into` is not written.
    """
    requests, v_heads, v_dim = v.shape
    assert q.shape == k.shape, (q.shape, k.shape)
    assert len(k) == requests, (k.shape, v.shape)
    assert v_heads % k.shape[1] == 0, (k.shape, v.shape)
    assert ssm_states.shape[1:] == (v_heads, k.shape[2], v_dim), ssm_states.shape
    assert g.shape == beta.shape == (requests, v_heads), (g.shape, beta.shape)
    assert slots.shape == into.shape == (requests,), (slots.shape, into.shape, requests)
    if v.is_cuda:
        return delta_decode_triton(ssm_states, q, k, v, g, beta, slots, into)
    if has_delta_loop(v, g, beta, ssm_states):
        runs = decode_runs(slots, into)
        return delta_scan_compiled(q, k, v, g[..., None], beta, ssm_states, runs)
    return delta_decode_reference(ssm_states, q, k, v, g, beta, slots, into)
