"""Step 3.5 and 3.7 (StepFun): gated heads in windows or not, experts whose activations are limited.

Published folders have lists with an entry for each layer, some with entries of drafting layers
behind them; transformers writes the same facts by type of layer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import FeedForward, load_norm
from ferryman.model.layers.expert_router import RouterNames, load_grouped_router
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import ExpertsBesideShared, load_grouped_mixture, load_mixture
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, check_flags, read_trunk
from ferryman.model.readers.transformer_readers import (
    FULL,
    WINDOW,
    read_experts,
    read_rotary_attention,
    with_rope_of,
)
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    GateActivation,
    GateShape,
    HeadNorm,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    GroupedRouting,
    MixtureShape,
    MlpShape,
)
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_fields, text_weights

NORM_ORIGIN = 1.0
PUBLISHED_WORDS = {
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "num_key_value_heads": "num_attention_groups",
}
"""The words of published folders for fields of transformers."""
MEANT = {
    "att_impl_type": "GQA",
    "moe_router_activation": "sigmoid",
    "yarn_only_types": [FULL],
    "moe_every_n_layer": 1,
    "use_rope_layers": [],
}
"""Fields that have one meaning here."""

_PUBLISHED = RouterNames(("gate.weight",), ("router_bias",))
_OF_TRANSFORMERS = RouterNames(("gate.weight",), ("gate.e_score_correction_bias",))


def read_step3p7(whole: ConfigFields) -> TransformerConfig:
    """Step 3.7's text: gated heads in windows or not, more of them there; experts with limits."""
    fields = text_fields(whole).with_former(**PUBLISHED_WORDS)
    _refuse_other_parts(fields)
    trunk = read_trunk(fields)
    words = _layer_words(fields, "layer_types", (FULL, WINDOW))
    return TransformerConfig(
        trunk,
        attention=tuple(_attention(fields, word, words) for word in words),
        feed_forwards=_feed_forwards(fields, trunk.num_layers),
    )


def _refuse_other_parts(fields: ConfigFields) -> None:
    check_activation(fields)
    check_flags(
        fields,
        mlp_bias=False,
        norm_expert_weight=True,
        sink=False,
        use_head_wise_attn_gate=True,
        use_moe_router_bias=True,
        use_qk_norm=True,
        zero_centered=True,
    )
    for name, meant in MEANT.items():
        if fields.raw.get(name) is not None and fields.raw[name] != meant:
            raise fields.refusal(name, repr(meant))


def _of_layers(fields: ConfigFields, name: str, expected: str) -> list[Any]:
    """The list `name` without the entries of drafting layers."""
    num_layers = fields.whole("num_hidden_layers")
    longest = num_layers + fields.whole("num_nextn_predict_layers", 0, least=0)
    entries = fields.raw.get(name)
    if not isinstance(entries, list) or len(entries) not in (num_layers, longest):
        raise fields.refusal(name, f"a list of {num_layers} {expected}")
    return entries[:num_layers]


def _layer_words(fields: ConfigFields, name: str, words_of_layers: tuple[str, ...]) -> list[str]:
    words = _of_layers(fields, name, f"of {', '.join(words_of_layers)}")
    if any(word not in words_of_layers for word in words):
        raise fields.refusal(name, f"a list of {', '.join(words_of_layers)}")
    return words


def _attention(fields: ConfigFields, word: str, words: list[str]) -> AttentionShape:
    turning = _with_rope(fields, word, words)
    if word == WINDOW:
        counted = {**turning.raw, "num_attention_heads": _heads_in_windows(fields)}
        turning = ConfigFields(fields.source, counted)
    shape = read_rotary_attention(turning)
    return replace(
        shape,
        scale=fields.positive("query_pre_attn_scalar", shape.head_dim) ** -0.5,
        head_norm=HeadNorm.EACH_HEAD,
        gate=GateShape("g_proj", GateActivation.SIGMOID, is_by_head=True),
        window_len=fields.whole("sliding_window") if word == WINDOW else 0,
    )


def _heads_in_windows(fields: ConfigFields) -> int:
    """The number of query heads of layers with a window; all else is as in the others."""
    name = "num_sliding_attention_heads"
    if fields.raw.get(name) is not None:
        return fields.whole(name)
    other = fields.inner("attention_other_setting")
    for same, known_as in (("num_key_value_heads", "num_attention_groups"), ("head_dim",) * 2):
        if other.whole(known_as, fields.whole(same)) != fields.whole(same):
            raise other.refusal(known_as, f"{fields.whole(same)}, as in layers without a window")
    return other.whole("num_attention_heads")


def _with_rope(fields: ConfigFields, word: str, words: list[str]) -> ConfigFields:
    """The fields with the waves of layers of the type `word` alone."""
    if fields.raw.get("rope_parameters"):
        if not isinstance(fields.inner("rope_parameters").raw.get(word), dict):
            raise fields.refusal("rope_parameters", f"waves by type of layer, {word} too")
        return with_rope_of(fields, word)
    if fields.raw.get("rope_theta") is None:
        raise fields.refusal("rope_theta", "given: this family's waves differ by layer")
    if fields.raw.get("rope_scaling") and fields.raw.get("yarn_only_types") is None:
        raise fields.refusal("yarn_only_types", f"[{FULL!r}]: no scaling of windows is supported")
    waves = {
        "rope_theta": _of_type(fields, "rope_theta", word, words),
        "rope_scaling": fields.raw.get("rope_scaling") if word == FULL else None,
    }
    if fields.raw.get("partial_rotary_factors") is not None:
        parts = _of_type(fields, "partial_rotary_factors", word, words)
        waves["partial_rotary_factor"] = parts
    return ConfigFields(fields.source, {**fields.raw, **waves})


def _of_type(fields: ConfigFields, name: str, word: str, words: list[str]) -> Any:
    """The entry of all layers of the type `word` in the list `name`; a number is of all layers."""
    entries = fields.raw[name]
    if not isinstance(entries, list):
        return entries
    alike = [entry for entry, layer in zip(entries, words, strict=False) if layer == word]
    if not alike or any(entry != alike[0] for entry in alike):
        raise fields.refusal(name, f"a list with one number for all layers of {word}")
    return alike[0]


def _feed_forwards(fields: ConfigFields, num_layers: int) -> tuple[FeedForwardShape, ...]:
    shared = _limits(fields, "swiglu_limits_shared", num_layers)
    routed = _limits(fields, "swiglu_limits", num_layers)
    layers = zip(_sparse_layers(fields, num_layers), shared, routed, strict=True)
    return tuple(
        _mixture(fields, limit, within)
        if is_sparse
        else MlpShape(fields.whole("intermediate_size"), False, limit)
        for is_sparse, limit, within in layers
    )


def _limits(fields: ConfigFields, name: str, num_layers: int) -> list[float]:
    """The limit of each layer's activations; 0 where there is none."""
    if fields.raw.get(name) is None:
        return [0.0] * num_layers
    entries = [entry or 0.0 for entry in _of_layers(fields, name, "numbers")]
    return [ConfigFields(fields.source, {name: entry}).not_negative(name, 0.0) for entry in entries]


def _sparse_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    """True for layers with experts; published folders list their indices."""
    if fields.raw.get("mlp_layer_types") is not None:
        words = _layer_words(fields, "mlp_layer_types", ("sparse", "dense"))
        return [word == "sparse" for word in words]
    entries = fields.raw.get("moe_layers_enum")
    if isinstance(entries, str):
        parts = [part.strip() for part in entries.split(",")]
        entries = [int(part) if part.isdecimal() else part for part in parts if part]
    if not isinstance(entries, list) or not all(isinstance(entry, int) for entry in entries):
        raise fields.refusal("moe_layers_enum", "the indices of layers with experts")
    return [layer in entries for layer in range(num_layers)]


def _mixture(fields: ConfigFields, limit: float, within: float) -> MixtureShape:
    """Experts within the limit `within` beside a shared one within `limit`."""
    return MixtureShape(
        replace(read_experts(fields, count="n_routed_experts"), limit=within),
        GroupedRouting(1, 1, True, fields.positive("moe_router_scaling_factor", 1.0)),
        MlpShape(fields.whole("share_expert_dim"), False, limit),
    )


def load_step3p7(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_transformer(
        config,
        manifest,
        text_weights(weights),
        _load_feed_forward,
        partial(load_norm, origin=NORM_ORIGIN),
        norm_origin=NORM_ORIGIN,
    )


def _load_feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    inside = weights.under("mlp")
    if isinstance(shape, MlpShape):
        return load_gated_mlp(inside, shape, hidden_dim)
    if not weights.has_module("moe.gate"):
        return load_grouped_mixture(inside, shape, hidden_dim, _OF_TRANSFORMERS)
    return _load_published(weights, shape, hidden_dim)


def _load_published(weights: Weights, shape: MixtureShape, hidden_dim: int) -> FeedForward:
    """The experts as one tensor each of all gates, ups and downs; the shared one beside them."""
    routing, shared = shape.routing, shape.shared
    assert isinstance(routing, GroupedRouting), "as it was read"
    assert shared is not None, "as it was read"
    moe = weights.under("moe")
    router = load_grouped_router(moe, shape.experts, routing, hidden_dim, _PUBLISHED)
    experts = load_mixture(moe, shape.experts, hidden_dim, router)
    return ExpertsBesideShared(
        experts, load_gated_mlp(weights.under("share_expert"), shared, hidden_dim)
    )
