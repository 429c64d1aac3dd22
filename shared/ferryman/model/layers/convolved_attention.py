"""Attention whose queries and keys go through two convolutions (CCA, Figliolia et al. 2025).

q, k, v = x · Wqkv;                  half the channels of v are of the token before
m       = (q + k of its group) / 2                            m of k: the mean over its group
q, k    = heads(channels([q, k])) + m                         both convolutions over the last tokens
q, k    = √head_dim · q / |q|, √head_dim · k / |k| · length   then rotated, and k into its page
y       = softmax(q kᵀ / √head_dim + causal mask) v · Wo

`channels` convolves each channel, `heads` mixes the channels of a head. A length below the dtype's
epsilon counts as the epsilon. State of a sequence's start is zeros: the bias of `channels` is part
of that of `heads`, which reads its outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.cache.shards import piece_of
from ferryman.model.layers.attention import attend
from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.head_placement import HeadPlacement, placement
from ferryman.model.layers.rotation import RotaryEmbedding, load_rotary
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.ranks import Group, share_of
from ferryman.model.shapes.recurrent_shapes import HeadConvShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.matrix import join_linear, summed_linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.elementwise.heads_into_pages import ProjectedHeads, TokenPlaces
from ferryman_kernels.elementwise.rms_norm import rms_norm
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode, causal_conv_prefill


@dataclass(frozen=True, slots=True)
class ChannelConv:
    """A convolution of each channel: `taps` [channels, width] and `bias` [channels], or None, in
    the accumulation dtype.

    Several of a layer share its slot: the states of each are neighbouring channels there.
    """

    taps: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, states: Tensor, batch: StepBatch) -> Tensor:
        """[tokens, channels]; `states` [slots, channels, width - 1] are read and advanced."""
        weights = states, self.taps, self.bias
        if isinstance(batch, PrefillBatch):
            return causal_conv_prefill(x, *weights, *batch.scans, activates=False)

        def advance(x: Tensor, read: Tensor, write: Tensor) -> Tensor:
            return causal_conv_decode(x, *weights, read, write, activates=False)

        return batch.wave_by_wave(advance, x)


@dataclass(frozen=True, slots=True)
class HeadMixing:
    """The convolution of each head: a product of its channels at the last tokens, the oldest
    first. `past` makes the earlier ones, or is None if there are none."""

    past: ChannelConv | None
    heads: tuple[Linear, ...]

    def __call__(self, x: Tensor, states: Tensor, batch: StepBatch) -> Tensor:
        """[tokens, heads · head_dim] for `x` of the same shape."""
        ages = 1
        windows = x
        if self.past is not None:
            ages += len(self.past.taps) // x.shape[1]
            earlier = self.past(x.repeat(1, ages - 1), states, batch)
            windows = torch.cat((earlier, x), dim=1)
        by_head = windows.view(len(x), ages, len(self.heads), -1).unbind(2)
        products = [head(part.flatten(1)) for head, part in zip(self.heads, by_head, strict=True)]
        return torch.cat(products, dim=1)


@dataclass(frozen=True, slots=True)
class LengthenedHeads:
    """Gives q and k [tokens, heads, head_dim] the length √head_dim, and k a factor of its head,
    `lengths` [kv_heads, 1], before `turn` rotates them."""

    ones: Tensor
    lengths: Tensor
    turn: RotaryEmbedding

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.turn(self._lengthened(q), self._lengthened(k) * self.lengths, positions)

    def _lengthened(self, heads: Tensor) -> Tensor:
        # A norm without an epsilon, but that a head of zeros stays one.
        least = torch.finfo(self.ones.dtype).tiny
        normed = rms_norm(heads.flatten(0, 1), self.ones, least).view_as(heads)
        # A head that is shorter than epsilon would become longer than heads / epsilon.
        most = heads.abs() * (sqrt(heads.shape[2]) / torch.finfo(heads.dtype).eps)
        return normed.clamp(-most, most)


@dataclass(frozen=True, slots=True)
class ConvolvedAttention:
    """The attention of layer `layer`. `qkv` yields all query heads, then key, then value heads."""

    layer: int
    shape: AttentionShape
    qkv: Linear
    channels: ChannelConv
    mixing: HeadMixing
    placement: HeadPlacement
    out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        pages, kind = state.attention[self.layer], self.shape.kind
        heads = self._heads(self.qkv(hidden), batch, state.conv[self.layer])
        places = TokenPlaces(batch.page_tables[kind], batch.rows, batch.positions)
        q = self.placement(heads, pages, places)
        return self.out(attend(q, batch, pages, state.kernels, self.shape).flatten(1))

    def _heads(self, projected: Tensor, batch: StepBatch, states: Tensor) -> ProjectedHeads:
        count, head_dim = len(self.channels.taps), self.shape.head_dim
        kv_dim = self.shape.kv_heads * head_dim
        first, second = states[:, :count], states[:, count:]
        qk, v = self.channels(projected, first, batch).split_with_sizes(
            (count - kv_dim, kv_dim), dim=1
        )
        mixed = self.mixing(qk.contiguous(), second, batch)
        means = self._means(projected[:, : count - kv_dim])
        q, k = (
            (part.view(len(part), -1, head_dim) + mean).to(projected.dtype)
            for part, mean in zip(
                mixed.split_with_sizes((count - 2 * kv_dim, kv_dim), dim=1), means, strict=True
            )
        )
        return ProjectedHeads(q, k, v.view(len(v), -1, head_dim))

    def _means(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """For q [tokens, q_heads, head_dim] the mean of each query and its key, and for k that of
        these means over a key's group; both in the accumulation dtype."""
        tokens, (kv_heads, head_dim) = len(projected), (self.shape.kv_heads, self.shape.head_dim)
        wide = projected.to(accumulation_dtype(projected.dtype))
        q, k = wide.split_with_sizes(
            (wide.shape[1] - kv_heads * head_dim, kv_heads * head_dim), dim=1
        )
        of_pairs = q.view(tokens, kv_heads, -1, head_dim)
        of_pairs = (of_pairs + k.view(tokens, kv_heads, 1, head_dim)) * 0.5
        # One after the other: torch's mean promises no order.
        of_group = reduce(torch.add, of_pairs.unbind(2)) / of_pairs.shape[2]
        return of_pairs.flatten(1, 2), of_group


def load_convolved_attention(
    weights: Weights, shape: AttentionShape, conv: HeadConvShape, place: LayerPlace
) -> ConvolvedAttention:
    """The attention under `weights`: a rank's heads of q, k and v, with their convolutions."""
    group, hidden_dim = weights.group, place.hidden_dim
    inner = weights.under("qkv_proj")
    out = weights.matrix("o_proj.weight", hidden_dim, shape.q_heads * shape.head_dim)
    out_bias = weights.tensor("o_proj.bias", hidden_dim) if shape.has_out_bias else None
    rank_keys = partial(share_of, heads=shape.kv_heads, group=group)
    lengths = weights.tensor("qk_norm.temp", shape.kv_heads, part=rank_keys)
    wide = accumulation_dtype(weights.dtype)
    turn = LengthenedHeads(
        torch.ones(shape.head_dim, dtype=wide, device=weights.device),
        lengths[:, None],
        load_rotary(weights, shape.positions),
    )
    return ConvolvedAttention(
        layer=place.layer,
        shape=shape.shard(group.num_ranks),
        qkv=_load_projections(inner, shape, hidden_dim),
        channels=_load_channels(inner, shape, conv),
        mixing=_load_mixing(inner, conv),
        placement=placement(turn),
        out=summed_linear(share_of(out, shape.q_heads, group, axis=1), out_bias, group),
    )


VALUES = ("v_proj_current", "v_proj_delayed")
"""The projections of values: of the token itself, and of the token before."""


def _load_projections(weights: Weights, shape: AttentionShape, hidden_dim: int) -> Linear:
    """A rank's rows of q, k and v; the bias of delayed values comes after their delay."""
    group, counts = weights.group, {"q_proj": shape.q_heads, "k_proj": shape.kv_heads}
    parts = [
        share_of(weights.matrix(f"{name}.weight", n * shape.head_dim, hidden_dim), n, group)
        for name, n in counts.items()
    ]
    bounds = _value_bounds(shape, group)
    half = shape.kv_heads * shape.head_dim // 2
    for name, (start, length) in zip(VALUES, bounds, strict=True):
        if length:
            rows = weights.matrix(f"{name}.weight", half, hidden_dim)
            parts.append(rows.narrow(0, start, length))
    if not shape.has_bias:
        return join_linear(parts)
    biases = [
        weights.tensor(
            f"{name}.bias", n * shape.head_dim, part=partial(share_of, heads=n, group=group)
        )
        for name, n in counts.items()
    ]
    current, delayed = bounds
    biases.append(weights.tensor(f"{VALUES[0]}.bias", half).narrow(0, *current))
    biases.append(biases[0].new_zeros(delayed[1]))
    return join_linear(parts, torch.cat(biases))


def _value_bounds(shape: AttentionShape, group: Group) -> tuple[tuple[int, int], tuple[int, int]]:
    """(start, length) of the rows of each half of v that a rank's heads have."""
    dim = shape.kv_heads * shape.head_dim
    pieces = min(shape.kv_heads, group.num_ranks)
    length = dim // pieces
    start, half = piece_of(pieces, group.rank, group.num_ranks) * length, dim // 2
    num_current = min(max(half - start, 0), length)
    return (min(start, half), num_current), (max(start - half, 0), length - num_current)


def _load_channels(weights: Weights, shape: AttentionShape, conv: HeadConvShape) -> ChannelConv:
    """The convolution of the channels of q and k. Values go through the same kernel, by taps of
    one and zero: those of the token, then those of the token before."""
    taps = _of_q_and_k(weights, "conv_qk_depthwise.weight", conv, 1, conv.channel_width)
    taps = F.pad(taps[:, 0], (conv.conv_width - conv.channel_width, 0))
    (_, num_current), delayed = _value_bounds(shape, weights.group)
    values = taps.new_zeros(num_current + delayed[1], conv.conv_width)
    values[:num_current, -1] = 1.0
    values[num_current:, -2] = 1.0
    bias = None
    if shape.has_bias:
        added = weights.precise(f"{VALUES[1]}.bias", shape.kv_heads * shape.head_dim // 2)
        bias = torch.cat((taps.new_zeros(len(taps) + num_current), added.narrow(0, *delayed)))
    return ChannelConv(torch.cat((taps, values)), bias)


def _load_mixing(weights: Weights, conv: HeadConvShape) -> HeadMixing:
    dim, ages = conv.head_dim, conv.head_width
    kernels = _of_q_and_k(weights, "conv_qk_grouped.weight", conv, dim, ages)
    kernels = kernels.view(-1, dim, dim, ages)  # [heads, out channels, in channels, tokens]
    inner = _of_q_and_k(weights, "conv_qk_depthwise.bias", conv).view(-1, 1, dim)
    biases = _of_q_and_k(weights, "conv_qk_grouped.bias", conv).view(-1, dim)
    biases = (biases + (kernels.sum(3) * inner).sum(2)).to(weights.dtype)
    rows = kernels.transpose(2, 3).flatten(2).to(weights.dtype)
    heads = tuple(make_linear(row, bias) for row, bias in zip(rows, biases, strict=True))
    if ages == 1:
        return HeadMixing(None, heads)
    # A copy of the channels for each earlier token, the oldest first.
    taps = kernels.new_zeros(ages - 1, len(heads) * dim, conv.conv_width)
    for place, copy in enumerate(taps):
        copy[:, conv.conv_width - ages + place] = 1.0
    return HeadMixing(ChannelConv(taps.flatten(0, 1), None), heads)


def _of_q_and_k(weights: Weights, name: str, conv: HeadConvShape, *sizes: int) -> Tensor:
    """A rank's heads of a tensor [channels, *sizes] that has those of q before those of k."""
    q_dim, k_dim, _ = conv.widths

    def part(whole: Tensor) -> Tensor:
        q, k = whole.split_with_sizes((q_dim, k_dim))
        group = weights.group
        return torch.cat((share_of(q, conv.q_heads, group), share_of(k, conv.kv_heads, group)))

    return weights.precise(name, q_dim + k_dim, *sizes, part=part)
