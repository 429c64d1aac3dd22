"""GPT-NeoX and Pythia: norms around the mean, partly rotary heads, an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.centred_norm import load_layer_norm
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.mlp import load_ungated_mlp
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import read_rotary_attention
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import FeedForwardShape, MlpShape
from ferryman.model.shapes.model_shapes import NormPlaces
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import gelu

ROTARY_SHARE = 0.25
"""The part of a head that turns unless the config says so."""

NAMES = {
    "model": "gpt_neox",
    "embed_tokens": "embed_in",
    "self_attn": "attention",
    "o_proj": "dense",
    "norm": "final_layer_norm",
}
UP_DOWN = ("dense_h_to_4h", "dense_4h_to_h")


def read_gpt_neox(config: ConfigFields) -> TransformerConfig:
    """GPT-NeoX and Pythia: attention and MLP side by side, each after a norm, or in turn."""
    fields = config.with_former(
        rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct"
    ).with_defaults(attention_bias=True)
    check_activation(fields, known_as=("gelu",))
    trunk = read_trunk(fields, norm_eps="layer_norm_eps")
    mlp = MlpShape(fields.whole("intermediate_size"), has_bias=True)
    layers = uniform_transformer(trunk, read_rotary_attention(fields, ROTARY_SHARE), mlp)
    is_side_by_side = fields.flag("use_parallel_residual", True)
    return replace(layers, norms=NormPlaces.SIDE_BY_SIDE if is_side_by_side else NormPlaces.BEFORE)


def _load_mlp(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MlpShape):
        raise TypeError(f"GPT-NeoX has no experts, but {shape}")
    return load_ungated_mlp(weights.under("mlp"), shape, hidden_dim, gelu, UP_DOWN)


def load_gpt_neox(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    """Published checkpoints call the head "embed_out"."""
    head = weights.first_of("lm_head.weight", "embed_out.weight").removesuffix(".weight")
    load = partial(load_transformer, feed_forward=_load_mlp, load_norm=load_layer_norm)
    return load(config, manifest, weights.called({**NAMES, "lm_head": head}))
