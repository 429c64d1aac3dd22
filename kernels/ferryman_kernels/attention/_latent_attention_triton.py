"""Attention to latents in Triton: a block of heads over a split of the chosen places.

The heads share every row they read. Splits are joined as in paged attention: all at once, or, where
the width of `places` must not show in the bits, folded in rising order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._triton import (
    Kernel,
    aligned,
    cdiv,
    dot_type,
    laid_out,
    next_power_of_two,
    tl,
)
from ferryman_kernels.attention._paged_attention_triton import MAX_SPLITS, _decode_join_kernel
from ferryman_kernels.attention.splits._split_attention_triton import fold_splits_triton

BLOCK_HEADS = 16
BLOCK_KEYS = {torch.bfloat16: 32}
"""Keys at once; float32, which no matrix unit multiplies, has registers for FLOAT32_KEYS."""
FLOAT32_KEYS = 16
TOKENS = 256
"""Tokens with partial results in memory at once."""
FOLDED = 1 << 26
"""Numbers of partial results in memory at once where splits are folded."""
SPLIT_KEYS = 512
"""The fewest places that one program reads; more if a token would need MAX_SPLITS."""


@Kernel.for_any("stride_places_token", "width")
def _latent_split_kernel(
    q_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    places_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    stride_page: int,
    stride_places_token: int,
    split_keys: int,
    width: int,
    page_size: int,
    heads: int,
    latent_dim: int,
    rope_dim: int,
    scale: float,
    HEADS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    KEYS: tl.constexpr,
    NARROW: tl.constexpr,
) -> None:
    """Writes softmax-weighted latents [token, head, split, latent_dim] and log(Σ exp(score))."""
    token, block, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    low = split * split_keys
    high = tl.minimum(low + split_keys, width)
    offs_head = block * HEADS + tl.arange(0, HEADS)
    offs_latent, offs_rope = tl.arange(0, BLOCK_LATENT), tl.arange(0, BLOCK_ROPE)
    mask_head, mask_latent = (offs_head < heads)[:, None], (offs_latent < latent_dim)[None, :]
    mask_rope = (offs_rope < rope_dim)[None, :]
    dim = latent_dim + rope_dim
    q_at = q_ptr + (token * heads + offs_head[:, None]) * dim
    q_latent = tl.load(q_at + offs_latent[None, :], mask=mask_head & mask_latent, other=0.0)
    q_rope = tl.load(q_at + latent_dim + offs_rope[None, :], mask=mask_head & mask_rope, other=0.0)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    norm = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, BLOCK_LATENT], tl.float32)
    for start in range(low, high, KEYS):
        offs_key = start + tl.arange(0, KEYS)
        places_at = places_ptr + token * stride_places_token + offs_key
        places = tl.load(places_at, mask=offs_key < high, other=-1).to(tl.int64)
        seen = (places >= 0)[:, None]
        rows = (places // page_size * stride_page + places % page_size * dim)[:, None]
        latent_at = pages_ptr + rows + offs_latent[None, :]
        latents = tl.load(latent_at, mask=seen & mask_latent, other=0.0).to(NARROW)
        rope_at = pages_ptr + rows + latent_dim + offs_rope[None, :]
        ropes = tl.load(rope_at, mask=seen & mask_rope, other=0.0).to(NARROW)
        scores = tl.dot(q_latent.to(NARROW), tl.trans(latents), input_precision="ieee")
        scores += tl.dot(q_rope.to(NARROW), tl.trans(ropes), input_precision="ieee")
        scores = tl.where((places >= 0)[None, :], scores * scale, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=1))
        # Without any key so far the peak is -inf, and the result must not become NaN.
        base = tl.where(peak > float("-inf"), peak, 0.0)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        norm = norm * shrink + tl.sum(weights, axis=1)
        out = out * shrink[:, None]
        out += tl.dot(weights.to(NARROW), latents, input_precision="ieee")
        top = peak
    at = (token * heads + offs_head) * tl.num_programs(2) + split
    norm = tl.where(norm > 0, norm, 1.0)  # a split without keys weighs exp(-inf)
    out = out / norm[:, None]
    partial_at = partial_ptr + at[:, None] * latent_dim + offs_latent[None, :]
    tl.store(partial_at, out, mask=mask_head & mask_latent)
    tl.store(weight_ptr + at, top + tl.log(norm), mask=offs_head < heads)


def latent_attention_triton(
    q: Tensor,
    pages: Tensor,
    places: Tensor,
    latent_dim: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    keys, width = BLOCK_KEYS.get(q.dtype, FLOAT32_KEYS), places.shape[1]
    split_keys = max(SPLIT_KEYS, cdiv(cdiv(width, MAX_SPLITS), keys) * keys)
    out = torch.empty(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)
    for low in range(0, len(q), TOKENS):
        tokens = slice(low, low + TOKENS)
        partial, weight = _split(q[tokens], pages, places[tokens], split_keys, latent_dim, scale)
        _join(partial, weight, sinks, out[tokens])
    return out


def split_latent_attention_triton(
    q: Tensor,
    pages: Tensor,
    places: Tensor,
    latent_dim: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """`latent_attention_triton` in one order of sums: a split has SPLIT_KEYS places, however
    many there are."""
    splits = max(1, cdiv(places.shape[1], SPLIT_KEYS))
    tokens_at_once = max(1, FOLDED // (q.shape[1] * splits * latent_dim))
    out = torch.empty(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)
    for low in range(0, len(q), tokens_at_once):
        tokens = slice(low, low + tokens_at_once)
        given = q[tokens], pages, places[tokens], SPLIT_KEYS, latent_dim, scale
        partial, weight = _split(*given)
        # A split's latents are divided by their weights already; it weighs what `weight` says.
        norms = (weight > -torch.inf).to(weight.dtype)
        out[tokens] = fold_splits_triton(partial, weight, norms, sinks, q.dtype)
    return out


def _split(
    q: Tensor, pages: Tensor, places: Tensor, split_keys: int, latent_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Each split's weighted latents [tokens, heads, splits, latent_dim], and the log of its sum of
    weights."""
    assert pages.stride()[1:] == (q.shape[2], 1), pages.stride()
    assert places.stride(1) == 1, places.stride()
    tokens, heads, dim = q.shape
    width, rope_dim = places.shape[1], dim - latent_dim
    splits = cdiv(width, split_keys)
    partial = torch.empty(tokens, heads, splits, latent_dim, device=q.device)
    weight = torch.empty(tokens, heads, splits, device=q.device)
    _latent_split_kernel[tokens, cdiv(heads, BLOCK_HEADS), splits](
        laid_out(q), pages, aligned(places), partial, weight,
        pages.stride(0), places.stride(0), split_keys, width, pages.shape[1],
        heads, latent_dim, rope_dim, scale,
        HEADS=BLOCK_HEADS, BLOCK_LATENT=max(16, next_power_of_two(latent_dim)),
        BLOCK_ROPE=max(16, next_power_of_two(rope_dim)),
        KEYS=BLOCK_KEYS.get(q.dtype, FLOAT32_KEYS), NARROW=dot_type(q),
        num_warps=4 if q.dtype == torch.bfloat16 else 8,
    )  # fmt: skip
    return partial, weight


def _join(partial: Tensor, weight: Tensor, sinks: Tensor | None, out: Tensor) -> None:
    tokens, heads, splits, latent_dim = partial.shape
    _decode_join_kernel[tokens * heads,](
        partial, weight, out if sinks is None else sinks, out, splits, heads, latent_dim,
        BLOCK_SPLITS=next_power_of_two(splits), BLOCK_DIM=max(16, next_power_of_two(latent_dim)),
        HAS_SINKS=sinks is not None, num_warps=2,
    )  # fmt: skip
