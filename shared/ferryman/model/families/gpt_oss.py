"""gpt-oss: attention with sinks, alternately in windows and full, and a mixture of experts.

expert(x) = down((up + 1) · gate · sigmoid(alpha · gate)),  gate and up clamped at `limit`

Experts are published in MXFP4, in which they stay, and by others in a plain dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import DecoderLayer, LayerPlace, load_decoder_layer
from ferryman.model.layers.expert_router import shares_of_chosen
from ferryman.model.layers.experts import (
    ExpertMatrices,
    RoutedExperts,
    ShareOfOutput,
    load_experts_for,
)
from ferryman.model.layers.mlp import ClampedSwiglu
from ferryman.model.layers.moe import MixtureOfExperts
from ferryman.model.readers.config_readers import (
    check_activation,
    read_layers,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import read_experts, read_rotary_attention
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.ranks import slice_of
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.quantisation.mxfp4 import BLOCK_LEN, mxfp4_matrices


@dataclass(frozen=True, slots=True)
class GptOssConfig:
    """One attention and one mixture of experts a layer."""

    trunk: TrunkShape
    attention: tuple[AttentionShape, ...]
    moe: MoeShape
    swiglu_alpha: float
    swiglu_limit: float
    is_quantised: bool

    @property
    def states(self) -> tuple[tuple[AttentionShape], ...]:
        return tuple((attention,) for attention in self.attention)


def read_gpt_oss(fields: ConfigFields) -> GptOssConfig:
    check_activation(fields)
    return GptOssConfig(
        trunk=read_trunk(fields),
        attention=_read_attention(fields),
        moe=_read_moe(fields),
        swiglu_alpha=fields.positive("swiglu_alpha", 1.702),
        swiglu_limit=fields.positive("swiglu_limit", 7.0),
        is_quantised=fields.raw.get("quantization_config") is not None,
    )


def _read_attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    if not (fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling")):
        raise fields.refusal("rope_scaling", "given: this family's positions are stretched")
    shape = read_rotary_attention(fields)
    has_bias = fields.flag("attention_bias", True)
    full = replace(shape, has_bias=has_bias, has_out_bias=has_bias, has_sinks=True)
    window = replace(full, window_len=fields.whole("sliding_window"))
    return read_layers(fields, "layer_types", {"full_attention": full, "sliding_attention": window})


def _read_moe(fields: ConfigFields) -> MoeShape:
    if fields.raw.get("quantization_config") is not None:
        for name in ("hidden_size", "intermediate_size"):
            if fields.whole(name) % BLOCK_LEN:
                raise fields.refusal(name, f"a multiple of {BLOCK_LEN} for experts in MXFP4")
    return read_experts(fields, count="num_local_experts", inner_dim="intermediate_size")


def load_gpt_oss(config: GptOssConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_model_decoder(config, manifest, weights, partial(_layer, config), EndScales())


def _layer(config: GptOssConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    mixer = load_attention(weights.under("self_attn"), config.attention[place.layer], place)
    return load_decoder_layer(weights, place, mixer, _load_moe(config, weights.under("mlp")))


def _load_moe(config: GptOssConfig, weights: Weights) -> MixtureOfExperts:
    num_experts, hidden_dim = config.moe.num_experts, config.trunk.hidden_dim
    score = make_linear(
        weights.tensor("router.weight", num_experts, hidden_dim),
        weights.tensor("router.bias", num_experts),
    )
    return MixtureOfExperts(
        shares_of_chosen(score, config.moe.experts_per_token),
        _load_experts(config, weights.under("experts")),
        weights.group,
    )


def _load_experts(config: GptOssConfig, weights: Weights) -> RoutedExperts:
    """The experts. Rows of gate and up alternate on disk; here those of gate come first."""
    num_experts, inner_dim = config.moe.num_experts, config.moe.inner_dim
    hidden_dim = config.trunk.hidden_dim
    gate_ups = _matrices(config, weights, "gate_up_proj", 2 * inner_dim, hidden_dim)
    downs = _matrices(config, weights, "down_proj", hidden_dim, inner_dim)
    biases = weights.tensor("gate_up_proj_bias", num_experts, 2 * inner_dim)
    down_biases = weights.tensor("down_proj_bias", num_experts, hidden_dim)
    order, group = torch.arange(2 * inner_dim), weights.group
    own = torch.cat([slice_of(rows, group) for rows in (order[::2], order[1::2])])
    parts = (
        ExpertMatrices(
            [gate_ups[i].with_rows(own)],
            slice_of(downs[i], group, axis=1),
            biases[i][own],
            # The outputs of the ranks are added, so one rank alone adds the bias.
            None if group.rank else down_biases[i],
        )
        for i in range(num_experts)
    )
    act = ClampedSwiglu(config.swiglu_alpha, config.swiglu_limit, added=1.0)
    return load_experts_for(weights.device, parts, act, ShareOfOutput())


def _matrices(
    config: GptOssConfig, weights: Weights, name: str, out_dim: int, in_dim: int
) -> tuple[Matrix, ...]:
    """Each expert's projection [out_dim, in_dim]; plain ones are stored transposed."""
    num_experts = config.moe.num_experts
    if config.is_quantised:
        return mxfp4_matrices(weights, name, num_experts, out_dim, in_dim)
    return weights.transposed_matrices(name, num_experts, out_dim, in_dim)
