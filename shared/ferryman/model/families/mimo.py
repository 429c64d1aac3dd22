"""Xiaomi's MiMo-V2: narrow values, sinks in windows, and the experts of DeepSeek-V3.

Published configs have words of their own, and those that transformers writes have others.
"""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.layers.transformer import TransformerConfig
from ferryman.model.readers.config_readers import (
    check_activation,
    check_values,
    read_grouped_routing,
    read_layers,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import (
    FULL,
    WINDOW,
    read_experts,
    read_mlp_types,
    read_plain_mlp,
    read_rotary_attention,
    with_rope_of,
)
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MixtureShape

ROTARY_SHARE = 0.334
NUM_DENSE = 1
PERIOD = 6
VALUE_SCALE = 0.707
DEFAULTS = {"head_dim": 192, "v_head_dim": 128}
"""The meaning of fields that a config leaves out."""

PATTERNS = {
    "layer_types": ("hybrid_layer_pattern", (FULL, WINDOW)),
    "mlp_layer_types": ("moe_layer_freq", ("dense", "sparse")),
}
"""Lists of published configs: their words by 0 and 1."""


def read_mimo_v2_flash(fields: ConfigFields) -> TransformerConfig:
    """MiMo-V2-Flash: five layers with a window for each full one; experts but for the first layer.

    Layers with a window have twice the key heads, and sinks. Values are narrower than keys.
    """
    fields = _with_present_names(fields)
    check_activation(fields)
    mixture, mlp = _mixture(fields), read_plain_mlp(fields)
    feed_forwards: tuple[FeedForwardShape, ...] = tuple(
        mixture if is_sparse else mlp for is_sparse in read_mlp_types(fields, NUM_DENSE)
    )
    return TransformerConfig(read_trunk(fields), _attention(fields), feed_forwards)


def _with_present_names(fields: ConfigFields) -> ConfigFields:
    """Fields of published configs by the names of transformers."""
    named = fields.with_former(rms_norm_eps="layernorm_epsilon").with_defaults(**DEFAULTS)
    for name, (former, words) in PATTERNS.items():
        if former in named.raw:
            numbers = named.whole_list(former)
            if set(numbers) - {0, 1}:
                raise named.refusal(former, "a list of 0 and 1")
            named = named.with_defaults(**{name: [words[number] for number in numbers]})
    if named.raw.get("sliding_window_size") is not None:
        # So many positions before a token's own.
        length = named.whole("sliding_window_size") + 1
        named = ConfigFields(named.source, {**named.raw, "sliding_window": length})
    return named


def _attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    types = [WINDOW if layer and (layer + 1) % PERIOD else FULL for layer in _layers(fields)]
    named = fields.with_defaults(layer_types=types)
    return read_layers(named, "layer_types", {FULL: _full(fields), WINDOW: _window(fields)})


def _layers(fields: ConfigFields) -> range:
    return range(fields.whole("num_hidden_layers"))


def _full(fields: ConfigFields) -> AttentionShape:
    plain = read_rotary_attention(with_rope_of(fields, FULL), ROTARY_SHARE)
    value_dim = fields.whole("v_head_dim")
    if value_dim > plain.head_dim:
        raise fields.refusal("v_head_dim", f"at most head_dim {plain.head_dim}")
    return replace(
        plain,
        has_out_bias=False,
        has_sinks=fields.flag("add_full_attention_sink_bias", False),
        value_dim=value_dim if value_dim < plain.head_dim else 0,
        value_scale=_value_scale(fields),
    )


def _value_scale(fields: ConfigFields) -> float:
    """Without the field values are scaled; null switches that off."""
    name = "attention_value_scale"
    is_off = name in fields.raw and fields.raw[name] is None
    return 1.0 if is_off else fields.positive(name, VALUE_SCALE)


def _window(fields: ConfigFields) -> AttentionShape:
    """A layer with a window. Raises ConfigError where its heads have other sizes."""
    same = {"swa_num_attention_heads": "num_attention_heads", "swa_head_dim": "head_dim"}
    for name, full_name in {**same, "swa_v_head_dim": "v_head_dim"}.items():
        if fields.whole(name, fields.whole(full_name)) != fields.whole(full_name):
            raise fields.refusal(name, f"the {full_name} of full layers")
    kv_heads = fields.whole("swa_num_key_value_heads", 2 * fields.whole("num_key_value_heads"))
    raw = {**fields.raw, "num_key_value_heads": kv_heads}
    near = ConfigFields(fields.source, raw)
    if near.raw.get("swa_rope_theta") is not None:
        near = ConfigFields(near.source, {**raw, "rope_theta": near.positive("swa_rope_theta")})
    return replace(
        _full(fields),
        kv_heads=kv_heads,
        positions=read_rotary_attention(with_rope_of(near, WINDOW), ROTARY_SHARE).positions,
        window_len=fields.whole("sliding_window", 129),
        has_sinks=fields.flag("add_swa_attention_sink_bias", True),
    )


def _mixture(fields: ConfigFields) -> MixtureShape:
    expected = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": None}
    check_values(fields, expected)
    experts = read_experts(fields, count="n_routed_experts")
    return MixtureShape(experts, read_grouped_routing(fields, experts))
