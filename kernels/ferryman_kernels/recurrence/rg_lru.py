"""The scan of an RG-LRU, a gated linear recurrence (De et al. 2024, Griffin), token by token.

    log a = rate · sigmoid(r),   rate = -8 · softplus(Λ)                              [dim]
    state ← a·state + √(1 − a²) · sigmoid(i) · x,   y = state                         [dim]

At position 0 there is no state before the token: a is 0, and the factor of its input 1. Each
channel is on its own, so a token's numbers do not depend on where its span starts.

1 − a² is 1 − exp(−u) with u = −2·log a. Where u is small, the difference of two numbers near one
would keep few digits, so it is the sum u − u²/2! + u³/3! − …, as long as float64 needs.

One op serves prefill and decode; its runs are those of `selective_scan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, aligned, cdiv, next_power_of_two, tl
from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    as_array,
    as_flat,
    exp,
    part,
    prange,
)
from ferryman_kernels.cpu._vectors import fused
from ferryman_kernels.ragged import SlotAt, Spans, check_rows, result_for
from ferryman_kernels.recurrence.selective_scan import (
    form_of_runs,
    run_at,
    runs_of_spans,
    runs_of_tokens,
)

BLOCK_DIM = 256
"""Channels that one program, or one iteration of the shared loop, computes."""

NUM_TERMS = 14
"""Terms of the sum: with u below a half the next one is smaller than float64 can tell."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""x, i, r [tokens, dim], rates [dim], positions [tokens], as `rg_lru_scan` takes them.

The functions below take `runs` [runs, 5] too: first token, tokens, slot that is read, slot that is
written, slot of the copy. A negative slot reads as cleared and is not written. They write `y`
[tokens, dim], which has the dtype of the states.
"""


def rg_lru_runs_reference(inputs: Inputs, states: Tensor, runs: Tensor, y: Tensor) -> None:
    x, enter, recur, rates = (tensor.to(states.dtype) for tensor in inputs[:4])
    log_decay = rates * recur.sigmoid()
    begins = (inputs[4] == 0)[:, None]
    decay = log_decay.exp().masked_fill(begins, 0)
    factor = (-torch.expm1(2 * log_decay)).sqrt().masked_fill(begins, 1)
    fed = factor * enter.sigmoid() * x
    for first, count, src, dst, copy in runs.tolist():
        state = states[src].clone() if src >= 0 else torch.zeros_like(states[0])
        for token in range(first, first + count):
            state = decay[token] * state + fed[token]
            y[token] = state
        for slot in (dst, copy):
            if slot >= 0:
                states[slot] = state


@part
def _one_minus_exp(u: Any, number: Any) -> Any:
    """1 − exp(−u) for u ≥ 0."""
    # From the last term on: each is the one before it · (−u / its number).
    total = number(1)
    for term in range(NUM_TERMS, 1, -1):
        total = fused(-u / number(term), total, number(1))
    return u * total if u < number(0.5) else number(1) - exp(-u)


def _scan(
    states: Any,
    stride_slot: int,
    x: Any,
    enter: Any,
    recur: Any,
    rates: Any,
    positions: Any,
    runs: Any,
    block_dim: int,
    y: Any,
) -> None:
    """Each job has the states of some channels of one run at hand for all of its tokens."""
    dim, number = len(rates), states.dtype.type
    num_blocks, unit = -(-dim // block_dim), number(1)
    for job in prange(len(runs) * num_blocks):
        first, count, src, dst, copy = runs[job // num_blocks]
        low = job % num_blocks * block_dim
        high = min(low + block_dim, dim)
        held = np.zeros(high - low, states.dtype)
        if src >= 0:
            for i in range(high - low):
                held[i] = states[src * stride_slot + low + i]
        for token in range(first, first + count):
            begins = positions[token] == 0
            # Channels stay apart, so the compiler makes vectors of them without another order.
            for i in range(high - low):
                c = low + i
                log_decay = rates[c] / (unit + exp(-recur[token, c]))
                fed = x[token, c] / (unit + exp(-enter[token, c]))
                factor = np.sqrt(_one_minus_exp(number(-2) * log_decay, number))
                later = fused(exp(log_decay), held[i], factor * fed)
                held[i] = fed if begins else later
                y[token, c] = held[i]
        for slot in (dst, copy):
            if slot >= 0:
                for i in range(high - low):
                    states[slot * stride_slot + low + i] = held[i]


_scan_loop = Loop(_scan, STRICT)


def rg_lru_runs_compiled(inputs: Inputs, states: Tensor, runs: Tensor, y: Tensor) -> None:
    assert states[0].is_contiguous(), states.stride()
    numbers = [tensor.to(states.dtype).contiguous().numpy() for tensor in inputs[:4]]
    _scan_loop(
        16 * y.numel(),
        as_flat(states), states.stride(0), *numbers, inputs[4].numpy(), runs.numpy(), BLOCK_DIM,
        as_array(y),
    )  # fmt: skip


@Kernel
def _rg_lru_runs_kernel(
    states_ptr: tl.tensor,
    x_ptr: tl.tensor,
    enter_ptr: tl.tensor,
    recur_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    runs_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_slot: int,
    stride_x_token: int,
    stride_enter_token: int,
    stride_recur_token: int,
    dim: int,
    BLOCK_DIM: tl.constexpr,
    NUM_TERMS: tl.constexpr,
) -> None:
    """Some channels of one run; `runs` rows: first token, tokens, read, written and copied slot."""
    token, count, src, dst, copy = run_at(runs_ptr, tl.program_id(0))
    wide = states_ptr.dtype.element_ty
    offs_dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask = offs_dim < dim
    held = offs_dim < tl.where(src >= 0, dim, 0)
    state = tl.load(states_ptr + src * stride_slot + offs_dim, mask=held, other=0.0)
    rates = tl.load(rates_ptr + offs_dim, mask=mask, other=0.0).to(wide)
    end = token + count
    while token < end:
        x = tl.load(x_ptr + token * stride_x_token + offs_dim, mask=mask, other=0.0).to(wide)
        enter_at = enter_ptr + token * stride_enter_token + offs_dim
        recur_at = recur_ptr + token * stride_recur_token + offs_dim
        enter = tl.load(enter_at, mask=mask, other=0.0).to(wide)
        recur = tl.load(recur_at, mask=mask, other=0.0).to(wide)
        begins = tl.load(positions_ptr + token) == 0
        log_decay = rates / (1 + tl.exp(-recur))
        u = -2 * log_decay
        total = tl.full((BLOCK_DIM,), 1, wide)
        # The sum of the series from its last term on.
        for back in tl.static_range(0, NUM_TERMS - 1):
            total = 1 - u / (NUM_TERMS - back) * total
        rest = tl.where(u < 0.5, u * total, 1 - tl.exp(-u))
        fed = x / (1 + tl.exp(-enter))
        state = tl.where(begins, fed, tl.exp(log_decay) * state + tl.sqrt(rest) * fed)
        tl.store(y_ptr + token * dim + offs_dim, state.to(y_ptr.dtype.element_ty), mask=mask)
        token += 1
    kept = offs_dim < tl.where(dst >= 0, dim, 0)
    copied = offs_dim < tl.where(copy >= 0, dim, 0)
    tl.store(states_ptr + dst * stride_slot + offs_dim, state, mask=kept)
    tl.store(states_ptr + copy * stride_slot + offs_dim, state, mask=copied)


def rg_lru_runs_triton(inputs: Inputs, states: Tensor, runs: Tensor, y: Tensor) -> None:
    x, enter, recur, rates, positions = map(aligned, inputs)
    dim = len(rates)
    assert states.stride(1) == 1, states.stride()
    assert x.stride(1) == enter.stride(1) == recur.stride(1) == 1, (x.stride(), enter.stride())
    block = min(BLOCK_DIM, next_power_of_two(dim))
    _rg_lru_runs_kernel[len(runs), cdiv(dim, block)](
        states, x, enter, recur, rates, positions, runs, y,
        states.stride(0), x.stride(0), enter.stride(0), recur.stride(0), dim,
        BLOCK_DIM=block, NUM_TERMS=NUM_TERMS, num_warps=4,
    )  # fmt: skip


def rg_lru_scan(
    x: Tensor,
    enter: Tensor,
    recur: Tensor,
    rates: Tensor,
    positions: Tensor,
    states: Tensor,
    spans: Spans,
    slots: Tensor,
    snapshots: Sequence[SlotAt] = (),
) -> Tensor:
    """Scans each request's part of `x` [tokens, dim] from its slot's state.

    `enter` (i) and `recur` (r) [tokens, dim] are gates before their sigmoid; `rates` [dim], at most
    0; `positions` [tokens], int64. y has the dtype of the states, because a gate follows before it
    is rounded. `states` is a strided view [slots, dim], advanced in place at `slots` [requests]. A
    snapshot's position lies in (start, end]; no two of a request are at the same one.
    """
    tokens = len(x)
    # Prefill and decode call one loop: a token has one result.
    _check(x, enter, recur, rates, positions, states)
    check_rows(spans, slots, tokens, snapshots)
    run, y = _backend(x, states), result_for(spans, x, states.dtype)
    for runs in runs_of_spans(spans, slots, snapshots):
        run((x, enter, recur, rates, positions), states, runs, y)
    return y


def rg_lru_decode(
    states: Tensor,
    x: Tensor,
    enter: Tensor,
    recur: Tensor,
    rates: Tensor,
    positions: Tensor,
    slots: Tensor,
    into: Tensor,
) -> Tensor:
    """One token of each request; states at `slots` [requests] advance into the slots `into`; y as
    above.

    A negative slot reads as cleared, and a negative target is not written. No request of a call may
    read a slot that another one writes.
    """
    _check(x, enter, recur, rates, positions, states)
    assert slots.shape == into.shape == (len(x),), (slots.shape, into.shape, x.shape)
    run, y = _backend(x, states), x.new_empty(x.shape, dtype=states.dtype)
    run((x, enter, recur, rates, positions), states, runs_of_tokens(slots, into), y)
    return y


def _check(
    x: Tensor, enter: Tensor, recur: Tensor, rates: Tensor, positions: Tensor, states: Tensor
) -> None:
    assert x.shape == enter.shape == recur.shape, (x.shape, enter.shape, recur.shape)
    assert rates.shape == states.shape[1:] == x.shape[1:], (rates.shape, states.shape, x.shape)
    assert positions.shape == x.shape[:1], (positions.shape, x.shape)


def _backend(x: Tensor, states: Tensor) -> Callable[[Inputs, Tensor, Tensor, Tensor], None]:
    forms = rg_lru_runs_triton, rg_lru_runs_compiled, rg_lru_runs_reference
    return form_of_runs(forms, x, states)
