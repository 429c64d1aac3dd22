"""Phi 1 to 4 and 3.5-MoE.

Phi 1 and 2 compute attention and MLP side by side. Later ones are Llama with the waves of longrope,
and an MLP or experts in every layer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.mistral import load_block_experts
from ferryman.model.layers.centred_norm import load_layer_norm
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.expert_router import OneByOneRouter
from ferryman.model.layers.mlp import load_ungated_mlp
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import GELU, check_activation, check_flags, read_trunk
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_plain_mlp,
    read_rotary_attention,
    read_short_windows,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, RotaryPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    MixtureShape,
    MlpShape,
    OneByOneRouting,
)
from ferryman.model.shapes.model_shapes import NormPlaces
from ferryman.model.shapes.rotary import LongropeScaling
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import gelu_tanh

PHI_NAMES = {"o_proj": "dense", "norm": "final_layernorm"}
PHI_ROTARY_SHARE = 0.5
NUM_CHOSEN = 2
JITTER = 0.01


def read_phi(fields: ConfigFields) -> TransformerConfig:
    """Phi 1 and 2: attention and an MLP without a gate, side by side; norms around the mean."""
    check_activation(fields, known_as=("gelu_new", GELU))
    check_flags(fields, qk_layernorm=False)
    trunk = replace(read_trunk(fields, norm_eps="layer_norm_eps"), has_head_bias=True)
    attention = replace(
        read_rotary_attention(fields, PHI_ROTARY_SHARE), has_bias=True, has_out_bias=True
    )
    mlp = MlpShape(fields.whole("intermediate_size"), has_bias=True)
    return replace(uniform_transformer(trunk, attention, mlp), norms=NormPlaces.SHARED)


def _phi_mlp(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MlpShape):
        raise TypeError(f"Phi 1 and 2 have no experts, but {shape}")
    return load_ungated_mlp(weights.under("mlp"), shape, hidden_dim, gelu_tanh, ("fc1", "fc2"))


def load_phi(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    load = partial(load_transformer, feed_forward=_phi_mlp, load_norm=load_layer_norm)
    return load(config, manifest, weights.called(PHI_NAMES))


def read_phi3(fields: ConfigFields) -> TransformerConfig:
    """Phi 3 and 4: Llama with q, k and v in one tensor, gate and up in another, and longrope."""
    check_activation(fields)
    check_flags(fields, attention_bias=False, mlp_bias=False, lm_head_bias=False)
    trunk = read_trunk(fields)
    return TransformerConfig(
        trunk,
        attention=read_short_windows(fields, read_rotary_attention(fields)),
        feed_forwards=(read_plain_mlp(fields),) * trunk.num_layers,
    )


def read_phimoe(fields: ConfigFields) -> TransformerConfig:
    """Phi-3.5-MoE: Mixtral with norms around the mean, biases, two experts chosen one by one."""
    check_activation(fields)
    trunk = replace(read_trunk(fields), has_head_bias=fields.flag("lm_head_bias", False))
    return TransformerConfig(
        trunk,
        attention=read_short_windows(fields, _attention(fields)),
        feed_forwards=(_mixture(fields),) * trunk.num_layers,
    )


def _mixture(fields: ConfigFields) -> MixtureShape:
    named = fields.with_defaults(num_experts_per_tok=NUM_CHOSEN)
    experts = read_experts(named, count="num_local_experts", inner_dim="intermediate_size")
    if experts.experts_per_token != NUM_CHOSEN:
        raise fields.refusal("num_experts_per_tok", str(NUM_CHOSEN))
    return MixtureShape(experts, OneByOneRouting(fields.positive("router_jitter_noise", JITTER)))


def _attention(fields: ConfigFields) -> AttentionShape:
    """q and k grow by "short_mscale" or "long_mscale" where waves have factors, by the length of
    the context."""
    shape = read_rotary_attention(fields)
    name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    positions, rope = shape.positions, fields.merged_with(name)
    if not isinstance(positions, RotaryPositions):
        raise TypeError(positions)
    if not isinstance(positions.scaling, LongropeScaling):
        if rope.raw.get("short_mscale") or rope.raw.get("long_mscale"):
            raise rope.refusal("short_mscale", "absent: no other type than 'longrope' has it")
        return shape
    trained_len = rope.whole("original_max_position_embeddings")
    is_long = rope.whole("max_position_embeddings") > trained_len
    growth = rope.positive("long_mscale" if is_long else "short_mscale")
    scaling = replace(positions.scaling, attention_factor=growth)
    return replace(shape, positions=replace(positions, scaling=scaling))


def _load_feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MixtureShape) or not isinstance(shape.routing, OneByOneRouting):
        raise TypeError(f"Phi-3.5-MoE has experts in every layer, chosen one by one, not {shape}")
    router = partial(OneByOneRouter, jitter=shape.routing.jitter)
    return load_block_experts(weights, shape.experts, hidden_dim, router)


load_phimoe = partial(load_transformer, feed_forward=_load_feed_forward, load_norm=load_layer_norm)
