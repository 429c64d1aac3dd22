"""The launches that the layers of a published model need, by their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tools.kernel_launches import (
    launch_activation,
    launch_attention,
    launch_block_index,
    launch_block_means,
    launch_choice,
    launch_choice_of_groups,
    launch_clamped_activation,
    launch_coded_attention,
    launch_conv,
    launch_delta_rule,
    launch_dense,
    launch_experts,
    launch_gated_norm,
    launch_gated_streams,
    launch_gated_sum,
    launch_heads_into_pages,
    launch_index,
    launch_joined_rows,
    launch_keyed_value,
    launch_kimi_delta,
    launch_latents,
    launch_limited_activation,
    launch_look_up,
    launch_mamba,
    launch_mamba1,
    launch_mamba_step,
    launch_mean_index,
    launch_mixed_streams,
    launch_mlstm,
    launch_norms,
    launch_profiled_attention,
    launch_residual,
    launch_rg_lru,
    launch_rotation,
    launch_split_attention,
    launch_streams,
    launch_weighted_sum,
    launch_wkv,
)

from ferryman.model.families.deepseek_v4 import DeepseekV4Config
from ferryman.model.families.gpt_oss import GptOssConfig
from ferryman.model.families.hy_v4 import HyV4Config
from ferryman.model.families.inkling import InklingConfig
from ferryman.model.families.minimax_m3 import MiniMaxM3Config
from ferryman.model.families.nemotron_h import ExpertsShape
from ferryman.model.families.zaya import ZayaConfig
from ferryman.model.layers.gated_streams import GatedStreamsShape
from ferryman.model.layers.hidden_streams import StreamsShape
from ferryman.model.layers.hyper_connections import HyperShape, MixedShape
from ferryman.model.layers.tabled_experts import SoftplusMixture
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    BlockIndexShape,
    ExpertHeadsShape,
    HeadNorm,
    IndexShape,
    LatentShape,
    NoPositions,
    ValueSource,
)
from ferryman.model.shapes.cell_shapes import MlstmShape, RwkvShape
from ferryman.model.shapes.delta_shapes import DeltaShape, KimiDeltaShape
from ferryman.model.shapes.feed_forward_shapes import (
    GroupedRouting,
    IdentityRouting,
    MixtureShape,
    MlpShape,
    MoeShape,
    SoftmaxRouting,
)
from ferryman.model.shapes.model_shapes import ModelConfig
from ferryman.model.shapes.ngram_shapes import NgramShape
from ferryman.model.shapes.recurrent_shapes import (
    HeadConvShape,
    HeadedMamba1Shape,
    LayerConvShape,
    LightningShape,
    Mamba1Shape,
    MambaShape,
    RgLruShape,
    ShortConvShape,
    TurningLightningShape,
)
from ferryman.model.shapes.row_shapes import (
    BlockRowsShape,
    MeanIndexShape,
    RowAttentionShape,
    RowIndexShape,
)

Launch = tuple[Any, ...]
"""A function of `kernel_launches`, and what it takes behind the dtype."""


def launches_of(config: ModelConfig) -> Iterator[Launch]:
    """The launches of a model's layers and norms."""
    hidden_dim = config.trunk.hidden_dim
    yield launch_norms, hidden_dim
    yield launch_dense, hidden_dim, hidden_dim
    yield launch_dense, hidden_dim, config.trunk.vocab_size
    yield launch_residual, hidden_dim, getattr(config, "residual_multiplier", 1.0)
    yield from _choices_of_groups(config)
    yield from _choices_with_identities(config)
    if isinstance(config, InklingConfig):
        for layer, attention in enumerate(config.attentions):
            yield from _recurrent(config.conv(layer))
            distance = config.distances[layer]
            heads = attention.q_heads, attention.kv_heads
            yield launch_profiled_attention, heads, attention.head_dim, distance.extent
            yield launch_dense, distance.state_dim, distance.extent
    for shape in _values(config):
        yield from _attending(shape)
        yield from _recurrent(shape)
        if isinstance(shape, ExpertsShape) and shape.latent_dim:
            yield from _products(shape.routed, shape.latent_dim)
        if isinstance(shape, MoeShape):
            yield from _mixture(config, shape)
        if isinstance(shape, ExpertHeadsShape):
            heads_dim = shape.kv_heads * shape.head_dim
            yield launch_experts, shape.num_experts, hidden_dim, heads_dim
            yield launch_experts, shape.num_experts, heads_dim, hidden_dim
        if isinstance(shape, MixtureShape) and shape.gates_shared:
            yield launch_gated_sum, hidden_dim
        if isinstance(shape, StreamsShape):
            yield launch_weighted_sum, shape.count, hidden_dim
        if isinstance(shape, HyperShape):
            yield launch_streams, shape.count, hidden_dim
        if isinstance(shape, GatedStreamsShape):
            yield from _gated_streams(shape, hidden_dim)
        if isinstance(shape, MixedShape):
            yield launch_mixed_streams, shape.count, hidden_dim, shape.rounds
        if isinstance(shape, SoftplusMixture):
            experts = shape.experts
            yield launch_look_up, experts.num_experts, experts.experts_per_token
        if isinstance(shape, MlpShape | MoeShape):
            yield _activation(config, shape)


def _gated_streams(shape: GatedStreamsShape, hidden_dim: int) -> Iterator[Launch]:
    """Their kernels, and the products that mix them, with gates for writing and without."""
    yield launch_gated_streams, shape.count, hidden_dim
    wide = shape.count * hidden_dim
    for rank in (shape.rank, shape.rank + shape.count):
        yield launch_dense, wide, rank
    yield launch_dense, shape.rank, wide


def _mixture(config: ModelConfig, shape: MoeShape) -> Iterator[Launch]:
    """Inkling's shared experts are the last of all; ZAYA's router may choose no expert."""
    shared = config.num_shared if isinstance(config, InklingConfig) else 0
    skipped = 1 if isinstance(config, ZayaConfig) else 0
    every = replace(shape, num_experts=shape.num_experts + shared)
    yield from _products(every, config.trunk.hidden_dim)
    yield launch_weighted_sum, shape.experts_per_token + shared, config.trunk.hidden_dim
    yield launch_choice, shape.num_experts + skipped, shape.experts_per_token


def _activation(config: ModelConfig, shape: MlpShape | MoeShape) -> Launch:
    if isinstance(config, GptOssConfig | MiniMaxM3Config):
        limits = config.swiglu_alpha, config.swiglu_limit
        return launch_clamped_activation, shape.inner_dim, *limits, 1.0
    if isinstance(config, DeepseekV4Config):
        return launch_clamped_activation, shape.inner_dim, 1.0, config.swiglu_limit, 0.0
    if isinstance(config, HyV4Config) and isinstance(shape, MoeShape):
        return launch_clamped_activation, shape.inner_dim, 1.0, config.swiglu_limit, 0.0
    if shape.limit:
        return launch_limited_activation, shape.inner_dim, shape.limit
    return launch_activation, shape.inner_dim


def _choices_of_groups(config: ModelConfig) -> Iterator[Launch]:
    """Those of routers whose experts are in several groups. A config has experts and routing side
    by side, or as parts of one shape."""
    shapes = list(_values(config))
    for routing in shapes:
        if isinstance(routing, GroupedRouting | SoftmaxRouting) and routing.num_groups > 1:
            groups = routing.num_groups, routing.groups_per_token
            for experts in shapes:
                if isinstance(experts, MoeShape):
                    sizes = experts.num_experts, experts.experts_per_token
                    yield launch_choice_of_groups, *sizes, *groups


def _choices_with_identities(config: ModelConfig) -> Iterator[Launch]:
    """Those of routers that choose among experts and identities."""
    shapes = list(_values(config))
    for routing in shapes:
        if isinstance(routing, IdentityRouting):
            for experts in shapes:
                if isinstance(experts, MoeShape):
                    outputs = experts.num_experts + routing.num_identities
                    yield launch_choice, outputs, experts.experts_per_token


def _values(value: Any) -> Iterator[Any]:
    """A config's shapes, wherever they lie in it."""
    yield value
    if is_dataclass(value):
        for field in fields(value):
            yield from _values(getattr(value, field.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from _values(part)


def _attending(shape: Any) -> Iterator[Launch]:
    match shape:
        case AttentionShape():
            heads = shape.q_heads, shape.kv_heads
            asked = heads, shape.head_dim, shape.has_sinks, shape.score_cap
            yield launch_attention, *asked
            yield launch_coded_attention, *asked
            yield launch_split_attention, heads, shape.head_dim
            yield launch_norms, shape.head_dim
            if not isinstance(shape.positions, NoPositions):
                yield launch_rotation, heads, shape.head_dim, shape.positions.rotary_dim
            yield from _heads_into_pages(shape)
        case LatentShape():
            sizes = shape.q_heads, shape.latent_dim, shape.rope_dim
            yield launch_latents, *sizes, shape.has_sinks
            yield launch_rotation, (shape.q_heads, 1), shape.rope_dim, shape.rope_dim
        case RowAttentionShape():
            yield launch_joined_rows, shape.q_heads, shape.head_dim
            yield launch_latents, shape.q_heads, shape.head_dim, 0, True
            turned = shape.head_dim, shape.positions.rotary_dim
            yield launch_rotation, (shape.q_heads, 1), *turned
            yield launch_norms, shape.head_dim
        case IndexShape() | RowIndexShape():
            yield launch_index, shape.heads, shape.head_dim
        case BlockIndexShape():
            yield launch_block_index, shape.heads, shape.head_dim, shape.block_len
        case MeanIndexShape():
            sizes = shape.heads, shape.head_dim, shape.block_len
            yield launch_mean_index, *sizes
            yield launch_norms, shape.head_dim


def _heads_into_pages(shape: AttentionShape) -> Iterator[Launch]:
    """The one launch of norms, rotation and pages, if the layer has it."""
    nope, norms = isinstance(shape.positions, NoPositions), shape.head_norm is HeadNorm.EACH_HEAD
    is_plain = norms or shape.head_norm is HeadNorm.NONE
    if is_plain and not (nope and not norms) and not shape.clip and shape.growth is None:
        rotary_dim = 0 if isinstance(shape.positions, NoPositions) else shape.positions.rotary_dim
        heads, dims = (shape.q_heads, shape.kv_heads), (shape.head_dim, shape.value_head_dim)
        has_value_norm = shape.values is not ValueSource.PROJECTED
        yield launch_heads_into_pages, heads, dims, rotary_dim, norms, has_value_norm


def _recurrent(shape: Any) -> Iterator[Launch]:
    match shape:
        case MambaShape():
            sizes = shape.ssm_heads, shape.ssm_head_dim, shape.ssm_groups, shape.ssm_state
            yield launch_mamba, *sizes
            yield launch_mamba_step, *sizes, shape.dt_limit
            yield launch_gated_norm, shape.inner_dim, shape.ssm_groups
            yield launch_conv, shape.conv_dim, shape.conv_width, shape.has_conv_bias
        case Mamba1Shape():
            yield launch_mamba1, shape.inner_dim, shape.ssm_state
            yield launch_conv, shape.inner_dim, shape.conv_width, shape.has_conv_bias
        case HeadedMamba1Shape():
            yield launch_mamba1, shape.head_dim, shape.ssm_state
            yield launch_conv, shape.inner_dim, shape.conv_width, shape.has_conv_bias
        case RgLruShape():
            yield launch_rg_lru, shape.dim
            yield launch_conv, shape.dim, shape.conv_width, True, False
        case DeltaShape():
            yield launch_delta_rule, (shape.k_heads, shape.v_heads), shape.k_dim, shape.v_dim
            yield launch_gated_norm, shape.v_dim, 1
            yield launch_norms, shape.k_dim
            channels = 2 * shape.k_heads * shape.k_dim + shape.v_heads * shape.v_dim
            yield launch_conv, channels, shape.conv_width, False
        case KimiDeltaShape():
            yield launch_kimi_delta, shape.heads, shape.head_dim
            yield launch_conv, 3 * shape.heads * shape.head_dim, shape.conv_width, False
        case LightningShape():
            yield launch_mamba, shape.heads, shape.head_dim, shape.heads, shape.head_dim
            if isinstance(shape, TurningLightningShape):
                yield launch_norms, shape.head_dim
                heads = shape.heads, shape.heads
                yield launch_rotation, heads, shape.head_dim, shape.positions.rotary_dim
                yield launch_gated_norm, shape.inner_dim, shape.norm_groups
        case MlstmShape():
            dims = shape.heads, shape.k_dim, shape.v_dim
            yield launch_mlstm, *dims, shape.gate_cap, shape.eps
        case RwkvShape():
            yield launch_wkv, shape.dim
            yield launch_conv, shape.hidden_dim, 2, False, False
        case BlockRowsShape():
            means = shape.means
            yield launch_block_means, means.channels, shape.block_len, means.series
        case ShortConvShape():
            yield launch_conv, shape.dim, shape.conv_width, shape.has_bias, False
        case LayerConvShape():
            for dim in (2 * shape.kv_dim, shape.hidden_dim):
                yield launch_conv, dim, shape.conv_width, False, False
        case NgramShape():
            yield launch_keyed_value, shape.streams, shape.hidden_dim
            yield launch_dense, shape.embed_dim, shape.row_dim + shape.hidden_dim
            for dim in (shape.row_dim, shape.id_dim):
                yield launch_conv, dim, shape.depth + 1, False, False
        case HeadConvShape():
            q, k, v = shape.widths
            for dim in (q + k + v, (shape.head_width - 1) * (q + k)):
                yield launch_conv, dim, shape.conv_width, False, False
            yield launch_dense, shape.head_width * shape.head_dim, shape.head_dim


def _products(shape: MoeShape, in_dim: int) -> Iterator[Launch]:
    """Gate and up, joined and apart, and down."""
    for out_dim in (2 * shape.inner_dim, shape.inner_dim):
        yield launch_experts, shape.num_experts, in_dim, out_dim
    yield launch_experts, shape.num_experts, shape.inner_dim, in_dim
