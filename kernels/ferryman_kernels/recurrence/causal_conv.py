"""Depthwise causal convolution over ragged batches, with its state in slots.

    y[t] = silu(bias + Σ_j weight[:, j] · x[t - width + 1 + j])         [tokens, conv_dim]

Without `activates` there is no SiLU (LFM2's short convolutions).

The state at position p is the last width - 1 inputs before p, the oldest first: conv_states[slot]
[conv_dim, width - 1]. A cleared slot stands for position 0. Prefill and decode add the bias first,
then taps in rising order, each rounded together with its product: they have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, cdiv, tl, wide_type
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.ragged import (
    PaddedSpan,
    SlotAt,
    Span,
    Spans,
    check_rows,
    first_tokens,
    on_device,
    on_host,
    result_for,
)
from ferryman_kernels.recurrence.loops._causal_conv_compiled import (
    causal_conv_decode_compiled,
    causal_conv_prefill_compiled,
)

BLOCK_TOKENS = 16
BLOCK_DIM = 128


def causal_conv_prefill_reference(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    activates: bool = True,
) -> Tensor:
    before = conv_states.shape[2]
    lengths = [end - start for start, end in spans]
    firsts = first_tokens(spans)
    states = conv_states[slots].transpose(1, 2)  # [requests, width - 1, conv_dim]
    parts = [
        part
        for index, length in enumerate(lengths)
        for part in (states[index], x[firsts[index] : firsts[index] + length])
    ]
    joined = torch.cat(parts)
    windows = joined.to(wide_dtype(x.dtype)).unfold(0, before + 1, 1)
    out = _convolve(windows, weight, bias, activates)
    y = torch.cat([out[firsts[i] + i * before :][:length] for i, length in enumerate(lengths)])
    for index, position, slot in (*_ends(spans, slots), *snapshots):
        base = firsts[index] + index * before + position - spans[index][0]
        conv_states[slot] = joined[base : base + before].T
    return y.to(x.dtype)


def _ends(spans: Sequence[Span], slots: Tensor) -> list[SlotAt]:
    return [
        (i, end, slot) for i, ((_, end), slot) in enumerate(zip(spans, slots.tolist(), strict=True))
    ]


def _convolve(windows: Tensor, weight: Tensor, bias: Tensor | None, activates: bool) -> Tensor:
    """silu(bias + Σ_j weight[:, j] · windows[..., j]) for windows [..., conv_dim, width]."""
    weight = weight.to(windows.dtype)
    # One tap after the other: the bits of a sum must not depend on the length of the chunk.
    total = windows[..., 0] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        total += windows[..., tap] * weight[:, tap]
    total = total if bias is None else total + bias.to(total.dtype)
    return F.silu(total) if activates else total


def causal_conv_decode_reference(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    into: Tensor,
    activates: bool = True,
) -> Tensor:
    named, kept = slots >= 0, into >= 0
    # No product with zero: what another request has in the first slot may be no number.
    states = conv_states[slots.clamp(min=0)].masked_fill(~named[:, None, None], 0)
    windows = torch.cat((states, x[:, :, None]), dim=2)  # [requests, conv_dim, width]
    conv_states[into[kept]] = windows[kept][:, :, 1:]
    return _convolve(windows.to(wide_dtype(x.dtype)), weight, bias, activates).to(x.dtype)


@Kernel
def _causal_conv_prefill_kernel(
    x_ptr: tl.tensor,
    conv_states_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    stride_x_token: int,
    stride_slot: int,
    conv_dim: int,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """A tile of one request's tokens by some channels; `tiles` rows: request, first, low, high."""
    tile = tiles_ptr + tl.program_id(0) * 4
    slot = tl.load(slots_ptr + tl.load(tile)).to(tl.int64)
    first = tl.load(tile + 1)
    tokens = (tl.load(tile + 2) + tl.arange(0, BLOCK_TOKENS))[:, None]
    mask_token = tokens < tl.load(tile + 3)
    offs_dim = (tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM))[None, :]
    mask_dim = offs_dim < conv_dim
    state_ptr = conv_states_ptr + slot * stride_slot + offs_dim * (WIDTH - 1)
    total = tl.zeros([BLOCK_TOKENS, BLOCK_DIM], WIDE)
    if HAS_BIAS:
        total += tl.load(bias_ptr + offs_dim, mask=mask_dim, other=0.0).to(WIDE)
    for j in tl.static_range(WIDTH):
        since = tokens - first - (WIDTH - 1) + j  # of the request's first token in this batch
        fresh = mask_token & mask_dim & (since >= 0)
        stale = mask_token & mask_dim & (since < 0)
        x = tl.load(x_ptr + (first + since) * stride_x_token + offs_dim, mask=fresh, other=0.0)
        before = tl.load(state_ptr + since + (WIDTH - 1), mask=stale, other=0.0)
        weight = tl.load(weight_ptr + offs_dim * WIDTH + j, mask=mask_dim, other=0.0).to(WIDE)
        total = tl.fma(tl.where(since >= 0, x, before).to(WIDE), weight, total)
    y = total / (1.0 + tl.exp(-total)) if ACTIVATES else total
    at = y_ptr + tokens * conv_dim + offs_dim
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask_token & mask_dim)


@Kernel
def _store_conv_states_kernel(
    x_ptr: tl.tensor,
    conv_states_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    stores_ptr: tl.tensor,
    stride_x_token: int,
    stride_slot: int,
    conv_dim: int,
    WIDTH: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Writes states at the given positions; `stores` rows: request, first, length, dst_slot (or
    -1). A negative length is nothing to write.

    One thread handles a channel throughout, so it reads the old columns before it shifts them.
    """
    store = stores_ptr + tl.program_id(0) * 4
    src = tl.load(slots_ptr + tl.load(store)).to(tl.int64)
    first, length, dst = tl.load(store + 1), tl.load(store + 2), tl.load(store + 3)
    dst = tl.where(dst < 0, src, dst)
    offs_dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    stored_dim = tl.where(length < 0, 0, conv_dim)
    for j in tl.static_range(WIDTH - 1):
        since = length - (WIDTH - 1) + j
        old_at = conv_states_ptr + src * stride_slot + offs_dim * (WIDTH - 1) + since + (WIDTH - 1)
        old = tl.load(old_at, mask=offs_dim < tl.where(since < 0, stored_dim, 0), other=0.0)
        x_at = x_ptr + (first + since) * stride_x_token + offs_dim
        x = tl.load(x_at, mask=offs_dim < tl.where(since < 0, 0, stored_dim), other=0.0)
        at = conv_states_ptr + dst * stride_slot + offs_dim * (WIDTH - 1) + j
        tl.store(at, tl.where(since < 0, old, x), mask=offs_dim < stored_dim)


def causal_conv_prefill_triton(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spans: Spans,
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    activates: bool = True,
) -> Tensor:
    """Three launches: those that read old states run before the one that overwrites them."""
    _check_strides(x, conv_states, weight)
    conv_dim = x.shape[1]
    y = result_for(spans, x, x.dtype)
    tiles, stored = _tables(spans, snapshots, x.device)
    _causal_conv_prefill_kernel[len(tiles), cdiv(conv_dim, BLOCK_DIM)](
        x, conv_states, weight, x if bias is None else bias, y, slots, tiles,
        x.stride(0), conv_states.stride(0), conv_dim,
        HAS_BIAS=bias is not None, ACTIVATES=activates, WIDTH=weight.shape[1],
        BLOCK_TOKENS=BLOCK_TOKENS, BLOCK_DIM=BLOCK_DIM, WIDE=wide_type(x.dtype),
    )  # fmt: skip
    for stores in stored:
        _store_conv_states_kernel[len(stores), cdiv(conv_dim, BLOCK_DIM)](
            x, conv_states, slots, stores,
            x.stride(0), conv_states.stride(0), conv_dim,
            WIDTH=weight.shape[1], BLOCK_DIM=BLOCK_DIM,
        )  # fmt: skip
    return y


def _tables(
    spans: Spans, snapshots: Sequence[SlotAt], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """The tiles, and the states to store: at snapshots, then at the ends of spans."""
    if isinstance(spans, PaddedSpan):
        requests, lows, _, counts = spans.tiles(BLOCK_TOKENS)
        tiles = torch.stack((requests, requests, lows, lows + counts), dim=1)
        return tiles, [spans.stores[:-1], spans.stores[-1:]]
    firsts = first_tokens(spans)
    asked = [(i, firsts[i], position - spans[i][0], slot) for i, position, slot in snapshots]
    ends = [(i, firsts[i], end - start, -1) for i, (start, end) in enumerate(spans)]
    stored = [on_device(tuple(stores), device) for stores in (asked, ends) if stores]
    return on_device(_tiles(spans), device), stored


def _tiles(spans: Sequence[Span]) -> tuple[tuple[int, ...], ...]:
    """(request, its first token, tile's first token, request's last token + 1) of every tile."""
    firsts = first_tokens(spans)
    return tuple(
        (i, firsts[i], low, firsts[i + 1])
        for i in range(len(spans))
        for low in range(firsts[i], firsts[i + 1], BLOCK_TOKENS)
    )


def _check_strides(x: Tensor, conv_states: Tensor, weight: Tensor) -> None:
    assert x.stride(1) == 1, x.stride()
    assert conv_states.stride()[1:] == (conv_states.shape[2], 1), conv_states.stride()
    assert weight.is_contiguous(), weight.stride()


@Kernel
def _causal_conv_decode_kernel(
    x_ptr: tl.tensor,
    conv_states_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    into_ptr: tl.tensor,
    stride_x_request: int,
    stride_slot: int,
    conv_dim: int,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Some channels of one request. One thread handles a channel, so it can shift in place."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    target = tl.load(into_ptr + request).to(tl.int64)
    offs_dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask_dim = offs_dim < conv_dim
    held = offs_dim < tl.where(slot >= 0, conv_dim, 0)
    kept = offs_dim < tl.where(target >= 0, conv_dim, 0)
    old_at = conv_states_ptr + slot * stride_slot + offs_dim * (WIDTH - 1)
    new_at = conv_states_ptr + target * stride_slot + offs_dim * (WIDTH - 1)
    total = tl.zeros([BLOCK_DIM], WIDE)
    if HAS_BIAS:
        total += tl.load(bias_ptr + offs_dim, mask=mask_dim, other=0.0).to(WIDE)
    for j in tl.static_range(WIDTH - 1):
        old = tl.load(old_at + j, mask=held, other=0.0)
        weight = tl.load(weight_ptr + offs_dim * WIDTH + j, mask=mask_dim, other=0.0).to(WIDE)
        total = tl.fma(old.to(WIDE), weight, total)
        if j > 0:
            tl.store(new_at + j - 1, old, mask=kept)
    x = tl.load(x_ptr + request * stride_x_request + offs_dim, mask=mask_dim, other=0.0)
    tl.store(new_at + WIDTH - 2, x, mask=kept)
    last = tl.load(weight_ptr + offs_dim * WIDTH + WIDTH - 1, mask=mask_dim, other=0.0).to(WIDE)
    total = tl.fma(x.to(WIDE), last, total)
    y = total / (1.0 + tl.exp(-total)) if ACTIVATES else total
    tl.store(y_ptr + request * conv_dim + offs_dim, y.to(y_ptr.dtype.element_ty), mask=mask_dim)


def causal_conv_decode_triton(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    into: Tensor,
    activates: bool = True,
) -> Tensor:
    _check_strides(x, conv_states, weight)
    requests, conv_dim = x.shape
    y = torch.empty(requests, conv_dim, dtype=x.dtype, device=x.device)
    _causal_conv_decode_kernel[requests, cdiv(conv_dim, BLOCK_DIM)](
        x, conv_states, weight, x if bias is None else bias, y, slots, into,
        x.stride(0), conv_states.stride(0), conv_dim,
        HAS_BIAS=bias is not None, ACTIVATES=activates, WIDTH=weight.shape[1],
        BLOCK_DIM=BLOCK_DIM, WIDE=wide_type(x.dtype),
    )  # fmt: skip
    return y


def causal_conv_prefill(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spans: Spans,
    slots: Tensor,
    snapshots: Sequence[SlotAt] = (),
    activates: bool = True,
) -> Tensor:
    """Convolves each request's part of `x` [tokens, conv_dim], continuing from its slot's state.

    `conv_states` is a strided view [slots, conv_dim, width - 1], advanced in place at `slots`
    [requests]; `weight` [conv_dim, width]. A snapshot's position lies in (start, end].
    """
    tokens, conv_dim = x.shape
    assert conv_states.shape[1:] == (conv_dim, weight.shape[1] - 1), conv_states.shape
    assert weight.shape[0] == conv_dim
    assert bias is None or bias.shape == (conv_dim,)
    assert conv_states.dtype == x.dtype, (conv_states.dtype, x.dtype)
    check_rows(spans, slots, tokens, snapshots)
    if x.is_cuda:
        return causal_conv_prefill_triton(
            x, conv_states, weight, bias, spans, slots, snapshots, activates
        )
    run = causal_conv_prefill_compiled if serves(x) else causal_conv_prefill_reference
    return run(x, conv_states, weight, bias, on_host(spans), slots, snapshots, activates)


def causal_conv_decode(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    into: Tensor,
    activates: bool = True,
) -> Tensor:
    """One token of each request: `x` [requests, conv_dim]; states at `slots` are shifted to `into`.

    A negative slot reads as cleared, and a negative target is not written. No request of a call may
    read a slot that another one writes.
    """
    requests, conv_dim = x.shape
    assert conv_states.shape[1:] == (conv_dim, weight.shape[1] - 1), conv_states.shape
    assert weight.shape[0] == conv_dim
    assert bias is None or bias.shape == (conv_dim,)
    assert conv_states.dtype == x.dtype, (conv_states.dtype, x.dtype)
    assert slots.shape == into.shape == (requests,), (slots.shape, into.shape, requests)
    if x.is_cuda:
        return causal_conv_decode_triton(x, conv_states, weight, bias, slots, into, activates)
    run = causal_conv_decode_compiled if serves(x) else causal_conv_decode_reference
    return run(x, conv_states, weight, bias, slots, into, activates)
