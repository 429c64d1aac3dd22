"""Paged attention in Triton: decode with split keys, and chunked prefill.

Both run the online softmax over blocks of keys and look up every key's page in the table, so any
page size works. Products of float32 are exact to float32, those of bfloat16 accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ferryman_kernels._triton import (
    Kernel,
    KernelPart,
    cdiv,
    dot_type,
    next_power_of_two,
    tl,
)
from ferryman_kernels.attention._attention_tiles import decode_tiles, prefill_tiles
from ferryman_kernels.attention.page_layout import PageScales, check_page_layout
from ferryman_kernels.ragged import PaddedSpan, Span, Spans, first_tokens, on_device, result_for

BLOCK_KEYS = 64


SPLIT_KEYS = 256
"""The fewest keys that one program of decode reads; more if a request would need MAX_SPLITS. 256
keys take 0.7 of the time of 512 for one request of 1,024 tokens, and 1.03 to 1.09 of it for 32 of
8,192 (H200)."""

MAX_SPLITS = 32


@KernelPart
def _number_of(code: tl.tensor) -> tl.tensor:
    """The e4m3 numbers of bytes, without an instruction for them: four bits of power, three of
    mantissa; without a power, eighths."""
    size = code.to(tl.int32) & 127
    bits = ((size + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    number = tl.where(size < 8, size.to(tl.float32) * 0.001953125, bits)
    number = tl.where(size == 127, float("nan"), number)
    return tl.where(code < 128, number, -number)


@Kernel
def _decode_split_kernel(
    q_ptr: tl.tensor,
    key_pages_ptr: tl.tensor,
    value_pages_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    stride_q_request: int,
    stride_page: int,
    stride_scale_page: int,
    stride_table_row: int,
    split_keys: int,
    window_len: int,
    page_size: int,
    head_dim: int,
    scale: float,
    cap: float,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    CODED: tl.constexpr,
) -> None:
    """The heads of one group over one split of one request's keys.

    Writes softmax-weighted values [q_head, split, head_dim] and log(Σ exp(score)) for each.
    """
    request, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions_ptr + request).to(tl.int64)
    visible = tl.where(window_len > 0, tl.maximum(position - window_len + 1, 0), 0)
    low = visible // split_keys * split_keys + split * split_keys
    high = tl.minimum(low + split_keys, position + 1)
    low = tl.maximum(low, visible)

    offs_group, offs_dim = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_DIM)
    q_heads = kv_head * GROUP + offs_group
    mask_q = (offs_group < GROUP)[:, None] & (offs_dim < head_dim)[None, :]
    q_at = request * stride_q_request + q_heads[:, None] * head_dim + offs_dim[None, :]
    q = tl.load(q_ptr + q_at, mask=mask_q, other=0.0).to(NARROW)
    top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_GROUP], tl.float32)
    out = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for start in range(low, high, KEYS):
        keys_at = start + tl.arange(0, KEYS)
        mask_key = keys_at < high
        pages_at = page_table_ptr + request * stride_table_row + keys_at // page_size
        pages = tl.load(pages_at, mask=mask_key, other=0).to(tl.int64)
        rows = pages * stride_page + (kv_head * page_size + keys_at % page_size) * head_dim
        mask = mask_key[:, None] & (offs_dim < head_dim)[None, :]
        at = rows[:, None] + offs_dim[None, :]
        keys = tl.load(key_pages_ptr + at, mask=mask, other=0)
        values = tl.load(value_pages_ptr + at, mask=mask, other=0)
        if CODED:  # what is stored is exact in every dtype from bfloat16 on
            scale_at = pages * stride_scale_page + kv_head * page_size + keys_at % page_size
            key_scale = tl.load(key_scales_ptr + scale_at, mask=mask_key, other=0.0)
            value_scale = tl.load(value_scales_ptr + scale_at, mask=mask_key, other=0.0)
            keys = _number_of(keys) * key_scale[:, None]
            values = _number_of(values) * value_scale[:, None]
        keys, values = keys.to(NARROW), values.to(NARROW)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if HAS_CAP:  # cap · tanh(score / cap)
            scores = cap - 2 * cap / (tl.exp(2 * scores / cap) + 1)
        scores = tl.where(mask_key[None, :], scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - peak[:, None])
        shrink = tl.exp(top - peak)
        norm = norm * shrink + tl.sum(weights, axis=1)
        out = out * shrink[:, None]
        out += tl.dot(weights.to(NARROW), values, input_precision="ieee")
        top = peak
    heads = (request * tl.num_programs(1) * GROUP + q_heads) * tl.num_programs(2) + split
    norm = tl.where(norm > 0, norm, 1.0)  # a split without keys weighs exp(-inf)
    out = out / norm[:, None]
    tl.store(partial_ptr + heads[:, None] * head_dim + offs_dim[None, :], out, mask=mask_q)
    tl.store(weight_ptr + heads, top + tl.log(norm), mask=offs_group < GROUP)


@Kernel
def _decode_join_kernel(
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    splits: int,
    q_heads: int,
    head_dim: int,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Joins the splits of one head of one query, and adds the sink to the norm."""
    head = tl.program_id(0).to(tl.int64)
    offs_split, offs_dim = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_DIM)
    mask_split, mask_dim = offs_split < splits, offs_dim < head_dim
    at = head * splits + offs_split
    weight = tl.load(weight_ptr + at, mask=mask_split, other=float("-inf"))
    peak = tl.max(weight, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head % q_heads)
        peak = tl.maximum(peak, sink)
    # A query without keys, which pads a batch, has the peak -inf, and must not become NaN.
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    weight = tl.exp(weight - peak)
    total = tl.sum(weight, axis=0)
    if HAS_SINKS:
        total += tl.exp(sink - peak)
    total = tl.where(total > 0, total, 1.0)
    mask = mask_split[:, None] & mask_dim[None, :]
    partial_at = at[:, None] * head_dim + offs_dim[None, :]
    partial = tl.load(partial_ptr + partial_at, mask=mask, other=0.0)
    out = tl.sum(partial * weight[:, None], axis=0) / total
    out_at = out_ptr + head * head_dim + offs_dim
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask_dim)


def paged_attention_decode_triton(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    scale: float,
    window_len: int,
    sinks: Tensor | None = None,
    score_cap: float = 0.0,
    scales: PageScales | None = None,
) -> Tensor:
    """The number of splits depends on the table's width alone: positions stay on the device."""
    _check_strides(q, key_pages, value_pages, page_table)
    pages = _as_read(key_pages, value_pages, scales)
    requests, q_heads, head_dim = q.shape
    kv_heads, page_size = key_pages.shape[1:3]
    reach = page_table.shape[1] * page_size
    split_keys = max(SPLIT_KEYS, cdiv(cdiv(reach, MAX_SPLITS), BLOCK_KEYS) * BLOCK_KEYS)
    splits = cdiv(min(reach, window_len + split_keys) if window_len else reach, split_keys)
    partial = torch.empty(requests, q_heads, splits, head_dim, device=q.device)
    weight = torch.empty(requests, q_heads, splits, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group, block_dim = q_heads // kv_heads, max(16, next_power_of_two(head_dim))
    tiles = decode_tiles(q, block_dim)
    _decode_split_kernel[requests, kv_heads, splits](
        q, *pages, page_table, positions, partial, weight,
        q.stride(0), key_pages.stride(0), pages[2].stride(0), page_table.stride(0),
        split_keys, window_len, page_size, head_dim, scale, score_cap,
        GROUP=group, BLOCK_GROUP=max(16, next_power_of_two(group)),
        BLOCK_DIM=block_dim, KEYS=tiles.keys, NARROW=dot_type(q),
        HAS_CAP=score_cap > 0, CODED=scales is not None,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    _decode_join_kernel[requests * q_heads,](
        partial, weight, out if sinks is None else sinks, out, splits, q_heads, head_dim,
        BLOCK_SPLITS=next_power_of_two(splits), BLOCK_DIM=block_dim,
        HAS_SINKS=sinks is not None, num_warps=2,
    )  # fmt: skip
    return out


@Kernel
def _prefill_kernel(
    q_ptr: tl.tensor,
    key_pages_ptr: tl.tensor,
    value_pages_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_q_token: int,
    stride_page: int,
    stride_scale_page: int,
    stride_table_row: int,
    window_len: int,
    page_size: int,
    head_dim: int,
    scale: float,
    cap: float,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    CODED: tl.constexpr,
) -> None:
    """A tile of one request's queries, one head; `tiles` rows: request, token, position, count."""
    tile, q_head = tiles_ptr + tl.program_id(0) * 4, tl.program_id(1)
    request, token, first = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    offs_query, offs_dim = tl.arange(0, QUERIES), tl.arange(0, BLOCK_DIM)
    positions = first + offs_query
    count = tl.load(tile + 3)
    mask_dim = (offs_dim < head_dim)[None, :]
    mask_q = (offs_query < count)[:, None] & mask_dim
    tokens = token + offs_query
    q_at = tokens[:, None] * stride_q_token + q_head * head_dim + offs_dim[None, :]
    q = tl.load(q_ptr + q_at, mask=mask_q, other=0.0).to(NARROW)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    norm = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, BLOCK_DIM], tl.float32)
    reach = tl.where(window_len > 0, window_len, first + QUERIES)
    low = tl.maximum(first - reach + 1, 0) // KEYS * KEYS
    for start in range(low, first + count, KEYS):
        keys_at = start + tl.arange(0, KEYS)
        # Keys that no query of the tile sees may lie in pages that are gone or have another owner.
        mask_key = (keys_at < first + count) & (keys_at > first - reach)
        pages_at = page_table_ptr + request * stride_table_row + keys_at // page_size
        pages = tl.load(pages_at, mask=mask_key, other=-1).to(tl.int64)
        kv_head = q_head // GROUP
        rows = pages * stride_page + (kv_head * page_size + keys_at % page_size) * head_dim
        mask = (pages >= 0)[:, None] & mask_dim
        at = rows[:, None] + offs_dim[None, :]
        keys = tl.load(key_pages_ptr + at, mask=mask, other=0)
        values = tl.load(value_pages_ptr + at, mask=mask, other=0)
        if CODED:  # what is stored is exact in every dtype from bfloat16 on
            scale_at = pages * stride_scale_page + kv_head * page_size + keys_at % page_size
            key_scale = tl.load(key_scales_ptr + scale_at, mask=pages >= 0, other=0.0)
            value_scale = tl.load(value_scales_ptr + scale_at, mask=pages >= 0, other=0.0)
            keys = _number_of(keys) * key_scale[:, None]
            values = _number_of(values) * value_scale[:, None]
        keys, values = keys.to(NARROW), values.to(NARROW)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if HAS_CAP:  # cap · tanh(score / cap)
            scores = cap - 2 * cap / (tl.exp(2 * scores / cap) + 1)
        seen = keys_at[None, :] <= positions[:, None]
        seen = seen & (keys_at[None, :] > positions[:, None] - reach)
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=1))
        # A row without any key so far has the peak -inf, and must not become NaN.
        base = tl.where(peak > float("-inf"), peak, 0.0)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        norm = norm * shrink + tl.sum(weights, axis=1)
        out = out * shrink[:, None]
        out += tl.dot(weights.to(NARROW), values, input_precision="ieee")
        top = peak
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q_head)
        peak = tl.maximum(top, sink)
        shrink = tl.exp(top - peak)
        norm = norm * shrink + tl.exp(sink - peak)
        out = out * shrink[:, None]
    out = out / tl.where(norm > 0, norm, 1.0)[:, None]
    out_at = (tokens[:, None] * tl.num_programs(1) + q_head) * head_dim + offs_dim[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=mask_q)


def paged_attention_prefill_triton(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    spans: Spans,
    scale: float,
    window_len: int,
    sinks: Tensor | None = None,
    score_cap: float = 0.0,
    scales: PageScales | None = None,
) -> Tensor:
    _check_strides(q, key_pages, value_pages, page_table)
    pages = _as_read(key_pages, value_pages, scales)
    _, q_heads, head_dim = q.shape
    kv_heads, page_size = key_pages.shape[1:3]
    out = result_for(spans, q, q.dtype)
    block_dim = max(16, next_power_of_two(head_dim))
    chosen = prefill_tiles(q, block_dim)
    described = _described(spans, chosen.queries, q.device)
    _prefill_kernel[len(described), q_heads](
        q, *pages, page_table, described, out if sinks is None else sinks, out,
        q.stride(0), key_pages.stride(0), pages[2].stride(0), page_table.stride(0),
        window_len, page_size, head_dim, scale, score_cap,
        GROUP=q_heads // kv_heads, QUERIES=chosen.queries, KEYS=chosen.keys,
        BLOCK_DIM=block_dim, NARROW=dot_type(q),
        HAS_SINKS=sinks is not None, HAS_CAP=score_cap > 0, CODED=scales is not None,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return out


def _as_read(
    key_pages: Tensor, value_pages: Tensor, scales: PageScales | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pages and scales as a kernel takes them; pages of numbers stand for scales, unread."""
    if scales is None:
        return key_pages, value_pages, key_pages, value_pages
    keys, values = scales
    assert keys.shape == values.shape == key_pages.shape[:3], (keys.shape, values.shape)
    assert keys.stride() == values.stride(), (keys.stride(), values.stride())
    assert keys.stride()[1:] == (key_pages.shape[2], 1), keys.stride()
    return key_pages.view(torch.uint8), value_pages.view(torch.uint8), keys, values


def _described(spans: Spans, queries: int, device: torch.device) -> Tensor:
    """The rows [tiles, 4] of `_tiles` on the device."""
    if isinstance(spans, PaddedSpan):
        return torch.stack(spans.tiles(queries), dim=1)
    return on_device(_tiles(spans, queries), device)


def _tiles(spans: Sequence[Span], queries: int) -> tuple[tuple[int, ...], ...]:
    """(request, first token, first position, queries) of every tile, the longest first."""
    tiles = [
        (i, first + low - start, low, min(queries, end - low))
        for i, ((start, end), first) in enumerate(zip(spans, first_tokens(spans), strict=False))
        for low in range(start, end, queries)
    ]
    return tuple(sorted(tiles, key=lambda tile: -tile[2]))


def _check_strides(q: Tensor, key_pages: Tensor, value_pages: Tensor, page_table: Tensor) -> None:
    assert q.stride()[1:] == (q.shape[2], 1), q.stride()
    check_page_layout(key_pages, value_pages)
    assert page_table.stride(1) == 1, page_table.stride()
