"""The causal convolution's loops for the CPU; formulas and names are those of `causal_conv`.

A sum begins with the bias and takes the taps in their order, in prefill as in decode, so a token
has the same bits in both. Tokens are rows and channels run along vectors. For a chunk the weights
are transposed: [width, conv_dim]; for one token that takes as long as the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    as_array,
    as_flat,
    narrow,
    part,
    prange,
    silu,
    wide,
)
from ferryman_kernels.cpu._vectors import fused
from ferryman_kernels.ragged import SlotAt, Span, first_tokens

BLOCK_TOKENS = 16
"""Tokens that one iteration of the shared loop computes."""


def _convolve(
    x: Any,
    stride_x: int,
    states: Any,
    stride_slot: int,
    weight: Any,
    bias: Any,
    slots: Any,
    tiles: Any,
    activates: bool,
    y: Any,
) -> None:
    """`tiles` rows: request, its first token, the tile's first token and its end.

    `x` is flat: in rows of a split product the compiler does not see that channels are adjacent,
    and the loop takes twice the time.
    """
    width, conv_dim = weight.shape
    for tile in prange(len(tiles)):
        total = np.empty(conv_dim, weight.dtype)
        first = tiles[tile, 1]
        slot = slots[tiles[tile, 0]]
        for token in range(tiles[tile, 2], tiles[tile, 3]):
            total[:] = bias
            for tap in range(width):
                since = token - first - (width - 1) + tap
                if since >= 0:
                    at = (first + since) * stride_x
                    row = x[at : at + conv_dim]
                    for c in range(conv_dim):
                        total[c] = fused(wide(row[c]), weight[tap, c], total[c])
                else:
                    at = slot * stride_slot + since + width - 1
                    for c in range(conv_dim):
                        total[c] = fused(
                            wide(states[at + c * (width - 1)]), weight[tap, c], total[c]
                        )
            out = y[token]
            for c in range(conv_dim):
                out[c] = narrow(silu(total[c]) if activates else total[c], out)


def _store_states(
    x: Any, states: Any, stride_slot: int, width: int, slots: Any, stores: Any
) -> None:
    """`stores` rows: request, its first token, tokens since, slot. The ends come last."""
    for store in range(len(stores)):
        request, first, length, dst = stores[store]
        src = slots[request]
        for j in range(width - 1):
            since = length - (width - 1) + j
            for c in range(x.shape[1]):
                old = src * stride_slot + c * (width - 1) + max(0, since + width - 1)
                new = x[first + since, c] if since >= 0 else states[old]
                states[dst * stride_slot + c * (width - 1) + j] = new


@part
def step_rounded(
    row: Any,
    states: Any,
    stride_slot: int,
    weight: Any,
    bias: Any,
    slot: int,
    target: int,
    out: Any,
) -> None:
    """silu of the sums of `step_row` to `out` [conv_dim], rounded to the dtype of `row`, as the
    convolution alone gives them."""
    total = step_row(row, states, stride_slot, weight, bias, slot, target)
    for c in range(out.shape[0]):
        out[c] = silu(total[c])
    for c in range(out.shape[0]):
        out[c] = wide(narrow(out[c], row))


@part
def step_row(
    row: Any, states: Any, stride_slot: int, weight: Any, bias: Any, slot: int, target: int
) -> Any:
    """The sums of one request's token, before the activation; its window slides by one.

    The inputs of a channel are adjacent in a state. So all windows slide when the whole state moves
    by one element; then the new token overwrites each channel's last element. `row` [conv_dim],
    `weight` [conv_dim, width] and an empty bias for none.
    """
    conv_dim, width = weight.shape
    before = width - 1
    total = np.zeros(conv_dim, weight.dtype)
    for c in range(bias.shape[0]):
        total[c] = bias[c]
    if slot >= 0:
        state = states[slot * stride_slot : slot * stride_slot + conv_dim * before]
        if before == 3:
            # Every Mamba has four taps. A stride that the compiler knows is twice as quick.
            for c in range(conv_dim):
                first = fused(wide(state[3 * c]), weight[c, 0], total[c])
                second = fused(wide(state[3 * c + 1]), weight[c, 1], first)
                total[c] = fused(wide(state[3 * c + 2]), weight[c, 2], second)
        else:
            for j in range(before):
                for c in range(conv_dim):
                    total[c] = fused(wide(state[c * before + j]), weight[c, j], total[c])
    for c in range(conv_dim):
        total[c] = fused(wide(row[c]), weight[c, before], total[c])
    if target >= 0:
        kept = states[target * stride_slot : target * stride_slot + conv_dim * before]
        if target == slot:
            for i in range(len(kept) - 1):
                kept[i] = kept[i + 1]
        else:
            old = slot * stride_slot
            for i in range(len(kept) - 1):
                kept[i] = states[old + i + 1] if slot >= 0 else 0
        if before == 3:
            for c in range(conv_dim):
                kept[3 * c + 2] = row[c]
        else:
            for c in range(conv_dim):
                kept[c * before + before - 1] = row[c]
    return total


def _step(
    x: Any,
    stride_x: int,
    states: Any,
    stride_slot: int,
    weight: Any,
    bias: Any,
    slots: Any,
    into: Any,
    activates: bool,
    y: Any,
) -> None:
    """One token of each request."""
    conv_dim = weight.shape[0]
    for request in prange(len(slots)):
        row, out = x[request * stride_x : request * stride_x + conv_dim], y[request]
        total = step_row(row, states, stride_slot, weight, bias, slots[request], into[request])
        if activates:
            for c in range(conv_dim):
                total[c] = silu(total[c])
        for c in range(conv_dim):
            out[c] = narrow(total[c], out)


_convolve_loop, _step_loop = Loop(_convolve, STRICT), Loop(_step, STRICT)
_store_loop = Loop(_store_states, STRICT)


def causal_conv_prefill_compiled(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    activates: bool = True,
) -> Tensor:
    taps, shift = _in_wide(x, weight, bias)
    y = torch.empty(x.shape, dtype=x.dtype)
    assert x.stride(1) == 1, x.stride()
    states, slot_at = as_flat(conv_states), slots.numpy()
    stride, firsts = conv_states.stride(0), first_tokens(spans)
    tiles = [
        (i, firsts[i], low, min(low + BLOCK_TOKENS, firsts[i + 1]))
        for i in range(len(spans))
        for low in range(firsts[i], firsts[i + 1], BLOCK_TOKENS)
    ]
    _convolve_loop(
        x.numel() * weight.shape[1],
        as_flat(x), x.stride(0), states, stride, taps, shift, slot_at, np.array(tiles),
        activates, as_array(y),
    )  # fmt: skip
    ends = [(i, end, slot) for i, ((_, end), slot) in enumerate(zip(spans, slot_at, strict=True))]
    stores = [(i, firsts[i], p - spans[i][0], slot) for i, p, slot in (*snapshots, *ends)]
    _store_loop.on_one_thread(
        as_array(x), states, stride, weight.shape[1], slot_at, np.array(stores)
    )
    return y


def causal_conv_decode_compiled(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    into: Tensor,
    activates: bool = True,
) -> Tensor:
    dtype = wide_dtype(x.dtype)
    shift = torch.empty(0, dtype=dtype) if bias is None else bias.to(dtype)
    taps = weight.to(dtype).contiguous().numpy()
    y = torch.empty(x.shape, dtype=x.dtype)
    _step_loop(
        x.numel() * weight.shape[1],
        as_flat(x), x.stride(0), as_flat(conv_states), conv_states.stride(0), taps, shift.numpy(),
        slots.numpy(), into.numpy(), activates, as_array(y),
    )  # fmt: skip
    return y


def _in_wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, Any]:
    """Weights [width, conv_dim] and bias [conv_dim] in the dtype of the sums."""
    dtype = wide_dtype(x.dtype)
    shift = torch.zeros(len(weight), dtype=dtype) if bias is None else bias.to(dtype)
    return weight.to(dtype).T.contiguous().numpy(), shift.contiguous().numpy()
