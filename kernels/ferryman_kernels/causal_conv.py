"""Depthwise causal convolution with SiLU over ragged batches, its state kept in slots.

    y[t] = silu(bias + Σ_j weight[:, j] · x[t - width + 1 + j])         [tokens, conv_dim]

The state at position p is the last width - 1 inputs before p, the oldest first:
conv_states[slot] [conv_dim, width - 1]. A cleared slot stands for position 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.ragged import SlotAt, Span


def causal_conv_prefill_reference(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt],
) -> Tensor:
    before = conv_states.shape[2]
    lengths = [end - start for start, end in spans]
    firsts = list(accumulate(lengths, initial=0))
    states = conv_states[slots].transpose(1, 2)  # [requests, width - 1, conv_dim]
    parts = [
        part
        for index, length in enumerate(lengths)
        for part in (states[index], x[firsts[index] : firsts[index] + length])
    ]
    joined = torch.cat(parts)
    windows = joined.to(wide_dtype(x.dtype)).unfold(0, before + 1, 1)
    out = _activate(windows, weight, bias)
    y = torch.cat(
        [out[first + index * before :][:length] for index, (first, length) in _items(lengths)]
    )
    for index, position, slot in (*_ends(spans, slots), *snapshots):
        base = firsts[index] + index * before + position - spans[index][0]
        conv_states[slot] = joined[base : base + before].T
    return y.to(x.dtype)


def _items(lengths: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)))


def _ends(spans: Sequence[Span], slots: Tensor) -> list[SlotAt]:
    return [
        (i, end, slot) for i, ((_, end), slot) in enumerate(zip(spans, slots.tolist(), strict=True))
    ]


def _activate(windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(bias + Σ_j weight[:, j] · windows[..., j]) for windows [..., conv_dim, width]."""
    total = (windows * weight.to(windows.dtype)).sum(-1)
    return F.silu(total if bias is None else total + bias.to(total.dtype))


def causal_conv_decode_reference(
    x: Tensor, conv_states: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor
) -> Tensor:
    named = slots >= 0
    states = conv_states[slots.clamp(min=0)] * named[:, None, None]
    windows = torch.cat((states, x[:, :, None]), dim=2)  # [requests, conv_dim, width]
    conv_states[slots[named]] = windows[named][:, :, 1:]
    return _activate(windows.to(wide_dtype(x.dtype)), weight, bias).to(x.dtype)


def causal_conv_prefill(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt] = (),
) -> Tensor:
    """Convolve each request's part of `x` [tokens, conv_dim], going on from its slot's state.

    `conv_states` is a strided view [slots, conv_dim, width - 1], advanced in place at `slots`
    [requests]; `weight` [conv_dim, width]. A snapshot's position lies in (start, end].
    """
    tokens, conv_dim = x.shape
    assert conv_states.shape[1:] == (conv_dim, weight.shape[1] - 1), conv_states.shape
    assert weight.shape[0] == conv_dim
    assert bias is None or bias.shape == (conv_dim,)
    assert conv_states.dtype == x.dtype, (slots.shape, spans)
    assert slots.shape == (len(spans),), (slots.shape, spans)
    assert sum(end - start for start, end in spans) == tokens, (spans, tokens)
    assert all(spans[i][0] < p <= spans[i][1] for i, p, _ in snapshots), (spans, snapshots)
    return causal_conv_prefill_reference(x, conv_states, weight, bias, spans, slots, snapshots)


def causal_conv_decode(
    x: Tensor, conv_states: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor
) -> Tensor:
    """One token of each request: `x` [requests, conv_dim], states shifted in place at `slots`.

    A negative slot stands for no request: its state counts as cleared and is written nowhere.
    """
    requests, conv_dim = x.shape
    assert conv_states.shape[1:] == (conv_dim, weight.shape[1] - 1), conv_states.shape
    assert weight.shape[0] == conv_dim
    assert bias is None or bias.shape == (conv_dim,)
    assert conv_states.dtype == x.dtype, (x.dtype, slots.shape)
    assert slots.shape == (requests,), (x.dtype, slots.shape)
    return causal_conv_decode_reference(x, conv_states, weight, bias, slots)
