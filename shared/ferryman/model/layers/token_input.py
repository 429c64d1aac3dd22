"""A layer's own input of each token, which gates a small product into its output (Gemma 3n, 4).

own   = (norm(embedding · Wlayer / √hidden_dim) + table_layer[token id] · √own_dim) / √2
added = norm((gelu(x · Wgate) · own) · Wproject)

The embeddings of a batch are looked up again in each layer. So a layer needs nothing of the others
but the hidden states, and a prompt may be cut anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.layers.decoder import EmbeddingAndHead
from ferryman.model.layers.decoder_layers import Layer, LayerPlace, Norm, load_norm
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.token_table import Embedding, load_columns
from ferryman_kernels.elementwise.activations import gelu_tanh


@dataclass(frozen=True, slots=True)
class TokenInputShape:
    """The tables of all layers: `num_ids` rows of `dim` channels each.

    A token id beyond the table has the row of id 0: ids of images and sound are not in it.
    """

    num_ids: int
    dim: int


@dataclass(frozen=True, slots=True)
class TokenInput:
    """`own` of tokens. `table` [num_ids, dim] is already scaled; `ends` has the embedding."""

    ends: EmbeddingAndHead
    table: Embedding
    num_ids: int
    project: Linear
    norm: Norm

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens, dim] for `token_ids` [tokens]."""
        by_id = self.table(torch.where(token_ids < self.num_ids, token_ids, 0))
        return (self.norm(self.project(self.ends.embed(token_ids))) + by_id) * math.sqrt(0.5)


@dataclass(frozen=True, slots=True)
class TokenGate:
    """The sum that a layer adds by its tokens' own input: `added` of the formula above."""

    own: TokenInput
    gate: Linear
    project: Linear
    norm: Norm

    def __call__(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """[tokens, hidden_dim] for `hidden` [tokens, hidden_dim]."""
        gate = gelu_tanh(self.gate(hidden))
        return self.norm(self.project(gate * self.own(token_ids)))


@dataclass(frozen=True, slots=True)
class TokenGatedLayer:
    """A layer after which the tokens' own input of it is added."""

    inner: Layer
    gate: TokenGate

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        hidden = self.inner.forward(hidden, batch, state)
        return hidden + self.gate(hidden, batch.token_ids)


def load_token_gate(
    model: Weights,
    layer: Weights,
    ends: EmbeddingAndHead,
    shape: TokenInputShape,
    place: LayerPlace,
    num_layers: int,
) -> TokenGate:
    """The gate under `layer`; the tables and projections of all layers are under `model`.

    Every rank computes all of it: its products are narrow.
    """
    dim, hidden_dim, eps = shape.dim, place.hidden_dim, place.norm_eps
    scaled = model.scaled(
        {
            "embed_tokens_per_layer.weight": rounded(math.sqrt(dim), model),
            "per_layer_model_projection.weight": hidden_dim**-0.5,
        }
    )
    size = shape.num_ids, num_layers * dim
    columns = range(place.layer * dim, (place.layer + 1) * dim)
    rows = scaled.matrix("per_layer_model_projection.weight", num_layers * dim, hidden_dim)
    token_input = TokenInput(
        ends=ends,
        table=load_columns(scaled, "embed_tokens_per_layer.weight", size, columns),
        num_ids=shape.num_ids,
        project=rows.narrow(0, place.layer * dim, dim).linear(None),
        norm=load_norm(model, "per_layer_projection_norm", dim, eps),
    )
    return TokenGate(
        own=token_input,
        gate=layer.matrix("per_layer_input_gate.weight", dim, hidden_dim).linear(None),
        project=layer.matrix("per_layer_projection.weight", hidden_dim, dim).linear(None),
        norm=load_norm(layer, "post_per_layer_input_norm", hidden_dim, eps),
    )


def rounded(scale: float, weights: Weights) -> float:
    """A scale as the published code applies it: rounded to the model's dtype."""
    return float(torch.tensor(scale, dtype=weights.dtype))
