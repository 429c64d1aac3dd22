"""Selective scan of a Mamba-1 layer (Gu & Dao 2023), token by token.

    state ← exp(dt ⊗ 1 · A)·state + (dt·x) ⊗ B                  [inner_dim, ssm_state]
    y     = state·C + D·x                                       [inner_dim]

Each channel has its own time step and its own decay of every state, so there is no product over
blocks as Mamba-2 has. A token's numbers do not depend on where its span starts, whatever the grid.

One op serves prefill and decode. A *run* is some consecutive tokens of one request, from the state
in one slot to that in another, with a copy of the last state in a third one (a snapshot).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, KernelPart, aligned, cdiv, next_power_of_two, tl
from ferryman_kernels.cpu._compiled import STRICT, Loop, as_array, as_flat, prange, serves
from ferryman_kernels.cpu._row_tiles import padded
from ferryman_kernels.cpu._vectors import LANES, exps, fused, load, spread, store, total
from ferryman_kernels.ragged import (
    PaddedSpan,
    SlotAt,
    Span,
    Spans,
    check_rows,
    first_tokens,
    on_device,
    result_for,
)

BLOCK_DIM = 32
"""Channels that one program, or one iteration of the shared loop, computes."""

Form = TypeVar("Form", bound=Callable[..., None])

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""x, dt, A, B, C, D, as `selective_scan` takes them.

The functions below take `runs` [runs, 5] too: first token, tokens, slot that is read, slot that is
written, slot of the copy. A negative slot reads as cleared and is not written. They write `y`
[tokens, inner_dim], which has the dtype of the states.
"""

Run = tuple[int, int, int, int]
"""(first token, tokens, index of the request, slot of the copy)."""


def selective_runs_reference(given: Inputs, states: Tensor, runs: Tensor, y: Tensor) -> None:
    x, dt, A, B, C, D = (tensor.to(states.dtype) for tensor in given)
    for first, count, src, dst, copy in runs.tolist():
        state = states[src].clone() if src >= 0 else torch.zeros_like(states[0])
        for token in range(first, first + count):
            fed = (dt[token] * x[token])[:, None] * B[token]
            state = (dt[token][:, None] * A).exp() * state + fed
            y[token] = (state * C[token]).sum(1) + D * x[token]
        for slot in (dst, copy):
            if slot >= 0:
                states[slot] = state


def _scan(
    states: Any,
    stride_slot: int,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    runs: Any,
    block_dim: int,
    y: Any,
) -> None:
    """Each job has the states of some channels of one run at hand for all of its tokens."""
    (inner_dim, state_dim), dtype = A.shape, states.dtype
    num_blocks = -(-inner_dim // block_dim)
    for job in prange(len(runs) * num_blocks):
        first, count, src, dst, copy = runs[job // num_blocks]
        low = job % num_blocks * block_dim
        high = min(low + block_dim, inner_dim)
        width = padded(state_dim, LANES)
        held, rates = np.zeros((high - low, width), dtype), np.zeros((high - low, width), dtype)
        b, c, zero = np.zeros(width, dtype), np.zeros(width, dtype), spread(dtype.type(0))
        for i in range(high - low):
            rates[i, :state_dim] = A[low + i]
        if src >= 0:
            old = src * stride_slot + low * state_dim
            for i in range(high - low):
                for n in range(state_dim):
                    held[i, n] = states[old + i * state_dim + n]
        for token in range(first, first + count):
            b[:state_dim], c[:state_dim] = B[token], C[token]
            for i in range(high - low):
                step, value = dt[token, low + i], x[token, low + i]
                steps, fed, sums = spread(step), spread(step * value), zero
                state, rate = held[i], rates[i]
                for n in range(0, width, LANES):
                    kept = fused(exps(fused(steps, load(rate, n), zero)), load(state, n), zero)
                    new = fused(fed, load(b, n), kept)
                    store(state, n, new)
                    sums = fused(new, load(c, n), sums)
                y[token, low + i] = total(sums) + D[low + i] * value
        for slot in (dst, copy):
            if slot >= 0:
                at = slot * stride_slot + low * state_dim
                for i in range(high - low):
                    for n in range(state_dim):
                        states[at + i * state_dim + n] = held[i, n]


_scan_loop = Loop(_scan, STRICT)


def selective_runs_compiled(given: Inputs, states: Tensor, runs: Tensor, y: Tensor) -> None:
    assert states[0].is_contiguous(), states.stride()
    arrays = [tensor.to(states.dtype).contiguous().numpy() for tensor in given]
    _scan_loop(
        y.numel() * states.shape[2],
        as_flat(states), states.stride(0), *arrays, runs.numpy(), BLOCK_DIM, as_array(y),
    )  # fmt: skip


@KernelPart
def run_at(runs_ptr: tl.tensor, number: tl.tensor) -> tl.tuple:
    """A run's first token and number of tokens, and the slots that are read, written and copied
    to."""
    run = runs_ptr + number * 5
    token, count = tl.load(run).to(tl.int64), tl.load(run + 1)
    src, dst = tl.load(run + 2).to(tl.int64), tl.load(run + 3).to(tl.int64)
    return token, count, src, dst, tl.load(run + 4).to(tl.int64)


@Kernel
def _selective_runs_kernel(
    states_ptr: tl.tensor,
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    runs_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_slot: int,
    stride_x_token: int,
    stride_dt_token: int,
    stride_b_token: int,
    stride_c_token: int,
    inner_dim: int,
    state_dim: int,
    BLOCK_DIM: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
) -> None:
    """Some channels of one run; `runs` rows: first token, tokens, read, written and copied slot."""
    token, count, src, dst, copy = run_at(runs_ptr, tl.program_id(0))
    wide = states_ptr.dtype.element_ty
    offs_dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    offs_state = tl.arange(0, BLOCK_STATE)
    mask_dim, mask_state = offs_dim < inner_dim, offs_state < state_dim
    mask = mask_dim[:, None] & mask_state[None, :]
    in_slot = offs_dim[:, None] * state_dim + offs_state[None, :]
    held = (offs_dim < tl.where(src >= 0, inner_dim, 0))[:, None] & mask_state[None, :]
    state = tl.load(states_ptr + src * stride_slot + in_slot, mask=held, other=0.0)
    a = tl.load(a_ptr + in_slot, mask=mask, other=0.0).to(wide)
    d = tl.load(d_ptr + offs_dim, mask=mask_dim, other=0.0).to(wide)
    end = token + count
    while token < end:
        x_at, dt_at = x_ptr + token * stride_x_token, dt_ptr + token * stride_dt_token
        b_at, c_at = b_ptr + token * stride_b_token, c_ptr + token * stride_c_token
        x = tl.load(x_at + offs_dim, mask=mask_dim, other=0.0).to(wide)
        dt = tl.load(dt_at + offs_dim, mask=mask_dim, other=0.0).to(wide)
        b = tl.load(b_at + offs_state, mask=mask_state, other=0.0).to(wide)
        c = tl.load(c_at + offs_state, mask=mask_state, other=0.0).to(wide)
        state = tl.exp(dt[:, None] * a) * state + (dt * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], axis=1) + d * x
        y_at = y_ptr + token * inner_dim + offs_dim
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask_dim)
        token += 1
    kept = (offs_dim < tl.where(dst >= 0, inner_dim, 0))[:, None] & mask_state[None, :]
    copied = (offs_dim < tl.where(copy >= 0, inner_dim, 0))[:, None] & mask_state[None, :]
    tl.store(states_ptr + dst * stride_slot + in_slot, state, mask=kept)
    tl.store(states_ptr + copy * stride_slot + in_slot, state, mask=copied)


def selective_runs_triton(given: Inputs, states: Tensor, runs: Tensor, y: Tensor) -> None:
    x, dt, A, B, C, D = map(aligned, given)
    inner_dim, state_dim = A.shape
    assert states.stride()[1:] == (state_dim, 1), states.stride()
    assert x.stride(1) == dt.stride(1) == 1, (x.stride(), dt.stride())
    assert B.stride(1) == C.stride(1) == 1, (B.stride(), C.stride())
    assert A.is_contiguous(), A.stride()
    block = min(BLOCK_DIM, next_power_of_two(inner_dim))
    _selective_runs_kernel[len(runs), cdiv(inner_dim, block)](
        states, x, dt, A, B, C, D, runs, y,
        states.stride(0), x.stride(0), dt.stride(0), B.stride(0), C.stride(0),
        inner_dim, state_dim,
        BLOCK_DIM=block, BLOCK_STATE=next_power_of_two(state_dim), num_warps=4,
    )  # fmt: skip


def rounds_of(spans: Sequence[Span], snapshots: Sequence[SlotAt]) -> Iterator[tuple[Run, ...]]:
    """The runs of a prefill: each request's span, cut where a snapshot is wanted.

    A round has at most one run of a request, because the next one reads the slot that it writes.
    """
    firsts = first_tokens(spans)
    cuts = [_cuts(i, span, snapshots) for i, span in enumerate(spans)]
    for number in range(max(map(len, cuts), default=0)):
        yield tuple(
            (firsts[i] + low - spans[i][0], high - low, i, copy)
            for i, parts in enumerate(cuts)
            for low, high, copy in parts[number : number + 1]
        )


def _cuts(index: int, span: Span, snapshots: Sequence[SlotAt]) -> list[tuple[int, int, int]]:
    """(start, end, slot of the snapshot at the end, or -1) of each part of a request's span."""
    start, end = span
    wanted = sorted((position, slot) for i, position, slot in snapshots if i == index)
    if not wanted or wanted[-1][0] < end:
        wanted.append((end, -1))
    lows = [start, *(position for position, _ in wanted[:-1])]
    return [(low, high, slot) for low, (high, slot) in zip(lows, wanted, strict=True)]


def runs_of_spans(spans: Spans, slots: Tensor, snapshots: Sequence[SlotAt]) -> Iterator[Tensor]:
    """The `rounds_of` a prefill on the device of `slots`, with the slots that runs read, write and
    copy to: [runs, 5]. A padded span brings its own."""
    if isinstance(spans, PaddedSpan):
        yield from torch.split(spans.runs[:, :5], 1)
        return
    for rows in rounds_of(spans, snapshots):
        first, count, request, copy = on_device(rows, slots.device).unbind(1)
        slot = slots[request]
        yield torch.stack((first, count, slot, slot, copy), dim=1)


def runs_of_tokens(slots: Tensor, into: Tensor) -> Tensor:
    """The runs [requests, 5] of one token of each request."""
    tokens = torch.arange(len(slots), device=slots.device)
    ones, none = torch.ones_like(tokens), torch.full_like(tokens, -1)
    return torch.stack((tokens, ones, slots, into, none), dim=1)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    spans: Spans,
    slots: Tensor,
    snapshots: Sequence[SlotAt] = (),
) -> Tensor:
    """Scans each request's part of `x` and `dt` [tokens, inner_dim] from its slot's state.

    y has the dtype of the states, because a gate follows before it is rounded.
    `A` [inner_dim, ssm_state], negative; `B` and `C` [tokens, ssm_state]; `ssm_states` is a strided
    view [slots, inner_dim, ssm_state], advanced in place at `slots` [requests]. A snapshot's
    position lies in (start, end]; no two of a request are at the same one.
    """
    tokens = len(x)
    _check(x, dt, A, B, C, D, ssm_states)
    check_rows(spans, slots, tokens, snapshots)
    run, y = _backend(x, ssm_states), result_for(spans, x, ssm_states.dtype)
    for runs in runs_of_spans(spans, slots, snapshots):
        run((x, dt, A, B, C, D), ssm_states, runs, y)
    return y


def selective_scan_decode(
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
    """One token of each request; states at `slots` [requests] advance into the slots `into`; y as
    above.

    A negative slot reads as cleared, and a negative target is not written. No request of a call may
    read a slot that another one writes.
    """
    _check(x, dt, A, B, C, D, ssm_states)
    assert slots.shape == into.shape == (len(x),), (slots.shape, into.shape, x.shape)
    run, y = _backend(x, ssm_states), x.new_empty(x.shape, dtype=ssm_states.dtype)
    run((x, dt, A, B, C, D), ssm_states, runs_of_tokens(slots, into), y)
    return y


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ssm_states: Tensor
) -> None:
    tokens, inner_dim = x.shape
    assert dt.shape == x.shape, (dt.shape, x.shape)
    assert B.shape == C.shape == (tokens, A.shape[1]), (B.shape, C.shape, A.shape)
    assert A.shape == ssm_states.shape[1:], (A.shape, ssm_states.shape)
    assert D.shape == (inner_dim,), D.shape


def _backend(x: Tensor, states: Tensor) -> Callable[[Inputs, Tensor, Tensor, Tensor], None]:
    forms = selective_runs_triton, selective_runs_compiled, selective_runs_reference
    return form_of_runs(forms, x, states)


def form_of_runs(forms: tuple[Form, Form, Form], x: Tensor, states: Tensor) -> Form:
    """The form of a scan of runs that serves x and the states: of those for a card, as a loop of
    the CPU, and in torch."""
    triton, compiled, reference = forms
    if x.is_cuda:
        return triton
    is_wide = states.dtype in (torch.float32, torch.float64)
    return compiled if is_wide and serves(x, states) else reference
