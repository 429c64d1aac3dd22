"""Arcee's models: AFM, which is Llama with another MLP, and AFMoE (Trinity), which has experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder import Decoder, EndScales
from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.expert_router import RouterNames
from ferryman.model.layers.mlp import load_gated_mlp, load_ungated_mlp, squared_relu
from ferryman.model.layers.moe import load_grouped_mixture
from ferryman.model.layers.transformer import (
    TransformerConfig,
    load_transformer,
    uniform_transformer,
)
from ferryman.model.readers.config_readers import (
    check_activation,
    check_values,
    read_mlp,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import (
    read_experts,
    read_plain_mlp,
    read_rotary_attention,
    read_windows,
)
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    GateActivation,
    GateShape,
    HeadNorm,
    NoPositions,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    GroupedRouting,
    MixtureShape,
    MlpShape,
)
from ferryman.model.shapes.model_shapes import NormPlaces
from ferryman.model.weights.named_weights import Weights

AFM_DEFAULTS = {"hidden_act": "relu2"}
DEFAULTS = {
    "head_dim": 128,
    "num_dense_layers": 1,
    "num_shared_experts": 2,
    "global_attn_every_n_layers": 4,
    "sliding_window": 1024,
}
"""The meaning of fields that a config leaves out."""

NORMS = {
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_ROUTER = RouterNames(("router.gate.weight",), ("expert_bias",))


def read_arcee(fields: ConfigFields) -> TransformerConfig:
    """AFM (Arcee): Llama whose MLP is a squared relu, without a gate."""
    fields = fields.with_defaults(**AFM_DEFAULTS)
    check_activation(fields, known_as=("relu2",))
    return uniform_transformer(read_trunk(fields), read_rotary_attention(fields), read_mlp(fields))


def _load_squared(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    if not isinstance(shape, MlpShape):
        raise TypeError(f"AFM has no experts, but {shape}")
    return load_ungated_mlp(weights.under("mlp"), shape, hidden_dim, squared_relu)


load_arcee = partial(load_transformer, feed_forward=_load_squared)


def read_afmoe(fields: ConfigFields) -> TransformerConfig:
    """AFMoE (Arcee Trinity): gated attention between norms, in windows or without positions.

    The first layers have dense MLPs, the others experts beside shared ones.
    """
    fields = fields.with_defaults(**DEFAULTS)
    check_activation(fields)
    trunk, num_dense = read_trunk(fields), fields.whole("num_dense_layers", least=0)
    # Embeddings are scaled as in maximal update parametrisation (Yang et al. 2022).
    multiplier = trunk.hidden_dim**0.5 if fields.flag("mup_enabled", False) else 1.0
    mixture, mlp = _mixture(fields), read_plain_mlp(fields)
    return TransformerConfig(
        trunk,
        attention=_attention(fields),
        feed_forwards=tuple(
            mlp if layer < num_dense else mixture for layer in range(trunk.num_layers)
        ),
        norms=NormPlaces.AROUND,
        scales=EndScales(multiplier),
    )


def _attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    period = fields.whole("global_attn_every_n_layers")
    turning = replace(
        read_rotary_attention(fields),
        head_norm=HeadNorm.EACH_HEAD,
        gate=GateShape("gate_proj", GateActivation.SIGMOID),
    )
    layers = read_windows(fields, turning, lambda layer: (layer + 1) % period != 0)
    return tuple(
        shape if shape.window_len else replace(shape, positions=NoPositions()) for shape in layers
    )


def _mixture(fields: ConfigFields) -> MixtureShape:
    _refuse_other_routing(fields)
    experts = read_experts(fields)
    scaling = fields.positive("route_scale", 1.0)
    shared = MlpShape(experts.inner_dim * fields.whole("num_shared_experts"), has_bias=False)
    return MixtureShape(experts, GroupedRouting(1, 1, norms_shares=True, scaling=scaling), shared)


def _refuse_other_routing(fields: ConfigFields) -> None:
    expected = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
    check_values(fields, expected)


def _load_feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    inside = weights.under("mlp")
    if isinstance(shape, MixtureShape):
        return load_grouped_mixture(inside, shape, hidden_dim, _ROUTER)
    return load_gated_mlp(inside, shape, hidden_dim)


def load_afmoe(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_transformer(config, manifest, weights.called(NORMS), _load_feed_forward)
