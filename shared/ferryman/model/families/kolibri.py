"""Kolibri 1 (Aleph Alpha): EXAONE 4's heads between four norms, experts by scores with a bias."""

from __future__ import annotations

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.exaone import read_turning_windows
from ferryman.model.families.glm import GLM4_NORMS
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import FeedForward
from ferryman.model.layers.expert_router import sigmoid_by_biased_score
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import ExpertsBesideShared, load_mixture
from ferryman.model.layers.transformer import TransformerConfig, load_transformer
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.readers.transformer_readers import WINDOW, read_experts
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    BiasedScoreRouting,
    FeedForwardShape,
    MixtureShape,
    MlpShape,
)
from ferryman.model.shapes.model_shapes import NormPlaces
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.named_weights import Weights

WINDOW_LEN = 513
"""The meaning of "sliding_window" where a config leaves it out; null is no window."""

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 4, "sliding_window_pattern": 5}
"""The meaning of fields that a config leaves out; the last is that of "layer_types"."""

PUBLISHED_NORMS = {
    **GLM4_NORMS,
    "post_attention_layernorm": "post_attn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
"""The names of norms in published folders."""

_BIASES = ("moe.router.expert_bias", "mlp.gate.e_score_correction_bias")
"""The names of a router's bias: that of published folders, and that of transformers."""


def read_kolibri1(config: ConfigFields) -> TransformerConfig:
    """Kolibri 1: EXAONE 4's heads between norms; in all layers experts, chosen by biased scores."""
    named = config.with_former(num_experts="num_local_experts").with_defaults(**DEFAULTS)
    fields = ConfigFields(named.source, {"sliding_window": WINDOW_LEN, **named.raw})
    _refuse_windows_of_no_length(fields)
    check_activation(fields)
    trunk = read_trunk(fields)
    mixture = MixtureShape(
        read_experts(fields),
        BiasedScoreRouting(fields.flag("norm_topk_prob", False)),
        MlpShape(fields.whole("shared_expert_intermediate_size"), has_bias=False),
    )
    return TransformerConfig(
        trunk,
        attention=read_turning_windows(fields, trunk.num_layers),
        feed_forwards=(mixture,) * trunk.num_layers,
        norms=NormPlaces.AROUND,
    )


def _refuse_windows_of_no_length(fields: ConfigFields) -> None:
    """Without "layer_types" the first layer has a window."""
    words = fields.raw.get("layer_types")
    if fields.raw["sliding_window"] is None and (words is None or WINDOW in words):
        raise fields.refusal("sliding_window", f"above 0 where layers are {WINDOW}")


def load_kolibri1(config: TransformerConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    is_published = weights.has("model.layers.0.post_attn_norm.weight")
    names = PUBLISHED_NORMS if is_published else GLM4_NORMS
    return load_transformer(config, manifest, weights.called(names), _load_feed_forward)


def _load_feed_forward(weights: Weights, shape: FeedForwardShape, hidden_dim: int) -> FeedForward:
    assert isinstance(shape, MixtureShape), "all layers have experts"
    assert isinstance(shape.routing, BiasedScoreRouting), "as it was read"
    assert shape.shared is not None, "as it was read"
    inside, experts = weights.under("mlp"), shape.experts
    score = make_linear(inside.precise("gate.weight", experts.num_experts, hidden_dim))
    bias = weights.precise(weights.first_of(*_BIASES), experts.num_experts)
    router = sigmoid_by_biased_score(score, bias, experts.experts_per_token, shape.routing)
    return ExpertsBesideShared(
        load_mixture(inside.under("experts"), experts, hidden_dim, router),
        load_gated_mlp(inside.under("shared_experts"), shape.shared, hidden_dim),
    )
