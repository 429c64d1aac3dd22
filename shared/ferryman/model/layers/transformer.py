"""Decoders of attention and a feed-forward in every layer, by the tensor names of Llama.

Most families are one of these and differ in what they read from config.json: norms of heads,
windows, layers without positions, experts, multipliers, the places of norms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    Layer,
    LayerPlace,
    Mixer,
    Norm,
    NormLoader,
    PostNormLayer,
    SandwichLayer,
    load_norm,
)
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import load_routed
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MixtureShape
from ferryman.model.shapes.model_shapes import NormPlaces, TrunkShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_weights


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """One attention and one feed-forward for each layer."""

    trunk: TrunkShape
    attention: tuple[AttentionShape, ...]
    feed_forwards: tuple[FeedForwardShape, ...]
    norms: NormPlaces = NormPlaces.BEFORE
    scales: EndScales = field(default_factory=EndScales)
    residual_multiplier: float = 1.0

    @property
    def states(self) -> tuple[tuple[AttentionShape], ...]:
        return tuple((attention,) for attention in self.attention)


def uniform_transformer(
    trunk: TrunkShape, attention: AttentionShape, feed_forward: FeedForwardShape
) -> TransformerConfig:
    """The config of a transformer whose layers are all alike."""
    num_layers = trunk.num_layers
    return TransformerConfig(trunk, (attention,) * num_layers, (feed_forward,) * num_layers)


@dataclass(frozen=True, slots=True)
class SideBySideLayer:
    """A mixer and a feed-forward that read the same norm, with one residual path."""

    norm: Norm
    mixer: Mixer
    feed_forward: FeedForward

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        normed = self.norm(hidden)
        return hidden + self.mixer.forward(normed, batch, state) + self.feed_forward(normed)


@dataclass(frozen=True, slots=True)
class TwoNormsLayer:
    """A mixer and a feed-forward that read the same hidden state, each by a norm of its own."""

    mixer_norm: Norm
    mixer: Mixer
    feed_forward_norm: Norm
    feed_forward: FeedForward

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        mixed = self.mixer.forward(self.mixer_norm(hidden), batch, state)
        return hidden + mixed + self.feed_forward(self.feed_forward_norm(hidden))


class FeedForwardLoader(Protocol):
    """Reads the feed-forward of the layer under `weights`."""

    def __call__(
        self, weights: Weights, shape: FeedForwardShape, hidden_dim: int
    ) -> FeedForward: ...


def load_feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    """The MLP or the mixture under "mlp"; experts have the names of Qwen and DeepSeek."""
    if isinstance(shape, MixtureShape):
        return load_routed(weights.under("mlp"), shape, hidden_dim)
    return load_gated_mlp(weights.under("mlp"), shape, hidden_dim)


def load_transformer(
    config: TransformerConfig,
    manifest: StateManifest,
    weights: Weights,
    feed_forward: FeedForwardLoader = load_feed_forward,
    load_norm: NormLoader = load_norm,
    *,
    norm_origin: float = 0.0,
) -> Decoder:
    """The decoder of `config`, by the tensor names that most families share. `norm_origin` is that
    of heads' norms; `load_norm` reads all others."""
    ends = load_embedding_and_head(
        weights, config.trunk, "model.norm.weight", config.scales, load_norm=load_norm
    )
    layer = partial(_layer, config, feed_forward, load_norm)
    layers = weights.under("model.layers")
    return load_decoder(config, manifest, ends, layers, layer, norm_origin)


def load_text_transformer(
    config: TransformerConfig,
    manifest: StateManifest,
    weights: Weights,
    feed_forward: FeedForwardLoader = load_feed_forward,
) -> Decoder:
    """`load_transformer` of the text model in a folder whose model may also read images."""
    return load_transformer(config, manifest, text_weights(weights), feed_forward)


def _layer(
    config: TransformerConfig,
    load: FeedForwardLoader,
    load_norm: NormLoader,
    weights: Weights,
    place: LayerPlace,
) -> Layer:
    mixer = load_attention(weights.under("self_attn"), config.attention[place.layer], place)
    feed_forward = load(weights, config.feed_forwards[place.layer], place.hidden_dim)
    norm = partial(load_norm, weights, dim=place.hidden_dim, eps=place.norm_eps)
    # The same four names mean other norms in other places: each of these is a layer of its own.
    if config.norms is NormPlaces.AFTER:
        return PostNormLayer(
            mixer,
            norm("post_attention_layernorm"),
            feed_forward,
            norm("post_feedforward_layernorm"),
        )
    if config.norms is NormPlaces.AROUND:
        return SandwichLayer(
            norm("input_layernorm"),
            mixer,
            norm("post_attention_layernorm"),
            norm("pre_feedforward_layernorm"),
            feed_forward,
            norm("post_feedforward_layernorm"),
        )
    if config.norms is NormPlaces.SIDE_BY_SIDE:
        return TwoNormsLayer(
            norm("input_layernorm"), mixer, norm("post_attention_layernorm"), feed_forward
        )
    if config.norms is NormPlaces.SHARED:
        return SideBySideLayer(norm("input_layernorm"), mixer, feed_forward)
    return DecoderLayer(
        mixer_norm=norm("input_layernorm"),
        mixer=mixer,
        feed_forward_norm=norm("post_attention_layernorm"),
        feed_forward=feed_forward,
        residual_multiplier=config.residual_multiplier,
    )
