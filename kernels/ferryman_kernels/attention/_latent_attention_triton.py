"""Attention to latents in Triton: a block of heads over a split of the chosen places.

The heads share every row they read. Splits are joined as in paged attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, dot_type, next_power_of_two, tl
from ferryman_kernels.attention._paged_attention_triton import MAX_SPLITS, _decode_join_kernel

BLOCK_HEADS = 16
BLOCK_KEYS = {torch.bfloat16: 32}
"""Keys at once; float32, which no matrix unit multiplies, has registers for FLOAT32_KEYS."""
FLOAT32_KEYS = 16
TOKENS = 256
"""Tokens with partial results in memory at once."""
SPLIT_KEYS = 512
"""The fewest places that one program reads; more if a token would need MAX_SPLITS."""


@Kernel
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
    q: Tensor, pages: Tensor, places: Tensor, latent_dim: int, scale: float
) -> Tensor:
    assert pages.stride()[1:] == (q.shape[2], 1), pages.stride()
    assert places.stride(1) == 1, places.stride()
    out = torch.empty(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)
    for low in range(0, len(q), TOKENS):
        tokens = slice(low, low + TOKENS)
        _attend(q[tokens].contiguous(), pages, places[tokens], scale, out[tokens])
    return out


def _attend(q: Tensor, pages: Tensor, places: Tensor, scale: float, out: Tensor) -> None:
    tokens, heads, latent_dim = out.shape
    width, rope_dim = places.shape[1], q.shape[2] - latent_dim
    keys = BLOCK_KEYS.get(q.dtype, FLOAT32_KEYS)
    split_keys = max(SPLIT_KEYS, cdiv(cdiv(width, MAX_SPLITS), keys) * keys)
    splits = cdiv(width, split_keys)
    partial = torch.empty(tokens, heads, splits, latent_dim, device=q.device)
    weight = torch.empty(tokens, heads, splits, device=q.device)
    block_latent = max(16, next_power_of_two(latent_dim))
    _latent_split_kernel[tokens, cdiv(heads, BLOCK_HEADS), splits](
        q, pages, places, partial, weight,
        pages.stride(0), places.stride(0), split_keys, width, pages.shape[1],
        heads, latent_dim, rope_dim, scale,
        HEADS=BLOCK_HEADS, BLOCK_LATENT=block_latent,
        BLOCK_ROPE=max(16, next_power_of_two(rope_dim)), KEYS=keys, NARROW=dot_type(q),
        num_warps=4 if q.dtype == torch.bfloat16 else 8,
    )  # fmt: skip
    _decode_join_kernel[tokens * heads,](
        partial, weight, out, out, splits, heads, latent_dim,
        BLOCK_SPLITS=next_power_of_two(splits), BLOCK_DIM=block_latent,
        HAS_SINKS=False, num_warps=2,
    )  # fmt: skip
