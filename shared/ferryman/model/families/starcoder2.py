"""StarCoder 2: grouped-query attention in windows, norms around the mean, an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ferryman.model.family import Family
from ferryman.model.layers.centred_norm import load_layer_norm
from ferryman.model.layers.decoder_layers import FeedForward, gelu_tanh
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.layers.ungated_mlp import load_ungated_mlp
from ferryman.model.readers.config_readers import GELU, check_activation, read_trunk
from ferryman.model.readers.transformer_readers import (
    has_short_window,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MlpShape
from ferryman.model.weights.named_weights import Weights

DEFAULTS = {"tie_word_embeddings": True, "use_bias": True, "hidden_act": GELU}
"""The meaning of fields that a published config leaves out."""


def _read(given: ConfigFields) -> TransformerConfig:
    fields = ConfigFields(given.source, {**DEFAULTS, **given.raw})
    check_activation(fields, known_as=(GELU,))
    trunk = read_trunk(fields, norm_eps="norm_epsilon")
    has_bias, has_window = fields.flag("use_bias", True), has_short_window(fields)
    full = replace(read_rotary_attention(fields), has_bias=has_bias, has_out_bias=has_bias)
    mlp = MlpShape(fields.whole("intermediate_size"), has_bias)
    return TransformerConfig(
        trunk,
        attention=read_windows(fields, full, lambda _: has_window),
        feed_forwards=(mlp,) * trunk.num_layers,
    )


def _feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MlpShape):
        raise TypeError(f"StarCoder 2 has no experts, but {shape}")
    under = weights.under("mlp")
    return load_ungated_mlp(under, shape, hidden_dim, gelu_tanh, ("c_fc", "c_proj"))


FAMILY = Family(
    ("Starcoder2ForCausalLM",),
    _read,
    partial(load_transformer, feed_forward=_feed_forward, load_norm=load_layer_norm),
)
