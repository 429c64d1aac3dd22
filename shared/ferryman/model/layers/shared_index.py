"""Layers of sparse attention that share an indexer (GLM-5.2).

The layers after one with an indexer attend to the places that it chose. A decoder's layers pass on
hidden states alone, so a layer with an indexer and those after it are one layer to the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ferryman.model.layers.decoder_layers import DecoderLayer, FeedForward, Layer, Norm
from ferryman.model.layers.sparse_latent import PlacedLatentAttention, SparseLatentAttention
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.state import ModelState


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    """Latent attention to given places and a feed-forward, each after a norm and with a residual
    path."""

    mixer_norm: Norm
    attention: PlacedLatentAttention
    feed_forward_norm: Norm
    feed_forward: FeedForward

    def normed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input, and the latent that its queries are computed from."""
        normed = self.mixer_norm(hidden)
        return normed, self.attention.projections.residual(normed)

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = hidden + mixed
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


@dataclass(frozen=True, slots=True)
class SharedIndexLayers:
    """`layers`, the first of which has the indexer of `chooser`."""

    chooser: SparseLatentAttention
    layers: tuple[PlacedLayer, ...]

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        inputs = self.layers[0].normed(hidden)
        places = self.chooser.chosen(*inputs, batch, state)
        for number, layer in enumerate(self.layers):
            # The first layer's are there already, because the choice needs them.
            normed, residual = layer.normed(hidden) if number else inputs
            mixed = layer.attention.attend(normed, residual, places, batch, state)
            hidden = layer.finish(hidden, mixed)
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
    if len(layers) > 1:
        return SharedIndexLayers(chooser, tuple(layers))
    alone = layers[0]
    return DecoderLayer(alone.mixer_norm, chooser, alone.feed_forward_norm, alone.feed_forward)
