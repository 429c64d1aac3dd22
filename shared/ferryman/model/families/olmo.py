"""OLMo 1 to 3, their experts, and OLMo Hybrid.

OLMo 1 is Llama with norms around the mean that have no weights. OLMo 2 and 3 have norms behind
attention and MLP, and on all heads of q and of k as one row; FlexOlmo is OLMo 2 with experts. The
delta nets of OLMo Hybrid have their norms before them, its attention behind it. Released models
of it have no rotary positions. β goes up to 2, so that a state may change its sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.centred_norm import load_plain_centred_norm
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    Layer,
    LayerPlace,
    PostNormLayer,
    RmsNorm,
    load_norm,
)
from ferryman.model.layers.delta import load_delta
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    head_dim_of,
    read_attention,
    read_delta,
    read_layers,
    read_rotary,
    read_trunk,
    read_used,
)
from ferryman.model.readers.transformer_readers import (
    FULL,
    WINDOW,
    read_experts,
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    HeadNorm,
    NoPositions,
    RotaryPositions,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.delta_shapes import DeltaLayout, DeltaShape
from ferryman.model.shapes.feed_forward_shapes import MixtureShape, MlpShape, SoftmaxRouting
from ferryman.model.shapes.model_shapes import NormPlaces, TrunkShape
from ferryman.model.shapes.rotary import read_scaling, read_theta
from ferryman.model.weights.named_weights import Weights

WITH_WINDOWS = "Olmo3ForCausalLM"
PERIOD = 4
DELTA_NORM_EPS = 1e-5
OLMO1_NORM_EPS = 1e-5
DELTA_NAMES = {"norm": "o_norm", "out_proj": "o_proj"}
PUBLISHED_NORMS = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""Names in published checkpoints, of delta nets; where transformers 5 saves, of all layers."""


def read_olmo(fields: ConfigFields) -> TransformerConfig:
    """OLMo 1: Llama with norms around the mean without weights; q, k and v may be clipped."""
    check_activation(fields)
    # A config of OLMo 1 has no epsilon: it is a constant of the model.
    trunk = read_trunk(ConfigFields(fields.source, {**fields.raw, "rms_norm_eps": OLMO1_NORM_EPS}))
    return uniform_transformer(trunk, _clipped(fields), read_plain_mlp(fields))


def _clipped(fields: ConfigFields) -> AttentionShape:
    return replace(read_rotary_attention(fields), clip=fields.not_negative("clip_qkv", 0.0))


load_olmo = partial(load_transformer, load_norm=load_plain_centred_norm)


def read_olmoe(fields: ConfigFields) -> TransformerConfig:
    """OLMoE: Llama with experts in every layer, and one norm of all heads of q, and one of k."""
    check_activation(fields)
    attention = replace(_clipped(fields), head_norm=HeadNorm.ALL_HEADS)
    return uniform_transformer(read_trunk(fields), attention, _experts(fields))


def read_flex_olmo(config: ConfigFields) -> TransformerConfig:
    """FlexOlmo: OLMo 2 with experts in every layer."""
    fields = config.with_defaults(rope_theta=500_000.0)
    check_activation(fields)
    attention = _attention(fields, read_rotary(fields, default_factor=1.0))
    layers = uniform_transformer(read_trunk(fields), attention, _experts(fields))
    return replace(layers, norms=NormPlaces.AFTER)


def _experts(fields: ConfigFields) -> MixtureShape:
    # transformers 5 writes num_local_experts.
    count = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
    experts = read_experts(fields, count=count, inner_dim="intermediate_size")
    return MixtureShape(experts, SoftmaxRouting(fields.flag("norm_topk_prob", False)))


def read_olmo2(fields: ConfigFields) -> TransformerConfig:
    """OLMo 2 and 3: norms behind attention and MLP, and on all heads of q and of k as one row.

    OLMo 3 has windows in three of four layers; their positions are not scaled.
    """
    check_activation(fields)
    trunk = read_trunk(fields)
    has_windows = WITH_WINDOWS in fields.words("architectures")
    return TransformerConfig(
        trunk,
        attention=_with_windows(fields)
        if has_windows
        else (_attention(fields, read_rotary(fields, default_factor=1.0)),) * trunk.num_layers,
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
        norms=NormPlaces.AFTER,
    )


def _attention(fields: ConfigFields, positions: RotaryPositions | NoPositions) -> AttentionShape:
    plain = read_attention(fields, head_dim_of(fields) ** -0.5, positions)
    return replace(plain, head_norm=HeadNorm.ALL_HEADS)


def _with_windows(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    full, near = _attention(fields, _positions(fields, FULL)), _positions(fields, WINDOW)
    layers = read_windows(fields, full, lambda layer: (layer + 1) % PERIOD != 0)
    return tuple(replace(shape, positions=near) if shape.window_len else shape for shape in layers)


def _positions(fields: ConfigFields, word: str) -> RotaryPositions:
    """Published configs have one `rope_scaling`, which is about full layers alone."""
    rope = fields.merged_with("rope_parameters").merged_with(word)
    if fields.raw.get("rope_parameters") is None and word == FULL:
        rope = fields.merged_with("rope_scaling")
    return RotaryPositions(read_theta(rope, 500_000.0), head_dim_of(fields), read_scaling(rope))


@dataclass(frozen=True, slots=True)
class OlmoHybridConfig:
    """A mixer for each layer, and the same MLP in all of them."""

    trunk: TrunkShape
    mixers: tuple[AttentionShape | DeltaShape, ...]
    mlp: MlpShape

    @property
    def states(self) -> tuple[tuple[AttentionShape | DeltaShape], ...]:
        return tuple((mixer,) for mixer in self.mixers)


def read_olmo_hybrid(fields: ConfigFields) -> OlmoHybridConfig:
    """OLMo Hybrid: gated delta nets, and every fourth layer the attention of OLMo 2."""
    check_activation(fields)
    trunk = read_trunk(fields)
    return OlmoHybridConfig(trunk, _mixers(fields, trunk.num_layers), read_plain_mlp(fields))


def _mixers(fields: ConfigFields, num_layers: int) -> tuple[AttentionShape | DeltaShape, ...]:
    attention, delta = partial(_hybrid_attention, fields), partial(_delta, fields)
    if fields.raw.get("layer_types") is not None:
        readers: dict[str, Callable[[], AttentionShape | DeltaShape]] = {
            "full_attention": attention,
            "linear_attention": delta,
        }
        return read_used(read_layers(fields, "layer_types", readers))
    return read_used([delta if (layer + 1) % PERIOD else attention for layer in range(num_layers)])


def _hybrid_attention(fields: ConfigFields) -> AttentionShape:
    has_positions = fields.merged_with("rope_parameters").raw.get("rope_theta") is not None
    return _attention(
        fields, read_rotary(fields, default_factor=1.0) if has_positions else NoPositions()
    )


def _delta(fields: ConfigFields) -> DeltaShape:
    heads = fields.whole("num_attention_heads")
    k_heads = fields.whole("linear_num_key_heads", heads)
    k_dim = fields.whole(
        "linear_key_head_dim", int(0.75 * fields.whole("hidden_size") / k_heads) or 1
    )
    given = fields.with_defaults(
        linear_num_key_heads=k_heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=k_dim,
        linear_value_head_dim=2 * k_dim,
    )
    turns_signs = fields.flag("linear_allow_neg_eigval", True)
    shape = read_delta(given, DeltaLayout.SEPARATE)
    return replace(shape, max_rate=2.0 if turns_signs else 1.0)


def load_olmo_hybrid(
    config: OlmoHybridConfig, manifest: StateManifest, weights: Weights
) -> Decoder:
    return load_model_decoder(config, manifest, weights, partial(_layer, config), EndScales())


def _layer(config: OlmoHybridConfig, weights: Weights, place: LayerPlace) -> Layer:
    mixer = config.mixers[place.layer]
    mlp = load_gated_mlp(weights.under("mlp"), config.mlp, place.hidden_dim)
    if isinstance(mixer, DeltaShape):
        return _delta_layer(mixer, weights, place, mlp)
    norm = partial(_norm, weights, place)
    return PostNormLayer(
        load_attention(weights.under("self_attn"), mixer, place),
        norm("post_attention_layernorm"),
        mlp,
        norm("post_feedforward_layernorm"),
    )


def _delta_layer(
    shape: DeltaShape, weights: Weights, place: LayerPlace, mlp: FeedForward
) -> DecoderLayer:
    norm = partial(_norm, weights, place)
    inside = weights.under("linear_attn").called(DELTA_NAMES)
    return DecoderLayer(
        mixer_norm=norm("input_layernorm"),
        mixer=load_delta(inside, shape, replace(place, norm_eps=DELTA_NORM_EPS)),
        feed_forward_norm=norm("post_attention_layernorm"),
        feed_forward=mlp,
    )


def _norm(weights: Weights, place: LayerPlace, name: str) -> RmsNorm:
    names = (f"{name}.weight", f"{PUBLISHED_NORMS.get(name, name)}.weight")
    found = weights.first_of(*names).removesuffix(".weight")
    return load_norm(weights, found, place.hidden_dim, place.norm_eps)
