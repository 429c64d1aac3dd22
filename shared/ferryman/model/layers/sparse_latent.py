"""Sparse latent attention (DeepSeek-V3.2): a lightning indexer chooses the positions to attend to.

index q      = residual · Wq, by head;    index key = layer_norm(x · Wk): written to its page
               the first channels of both, or the last, rotated by position
head weights = x · Ww / √(heads · head_dim)
y            = latent attention over the chosen positions alone

Layers may share an indexer (GLM-5.2): those after one with an indexer attend to the places that it
chose. A decoder's layers pass on hidden states alone, so a layer with an indexer and those after it
are one layer to the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.model.layers.centred_norm import LayerNorm
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    Layer,
    LayerPlace,
    NormedPath,
    Residual,
    ResidualPath,
)
from ferryman.model.layers.latent import LatentProjections, load_projections
from ferryman.model.layers.rotation import RotaryEmbedding
from ferryman.model.shapes.attention_shapes import IndexShape, LatentShape
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.attention.latent_pages import write_latents


@dataclass(frozen=True, slots=True)
class Indexer:
    """Queries, keys and head weights of the sparse index.

    `head_weights` are in the accumulation dtype; they include the scale of the scores.
    """

    shape: IndexShape
    query_up: Linear
    key: Linear
    key_norm: LayerNorm
    head_weights: Linear
    turn: RotaryEmbedding

    def write(
        self, hidden: Tensor, residual: Tensor, batch: StepBatch, pages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Writes the tokens' index keys; returns queries [tokens, heads, head_dim] and weights."""
        q = self.query_up(residual).view(len(hidden), self.shape.heads, -1)
        key = self.key_norm(self.key(hidden))[:, None]
        q, key = self.turn(q, key, batch.positions)
        table = batch.page_tables[Kind.FULL]
        write_latents(pages, key[:, 0], table, batch.rows, batch.positions)
        return q, self.head_weights(hidden.to(accumulation_dtype(hidden.dtype)))


@dataclass(frozen=True, slots=True)
class PlacedLatentAttention:
    """Latent attention of layer `layer` to places that are given."""

    layer: int
    projections: LatentProjections

    def attend(
        self,
        hidden: Tensor,
        residual: Tensor,
        places: Tensor,
        batch: StepBatch,
        state: ModelState,
    ) -> Tensor:
        """Writes the tokens' rows and attends to `places`, as `choose_prefill` returns them."""
        pages, shape = state.latent[self.layer], self.projections.shape
        q = self.projections.write(hidden, residual, batch, pages)
        attend = state.kernels.latent_places
        attended = attend(q, pages, places, shape.latent_dim, shape.scale, self.projections.sinks)
        return self.projections.finish(attended, hidden)


@dataclass(frozen=True, slots=True)
class SparseLatentAttention:
    """A mixer with an indexer: a token attends to the positions that it chooses."""

    attention: PlacedLatentAttention
    indexer: Indexer

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        residual = self.attention.projections.residual(hidden)
        places = self.chosen(hidden, residual, batch, state)
        return self.attention.attend(hidden, residual, places, batch, state)

    def chosen(
        self, hidden: Tensor, residual: Tensor, batch: StepBatch, state: ModelState
    ) -> Tensor:
        """The places that each token attends to; writes the tokens' index keys."""
        table, pages = batch.page_tables[Kind.FULL], state.index[self.attention.layer]
        q, weights = self.indexer.write(hidden, residual, batch, pages)
        count = self.indexer.shape.count
        if isinstance(batch, PrefillBatch):
            return state.kernels.choose_prefill(q, weights, pages, table, batch.spans, count)
        return state.kernels.choose_decode(q, weights, pages, table, batch.positions, count)


def load_placed_attention(
    weights: Weights, shape: LatentShape, place: LayerPlace
) -> PlacedLatentAttention:
    """Latent attention under `weights`."""
    return PlacedLatentAttention(place.layer, load_projections(weights, shape, place))


def load_indexer(
    weights: Weights,
    attention: PlacedLatentAttention,
    shape: LatentShape,
    index: IndexShape,
    place: LayerPlace,
) -> SparseLatentAttention:
    """`attention`, which has the undivided `shape`, with the indexer under `weights`."""
    under, order = weights, _halves_apart(index, shape.rope_dim)
    scale = (index.heads * index.head_dim) ** -0.5
    queries = under.matrix("wq_b.weight", index.heads * index.head_dim, shape.query_rank)
    by_head = torch.arange(index.heads)[:, None] * index.head_dim + order
    indexer = Indexer(
        shape=index,
        query_up=queries.with_rows(by_head.flatten()).linear(None),
        key=under.matrix("wk.weight", index.head_dim, place.hidden_dim)
        .with_rows(order)
        .linear(None),
        key_norm=LayerNorm(
            under.precise("k_norm.weight", index.head_dim)[order],
            under.precise("k_norm.bias", index.head_dim)[order],
            index.norm_eps,
        ),
        head_weights=make_linear(
            under.precise("weights_proj.weight", index.heads, place.hidden_dim) * scale
        ),
        turn=attention.projections.turn,
    )
    return SparseLatentAttention(attention, indexer)


def _halves_apart(index: IndexShape, rope_dim: int) -> Tensor:
    """The order of an index head's channels in which those that turn come first, and the two of a
    rotated pair are rope_dim / 2 apart: queries and keys share it, so scores stay the same."""
    channels = torch.arange(index.head_dim)
    if index.turns_last:
        channels = channels.roll(rope_dim)
    if not index.is_interleaved:
        return channels
    turning = channels[:rope_dim]
    return torch.cat((turning[0::2], turning[1::2], channels[rope_dim:]))


class Entered(NamedTuple):
    """The attention's input, the latent that its queries are computed from, and what its output is
    added to."""

    normed: Tensor
    latent: Tensor
    residual: Residual


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    """Latent attention to given places and a feed-forward, each with a path around it."""

    mixer_path: ResidualPath
    attention: PlacedLatentAttention
    feed_forward_path: ResidualPath
    feed_forward: FeedForward

    def entered(self, hidden: Tensor) -> Entered:
        normed, residual = self.mixer_path.entered(hidden)
        return Entered(normed, self.attention.projections.residual(normed), residual)

    def finish(self, residual: Residual, mixed: Tensor) -> Tensor:
        """The hidden states after the layer, from the attention's output."""
        normed, rest = self.feed_forward_path.entered(residual.plus(mixed))
        return rest.plus(self.feed_forward(normed))


@dataclass(frozen=True, slots=True)
class SharedIndexLayers:
    """`layers`, the first of which has the indexer of `chooser`."""

    chooser: SparseLatentAttention
    layers: tuple[PlacedLayer, ...]

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        first = self.layers[0].entered(hidden)
        places = self.chooser.chosen(first.normed, first.latent, batch, state)
        for number, layer in enumerate(self.layers):
            # The first layer's are there already, because the choice needs them.
            entered = layer.entered(hidden) if number else first
            attend = layer.attention.attend
            mixed = attend(entered.normed, entered.latent, places, batch, state)
            hidden = layer.finish(entered.residual, mixed)
        return hidden


SparsePart = tuple[PlacedLayer, SparseLatentAttention | None]
"""A layer, and its attention with an indexer if it has one of its own."""


def joined_by_index(parts: Sequence[SparsePart]) -> tuple[Layer, ...]:
    """The decoder's layers; the first of `parts` has an indexer."""
    return tuple(_layer(chooser, layers) for chooser, layers in _runs(parts))


def _runs(
    parts: Sequence[SparsePart],
) -> Iterator[tuple[SparseLatentAttention, list[PlacedLayer]]]:
    """Each attention with an indexer, with its own layer and those after it that have none."""
    starts = [number for number, (_, chooser) in enumerate(parts) if chooser is not None]
    for start, end in zip(starts, [*starts[1:], len(parts)], strict=True):
        chooser = parts[start][1]
        if chooser is not None:
            yield chooser, [layer for layer, _ in parts[start:end]]


def _layer(chooser: SparseLatentAttention, layers: list[PlacedLayer]) -> Layer:
    match layers:
        case [PlacedLayer(NormedPath(mixer_norm), _, NormedPath(feed_forward_norm), feed_forward)]:
            # This layer leaves its last sum to the norm of the next one.
            return DecoderLayer(mixer_norm, chooser, feed_forward_norm, feed_forward)
    return SharedIndexLayers(chooser, tuple(layers))
