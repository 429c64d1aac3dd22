"""Several streams of hidden states, of which each layer computes on one (Gemma 3n).

Alternating updates (AltUp, Baykal et al. 2023), for streams s [tokens, streams, hidden_dim]:

mode(x)   = tanh(norm(x) · Wr / hidden_dim)                   [tokens, streams]
predicted = s + (mode(s_active) · Wp as a matrix) s
corrected = predicted + (1 + mode(y) · Wc) ⊗ (y - predicted_active)       y: the layer's output

The first stream is the embedding, each other one a projection of it, as long as it is; the final
norm takes the mean of the streams, projected again.

A layer of attention and an MLP over the streams:

x        = norm(active stream);   low = x + norm(x · Wleft · Wright)
gated    = (active + norm(attention(x)) + low) / √2
output   = gated + norm(mlp(norm(gated)))
streams  = corrected by the output; all but the first += the token's own input of the layer
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import (
    FeedForward,
    Layer,
    LayerPlace,
    Mixer,
    Norm,
    RmsNorm,
    load_norm,
)
from ferryman.model.layers.token_input import TokenGate
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.products.weighted_sum import weighted_sum

LEAST_SQUARE = 1e-5


@dataclass(frozen=True, slots=True)
class StreamsShape:
    """`count` streams; layers compute on the stream `active`.

    `scales_output`: the corrected stream that gates the tokens' own inputs is scaled by channel.
    """

    count: int
    active: int
    scales_output: bool


@dataclass(frozen=True, slots=True)
class AlternatingUpdates:
    """A layer's predictions of all streams, and their correction by what it computes of one."""

    shape: StreamsShape
    norm: Norm
    route: Linear
    predictions: Linear
    corrections: Linear

    def predicted(self, streams: Tensor) -> Tensor:
        """All streams [tokens, streams, hidden_dim] before the layer runs."""
        count = self.shape.count
        mixing = self.predictions(self._mode(self.active(streams))).view(-1, count, count)
        wide = accumulation_dtype(streams.dtype)
        before, shares = streams.to(wide), mixing.to(wide)
        # torch's product of batches promises no order, this sum has that of the streams.
        mixed = [weighted_sum(before, share) for share in shares.unbind(1)]
        return (before + torch.stack(mixed, dim=1)).to(streams.dtype)

    def corrected(self, predicted: Tensor, output: Tensor) -> Tensor:
        """All streams after the layer, whose output for the active one is [tokens, hidden_dim]."""
        shares = self.corrections(self._mode(output)) + 1.0
        news = output - self.active(predicted)
        return predicted + shares[:, :, None] * news[:, None]

    def active(self, streams: Tensor) -> Tensor:
        return streams[:, self.shape.active].contiguous()

    def _mode(self, hidden: Tensor) -> Tensor:
        return self.route(self.norm(hidden)).tanh()


@dataclass(frozen=True, slots=True)
class ProjectedStreams:
    """The hidden state itself as one stream, and `projections` of it as the others."""

    projections: tuple[Linear, ...]

    def __call__(self, hidden: Tensor) -> Tensor:
        others = (as_long_as(hidden, project(hidden)) for project in self.projections)
        return torch.stack((hidden, *others), dim=1)


@dataclass(frozen=True, slots=True)
class SpreadLayer:
    """The first layer: `spread` makes streams [tokens, streams, hidden_dim] of its input
    [tokens, hidden_dim]."""

    spread: Callable[[Tensor], Tensor]
    inner: Layer

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        return self.inner.forward(self.spread(hidden), batch, state)


@dataclass(frozen=True, slots=True)
class JoinedStreamsNorm:
    """The final norm: of the mean of the first stream and the `projections` of the others."""

    projections: tuple[Linear, ...]
    norm: Norm

    def __call__(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden_dim] for `hidden` [tokens, streams, hidden_dim]."""
        first, *others = hidden.unbind(1)
        parts = [
            as_long_as(first, project(other))
            for project, other in zip(self.projections, others, strict=True)
        ]
        return self.norm(torch.stack((first, *parts)).mean(0))


def as_long_as(model: Tensor, hidden: Tensor) -> Tensor:
    """`hidden` with each row as long as that of `model`; both [tokens, hidden_dim]."""
    wanted = model.square().mean(-1, keepdim=True).sqrt()
    length = hidden.square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
    return hidden * wanted / length


def load_alternating_updates(
    weights: Weights, shape: StreamsShape, hidden_dim: int, eps: float
) -> AlternatingUpdates:
    """The updates under `weights`; 1 / hidden_dim is part of the norm's weight."""
    count = shape.count
    norm = weights.precise("router_norm.weight", hidden_dim) / hidden_dim
    return AlternatingUpdates(
        shape=shape,
        norm=RmsNorm(norm, eps),
        route=weights.matrix("modality_router.weight", count, hidden_dim).linear(None),
        predictions=weights.matrix("prediction_coefs.weight", count**2, count).linear(None),
        corrections=weights.matrix("correction_coefs.weight", count, count).linear(None),
    )


def load_projections(
    weights: Weights, name: str, shape: StreamsShape, hidden_dim: int
) -> tuple[Linear, ...]:
    """A product for each stream but the first; every rank computes them."""
    return tuple(
        weights.matrix(f"{name}.{number}.weight", hidden_dim, hidden_dim).linear(None)
        for number in range(shape.count - 1)
    )


@dataclass(frozen=True, slots=True)
class LowRankResidual:
    """x + norm(x · Wleft · Wright): the learned augmented residual layer (LAuReL)."""

    left: Linear
    right: Linear
    norm: Norm

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden + self.norm(self.right(self.left(hidden)))


@dataclass(frozen=True, slots=True)
class StreamsLayer:
    """One layer; hidden states are [tokens, streams, hidden_dim], in and out."""

    updates: AlternatingUpdates
    residual: LowRankResidual
    mixer_norm: Norm
    mixer: Mixer
    mixed_norm: Norm
    feed_forward_norm: Norm
    feed_forward: FeedForward
    fed_norm: Norm
    gate: TokenGate

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        predicted = self.updates.predicted(hidden)
        normed = self.mixer_norm(self.updates.active(predicted))
        mixed = self.mixer.forward(normed, batch, state)
        active = self.updates.active(predicted) + self.mixed_norm(mixed)
        gated = (active + self.residual(normed)) * math.sqrt(0.5)
        fed = self.feed_forward(self.feed_forward_norm(gated))
        corrected = self.updates.corrected(predicted, gated + self.fed_norm(fed))
        gates = self.gate(self.updates.active(corrected), batch.token_ids)
        corrected[:, 1:] += gates[:, None]
        return corrected


def load_low_rank_residual(weights: Weights, rank: int, place: LayerPlace) -> LowRankResidual:
    """The residual under `weights`; every rank computes its narrow products."""
    dim = place.hidden_dim
    return LowRankResidual(
        weights.matrix("linear_left.weight", rank, dim).linear(None),
        weights.matrix("linear_right.weight", dim, rank).linear(None),
        load_norm(weights, "post_laurel_norm", dim, place.norm_eps),
    )
