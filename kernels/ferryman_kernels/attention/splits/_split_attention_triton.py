"""Paged attention in Triton in one order of sums, by one compiled kernel for prefill and decode.

A request's keys are cut at multiples of SPLIT_KEYS. A program has some queries of one request with
all heads that share a head of keys, as the rows of a tile; it multiplies a split's keys in blocks
from the split's beginning on, and leaves each row its peak, its sum of weights and its weighted
values. Splits are folded in rising order: by the same program where there are queries enough
(prefill), or each split by a program of its own, and the fold by another kernel (decode). The tile
of rows is the same for both, so the products are the same instructions.

A block in which a row sees nothing leaves the row as it was. So what a tile, a chunk or a batch has
besides does not show in the row's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman_kernels._triton import (
    Kernel,
    KernelPart,
    cdiv,
    dot_type,
    laid_out,
    next_power_of_two,
    tl,
)
from ferryman_kernels.attention._paged_attention_triton import (
    _as_read,
    _check_strides,
    _number_of,
    _tiles,
)
from ferryman_kernels.attention.page_layout import PageScales
from ferryman_kernels.ragged import PaddedSpan, Spans, on_device, result_for

SPLIT_KEYS = 512
"""The keys of a split, as on a CPU."""

EVERY_SPLIT = 1 << 30
"""The splits of a program that folds all of its tile's."""


PROFILED_KEYS, PROFILED_STAGES = 16, 2
"""The keys of a product whose scores have a term of their own, and its stages."""


class SplitTiles(NamedTuple):
    """The rows and keys of one product, its warps and stages of loads; for any number of
    queries."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the widest head; chosen by registers and spills as compiled for sm_90a. 64 rows are the least
# that Hopper multiplies by warp groups.
_TILES = {
    64: SplitTiles(64, 64, 4, 2),
    128: SplitTiles(64, 64, 8, 2),
    256: SplitTiles(32, 32, 8, 2),
    512: SplitTiles(32, 16, 8, 2),
}
# Multiplied without matrix units, out of registers.
_FLOAT32_TILES = {
    128: SplitTiles(16, 16, 4, 3),
    512: SplitTiles(16, 16, 8, 2),
}


def split_tiles(dtype: torch.dtype, block_dim: int, block_group: int) -> SplitTiles:
    """For heads padded to `block_dim`, of which `block_group` share a head of keys."""
    table = _TILES if dtype == torch.bfloat16 else _FLOAT32_TILES
    found = next(tiles for widest, tiles in table.items() if block_dim <= widest)
    return found._replace(rows=max(found.rows, block_group))


@KernelPart
def _folded_norm(
    top: tl.tensor, norm: tl.tensor, next_top: tl.tensor, next_norm: tl.tensor
) -> tl.tensor:
    """The sum of weights of the splits so far and of the next one, each by its peak. A sum of 0 is
    of no key: then the other one stays as it is."""
    peak = tl.maximum(top, next_top)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    both = tl.fma(next_norm, tl.exp(next_top - base), norm * tl.exp(top - base))
    return tl.where(next_norm == 0, norm, tl.where(norm == 0, next_norm, both))


@KernelPart
def _folded_values(
    top: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    next_top: tl.tensor,
    next_norm: tl.tensor,
    next_out: tl.tensor,
) -> tl.tensor:
    """The weighted values [rows, dim], likewise."""
    peak = tl.maximum(top, next_top)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    kept = out * tl.exp(top - base)[:, None]
    both = tl.fma(next_out, tl.exp(next_top - base)[:, None], kept)
    is_last = (next_norm == 0)[:, None]
    return tl.where(is_last, out, tl.where((norm == 0)[:, None], next_out, both))


@Kernel.for_any("stride_table_row", "splits_each")
def _split_attention_kernel(
    q_ptr: tl.tensor,
    key_pages_ptr: tl.tensor,
    value_pages_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    norms_ptr: tl.tensor,
    profiles_ptr: tl.tensor,
    stride_page: int,
    stride_scale_page: int,
    stride_table_row: int,
    splits_each: int,
    window_len: int,
    page_size: int,
    head_dim: int,
    extent: int,
    scale: float,
    cap: float,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    CODED: tl.constexpr,
    HAS_PROFILES: tl.constexpr,
) -> None:
    """Some queries of one request with the heads of one group, over some of their splits.

    A tile is a request, its first token, that token's position, and the number of its tokens.
    """
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, first = tl.load(requests_ptr + tile).to(tl.int64), tl.load(tokens_ptr + tile)
    position, count = tl.load(positions_ptr + tile).to(tl.int64), tl.load(counts_ptr + tile)
    last = position + count - 1
    lowest = tl.where(window_len > 0, tl.maximum(position - window_len + 1, 0), 0)

    offs_row, offs_dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    query, member = offs_row // BLOCK_GROUP, offs_row % BLOCK_GROUP
    is_row = (query < count) & (member < GROUP)
    tokens, q_heads = first + query, kv_head * GROUP + member
    heads = tokens.to(tl.int64) * (tl.num_programs(1) * GROUP) + q_heads
    mask_dim = (offs_dim < head_dim)[None, :]
    mask_q = is_row[:, None] & mask_dim
    q_at = heads[:, None] * head_dim + offs_dim[None, :]
    q = tl.load(q_ptr + q_at, mask=mask_q, other=0.0).to(NARROW)
    sees_to = tl.where(is_row, position + query, -1)
    sees_from = tl.where(window_len > 0, sees_to - window_len + 1, 0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    split = lowest // SPLIT + part * splits_each
    end = tl.minimum(split + splits_each, last // SPLIT + 1)
    while split < end:
        low = tl.maximum(split * SPLIT, lowest // KEYS * KEYS)
        high = tl.minimum((split + 1) * SPLIT, last + 1)
        next_top = tl.full([ROWS], float("-inf"), tl.float32)
        next_norm = tl.zeros([ROWS], tl.float32)
        next_out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        for start in range(low, high, KEYS):
            keys_at = start + tl.arange(0, KEYS)
            # Keys that no query of the tile sees may lie in pages that are gone.
            mask_key = (keys_at >= lowest) & (keys_at < high)
            pages_at = page_table_ptr + request * stride_table_row + keys_at // page_size
            pages = tl.load(pages_at, mask=mask_key, other=-1).to(tl.int64)
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
            seen = keys_at[None, :] <= sees_to[:, None]
            seen = seen & (keys_at[None, :] >= sees_from[:, None])
            if HAS_PROFILES:  # [tokens, q_heads, extent]
                distance = sees_to[:, None] - keys_at[None, :]
                near_at = profiles_ptr + heads[:, None] * extent + distance
                near = tl.load(near_at, mask=seen & (distance < extent), other=0.0)
                scores += near.to(tl.float32)
            scores = tl.where(seen, scores, float("-inf"))
            peak = tl.maximum(next_top, tl.max(scores, axis=1))
            # A row without any key so far has the peak -inf, and must not become NaN.
            base = tl.where(peak > float("-inf"), peak, 0.0)
            weights = tl.exp(scores - base[:, None])
            shrink = tl.exp(next_top - base)
            next_norm = next_norm * shrink + tl.sum(weights, axis=1)
            next_out = next_out * shrink[:, None]
            next_out += tl.dot(weights.to(NARROW), values, input_precision="ieee")
            next_top = peak
        out = _folded_values(top, norm, out, next_top, next_norm, next_out)
        norm = _folded_norm(top, norm, next_top, next_norm)
        top = tl.maximum(top, next_top)
        split += 1
    at = heads * tl.num_programs(2) + part
    tl.store(partial_ptr + at[:, None] * head_dim + offs_dim[None, :], out, mask=mask_q)
    tl.store(tops_ptr + at, top, mask=is_row)
    tl.store(norms_ptr + at, norm, mask=is_row)


@Kernel.for_any("parts")
def _fold_splits_kernel(
    partial_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    norms_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts: int,
    q_heads: int,
    head_dim: int,
    BLOCK_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Folds the parts of one head of one query in rising order; the sink comes last."""
    head = tl.program_id(0).to(tl.int64)
    offs_one, offs_dim = tl.arange(0, 1), tl.arange(0, BLOCK_DIM)[None, :]
    mask_dim = offs_dim < head_dim
    top = tl.full([1], float("-inf"), tl.float32)
    norm = tl.zeros([1], tl.float32)
    out = tl.zeros([1, BLOCK_DIM], tl.float32)
    part = head * parts
    end = part + parts
    while part < end:
        at = part + offs_one
        next_top, next_norm = tl.load(tops_ptr + at), tl.load(norms_ptr + at)
        next_out = tl.load(partial_ptr + part * head_dim + offs_dim, mask=mask_dim, other=0.0)
        out = _folded_values(top, norm, out, next_top, next_norm, next_out)
        norm = _folded_norm(top, norm, next_top, next_norm)
        top = tl.maximum(top, next_top)
        part += 1
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head % q_heads + offs_one)
        # A sink weighs, and has no value.
        one, none = tl.full([1], 1.0, tl.float32), tl.zeros([1, BLOCK_DIM], tl.float32)
        out = _folded_values(top, norm, out, sink, one, none)
        norm = _folded_norm(top, norm, sink, one)
    out = out / tl.where(norm > 0, norm, 1.0)[:, None]
    out_at = out_ptr + head * head_dim + offs_dim
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask_dim)


Tiles = tuple[Tensor, Tensor, Tensor, Tensor]
"""Request, first token, its position and the number of tokens of each tile, int64 [tiles]."""


def split_attention_triton(
    q: Tensor,
    pages: tuple[Tensor, Tensor, Tensor, Tensor],
    page_table: Tensor,
    tiles: Tiles,
    splits: tuple[Tensor, int],
    seen: tuple[float, int, Tensor | None, float, bool],
    profiles: Tensor | None = None,
) -> Tensor:
    """`splits` are the memory for the sums of weights [tokens, q_heads, parts], zeros for a row of
    no tile, and the splits of each part; `seen` is the scale of scores, the window, the sinks, the
    scores' cap, and whether pages are codes. `profiles` are those of `profiled_attention`."""
    (norms, each), (scale, window_len, sinks, score_cap, is_coded) = splits, seen
    q, (tokens, q_heads, head_dim), parts = laid_out(q), q.shape, norms.shape[2]
    kv_heads, page_size = pages[0].shape[1:3]
    group, block_dim = q_heads // kv_heads, max(16, next_power_of_two(head_dim))
    block_group = next_power_of_two(group)
    chosen = split_tiles(q.dtype, block_dim, block_group)
    if profiles is not None:
        chosen = chosen._replace(keys=PROFILED_KEYS, stages=PROFILED_STAGES)
    partial = torch.empty(tokens, q_heads, parts, head_dim, device=q.device)
    tops = torch.empty_like(norms)
    _split_attention_kernel[len(tiles[0]), kv_heads, parts](
        q, *pages, page_table, *tiles, partial, tops, norms,
        tops if profiles is None else laid_out(profiles),
        pages[0].stride(0), pages[2].stride(0), page_table.stride(0), each,
        window_len, page_size, head_dim, 0 if profiles is None else profiles.shape[2],
        scale, score_cap,
        GROUP=group, BLOCK_GROUP=block_group, ROWS=chosen.rows, KEYS=chosen.keys,
        SPLIT=SPLIT_KEYS, BLOCK_DIM=block_dim, NARROW=dot_type(q),
        HAS_CAP=score_cap > 0, CODED=is_coded, HAS_PROFILES=profiles is not None,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return fold_splits_triton(partial, tops, norms, sinks, q.dtype)


def fold_splits_triton(
    partial: Tensor, tops: Tensor, norms: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The values [tokens, heads, dim] of `partial` [tokens, heads, parts, dim], whose peaks and
    sums of weights are `tops` and `norms` [tokens, heads, parts]."""
    tokens, heads, parts, dim = partial.shape
    out = torch.empty(tokens, heads, dim, dtype=dtype, device=partial.device)
    _fold_splits_kernel[tokens * heads,](
        partial, tops, norms, tops if sinks is None else sinks, out, parts, heads, dim,
        BLOCK_DIM=max(16, next_power_of_two(dim)), HAS_SINKS=sinks is not None, num_warps=2,
    )  # fmt: skip
    return out


def split_prefill_triton(
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
    profiles: Tensor | None = None,
) -> Tensor:
    _check_strides(q, key_pages, value_pages, page_table)
    group = next_power_of_two(q.shape[1] // key_pages.shape[1])
    block_dim = max(16, next_power_of_two(q.shape[2]))
    queries = split_tiles(q.dtype, block_dim, group).rows // group
    if isinstance(spans, PaddedSpan):
        tiles = spans.tiles(queries)
    else:
        tiles = _columns(_tiles(spans, queries), q.device)
    seen = scale, window_len, sinks, score_cap, scales is not None
    pages = _as_read(key_pages, value_pages, scales)
    norms = result_for(spans, q[:, :, :1], torch.float32)
    return split_attention_triton(q, pages, page_table, tiles, (norms, EVERY_SPLIT), seen, profiles)


def _columns(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tiles:
    """The columns of the tiles' rows on the device, each from a multiple of 16 bytes on."""
    padding = (0,) * (len(rows) % 2)
    columns = tuple((*column, *padding) for column in zip(*rows, strict=True))
    requests, tokens, positions, counts = on_device(columns, device)[:, : len(rows)].unbind(0)
    return requests, tokens, positions, counts


def split_decode_triton(
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
    profiles: Tensor | None = None,
) -> Tensor:
    """A tile has one query. The number of parts follows the table's width: positions stay on the
    device; a part behind a query's last split has nothing to do."""
    _check_strides(q, key_pages, value_pages, page_table)
    reach = page_table.shape[1] * key_pages.shape[2]
    parts = cdiv(min(reach, window_len + SPLIT_KEYS) if window_len else reach, SPLIT_KEYS)
    rows = torch.arange(len(q), device=q.device)
    tiles = rows, rows, positions.to(torch.int64), torch.ones_like(rows)
    seen = scale, window_len, sinks, score_cap, scales is not None
    pages = _as_read(key_pages, value_pages, scales)
    norms = torch.empty(*q.shape[:2], parts, device=q.device)
    return split_attention_triton(q, pages, page_table, tiles, (norms, 1), seen, profiles)
