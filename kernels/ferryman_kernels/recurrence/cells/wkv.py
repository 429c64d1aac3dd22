"""The weighted mean of RWKV-4 (Peng et al. 2023), token by token, each channel on its own.

    p       = max(peak, first + k)
    y       = (e^(peak − p)·num + e^(first + k − p)·v) / (e^(peak − p)·den + e^(first + k − p))
    peak    ← max(peak − decay, k);  primes are values before
    num     ← e^(peak' − decay − peak)·num + e^(k − peak)·v
    den     ← e^(peak' − decay − peak)·den + e^(k − peak)

`first` is a bonus of the token itself. At position 0 there is no state before the token: y and num
are v, den is 1, and the maximum is k. So a divisor is never less than 1.

One op serves prefill and decode; its runs are those of `selective_scan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from ferryman_kernels.recurrence.cells._wkv_triton import wkv_runs_triton
from ferryman_kernels.recurrence.cells.wkv_rows import NOTHING, WeightedRows
from ferryman_kernels.recurrence.selective_scan import form_of_runs, runs_of_spans, runs_of_tokens

BLOCK_DIM = 256
"""Channels that one iteration of the shared loop computes."""


def wkv_runs_reference(rows: WeightedRows, states: Tensor, runs: Tensor, y: Tensor) -> None:
    """`runs` [runs, 5]: first token, tokens, slot that is read, slot that is written, slot of the
    copy. A negative slot reads as cleared and is not written. Writes `y` [tokens, dim]."""
    numbers = rows.k, rows.v, rows.decay, rows.first
    k, v, decay, bonus = (number.to(states.dtype) for number in numbers)
    begins = (rows.positions == 0).tolist()
    for first, count, src, dst, copy in runs.tolist():
        num, den, peak = states[src].clone() if src >= 0 else _cleared(states)
        for t in range(first, first + count):
            if begins[t]:
                num, den, peak = _cleared(states)
            most = torch.maximum(peak, k[t] + bonus)
            old, new = (peak - most).exp(), (k[t] + bonus - most).exp()
            y[t] = (old * num + new * v[t]) / (old * den + new)
            later = torch.maximum(peak - decay, k[t])
            old, new = (peak - decay - later).exp(), (k[t] - later).exp()
            num, den, peak = old * num + new * v[t], old * den + new, later
        for slot in (dst, copy):
            if slot >= 0:
                states[slot] = torch.stack((num, den, peak))


def _cleared(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    zeros = torch.zeros_like(states[0, 0])
    return zeros, zeros, zeros + NOTHING


@part
def _advance(k: Any, v: Any, decay: Any, bonus: Any, num: Any, den: Any, peak: Any) -> Any:
    """y of a channel, and its three numbers after the token."""
    raised, lowered = k + bonus, peak - decay
    most = raised if raised > peak else peak
    later = k if k > lowered else lowered
    old, new = exp(peak - most), exp(raised - most)
    y = fused(old, num, new * v) / fused(old, den, new)
    old, new = exp(lowered - later), exp(k - later)
    return y, fused(old, num, new * v), fused(old, den, new), later


def _scan(
    states: Any, stride_slot: int, k: Any, v: Any, positions: Any, decay: Any, bonus: Any,
    runs: Any, block_dim: int, y: Any,
) -> None:  # fmt: skip
    """Each job has the states of some channels of one run at hand for all of its tokens."""
    dim, number = len(decay), states.dtype.type
    num_blocks, unit, nothing = -(-dim // block_dim), number(1), number(NOTHING)
    for job in prange(len(runs) * num_blocks):
        first, count, src, dst, copy = runs[job // num_blocks]
        low = job % num_blocks * block_dim
        width = min(low + block_dim, dim) - low
        num, den = np.zeros(width, states.dtype), np.zeros(width, states.dtype)
        peak = np.full(width, nothing, states.dtype)
        if src >= 0:
            at = src * stride_slot + low
            for i in range(width):
                num[i], den[i] = states[at + i], states[at + dim + i]
                peak[i] = states[at + 2 * dim + i]
        for token in range(first, first + count):
            begins = positions[token] == 0
            # Channels stay apart, so the compiler makes vectors of them without another order.
            for i in range(width):
                c = low + i
                key, value = k[token, c], v[token, c]
                answer, later_num, later_den, later = _advance(
                    key, value, decay[c], bonus[c], num[i], den[i], peak[i]
                )
                y[token, c] = value if begins else answer
                num[i] = value if begins else later_num
                den[i] = unit if begins else later_den
                peak[i] = key if begins else later
        for slot in (dst, copy):
            if slot >= 0:
                at = slot * stride_slot + low
                for i in range(width):
                    states[at + i], states[at + dim + i] = num[i], den[i]
                    states[at + 2 * dim + i] = peak[i]


_scan_loop = Loop(_scan, STRICT)


def wkv_runs_compiled(rows: WeightedRows, states: Tensor, runs: Tensor, y: Tensor) -> None:
    """Scans runs as the reference does."""
    assert states[0].is_contiguous(), states.stride()
    numbers = rows.k, rows.v, rows.decay, rows.first
    k, v, decay, bonus = (number.to(states.dtype).contiguous().numpy() for number in numbers)
    _scan_loop(
        32 * y.numel(),
        as_flat(states), states.stride(0), k, v, rows.positions.numpy(), decay, bonus,
        runs.numpy(), BLOCK_DIM, as_array(y),
    )  # fmt: skip


def wkv_scan(
    rows: WeightedRows,
    states: Tensor,
    spans: Spans,
    slots: Tensor,
    snapshots: Sequence[SlotAt] = (),
) -> Tensor:
    """Scans each request's tokens from its slot's state; y [tokens, dim] in the states' dtype,
    because a gate follows before it is rounded.

    `states` is a strided view [slots, 3, dim] of num, den and the maximum, advanced in place at
    `slots` [requests]. A snapshot's position lies in (start, end]; no two of a request are at the
    same one.
    """
    _check(rows, states)
    check_rows(spans, slots, len(rows.k), snapshots)
    run, y = _backend(rows, states), result_for(spans, rows.k, states.dtype)
    for runs in runs_of_spans(spans, slots, snapshots):
        run(rows, states, runs, y)
    return y


def wkv_decode(rows: WeightedRows, states: Tensor, slots: Tensor, into: Tensor) -> Tensor:
    """One token of each request; states at `slots` [requests] advance into the slots `into`; y as
    above.

    A negative slot reads as cleared, and a negative target is not written. No request of a call may
    read a slot that another one writes.
    """
    _check(rows, states)
    assert slots.shape == into.shape == (len(rows.k),), (slots.shape, into.shape, rows.k.shape)
    run, y = _backend(rows, states), rows.k.new_empty(rows.k.shape, dtype=states.dtype)
    run(rows, states, runs_of_tokens(slots, into), y)
    return y


def _check(rows: WeightedRows, states: Tensor) -> None:
    assert rows.k.shape == rows.v.shape, (rows.k.shape, rows.v.shape)
    assert states.shape[1:] == (3, rows.k.shape[1]), (states.shape, rows.k.shape)
    assert rows.decay.shape == rows.first.shape == rows.k.shape[1:], rows.decay.shape
    assert rows.positions.shape == rows.k.shape[:1], (rows.positions.shape, rows.k.shape)


def _backend(
    rows: WeightedRows, states: Tensor
) -> Callable[[WeightedRows, Tensor, Tensor, Tensor], None]:
    forms = wkv_runs_triton, wkv_runs_compiled, wkv_runs_reference
    return form_of_runs(forms, rows.k, states)
