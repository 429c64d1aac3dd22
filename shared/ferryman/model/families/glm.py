"""GLM-4 to 5, dots.llm1 and Solar Open.

The dense GLM-4 turn a part of each head, neighbouring channels together. Later models have
DeepSeek's experts behind attention of their own, or DeepSeek's too; most of them have dense MLPs in
the first layers.
"""

from __future__ import annotations

from dataclasses import replace

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.deepseek import (
    DeepseekConfig,
    SparseDeepseekConfig,
    read_deepseek_v3,
    read_deepseek_v32,
)
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    check_flags,
    read_grouped_routing,
    read_layers,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MixtureShape, MlpShape
from ferryman.model.shapes.model_shapes import NormPlaces
from ferryman.model.weights.named_weights import Weights

# The meanings of fields that published configs leave out.
DOTS1_DEFAULTS = {"norm_topk_prob": False, "first_k_dense_replace": 0}
GLM4_DEFAULTS = {"first_k_dense_replace": 1, "n_shared_experts": 1}
LITE_DEFAULTS = {**GLM4_DEFAULTS, "routed_scaling_factor": 1.8}
GLM5_DEFAULTS = {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
DENSE_DEFAULTS = {"head_dim": 128, "attention_bias": True, "num_key_value_heads": 2}
SOLAR_DEFAULTS = {"n_shared_experts": 1, "rope_theta": 1_000_000.0, "head_dim": 128}

GLM4_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
"""The names of norms in GLM-4-0414; the second is that of another norm elsewhere."""


def read_glm(config: ConfigFields) -> TransformerConfig:
    """GLM-4-9B, dense: Llama; half of each head turns, neighbouring channels together."""
    fields = config.with_defaults(**DENSE_DEFAULTS)
    check_activation(fields)
    plain = read_rotary_attention(fields, default_factor=0.5, is_interleaved=True)
    attention = replace(plain, has_out_bias=False)
    return uniform_transformer(read_trunk(fields), attention, read_plain_mlp(fields))


def read_glm4(config: ConfigFields) -> TransformerConfig:
    """GLM-4-0414, dense: GLM-4-9B with norms before and behind attention and MLP."""
    return replace(read_glm(config), norms=NormPlaces.AROUND)


def load_glm4(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_transformer(config, manifest, weights.called(GLM4_NORMS))


def read_glm4_moe(given: ConfigFields) -> TransformerConfig:
    """GLM-4.5 to 4.7: partly rotary attention, dense MLPs first, then DeepSeek's experts."""
    fields = given.with_defaults(**GLM4_DEFAULTS)
    check_activation(fields)
    trunk = read_trunk(fields)
    plain = read_rotary_attention(fields, default_factor=0.5)
    head_norm = HeadNorm.EACH_HEAD if fields.flag("use_qk_norm", False) else HeadNorm.NONE
    attention = replace(plain, has_out_bias=False, head_norm=head_norm)
    return TransformerConfig(
        trunk,
        attention=(attention,) * trunk.num_layers,
        feed_forwards=_feed_forwards(fields, trunk.num_layers),
    )


def read_solar_open(config: ConfigFields) -> TransformerConfig:
    """Solar Open: GLM-4.5 with experts in every layer; whole heads turn."""
    fields = config.with_defaults(**SOLAR_DEFAULTS)
    check_activation(fields)
    check_flags(fields, use_qk_norm=False)
    attention = replace(read_rotary_attention(fields), has_out_bias=False)
    return uniform_transformer(read_trunk(fields), attention, _mixture(fields))


def read_dots1(given: ConfigFields) -> TransformerConfig:
    """dots.llm1: the attention of Qwen 3, dense MLPs first, then the experts of DeepSeek-V3.

    Shares are those of the chosen experts' sigmoids unless "norm_topk_prob" is true.
    """
    fields = given.with_defaults(**DOTS1_DEFAULTS)
    check_activation(fields)
    if fields.raw.get("scoring_func", "noaux_tc") not in ("noaux_tc", "sigmoid"):
        raise fields.refusal("scoring_func", "'noaux_tc'")
    trunk = read_trunk(fields)
    return TransformerConfig(
        trunk,
        attention=_dots1_attention(fields),
        feed_forwards=_feed_forwards(fields, trunk.num_layers),
    )


def _dots1_attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    full = replace(read_rotary_attention(fields), head_norm=HeadNorm.EACH_HEAD)
    has_windows = fields.raw.get("sliding_window") is not None
    first = fields.whole("max_window_layers", 62, least=0)
    return read_windows(fields, full, lambda layer: has_windows and layer >= first)


def _feed_forwards(fields: ConfigFields, num_layers: int) -> tuple[FeedForwardShape, ...]:
    """Experts in groups beside shared ones, but for the first layers."""
    num_dense = fields.whole("first_k_dense_replace", least=0)
    return tuple(
        _mixture(fields) if layer >= num_dense else read_plain_mlp(fields)
        for layer in range(num_layers)
    )


def _mixture(fields: ConfigFields) -> FeedForwardShape:
    experts = read_experts(fields, count="n_routed_experts")
    shared = MlpShape(experts.inner_dim * fields.whole("n_shared_experts"), has_bias=False)
    return MixtureShape(experts, read_grouped_routing(fields, experts), shared)


def read_glm4_moe_lite(given: ConfigFields) -> DeepseekConfig:
    """GLM-4.7-Flash (GLM-4-MoE-Lite): DeepSeek-V3's latent attention and experts, smaller."""
    return read_deepseek_v3(ConfigFields(given.source, {**LITE_DEFAULTS, **given.raw}))


def read_glm_moe_dsa(given: ConfigFields) -> SparseDeepseekConfig:
    """GLM-5: DeepSeek-V3.2 whose indexers rotate neighbouring channels together.

    In GLM-5.2 most layers attend to the places that the indexer of an earlier layer chose.
    """
    fields = ConfigFields(given.source, {**GLM5_DEFAULTS, **given.raw})
    check_flags(fields, indexer_rope_interleave=True)
    sparse, has_indexer = read_deepseek_v32(fields), _read_indexers(fields)
    index = replace(sparse.index, is_interleaved=True)
    return replace(sparse, index=index, has_indexer=has_indexer)


def _read_indexers(fields: ConfigFields) -> tuple[bool, ...]:
    """True for layers with an indexer: by a list, by a pattern of "F" and "S", or else by a period
    behind the first layers, which all have one."""
    num_layers, pattern = fields.whole("num_hidden_layers"), fields.raw.get("index_topk_pattern")
    name = "index_topk_freq"
    if fields.raw.get("indexer_types") is not None:
        name = "indexer_types"
        found = read_layers(fields, name, {"full": True, "shared": False})
    elif pattern is not None:
        name, text = "index_topk_pattern", pattern if isinstance(pattern, str) else ""
        if len(text) != num_layers or set(text) - {"F", "S"}:
            raise fields.refusal(name, f"{num_layers} letters F and S")
        found = tuple(letter == "F" for letter in text)
    else:
        period, offset = fields.whole(name, 1), fields.whole("index_skip_topk_offset", 2, least=0)
        found = tuple(max(layer - offset + 1, 0) % period == 0 for layer in range(num_layers))
    if not found[0]:
        raise fields.refusal(name, "such that the first layer has an indexer")
    return found
