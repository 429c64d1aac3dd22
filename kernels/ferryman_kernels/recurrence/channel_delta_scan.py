"""The delta rule with a decay for each channel: Kimi Delta Attention (Kimi Linear, 2025).

    decayed = exp(g)·state                g by channel of the key     [heads, k_dim, v_dim]
    state   ← decayed + k ⊗ β·(v - k·decayed)
    y       = q·state                                                 [heads, v_dim]

Token by token over *runs*, as `selective_scan` defines them; prefill and decode share the op. The
columns of a state do not know each other, so on a card a program holds some of a head's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, KernelPart, cdiv, laid_out, next_power_of_two, tl
from ferryman_kernels.ragged import SlotAt, Spans, check_rows, on_host, result_for
from ferryman_kernels.recurrence.loops._delta_compiled import delta_scan_compiled, has_delta_loop
from ferryman_kernels.recurrence.loops.runs import decode_runs, prefill_runs
from ferryman_kernels.recurrence.selective_scan import run_at, runs_of_spans, runs_of_tokens

BLOCK_VALUE = 16
"""Columns of a head's state that one program holds."""

DeltaInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, g, beta, as `channel_delta_scan` takes them."""


def channel_delta_runs_reference(
    given: DeltaInputs, states: Tensor, runs: Tensor, y: Tensor
) -> None:
    q, k, v, g, beta = (tensor.to(states.dtype) for tensor in given)
    for first, count, src, dst, copy in runs.tolist():
        state = states[src].clone() if src >= 0 else torch.zeros_like(states[0])
        for token in range(first, first + count):
            state = state * g[token].exp()[..., None]
            known = (k[token][..., None] * state).sum(1)
            fed = beta[token][:, None] * (v[token] - known)
            state = state + k[token][..., None] * fed[:, None]
            y[token] = (q[token][..., None] * state).sum(1)
        for slot in (dst, copy):
            if slot >= 0:
                states[slot] = state


@KernelPart
def _of_token(
    at: tl.tuple,
    sizes: tl.tuple,
    token: tl.tensor,
    head: tl.tensor,
    offs_key: tl.tensor,
    offs_value: tl.tensor,
    BY_CHANNEL: tl.constexpr,
) -> tl.tuple:
    """A token's q and k [key], v [value], g ([key] by channel) and beta of a head; `at` are their
    addresses."""
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr = at
    heads, heads_per_key, k_dim, v_dim = sizes
    key_at = (token * (heads // heads_per_key) + head // heads_per_key) * k_dim + offs_key
    value_at = (token * heads + head) * v_dim + offs_value
    q = tl.load(q_ptr + key_at, mask=offs_key < k_dim, other=0.0)
    k = tl.load(k_ptr + key_at, mask=offs_key < k_dim, other=0.0)
    v = tl.load(v_ptr + value_at, mask=offs_value < v_dim, other=0.0)
    if BY_CHANNEL:
        g = tl.load(g_ptr + key_at, mask=offs_key < k_dim, other=0.0)
    else:
        g = tl.load(g_ptr + token * heads + head)
    beta = tl.load(beta_ptr + token * heads + head)
    return q, k, v, g, beta


@Kernel
def _delta_runs_kernel(
    states_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    runs_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_slot: int,
    heads: int,
    heads_per_key: int,
    k_dim: int,
    v_dim: int,
    BY_CHANNEL: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
) -> None:
    """Some columns of one head of one run; `runs` as in `selective_scan`. Decays are by channel of
    the key, or one for each head (`delta_decode`)."""
    token, count, src, dst, copy = run_at(runs_ptr, tl.program_id(0))
    head = tl.program_id(1)
    wide = states_ptr.dtype.element_ty
    offs_key = tl.arange(0, BLOCK_KEY)
    offs_value = tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    mask_key, mask_value = offs_key < k_dim, offs_value < v_dim
    in_slot = (head * k_dim + offs_key)[:, None] * v_dim + offs_value[None, :]
    held = mask_key[:, None] & (offs_value < tl.where(src >= 0, v_dim, 0))[None, :]
    state = tl.load(states_ptr + src * stride_slot + in_slot, mask=held, other=0.0)
    # The state stays in registers from the run's first token to its last. A token's numbers are
    # asked for a token ahead, because they come later than a token takes.
    end = token + count
    at = q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr
    sizes = heads, heads_per_key, k_dim, v_dim
    q, k, v, g, beta = _of_token(at, sizes, token, head, offs_key, offs_value, BY_CHANNEL)
    while token < end:
        second = tl.minimum(token + 1, end - 1)
        q_next, k_next, v_next, g_next, beta_next = _of_token(
            at, sizes, second, head, offs_key, offs_value, BY_CHANNEL
        )
        decay = tl.exp(g.to(wide))
        wide_k = k.to(wide)
        state = (decay[:, None] if BY_CHANNEL else decay) * state
        fed = beta.to(wide) * (v.to(wide) - tl.sum(wide_k[:, None] * state, axis=0))
        state += wide_k[:, None] * fed[None, :]
        y = tl.sum(q.to(wide)[:, None] * state, axis=0)
        y_at = y_ptr + (token * heads + head) * v_dim + offs_value
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask_value)
        q, k, v, g, beta = q_next, k_next, v_next, g_next, beta_next
        token += 1
    kept = mask_key[:, None] & (offs_value < tl.where(dst >= 0, v_dim, 0))[None, :]
    copied = mask_key[:, None] & (offs_value < tl.where(copy >= 0, v_dim, 0))[None, :]
    tl.store(states_ptr + dst * stride_slot + in_slot, state, mask=kept)
    tl.store(states_ptr + copy * stride_slot + in_slot, state, mask=copied)


def delta_runs_triton(given: DeltaInputs, states: Tensor, runs: Tensor, y: Tensor) -> None:
    """g [tokens, heads, k_dim] is by channel, and [tokens, heads] by head; heads may share q and
    k."""
    heads, k_dim, v_dim = states.shape[1:]
    _, k, _, g, _ = given
    assert states.stride()[1:] == (k_dim * v_dim, v_dim, 1), states.stride()
    block = min(BLOCK_VALUE, next_power_of_two(v_dim))
    _delta_runs_kernel[len(runs), heads, cdiv(v_dim, block)](
        states, *map(laid_out, given), runs, y,
        states.stride(0), heads, heads // k.shape[1], k_dim, v_dim,
        BY_CHANNEL=g.ndim == 3, BLOCK_KEY=next_power_of_two(k_dim), BLOCK_VALUE=block, num_warps=4,
    )  # fmt: skip


def channel_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_states: Tensor,
    spans: Spans,
    slots: Tensor,
    snapshots: Sequence[SlotAt] = (),
) -> Tensor:
    """Scans each request's part of the tokens from its slot's state; y as `v`, [tokens, heads,
    v_dim].

    `q`, `k` and `g` (log decay, ≤ 0) [tokens, heads, k_dim]; `beta` [tokens, heads]; `ssm_states`
    is a strided view [slots, heads, k_dim, v_dim], advanced in place at `slots` [requests]. A
    snapshot's position lies in (start, end]; no two of a request are at the same one.
    """
    _check((q, k, v, g, beta), ssm_states)
    check_rows(spans, slots, len(v), snapshots)
    if has_delta_loop(v, g, beta, ssm_states):
        pieces = prefill_runs(on_host(spans), slots, snapshots)
        return delta_scan_compiled(q, k, v, g, beta, ssm_states, pieces)
    y = result_for(spans, v, ssm_states.dtype)
    for runs in runs_of_spans(spans, slots, snapshots):
        _run((q, k, v, g, beta), ssm_states, runs, y)
    return y.to(v.dtype)


def channel_delta_decode(
    ssm_states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """One token of each request; states at `slots` [requests] advance into the slots `into`.

    A negative slot reads as cleared, and a negative target is not written. No request of a call may
    read a slot that another one writes.
    """
    _check((q, k, v, g, beta), ssm_states)
    assert slots.shape == into.shape == (len(v),), (slots.shape, into.shape, v.shape)
    if has_delta_loop(v, g, beta, ssm_states):
        return delta_scan_compiled(q, k, v, g, beta, ssm_states, decode_runs(slots, into))
    y = v.new_empty(v.shape, dtype=ssm_states.dtype)
    _run((q, k, v, g, beta), ssm_states, runs_of_tokens(slots, into), y)
    return y.to(v.dtype)


def _check(given: DeltaInputs, ssm_states: Tensor) -> None:
    q, k, v, g, beta = given
    assert q.shape == k.shape == g.shape, (q.shape, k.shape, g.shape)
    assert v.shape[:2] == k.shape[:2] == beta.shape, (v.shape, k.shape, beta.shape)
    assert ssm_states.shape[1:] == (*k.shape[1:], v.shape[2]), ssm_states.shape


def _run(given: DeltaInputs, states: Tensor, runs: Tensor, y: Tensor) -> None:
    run = delta_runs_triton if y.is_cuda else channel_delta_runs_reference
    run(given, states, runs, y)
