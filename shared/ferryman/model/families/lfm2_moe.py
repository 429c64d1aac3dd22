"""LFM2-MoE: LFM2 with experts behind the first layers.

score  = sigmoid(x · Wᵀ);   chosen = the best of score + bias
share  = scaling · score of the chosen, first divided by their sum
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.lfm2 import (
    Operator,
    load_lfm2,
    load_lfm2_layer,
    read_lfm2_trunk,
    read_operators,
    with_lfm2_names,
)
from ferryman.model.family import Family
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    LayerPlace,
    load_gated_mlp,
)
from ferryman.model.layers.moe import load_mixture
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape, MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.named_weights import Weights

_SUM_EPS = 1e-6  # added to the sum of the chosen shares, as the published model was trained


@dataclass(frozen=True, slots=True)
class BiasedRouting:
    """The routing of a token. `has_bias`: a learnt bias affects the choice, not the share."""

    has_bias: bool
    norms_shares: bool
    scaling: float


@dataclass(frozen=True, slots=True)
class Lfm2MoeConfig:
    """One operator a layer; the first `num_dense` layers have an MLP, the others experts."""

    trunk: TrunkShape
    operators: tuple[Operator, ...]
    mlp: MlpShape
    moe: MoeShape
    routing: BiasedRouting
    num_dense: int

    @property
    def states(self) -> tuple[tuple[Operator], ...]:
        return tuple((operator,) for operator in self.operators)


def _read(fields: ConfigFields) -> Lfm2MoeConfig:
    fields = with_lfm2_names(fields)
    num_experts, chosen = fields.whole("num_experts"), fields.whole("num_experts_per_tok")
    if chosen > num_experts:
        raise fields.refusal("num_experts_per_tok", f"at most num_experts {num_experts}")
    return Lfm2MoeConfig(
        trunk=read_lfm2_trunk(fields),
        operators=read_operators(fields),
        mlp=MlpShape(fields.whole("intermediate_size"), has_bias=False),
        moe=MoeShape(num_experts, chosen, fields.whole("moe_intermediate_size")),
        routing=BiasedRouting(
            fields.flag("use_expert_bias", True),
            fields.flag("norm_topk_prob", True),
            fields.positive("routed_scaling_factor", 1.0),
        ),
        num_dense=fields.whole("num_dense_layers", 2, least=0),
    )


@dataclass(frozen=True, slots=True)
class BiasedRouter:
    """`weight` [experts, hidden_dim] and `bias` [experts] in the accumulation dtype."""

    weight: Tensor
    bias: Tensor
    routing: BiasedRouting
    experts_per_token: int

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(hidden.to(self.weight.dtype), self.weight).sigmoid()
        chosen = (scores + self.bias).topk(self.experts_per_token, dim=-1).indices
        shares = scores.gather(1, chosen)
        if self.routing.norms_shares:
            shares = shares / (shares.sum(-1, keepdim=True) + _SUM_EPS)
        return shares * self.routing.scaling, chosen


def _load(config: Lfm2MoeConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    return load_lfm2(config, manifest, weights, partial(_layer, config))


def _layer(config: Lfm2MoeConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    feed_forward = _feed_forward(config, weights.under("feed_forward"), place)
    return load_lfm2_layer(weights, place, config.operators[place.layer], feed_forward)


def _feed_forward(config: Lfm2MoeConfig, weights: Weights, place: LayerPlace) -> FeedForward:
    if place.layer < config.num_dense:
        return load_gated_mlp(weights, config.mlp, place.hidden_dim)
    moe, routing = config.moe, config.routing
    score = weights.precise("gate.weight", moe.num_experts, place.hidden_dim)
    bias = score.new_zeros(moe.num_experts)
    if routing.has_bias:
        bias = weights.precise("expert_bias", moe.num_experts)
    router = BiasedRouter(score, bias, routing, moe.experts_per_token)
    return load_mixture(weights.under("experts"), moe, place.hidden_dim, router)


FAMILY = Family(("Lfm2MoeForCausalLM",), _read, _load)
