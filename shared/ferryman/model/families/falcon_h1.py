"""Falcon-H1: Mamba-2 and attention side by side in each layer, then a gated MLP.

hidden += ssm_out · mamba(norm(hidden)) + attention_out · attention(norm(hidden))

Its many multipliers (maximal update parametrisation) are multiplied into the weights at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import DecoderLayer, LayerPlace, load_decoder_layer
from ferryman.model.layers.mixers import Parallel, load_mixer
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.readers.config_readers import (
    check_activation,
    read_mamba,
    read_mlp,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import read_rotary_attention
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.recurrent_shapes import Gating, MambaShape
from ferryman.model.weights.named_weights import Weights


@dataclass(frozen=True, slots=True)
class Multipliers:
    """`ssm_parts` are for gate, x, B, C and dt; `mlp` for its gate and its down projection."""

    attention_in: float
    attention_out: float
    key: float
    ssm_in: float
    ssm_out: float
    ssm_parts: tuple[float, ...]
    mlp: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FalconH1Config:
    """All layers are alike."""

    trunk: TrunkShape
    attention: AttentionShape
    mamba: MambaShape
    mlp: MlpShape
    multipliers: Multipliers
    embedding_multiplier: float
    head_multiplier: float

    @property
    def states(self) -> tuple[tuple[AttentionShape, MambaShape], ...]:
        return ((self.attention, self.mamba),) * self.trunk.num_layers


def read_falcon_h1(fields: ConfigFields) -> FalconH1Config:
    check_activation(fields)
    return FalconH1Config(
        trunk=read_trunk(fields),
        attention=read_rotary_attention(fields),
        mamba=_mamba(fields),
        mlp=read_mlp(fields),
        multipliers=Multipliers(
            attention_in=fields.positive("attention_in_multiplier", 1.0),
            attention_out=fields.positive("attention_out_multiplier", 1.0),
            key=fields.positive("key_multiplier", 1.0),
            ssm_in=fields.positive("ssm_in_multiplier", 1.0),
            ssm_out=fields.positive("ssm_out_multiplier", 1.0),
            ssm_parts=fields.positives("ssm_multipliers", (1.0,) * 5),
            mlp=fields.positives("mlp_multipliers", (1.0,) * 2),
        ),
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        head_multiplier=fields.positive("lm_head_multiplier", 1.0),
    )


def _mamba(fields: ConfigFields) -> MambaShape:
    inner_dim = fields.raw.get("mamba_d_ssm")
    return read_mamba(
        fields,
        inner_dim=None if inner_dim is None else fields.whole("mamba_d_ssm"),
        has_out_bias=fields.flag("projectors_bias", False),
        gating=_gating(fields),
    )


def _gating(fields: ConfigFields) -> Gating:
    if not fields.flag("mamba_rms_norm", False):
        return Gating.GATE_ALONE
    is_before = fields.flag("mamba_norm_before_gate", True)
    return Gating.NORM_THEN_GATE if is_before else Gating.GATE_THEN_NORM


def load_falcon_h1(config: FalconH1Config, manifest: StateManifest, weights: Weights) -> Decoder:
    scales = EndScales(config.embedding_multiplier, 1.0 / config.head_multiplier)
    layer = partial(_layer, config)
    return load_model_decoder(
        config, manifest, weights, layer, scales, final_norm="final_layernorm"
    )


def _layer(config: FalconH1Config, weights: Weights, place: LayerPlace) -> DecoderLayer:
    scaled = weights.scaled(_factors(config))
    mixers = tuple(load_mixer(scaled, shape, place) for shape in config.states[place.layer])
    mlp = load_gated_mlp(scaled.under("feed_forward"), config.mlp, place.hidden_dim)
    norms = ("input_layernorm", "pre_ff_layernorm")
    return load_decoder_layer(weights, place, Parallel(mixers), mlp, norms=norms)


def _factors(config: FalconH1Config) -> Mapping[str, float | Tensor]:
    """The factor of each tensor of a layer. A factor of the input is not applied to the bias."""
    m, parts = config.multipliers, _ssm_parts(config)
    gate, down = m.mlp
    return {
        "self_attn.q_proj.weight": m.attention_in,
        "self_attn.k_proj.weight": m.attention_in * m.key,
        "self_attn.k_proj.bias": m.key,
        "self_attn.v_proj.weight": m.attention_in,
        "self_attn.o_proj.weight": m.attention_out,
        "self_attn.o_proj.bias": m.attention_out,
        "mamba.in_proj.weight": m.ssm_in * parts[:, None],
        "mamba.in_proj.bias": parts,
        "mamba.out_proj.weight": m.ssm_out,
        "mamba.out_proj.bias": m.ssm_out,
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.gate_proj.bias": gate,
        "feed_forward.down_proj.weight": down,
        "feed_forward.down_proj.bias": down,
    }


def _ssm_parts(config: FalconH1Config) -> Tensor:
    """The multiplier of each output of the in-projection [proj_dim]: gate, x, B, C, dt."""
    mamba = config.mamba
    dims = (mamba.inner_dim, mamba.inner_dim, mamba.group_dim, mamba.group_dim, mamba.ssm_heads)
    parts = zip(dims, config.multipliers.ssm_parts, strict=True)
    return torch.cat([torch.full((dim,), part, dtype=torch.float64) for dim, part in parts])
