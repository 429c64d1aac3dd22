"""Chunked gated delta rule (Yang, Kautz & Hatamizadeh 2024, Gated DeltaNet) on an absolute grid.

    state[t] = exp(g[t])·state[t-1] + k[t] ⊗ β[t]·(v[t] - k[t]·exp(g[t])·state[t-1])
    y[t]     = q[t]·state[t]                                    [tokens, v_heads, v_dim]

Blocks of `chunk_len` positions, counted from position 0 of each request, are computed at once. With
L[t] = Σ g from the block's first token to t, every decay is the exp of a number ≤ 0, and fed[t],
the summand of token t, solves a triangular system:

    fed[t] = β[t]·(v[t] - exp(L[t])·k[t]·entering - Σ_{s < t} exp(L[t] - L[s])·(k[t]·k[s])·fed[s])
    y[t]   = exp(L[t])·q[t]·entering + Σ_{s ≤ t} exp(L[t] - L[s])·(q[t]·k[s])·fed[s]
    left   = exp(L[end])·entering + Σ_s exp(L[end] - L[s])·k[s] ⊗ fed[s]

The system is solved by substitution, because a series of its powers has terms as large as binomials
where keys repeat. A block that a span cuts is padded in place (`chunk_grid`) with g = β = 0, which
neither decays nor feeds. So a run that resumes at the end of a block computes exactly the numbers
of a cold run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman_kernels.ragged import SlotAt, Span
from ferryman_kernels.recurrence._delta_chunk_scan_triton import (
    MAX_CHUNK_LEN,
    delta_chunk_scan_triton,
)
from ferryman_kernels.recurrence.chunk_grid import (
    Grid,
    check_spans,
    decay_between,
    in_blocks,
    lay_grid,
)
from ferryman_kernels.recurrence.loops._delta_compiled import delta_scan_compiled, has_delta_loop
from ferryman_kernels.recurrence.loops.runs import prefill_runs


@dataclass(frozen=True, slots=True)
class _Blocks:
    """All blocks of a batch. The data of a key head is repeated for each of its v_heads.

    `keys`, `queries` [blocks, v_heads, chunk, k_dim]; `values` [blocks, v_heads, chunk, v_dim];
    `beta`, `decay` (since the start of the block), `to_end` [blocks, v_heads, chunk, 1]; `system`
    and `scores` [blocks, v_heads, chunk, chunk].
    """

    keys: Tensor
    queries: Tensor
    values: Tensor
    beta: Tensor
    decay: Tensor
    to_end: Tensor
    system: Tensor
    scores: Tensor


def delta_chunk_scan_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_states: Tensor,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    chunk_len: int,
) -> Tensor:
    grid = lay_grid(spans, snapshots, chunk_len)
    blocks = _prepare(q, k, v, g, beta, grid, ssm_states.dtype)
    y = _run_blocks(blocks, ssm_states, slots, grid, snapshots)
    return y.transpose(1, 2).flatten(0, 1)[grid.cells.to(y.device)].to(v.dtype)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, grid: Grid, wide: torch.dtype
) -> _Blocks:
    per_key = v.shape[1] // k.shape[1]
    keys, queries, values = (_by_head(in_blocks(rows.to(wide), grid)) for rows in (k, q, v))
    rates = _by_head(in_blocks(beta.to(wide)[..., None], grid))
    # Sums in float64: a difference of two long float32 sums would lose the small steps in it.
    log_decay = in_blocks(g.double(), grid).cumsum(1).transpose(1, 2).contiguous()
    between = decay_between(log_decay, wide)
    system = between * (keys @ keys.mT).repeat_interleave(per_key, 1)
    return _Blocks(
        keys=keys.repeat_interleave(per_key, 1),
        queries=queries.repeat_interleave(per_key, 1),
        values=values,
        beta=rates,
        decay=log_decay.exp().to(wide)[..., None],
        to_end=(log_decay[..., -1:] - log_decay).exp().to(wide)[..., None],
        system=system.mul_(rates),
        scores=between.mul_((queries @ keys.mT).repeat_interleave(per_key, 1)),
    )


def _by_head(rows: Tensor) -> Tensor:
    """[blocks, chunk, heads, dim] as [blocks, heads, chunk, dim], contiguous: the bits of a product
    may depend on its strides, and must not depend on the number of blocks."""
    return rows.transpose(1, 2).contiguous()


def _run_blocks(
    blocks: _Blocks, ssm_states: Tensor, slots: Tensor, grid: Grid, snapshots: Sequence[SlotAt]
) -> Tensor:
    """Carries each request's state over its blocks; returns y [blocks, v_heads, chunk, v_dim].

    Writes the states at the ends and at the snapshots' positions to their slots.
    """
    wanted = grid.wanted(slots, snapshots)
    y = torch.empty_like(blocks.values)
    for index, slot in enumerate(slots.tolist()):
        state = ssm_states[slot].clone()
        for block in range(grid.first_blocks[index], grid.first_blocks[index + 1]):
            y[block], state = _advance(blocks, block, state)
            for dst in wanted.get(block, ()):
                ssm_states[dst] = state
    return y


def _advance(blocks: _Blocks, block: int, entering: Tensor) -> tuple[Tensor, Tensor]:
    """y [v_heads, chunk, v_dim] of one block, and the state after it."""
    keys, decay = blocks.keys[block], blocks.decay[block]
    unfed = blocks.values[block] - decay * (keys @ entering)
    fed = torch.linalg.solve_triangular(
        blocks.system[block], unfed * blocks.beta[block], upper=False, unitriangular=True
    )
    y = torch.baddbmm(decay * (blocks.queries[block] @ entering), blocks.scores[block], fed)
    left = (keys * blocks.to_end[block]).mT.contiguous() @ fed
    return y, torch.addcmul(left, entering, decay[:, -1:])


def delta_chunk_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_states: Tensor,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    chunk_len: int,
) -> Tensor:
    """Scans each request's part of the tokens from its slot's state; y has the shape and dtype of
    `v`.

    `q` and `k` [tokens, k_heads, k_dim], normed and scaled by the family; `v` [tokens, v_heads,
    v_dim], where head h reads key head h // (v_heads / k_heads); `g` (log decay, ≤ 0) and `beta`
    [tokens, v_heads]. `ssm_states` is a strided view [slots, v_heads, k_dim, v_dim], advanced in
    place at `slots` [requests]. A snapshot's position is in (start, end]; it cuts its block.
    """
    tokens, v_heads, v_dim = v.shape
    assert q.shape == k.shape, (q.shape, k.shape)
    assert len(k) == tokens, (k.shape, v.shape)
    assert v_heads % k.shape[1] == 0, (k.shape, v.shape)
    assert ssm_states.shape[1:] == (v_heads, k.shape[2], v_dim), ssm_states.shape
    assert g.shape == beta.shape == (tokens, v_heads), (g.shape, beta.shape)
    assert slots.shape == (len(spans),), (slots.shape, spans)
    check_spans(spans, snapshots, tokens)
    if has_delta_loop(v, g, beta, ssm_states):
        runs = prefill_runs(spans, slots, snapshots)
        return delta_scan_compiled(q, k, v, g[..., None], beta, ssm_states, runs)
    is_single = ssm_states.dtype is torch.float32
    on_card = ssm_states.is_cuda and chunk_len <= MAX_CHUNK_LEN and is_single
    run = delta_chunk_scan_triton if on_card else delta_chunk_scan_reference
    return run(q, k, v, g, beta, ssm_states, spans, slots, snapshots, chunk_len)
