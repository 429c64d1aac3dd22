"""Attention whose scores depend on distance by learned profiles (Inkling).

q, r     = x · Wq, x · Wr;   k, v = x · Wk, x · Wv, each plus its convolution over the last tokens
q, k     = norm(q), norm(k)                                             of every head alone
profile  = r · bank                              [q_heads, extent]: one number for each distance
y        = softmax(scale · q kᵀ + profile of the distance + causal mask) v · Wo

Queries and profiles may grow with their position: by 1 + alpha · log(max((position + 1) / floor,
1)).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.convolved_attention import ChannelConv
from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.head_placement import HeadPlacement, load_placement
from ferryman.model.shapes.attention_shapes import AttentionShape, DistanceShape, LogGrowth
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.recurrent_shapes import LayerConvShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.matrix import join_linear, summed_linear
from ferryman.model.weights.named_weights import Part, Weights, accumulation_dtype, undivided
from ferryman_kernels.attention.splits.profiled_attention import profiled_decode, profiled_prefill
from ferryman_kernels.elementwise.heads_into_pages import ProjectedHeads, TokenPlaces

GROWN_NUMBERS = 1 << 22
"""Numbers that are multiplied by their growth at once, if they are of more than one token."""


@dataclass(frozen=True, slots=True)
class ProfiledAttention:
    """The attention of layer `layer`. `projections` yield all query heads, then key, then value
    heads, then the states of the query heads that `bank` makes profiles of."""

    layer: int
    shape: AttentionShape
    distance: DistanceShape
    projections: Linear
    conv: ChannelConv
    bank: Linear
    placement: HeadPlacement
    out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        shape, pages = self.shape, state.attention[self.layer]
        q_dim, kv_dim = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        rel_dim = shape.q_heads * self.distance.state_dim
        q, kv, r = self.projections(hidden).split_with_sizes((q_dim, 2 * kv_dim, rel_dim), dim=1)
        convolved = self.conv(kv, state.conv[self.layer][:, : 2 * kv_dim], batch)
        k, v = (part.view(len(q), -1, shape.head_dim) for part in convolved.chunk(2, dim=1))
        table = batch.page_tables[shape.kind]
        places = TokenPlaces(table, batch.rows, batch.positions)
        heads = ProjectedHeads(q.view(len(q), -1, shape.head_dim), k, v)
        q = self.placement(heads, pages, places)
        # Keys are in their pages before any query of the step looks at them.
        profiles = self.bank(r.reshape(-1, self.distance.state_dim)).view(*q.shape[:2], -1)
        if self.distance.growth is not None:
            factors = growth_of(self.distance.growth, batch.positions, q.dtype)
            q, profiles = grow(q, factors), grow(profiles, factors)
        opened, table = pages.opened(table, q.dtype)
        keys = opened.key_pages, opened.value_pages, table
        seen = shape.scale, shape.window_len, opened.scales
        if isinstance(batch, PrefillBatch):
            where = batch.spans, batch.rows, batch.positions
            mixed = profiled_prefill(q, profiles, *keys, *where, *seen)
        else:
            mixed = profiled_decode(q, profiles, *keys, batch.positions, *seen)
        return self.out(mixed.flatten(1))


def growth_of(growth: LogGrowth, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """The factors [tokens] of queries at `positions` [tokens], in the accumulation dtype."""
    # In float64, and rounded once: torch's logarithm may differ by a bit behind a whole vector.
    counted = (positions + 1).clamp_min(1).to(torch.float64) / growth.floor
    return (1.0 + growth.alpha * counted.clamp_min(1.0).log()).to(accumulation_dtype(dtype))


def grow(numbers: Tensor, factors: Tensor) -> Tensor:
    """Multiplies `numbers` [tokens, heads, dim] by their token's factor, in place, and rounds once.

    In pieces, because a piece is there in the accumulation dtype as well: profiles are large.
    """
    at_once = max(1, GROWN_NUMBERS // numbers[:1].numel())
    for part, factor in zip(
        torch.split(numbers, at_once), torch.split(factors, at_once), strict=True
    ):
        part.copy_(part.to(factors.dtype) * factor[:, None, None])
    return numbers


def load_residual_taps(
    weights: Weights, name: str, channels: int, width: int, part: Part = undivided
) -> Tensor:
    """The taps [channels, width] of x + conv(x): the last of them has the residual path as well.
    `part` cuts a rank's channels."""
    taps = weights.precise(f"{name}.weight", channels, 1, width, part=part).squeeze(1)
    return torch.cat((taps[:, :-1], taps[:, -1:] + 1.0), dim=1)


def load_profiled_attention(
    weights: Weights,
    shape: AttentionShape,
    distance: DistanceShape,
    conv: LayerConvShape,
    place: LayerPlace,
) -> ProfiledAttention:
    """The attention under `weights`: a rank's query heads, and the heads of k and v they read."""
    group, hidden_dim = weights.group, place.hidden_dim
    rank_keys = partial(share_of, heads=shape.kv_heads, group=group)
    rows = (
        ("q_proj", shape.q_heads, shape.head_dim),
        ("k_proj", shape.kv_heads, shape.head_dim),
        ("v_proj", shape.kv_heads, shape.head_dim),
        ("r_proj", shape.q_heads, distance.state_dim),
    )
    taps = [
        load_residual_taps(weights, f"{name}_sconv.conv1d", conv.kv_dim, conv.conv_width, rank_keys)
        for name in "kv"
    ]
    bank = weights.tensor("rel_logits_proj.proj", distance.state_dim, distance.extent)
    out = weights.matrix("o_proj.weight", hidden_dim, shape.q_heads * shape.head_dim)
    return ProfiledAttention(
        layer=place.layer,
        shape=shape.shard(group.num_ranks),
        distance=distance,
        projections=join_linear(
            [
                share_of(weights.matrix(f"{name}.weight", heads * dim, hidden_dim), heads, group)
                for name, heads, dim in rows
            ]
        ),
        conv=ChannelConv(torch.cat(taps), None),
        # A copy: the strides of a transposed row are none of a matrix that is packed.
        bank=make_linear(bank.T.clone(memory_format=torch.contiguous_format)),
        placement=load_placement(weights, shape, place),
        out=summed_linear(share_of(out, shape.q_heads, group, axis=1), None, group),
    )
