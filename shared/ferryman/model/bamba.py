"""Bamba: Mamba-2 and attention with partly rotary heads, a gated MLP in every layer."""

from __future__ import annotations

import torch

from ferryman.cache.manifest import StateManifest
from ferryman.model.attention import load_attention
from ferryman.model.config import BambaConfig
from ferryman.model.decoder import Decoder, EndScales, load_ends
from ferryman.model.layers import DecoderLayer, GatedMlp, Mixing, RmsNorm
from ferryman.model.linear import make_linear
from ferryman.model.mamba import MambaPlace, load_mamba
from ferryman.model.shapes import Mixer, MlpShape
from ferryman.model.weights import Weights


def load_bamba(config: BambaConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    """The model of `config` with the tensors of `weights`."""
    return Decoder(
        config=config,
        manifest=manifest,
        ends=load_ends(weights, config.trunk, "model.final_layernorm.weight", EndScales()),
        layers=tuple(
            _layer(config, manifest.scan_chunk, weights.under(f"model.layers.{index}"), index)
            for index in range(len(config.trunk.mixers))
        ),
    )


def _layer(config: BambaConfig, scan_chunk: int, weights: Weights, index: int) -> DecoderLayer:
    trunk = config.trunk
    mixer_norm = weights.precise("input_layernorm.weight", trunk.hidden_dim)
    feed_forward_norm = weights.precise("pre_ff_layernorm.weight", trunk.hidden_dim)
    return DecoderLayer(
        mixer_norm=RmsNorm(mixer_norm, trunk.norm_eps),
        mixer=_mixer(config, scan_chunk, weights, index),
        feed_forward_norm=RmsNorm(feed_forward_norm, trunk.norm_eps),
        feed_forward=_mlp(config.mlp, trunk.hidden_dim, weights.under("feed_forward")),
        residual_multiplier=1.0,
    )


def _mixer(config: BambaConfig, scan_chunk: int, weights: Weights, index: int) -> Mixing:
    trunk = config.trunk
    if trunk.mixers[index] is Mixer.ATTENTION:
        return load_attention(weights.under("self_attn"), index, config.attention, trunk.hidden_dim)
    place = MambaPlace(index, trunk.hidden_dim, trunk.norm_eps, scan_chunk)
    return load_mamba(weights.under("mamba"), config.mamba, place)


def _mlp(shape: MlpShape, hidden_dim: int, weights: Weights) -> GatedMlp:
    parts = ("gate_proj", "up_proj")
    joined = torch.cat(
        [weights.tensor(f"{name}.weight", shape.inner_dim, hidden_dim) for name in parts]
    )
    bias, down_bias = None, None
    if shape.has_bias:
        bias = torch.cat([weights.tensor(f"{name}.bias", shape.inner_dim) for name in parts])
        down_bias = weights.tensor("down_proj.bias", hidden_dim)
    down = weights.tensor("down_proj.weight", hidden_dim, shape.inner_dim)
    return GatedMlp(make_linear(joined, bias), make_linear(down, down_bias))
