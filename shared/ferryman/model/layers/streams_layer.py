"""A layer of attention and an MLP over several streams of hidden states (Gemma 3n).

x        = norm(active stream);   low = x + norm(x · Wleft · Wright)
gated    = (active + norm(attention(x)) + low) / √2
output   = gated + norm(mlp(norm(gated)))
streams  = corrected by the output; all but the first += the token's own input of the layer
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ferryman.model.layers.decoder_layers import (
    FeedForward,
    LayerPlace,
    Mixer,
    Norm,
    load_norm,
)
from ferryman.model.layers.hidden_streams import AlternatingUpdates
from ferryman.model.layers.token_input import TokenGate
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.named_weights import Weights


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
