"""Nemotron-H: layers of one part each: Mamba-2, attention without positions, MLP or experts.

A pattern in the config names the part of each layer.

hidden += part(norm(hidden))

Experts may work on a projection of the token that is narrower than the token (Nemotron 3). A time
step is bounded by `time_step_limit`, as in the code published with the models (decision 0058).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.errors import ConfigError
from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    FeedForwardLayer,
    Layer,
    LayerPlace,
    MixerLayer,
    load_norm,
)
from ferryman.model.layers.expert_router import load_grouped_router
from ferryman.model.layers.experts import ExpertMatrices, ShareOfOutput, load_experts_for
from ferryman.model.layers.mamba import load_mamba
from ferryman.model.layers.mlp import UngatedMlp, load_ungated_mlp, squared_relu
from ferryman.model.layers.moe import ExpertsBesideShared, MixtureOfExperts
from ferryman.model.layers.mtp import (
    DEEPSEEK_NAMES,
    MtpHead,
    MtpSource,
    attention_like,
    check_one_layer,
    load_entry_input,
)
from ferryman.model.readers.config_readers import (
    read_attention,
    read_dt_limit,
    read_grouped_routing,
    read_trunk,
    read_used,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import GroupedRouting, MlpShape, MoeShape
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.ranks import slice_of
from ferryman.model.shapes.recurrent_shapes import MambaShape
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import Weights

# The letters of `hybrid_override_pattern` as published, and the words that replaced them later.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Experts beside a shared MLP. The experts see `latent_dim` channels of a token (0: all)."""

    routed: MoeShape
    routing: GroupedRouting
    shared: MlpShape
    latent_dim: int


Part = AttentionShape | MambaShape | MlpShape | ExpertsShape


@dataclass(frozen=True, slots=True)
class NemotronHConfig:
    """One part for each layer."""

    trunk: TrunkShape
    parts: tuple[Part, ...]

    @property
    def states(self) -> tuple[tuple[AttentionShape | MambaShape, ...], ...]:
        return tuple(
            () if isinstance(part, MlpShape | ExpertsShape) else (part,) for part in self.parts
        )


def read_nemotron_h(fields: ConfigFields) -> NemotronHConfig:
    fields = fields.with_former(head_dim="attention_head_dim")
    _refuse_what_is_not_supported(fields)
    attention, mamba = partial(_attention, fields), partial(_mamba, fields)
    readers: dict[str, Callable[[], Part]] = {
        "mamba": mamba,
        "linear_attention": mamba,
        "attention": attention,
        "full_attention": attention,
        "mlp": partial(_mlp, fields),
        "moe": partial(_experts, fields),
    }
    name, words = _pattern(fields)
    if any(word not in readers for word in words):
        raise fields.refusal(name, f"made of {', '.join(readers)}")
    parts = read_used([readers[word] for word in words])
    trunk = read_trunk(fields, num_layers=len(parts), norm_eps="layer_norm_epsilon")
    return NemotronHConfig(trunk, parts)


def _attention(fields: ConfigFields) -> AttentionShape:
    return read_attention(fields, fields.whole("head_dim") ** -0.5, NoPositions())


def _mlp(fields: ConfigFields) -> MlpShape:
    return MlpShape(fields.whole("intermediate_size"), fields.flag("mlp_bias", False))


def _pattern(fields: ConfigFields) -> tuple[str, tuple[str, ...]]:
    """The name of the field that lists the layers, and its words."""
    if isinstance(letters := fields.raw.get("hybrid_override_pattern"), str):
        return "hybrid_override_pattern", tuple(_LETTERS.get(each, each) for each in letters)
    name = "layer_types" if "layer_types" in fields.raw else "layers_block_type"
    return name, fields.words(name)


def _experts(fields: ConfigFields) -> ExpertsShape:
    num_experts, chosen = fields.whole("n_routed_experts"), fields.whole("num_experts_per_tok")
    routed = MoeShape(num_experts, chosen, fields.whole("moe_intermediate_size"))
    shared_dim = fields.whole("moe_shared_expert_intermediate_size")
    return ExpertsShape(
        routed=routed,
        routing=read_grouped_routing(fields, routed),
        shared=MlpShape(shared_dim, fields.flag("mlp_bias", False)),
        latent_dim=fields.whole("moe_latent_size", 0, least=0),
    )


def _refuse_what_is_not_supported(fields: ConfigFields) -> None:
    expected: Mapping[str, tuple[object, ...]] = {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "attention_bias": (False,),
        "sliding_window": (None,),
        "residual_in_fp32": (False,),
    }
    for name, values in expected.items():
        if fields.raw.get(name, values[0]) not in values:
            raise fields.refusal(name, f"{values[0]!r}; nothing else is supported")


def _mamba(fields: ConfigFields) -> MambaShape:
    heads, groups = fields.whole("mamba_num_heads"), fields.whole("n_groups")
    if heads % groups:
        raise fields.refusal("n_groups", f"a divisor of mamba_num_heads {heads}")
    has_bias = fields.flag("use_bias", False)
    return MambaShape(
        ssm_heads=heads,
        ssm_head_dim=fields.whole("mamba_head_dim"),
        ssm_groups=groups,
        ssm_state=fields.whole("ssm_state_size"),
        conv_width=fields.whole("conv_kernel", least=2),
        has_conv_bias=fields.flag("use_conv_bias", True),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
        dt_limit=read_dt_limit(fields),
    )


@dataclass(frozen=True, slots=True)
class LatentMixture:
    """Experts between two projections. The router sees the token itself."""

    into: Linear
    experts: MixtureOfExperts
    out: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        routed = self.experts.router(hidden)
        return self.out(self.experts.mixed(self.into(hidden), *routed))


def load_nemotron_h(config: NemotronHConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    root = "backbone" if "backbone.embeddings.weight" in weights.checkpoint.tensors else "model"
    ends = load_embedding_and_head(
        weights,
        config.trunk,
        f"{root}.norm_f.weight",
        EndScales(),
        embedded=f"{root}.embeddings.weight",
    )
    return load_decoder(
        config, manifest, ends, weights.under(f"{root}.layers"), partial(_layer, config)
    )


def _layer(config: NemotronHConfig, weights: Weights, place: LayerPlace) -> Layer:
    dim, eps = place.hidden_dim, place.norm_eps
    norm, inside = load_norm(weights, "norm", dim, eps), weights.under("mixer")
    match config.parts[place.layer]:
        case AttentionShape() as attention:
            return MixerLayer(norm, load_attention(inside, attention, place))
        case MambaShape() as mamba:
            return MixerLayer(norm, load_mamba(inside, mamba, place))
        case MlpShape() as mlp:
            return FeedForwardLayer(norm, _load_mlp(inside, mlp, dim))
        case ExpertsShape() as experts:
            return FeedForwardLayer(norm, _load_experts_beside_shared(inside, experts, dim))


def _check_mtp(fields: ConfigFields) -> None:
    check_one_layer(fields, "num_nextn_predict_layers")
    letters = fields.raw.get("mtp_hybrid_override_pattern")
    words = fields.raw.get("mtp_layers_block_type")
    if letters != "*E" and words not in (["attention", "moe"], ["full_attention", "moe"]):
        name = "mtp_layers_block_type" if letters is None else "mtp_hybrid_override_pattern"
        raise fields.refusal(name, "attention, then experts, for --draft mtp")


def _mtp_attention(config: NemotronHConfig) -> AttentionShape:
    return attention_like(config.states)


def _load_mtp(config: NemotronHConfig, weights: Weights, place: LayerPlace) -> MtpHead:
    """Two layers of one part each, which together have the form of one layer with both."""
    first, last = (weights.under(f"mtp.layers.{index}") for index in (0, 1))
    dim, eps = place.hidden_dim, place.norm_eps
    experts = [part for part in config.parts if isinstance(part, ExpertsShape)]
    if not experts:
        raise ConfigError("--draft mtp needs a model with at least one layer of experts")
    return MtpHead(
        load_entry_input(first, DEEPSEEK_NAMES, place),
        DecoderLayer(
            mixer_norm=load_norm(first, "norm", dim, eps),
            mixer=load_attention(first.under("mixer"), _mtp_attention(config), place),
            feed_forward_norm=load_norm(last, "norm", dim, eps),
            feed_forward=_load_experts_beside_shared(last.under("mixer"), experts[0], dim),
        ),
        load_norm(last, "final_layernorm", dim, eps),
    )


def _load_experts_beside_shared(
    weights: Weights, shape: ExpertsShape, hidden_dim: int
) -> FeedForward:
    shared = _load_mlp(weights.under("shared_experts"), shape.shared, hidden_dim)
    return ExpertsBesideShared(_load_experts(weights, shape, hidden_dim), shared)


def _load_mlp(weights: Weights, shape: MlpShape, hidden_dim: int) -> UngatedMlp:
    return load_ungated_mlp(weights, shape, hidden_dim, squared_relu)


def _load_experts(weights: Weights, shape: ExpertsShape, hidden_dim: int) -> FeedForward:
    """The experts. Each rank has a part of every expert's inner channels; the mixture sums them."""
    router = load_grouped_router(weights.under("gate"), shape.routed, shape.routing, hidden_dim)
    inside, group, seen = weights.under("experts"), weights.group, shape.latent_dim or hidden_dim
    parts = (
        ExpertMatrices([slice_of(up, group)], slice_of(down, group, axis=1))
        for up, down in _expert_matrices(inside, shape.routed, seen)
    )
    experts = load_experts_for(weights.device, parts, squared_relu, ShareOfOutput())
    mixture = MixtureOfExperts(router, experts, group)
    if not shape.latent_dim:
        return mixture
    into = _load_linear(weights, "fc1_latent_proj", seen, hidden_dim, shape.shared.has_bias)
    out = _load_linear(weights, "fc2_latent_proj", hidden_dim, seen, shape.shared.has_bias)
    return LatentMixture(into, mixture, out)


def _expert_matrices(
    weights: Weights, shape: MoeShape, seen_dim: int
) -> Iterator[tuple[Matrix, Matrix]]:
    """Up and down of each expert: from one tensor of all, or under each expert's number."""
    if weights.has("up_proj"):
        ups = weights.matrices("up_proj", shape.num_experts, shape.inner_dim, seen_dim)
        downs = weights.matrices("down_proj", shape.num_experts, seen_dim, shape.inner_dim)
        yield from zip(ups, downs, strict=True)
        return
    for index in range(shape.num_experts):
        own = weights.under(str(index))
        up = own.matrix("up_proj.weight", shape.inner_dim, seen_dim)
        yield up, own.matrix("down_proj.weight", seen_dim, shape.inner_dim)


def _load_linear(weights: Weights, name: str, out_dim: int, in_dim: int, has_bias: bool) -> Linear:
    bias = weights.tensor(f"{name}.bias", out_dim) if has_bias else None
    return weights.matrix(f"{name}.weight", out_dim, in_dim).linear(bias)


NEMOTRON_H_MTP = MtpSource(_check_mtp, _mtp_attention, _load_mtp)
