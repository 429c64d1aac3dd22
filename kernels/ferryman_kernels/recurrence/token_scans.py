"""Recurrences token by token on a card, so that prefill has decode's bits.

Each op is one that exists, with the same arguments and results. There a card computes a prompt in
blocks and a decode step by the recurrence itself, which are two orders of sums; here both are runs
of one compiled kernel, which reads a state, takes a run's tokens in their order and writes it. A
CPU does so anyway, by the usual ops (decision 0137).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ferryman_kernels.ragged import PaddedSpan, SlotAt, Spans, check_rows, on_host, result_for
from ferryman_kernels.recurrence._ssd_runs_triton import ssd_runs_triton
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode
from ferryman_kernels.recurrence.channel_delta_scan import delta_runs_triton
from ferryman_kernels.recurrence.chunk_grid import check_spans
from ferryman_kernels.recurrence.delta_chunk_scan import delta_chunk_scan
from ferryman_kernels.recurrence.delta_step import DeltaWeights, delta_step
from ferryman_kernels.recurrence.mamba_step import StepWeights, mamba_step, state_inputs
from ferryman_kernels.recurrence.selective_scan import runs_of_spans, runs_of_tokens
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan
from ferryman_kernels.recurrence.ssd_decode import selective_state_update


def chunk_scan_by_token(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    spans: Spans,
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    chunk_len: int,
) -> Tensor:
    """`chunk_scan`; on a card `chunk_len` decides nothing."""
    if not ssm_states.is_cuda:
        inputs = x, dt, A, B, C, D, ssm_states
        return chunk_scan(*inputs, on_host(spans), slots, snapshots, chunk_len)
    _check_spans(spans, slots, snapshots, len(x))
    y = result_for(spans, x, x.dtype)
    for runs in runs_of_spans(spans, slots, snapshots):
        ssd_runs_triton((x, dt, A, B, C, D), ssm_states, runs, y)
    return y


def state_update_by_token(
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
    """`selective_state_update`."""
    if not ssm_states.is_cuda:
        return selective_state_update(ssm_states, x, dt, A, B, C, D, slots, into)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    ssd_runs_triton((x, dt, A, B, C, D), ssm_states, runs_of_tokens(slots, into), y)
    return y


def mamba_step_by_token(
    mixed: Tensor,
    dt: Tensor,
    weights: StepWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """`mamba_step`; on a card with the time steps that a prefill computes."""
    if not ssm_states.is_cuda:
        return mamba_step(mixed, dt, weights, conv_states, ssm_states, slots, into)
    taps = weights.conv_weight, weights.conv_bias
    convolved = causal_conv_decode(mixed, conv_states, *taps, slots, into)
    given = state_inputs(convolved, weights.time_steps(dt), weights, ssm_states)
    return state_update_by_token(*given, slots, into)


def delta_scan_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_states: Tensor,
    spans: Spans,
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    chunk_len: int,
) -> Tensor:
    """`delta_chunk_scan`; on a card `chunk_len` decides nothing."""
    if not ssm_states.is_cuda:
        inputs = q, k, v, g, beta, ssm_states
        return delta_chunk_scan(*inputs, on_host(spans), slots, snapshots, chunk_len)
    _check_spans(spans, slots, snapshots, len(v))
    y = result_for(spans, v, v.dtype)
    for runs in runs_of_spans(spans, slots, snapshots):
        delta_runs_triton((q, k, v, g, beta), ssm_states, runs, y)
    return y


def delta_step_by_token(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """`delta_step`."""
    if not ssm_states.is_cuda:
        return delta_step(mixed, a, b, weights, conv_states, ssm_states, slots, into)
    _, v_heads, _, v_dim = ssm_states.shape
    convolved = causal_conv_decode(mixed, conv_states, weights.conv_weight, None, slots, into)
    given = weights.inputs(convolved, a, b, v_heads, v_dim)
    y = torch.empty(len(mixed), v_heads, v_dim, dtype=mixed.dtype, device=mixed.device)
    delta_runs_triton(given, ssm_states, runs_of_tokens(slots, into), y)
    return y


def _check_spans(spans: Spans, slots: Tensor, snapshots: Sequence[SlotAt], tokens: int) -> None:
    check_rows(spans, slots, tokens)
    if not isinstance(spans, PaddedSpan):
        check_spans(spans, snapshots, tokens)
