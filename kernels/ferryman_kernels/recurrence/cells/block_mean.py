"""Means of the tokens of a block, channel by channel, token by token (DeepSeek-V4's compressors).

    z    = score + bias[position mod block_len]
    mean = Σ e^z·value / Σ e^z       over the tokens of a block so far, in each channel

With two series of channels blocks overlap: a block's mean is over its own tokens by the second
series, and over those of the block before by the first one. A state has for each series its
weighted sum, its sum of weights and the greatest z. Where a block begins, what the first series
gathered becomes the beginning of the second one's sums. At position 0 both are cleared.

A block's mean is that of its last token. One op serves prefill and decode; its runs are those of
`selective_scan`.
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
from ferryman_kernels.recurrence.cells._block_mean_triton import block_mean_runs_triton
from ferryman_kernels.recurrence.cells.block_mean_rows import NOTHING, BlockedRows
from ferryman_kernels.recurrence.selective_scan import form_of_runs, runs_of_spans, runs_of_tokens

BLOCK_DIM = 256
"""Channels that one iteration of the shared loop computes."""


def block_mean_runs_reference(rows: BlockedRows, states: Tensor, runs: Tensor, y: Tensor) -> None:
    """`runs` [runs, 5]: first token, tokens, slot that is read, slot that is written, slot of the
    copy. A negative slot reads as cleared and is not written. Writes `y` [tokens, dim]."""
    series, dim, block_len = states.shape[1] // 3, states.shape[2], len(rows.bias)
    positions = rows.positions.tolist()
    for first, count, src, dst, copy in runs.tolist():
        sums = states[src].clone() if src >= 0 else _cleared(states[0])
        sums = sums.view(series, 3, dim)
        for t in range(first, first + count):
            if positions[t] % block_len == 0:
                before = sums[:-1] if positions[t] else _cleared(sums[:-1])
                sums = torch.cat((_cleared(sums[:1]), before))
            values, scores = (x[t].to(states.dtype).view(series, dim) for x in rows[:2])
            z = scores + rows.bias[positions[t] % block_len].view(series, dim)
            num, den, peak = sums.unbind(1)
            later = torch.maximum(peak, z)
            old, new = (peak - later).exp(), (z - later).exp()
            sums = torch.stack((old * num + new * values, old * den + new, later), dim=1)
            y[t] = sums[-1, 0] / sums[-1, 1]
        for slot in (dst, copy):
            if slot >= 0:
                states[slot] = sums.flatten(0, 1)


def _cleared(sums: Tensor) -> Tensor:
    """Sums […, 3 · n, dim] of no token."""
    cleared = torch.zeros_like(sums)
    cleared.view(-1, 3, sums.shape[-1])[:, 2] = NOTHING
    return cleared


@part
def _folded(z: Any, value: Any, num: Any, den: Any, peak: Any) -> Any:
    """A channel's three numbers with one more token."""
    later = z if z > peak else peak
    old, new = exp(peak - later), exp(z - later)
    return fused(old, num, new * value), fused(old, den, new), later


@part
def _begin(num: Any, den: Any, peak: Any, dim: int, has_before: bool, nothing: Any) -> None:
    """The sums of a new block. Those of the first series, if there are two, become the last's."""
    width, zero = len(num) - dim, nothing - nothing
    for i in range(dim):
        # The last series is the only one, or stands behind the first.
        keeps = has_before and width > 0
        num[width + i] = num[i] if keeps else zero
        den[width + i] = den[i] if keeps else zero
        peak[width + i] = peak[i] if keeps else nothing
    for i in range(width):
        num[i], den[i], peak[i] = zero, zero, nothing


def _scan(
    states: Any, stride_slot: int, values: Any, scores: Any, positions: Any, bias: Any, runs: Any,
    dim: int, block_dim: int, y: Any,
) -> None:  # fmt: skip
    """Each job has the states of some channels of one run at hand for all of its tokens."""
    block_len, series = len(bias), bias.shape[1] // dim
    num_blocks, nothing = -(-dim // block_dim), states.dtype.type(NOTHING)
    for job in prange(len(runs) * num_blocks):
        first, count, src, dst, copy = runs[job // num_blocks]
        low = job % num_blocks * block_dim
        width = min(low + block_dim, dim) - low
        num, den = np.zeros(series * width, states.dtype), np.zeros(series * width, states.dtype)
        peak = np.full(series * width, nothing, states.dtype)
        for number in range(series if src >= 0 else 0):
            at, to = src * stride_slot + 3 * number * dim + low, number * width
            for i in range(width):
                num[to + i], den[to + i] = states[at + i], states[at + dim + i]
                peak[to + i] = states[at + 2 * dim + i]
        for token in range(first, first + count):
            place = positions[token] % block_len
            if place == 0:
                _begin(num, den, peak, width, positions[token] > 0, nothing)
            for number in range(series):
                at, to = number * dim + low, number * width
                # Channels stay apart, so the compiler makes vectors of them without another order.
                for i in range(width):
                    z = scores[token, at + i] + bias[place, at + i]
                    num[to + i], den[to + i], peak[to + i] = _folded(
                        z, values[token, at + i], num[to + i], den[to + i], peak[to + i]
                    )
            last = (series - 1) * width
            for i in range(width):
                y[token, low + i] = num[last + i] / den[last + i]
        for slot in (dst, copy):
            for number in range(series if slot >= 0 else 0):
                at, to = slot * stride_slot + 3 * number * dim + low, number * width
                for i in range(width):
                    states[at + i], states[at + dim + i] = num[to + i], den[to + i]
                    states[at + 2 * dim + i] = peak[to + i]


_scan_loop = Loop(_scan, STRICT)


def block_mean_runs_compiled(rows: BlockedRows, states: Tensor, runs: Tensor, y: Tensor) -> None:
    """Scans runs as the reference does."""
    assert states[0].is_contiguous(), states.stride()
    numbers = rows.values, rows.scores, rows.bias
    values, scores, bias = (number.to(states.dtype).contiguous().numpy() for number in numbers)
    _scan_loop(
        32 * values.size,
        as_flat(states), states.stride(0), values, scores, rows.positions.numpy(), bias,
        runs.numpy(), states.shape[2], BLOCK_DIM, as_array(y),
    )  # fmt: skip


def block_mean_scan(
    rows: BlockedRows,
    states: Tensor,
    spans: Spans,
    slots: Tensor,
    snapshots: Sequence[SlotAt] = (),
) -> Tensor:
    """The mean of each token's block so far, [tokens, dim], in the states' dtype, because a norm
    follows before it is rounded.

    `states` is a strided view [slots, 3 · series, dim] of the weighted sum, the sum of weights and
    the maximum of each series, advanced in place at `slots` [requests]. A snapshot's position lies
    in (start, end]; no two of a request are at the same one.
    """
    _check(rows, states)
    check_rows(spans, slots, len(rows.values), snapshots)
    run, y = _backend(rows, states), result_for(spans, _means_like(rows, states), states.dtype)
    for runs in runs_of_spans(spans, slots, snapshots):
        run(rows, states, runs, y)
    return y


def block_mean_decode(rows: BlockedRows, states: Tensor, slots: Tensor, into: Tensor) -> Tensor:
    """One token of each request; states at `slots` [requests] advance into the slots `into`; y as
    above.

    A negative slot reads as cleared, and a negative target is not written. No request of a call may
    read a slot that another one writes.
    """
    _check(rows, states)
    assert slots.shape == into.shape == rows.positions.shape, (slots.shape, into.shape)
    run, y = _backend(rows, states), torch.empty_like(_means_like(rows, states), dtype=states.dtype)
    run(rows, states, runs_of_tokens(slots, into), y)
    return y


def _means_like(rows: BlockedRows, states: Tensor) -> Tensor:
    """A tensor [tokens, dim] with the shape of the means."""
    return rows.values[:, : states.shape[2]]


def _check(rows: BlockedRows, states: Tensor) -> None:
    count, dim = states.shape[1:]
    assert count in (3, 6), states.shape
    shape = len(rows.positions), count // 3 * dim
    assert rows.values.shape == rows.scores.shape == shape, (rows.values.shape, shape)
    assert rows.bias.shape[1:] == shape[1:], (rows.bias.shape, shape)
    assert rows.bias.dtype == states.dtype, (rows.bias.dtype, states.dtype)


def _backend(
    rows: BlockedRows, states: Tensor
) -> Callable[[BlockedRows, Tensor, Tensor, Tensor], None]:
    forms = block_mean_runs_triton, block_mean_runs_compiled, block_mean_runs_reference
    return form_of_runs(forms, rows.values, states)
