"""Granite 4 H (GraniteMoeHybrid): Mamba-2 and attention, experts beside a shared MLP."""

from __future__ import annotations

from ferryman.cache.manifest import StateManifest
from ferryman.model.attention import load_attention
from ferryman.model.config import GraniteHybridConfig
from ferryman.model.decoder import Decoder, EndScales, load_ends
from ferryman.model.layers import DecoderLayer, FeedForward, GatedMlp, Mixing, RmsNorm
from ferryman.model.linear import make_linear
from ferryman.model.mamba import MambaPlace, load_mamba
from ferryman.model.moe import ExpertsBesideShared, load_experts
from ferryman.model.shapes import Mixer
from ferryman.model.weights import Weights


def load_granite(config: GraniteHybridConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    """The model of `config` with the tensors of `weights`."""
    scales = EndScales(config.embedding_multiplier, config.logits_scaling)
    return Decoder(
        config=config,
        manifest=manifest,
        ends=load_ends(weights, config.trunk, "model.norm.weight", scales),
        layers=tuple(
            _layer(config, manifest.scan_chunk, weights.under(f"model.layers.{index}"), index)
            for index in range(len(config.trunk.mixers))
        ),
    )


def _layer(
    config: GraniteHybridConfig, scan_chunk: int, weights: Weights, index: int
) -> DecoderLayer:
    trunk = config.trunk
    mixer_norm = weights.precise("input_layernorm.weight", trunk.hidden_dim)
    feed_forward_norm = weights.precise("post_attention_layernorm.weight", trunk.hidden_dim)
    return DecoderLayer(
        mixer_norm=RmsNorm(mixer_norm, trunk.norm_eps),
        mixer=_mixer(config, scan_chunk, weights, index),
        feed_forward_norm=RmsNorm(feed_forward_norm, trunk.norm_eps),
        feed_forward=_feed_forward(config, weights),
        residual_multiplier=config.residual_multiplier,
    )


def _mixer(config: GraniteHybridConfig, scan_chunk: int, weights: Weights, index: int) -> Mixing:
    trunk = config.trunk
    if trunk.mixers[index] is Mixer.ATTENTION:
        return load_attention(weights.under("self_attn"), index, config.attention, trunk.hidden_dim)
    place = MambaPlace(index, trunk.hidden_dim, trunk.norm_eps, scan_chunk)
    return load_mamba(weights.under("mamba"), config.mamba, place)


def _feed_forward(config: GraniteHybridConfig, weights: Weights) -> FeedForward:
    hidden_dim, inner_dim = config.trunk.hidden_dim, config.shared_mlp.inner_dim
    shared = GatedMlp(
        make_linear(weights.tensor("shared_mlp.input_linear.weight", 2 * inner_dim, hidden_dim)),
        make_linear(weights.tensor("shared_mlp.output_linear.weight", hidden_dim, inner_dim)),
    )
    if config.moe is None:
        return shared
    routed = load_experts(weights.under("block_sparse_moe"), config.moe, hidden_dim)
    return ExpertsBesideShared(routed, shared)
