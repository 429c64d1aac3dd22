"""Chunked scan of a Mamba-2 layer: state space duality (Dao & Gu 2024) on an absolute grid.

    state[t] = exp(dt[t]·A)·state[t-1] + dt[t]·(x[t] ⊗ B[t])
    y[t]     = state[t]·C[t] + D·x[t]                       [tokens, ssm_heads, ssm_head_dim]

Blocks of `chunk_len` positions, counted from position 0 of each request, are computed at once. With
L[t] = Σ dt·A from the block's first token to t, every decay is the exp of a number ≤ 0:

    y[t] = Σ_{s ≤ t} exp(L[t] - L[s])·(C[t]·B[s])·dt[s]·x[s] + exp(L[t])·entering·C[t] + D·x[t]
    left = exp(L[end])·entering + Σ_s exp(L[end] - L[s])·dt[s]·x[s] ⊗ B[s]

A block that a span cuts is padded in place (`chunk_grid`) with dt = 0, which neither decays nor
feeds. So a run that resumes at the end of a block computes exactly the numbers of a cold run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ferryman_kernels.ragged import SlotAt, Span
from ferryman_kernels.recurrence._ssd_chunk_scan_triton import MAX_CHUNK_LEN, chunk_scan_triton
from ferryman_kernels.recurrence.chunk_grid import (
    Grid,
    check_spans,
    decay_between,
    in_blocks,
    lay_grid,
)
from ferryman_kernels.recurrence.loops._ssd_compiled import has_ssd_loop, ssd_scan_compiled
from ferryman_kernels.recurrence.loops.runs import prefill_runs


def chunk_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    chunk_len: int,
) -> Tensor:
    grid, wide = lay_grid(spans, snapshots, chunk_len), ssm_states.dtype
    wide_x, wide_dt = x.to(wide), dt.to(wide)
    fed = in_blocks(wide_x * wide_dt[..., None], grid)  # [blocks, chunk, ssm_heads, ssm_head_dim]
    keys = in_blocks(B.to(wide), grid).transpose(1, 2).contiguous()
    queries = in_blocks(C.to(wide), grid).transpose(1, 2).contiguous()
    # Sums in float64: a difference of two long float32 sums would lose the small steps in it.
    log_decay = in_blocks(dt.double() * A.double(), grid).cumsum(1)  # [blocks, chunk, ssm_heads]

    left = _state_fed_by(fed, keys, log_decay)
    entering = _run_states(left, log_decay[:, -1].exp(), ssm_states, slots, grid, snapshots)
    y = _from_before(entering, queries, log_decay)
    y += _within_blocks(fed, keys, queries, log_decay).transpose(1, 2)
    return (y.flatten(0, 1)[grid.cells] + D.to(wide)[:, None] * wide_x).to(x.dtype)


# Below, keys and queries are [blocks, ssm_groups, chunk, ssm_state] and contiguous: the bits of a
# product may depend on its strides, and must not depend on the number of blocks. Heads of a group
# are side by side in one product, so that no key is copied for each of them.


def _state_fed_by(fed: Tensor, keys: Tensor, log_decay: Tensor) -> Tensor:
    """The summand of each block to the state: [blocks, ssm_heads, ssm_head_dim, ssm_state]."""
    blocks, chunk_len, ssm_heads, ssm_head_dim = fed.shape
    to_end = (log_decay[:, -1:] - log_decay).exp().to(fed.dtype)
    columns = (fed * to_end[..., None]).view(blocks, chunk_len, keys.shape[1], -1)
    left = columns.permute(0, 2, 3, 1).contiguous() @ keys
    return left.view(blocks, ssm_heads, ssm_head_dim, -1)


def _within_blocks(fed: Tensor, keys: Tensor, queries: Tensor, log_decay: Tensor) -> Tensor:
    """The part of y from tokens of the same block: [blocks, ssm_heads, chunk, ssm_head_dim]."""
    decayed, seen = log_decay.transpose(1, 2).contiguous(), queries @ keys.mT
    scores = decay_between(decayed, seen.dtype)
    scores.view(len(seen), seen.shape[1], -1, *seen.shape[2:]).mul_(seen[:, :, None])
    return scores @ fed.transpose(1, 2).contiguous()


def _from_before(entering: Tensor, queries: Tensor, log_decay: Tensor) -> Tensor:
    """The part of y from the state before each block: [blocks, chunk, ssm_heads, head_dim]."""
    blocks, ssm_heads, ssm_head_dim, ssm_state = entering.shape
    columns = entering.view(blocks, queries.shape[1], -1, ssm_state)
    seen = (queries @ columns.mT).transpose(1, 2).contiguous()
    seen = seen.view(blocks, -1, ssm_heads, ssm_head_dim)
    return seen.mul_(log_decay.exp().to(seen.dtype)[..., None])


def _run_states(
    left: Tensor,
    decay: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    grid: Grid,
    snapshots: Sequence[SlotAt],
) -> Tensor:
    """Carries each request's state over its blocks; returns the state that enters each block.

    Overwrites `left` [blocks, …] with it, and writes the states at the ends and at the snapshots'
    positions to their slots.
    """
    decay = decay.to(left.dtype)[..., None, None]
    wanted = grid.wanted(slots, snapshots)
    for index, slot in enumerate(slots.tolist()):
        state = ssm_states[slot].clone()
        for block in range(grid.first_blocks[index], grid.first_blocks[index + 1]):
            fed = left[block].clone()
            left[block] = state
            state = torch.addcmul(fed, state, decay[block])
            for dst in wanted.get(block, ()):
                ssm_states[dst] = state
    return left


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    chunk_len: int,
) -> Tensor:
    """Scans each request's part of `x` [tokens, ssm_heads, ssm_head_dim] from its slot's state.

    `dt` [tokens, ssm_heads]; `B` and `C` [tokens, ssm_groups, ssm_state]; `ssm_states` is a strided
    view [slots, ssm_heads, ssm_head_dim, ssm_state], advanced in place at `slots` [requests]. A
    snapshot's position is in (start, end]; it cuts its block.
    """
    tokens, ssm_heads, ssm_head_dim = x.shape
    assert ssm_states.shape[1:] == (ssm_heads, ssm_head_dim, B.shape[2]), ssm_states.shape
    assert dt.shape == (tokens, ssm_heads), dt.shape
    assert A.shape == D.shape == (ssm_heads,), dt.shape
    assert B.shape == C.shape, (B.shape, C.shape)
    assert ssm_heads % B.shape[1] == 0, (B.shape, C.shape)
    assert slots.shape == (len(spans),), (slots.shape, spans)
    check_spans(spans, snapshots, tokens)
    given = x, dt, A, B, C, D, ssm_states
    if has_ssd_loop(*given):
        return ssd_scan_compiled(*given, prefill_runs(spans, slots, snapshots))
    on_card = ssm_states.is_cuda and chunk_len <= MAX_CHUNK_LEN
    is_single = all(each.dtype is torch.float32 for each in (dt, A, D, ssm_states))
    run = chunk_scan_triton if on_card and is_single else chunk_scan_reference
    return run(*given, spans, slots, snapshots, chunk_len)
