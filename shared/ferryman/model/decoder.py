"""The decoder that all families share: embedding, layers, norm, head.

hidden = embed(tokens) · embedding_multiplier
hidden = layer(hidden)                             for each layer
logits = norm(hidden) · Whead / logits_scaling     (capped: cap · tanh(logits / cap))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.cache.manifest import StateManifest
from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.layers import Layer, Place, RmsNorm
from ferryman.model.linear import Linear, make_joined
from ferryman.model.shapes import ModelConfig, TrunkShape
from ferryman.model.state import ModelState
from ferryman.model.weights import Weights, accumulation_dtype


class Model(Protocol):
    """What the engine runs. Both forwards advance `state` in place.

    Logits come in the accumulation dtype: float64 for a float64 model, float32 otherwise.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def manifest(self) -> StateManifest: ...

    @property
    def device(self) -> torch.device: ...

    def prefill(self, batch: PrefillBatch, state: ModelState) -> Tensor:
        """Logits [sampled, vocab] of the batch's `last_tokens`."""
        ...

    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor:
        """Logits [requests, vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class EndScales:
    """What a family multiplies at its ends, and where it caps its logits; 0: nowhere."""

    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    logits_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ends of a decoder: from token ids to hidden states, from those to logits."""

    embedding: Tensor
    norm: RmsNorm
    head: Linear
    scales: EndScales

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.embedding).mul_(self.scales.embedding_multiplier)

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, vocab], in the accumulation dtype."""
        scores = self.head(self.norm(hidden))
        logits = scores.to(accumulation_dtype(scores.dtype)).div_(self.scales.logits_scaling)
        cap = self.scales.logits_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model of any family, put together from its layers."""

    config: ModelConfig
    manifest: StateManifest
    ends: Ends
    layers: tuple[Layer, ...]

    @property
    def vocab_size(self) -> int:
        return self.config.trunk.vocab_size

    @property
    def device(self) -> torch.device:
        return self.ends.embedding.device

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch, state: ModelState) -> Tensor:
        hidden = self.ends.embed(batch.token_ids)
        for layer in self.layers:
            hidden = layer.prefill(hidden, batch, state)
        return self.ends.logits(hidden[batch.last_tokens])

    @torch.inference_mode()
    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor:
        hidden = self.ends.embed(batch.token_ids)
        for layer in self.layers:
            hidden = layer.decode(hidden, batch, state)
        return self.ends.logits(hidden)


def load_decoder(
    config: ModelConfig,
    manifest: StateManifest,
    ends: Ends,
    layers: Weights,
    load_layer: Callable[[Weights, Place], Layer],
    norm_origin: float = 0.0,
) -> Decoder:
    """The decoder of `config` between its ends: `load_layer` makes each layer of what lies under
    its number in `layers`, for where it stands.
    """
    trunk = config.trunk
    places = (
        Place(index, trunk.hidden_dim, trunk.norm_eps, manifest.scan_chunk, norm_origin)
        for index in range(trunk.num_layers)
    )
    loaded = tuple(load_layer(layers.under(str(place.layer)), place) for place in places)
    return Decoder(config, manifest, ends, loaded)


def load_ends(
    weights: Weights,
    trunk: TrunkShape,
    final_norm: str,
    scales: EndScales,
    *,
    embedded: str = "model.embed_tokens.weight",
    norm_origin: float = 0.0,
) -> Ends:
    """Embedding, final norm and head; a tied head multiplies by the embedding."""
    size = (trunk.vocab_size, trunk.hidden_dim)
    embedding = weights.tensor(embedded, *size)
    head = embedding if trunk.ties_embeddings else weights.tensor("lm_head.weight", *size)
    norm = RmsNorm(weights.precise(final_norm, trunk.hidden_dim) + norm_origin, trunk.norm_eps)
    return Ends(embedding, norm, make_joined(head, weights.group), scales)
