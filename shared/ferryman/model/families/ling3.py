"""Ling 3 (Bailing): Kimi Delta Attention and gated latent attention, the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.deepseek import (
    load_dense_or_experts,
    read_turning_latent,
    with_whole_turns,
)
from ferryman.model.families.kimi_linear import (
    KimiLinearConfig,
    KimiMixer,
    config_with,
    load_kimi_mixer,
    with_former_names,
)
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    LayerPlace,
    load_decoder_layer,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    check_flags,
    read_layers,
    read_used,
)
from ferryman.model.readers.transformer_readers import FULL
from ferryman.model.shapes.attention_shapes import GateActivation, GateShape, LatentShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.delta_shapes import KimiDeltaShape
from ferryman.model.weights.named_weights import Weights

LINEAR = "linear_attention"
NUM_DENSE = 2
LEAST_DECAY = -5.0
DEFAULTS = {
    "num_shared_experts": 1,
    "num_expert_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rope_theta": 6_000_000.0,
    "layer_group_size": 6,
    "head_dim": 128,
}
"""The meaning of fields that a config leaves out."""

GATE = GateShape("g_proj", GateActivation.SIGMOID, is_by_head=True)

BAILING_NAMES: Mapping[str, str] = {
    "embed_tokens": "word_embeddings",
    "self_attn": "attention",
    "o_proj": "dense",
    "e_score_correction_bias": "expert_bias",
}
"""The words of Ling's and Ring's families for parts of a tensor's name."""


def read_bailing_hybrid(fields: ConfigFields) -> KimiLinearConfig:
    """Ling 3: Kimi Delta Attention, every sixth layer gated latent attention, experts."""
    fields = with_former_names(fields.with_defaults(**DEFAULTS))
    check_activation(fields)
    check_flags(fields, tie_word_embeddings=False)
    return config_with(fields, _mixers, NUM_DENSE)


def _mixers(fields: ConfigFields, num_layers: int) -> tuple[KimiMixer, ...]:
    readers: dict[str, Callable[[], KimiMixer]] = {
        FULL: partial(_latent, fields),
        LINEAR: partial(_delta, fields),
    }
    period = fields.whole("layer_group_size")
    words = [LINEAR if (layer + 1) % period else FULL for layer in range(num_layers)]
    return read_used(read_layers(fields.with_defaults(layer_types=words), "layer_types", readers))


def _latent(fields: ConfigFields) -> LatentShape:
    check_flags(fields, rope_interleave=True)
    if fields.raw.get("q_lora_rank") is not None:
        raise fields.refusal("q_lora_rank", "null: queries are computed from hidden")
    return replace(read_turning_latent(with_whole_turns(fields)), gate=GATE)


def _delta(fields: ConfigFields) -> KimiDeltaShape:
    # A bound from below is a number below zero, which no other field is.
    least = fields.raw.get("kda_lower_bound", LEAST_DECAY)
    if not isinstance(least, int | float) or isinstance(least, bool) or not -1e3 < least < 0:
        raise fields.refusal("kda_lower_bound", "a number below 0")
    # transformers writes these sizes once more, and another head_dim.
    named = fields.with_defaults(
        linear_num_heads=fields.whole("num_attention_heads"),
        linear_head_dim=fields.whole("head_dim"),
        linear_conv_kernel_dim=fields.whole("short_conv_kernel_size", 4, least=2),
    )
    return KimiDeltaShape(
        heads=named.whole("linear_num_heads"),
        head_dim=named.whole("linear_head_dim"),
        conv_width=named.whole("linear_conv_kernel_dim", least=2),
        has_wide_gates=True,
        least_decay=float(least) if fields.flag("kda_safe_gate", True) else 0.0,
    )


def load_bailing_hybrid(
    config: KimiLinearConfig, manifest: StateManifest, weights: Weights
) -> Decoder:
    named = weights.called(BAILING_NAMES)
    return load_model_decoder(config, manifest, named, partial(_layer, config), EndScales())


def _layer(config: KimiLinearConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    mixer = load_kimi_mixer(weights.under("self_attn"), config.mixers[place.layer], place)
    return load_decoder_layer(weights, place, mixer, load_dense_or_experts(config, weights, place))
