"""Zamba: Mamba-1 layers of several heads; before some of them goes one shared transformer block.

hybrid:   t = block([hidden, embedding]) · Wlinear
          hidden += mamba(norm(hidden + t))
others:   hidden += mamba(norm(hidden))

The block is that of Zamba2, without adapters: all layers that have it use the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.mamba import read_dt_rank
from ferryman.model.families.zamba2 import HybridLayer, SharedBlock, is_layer_hybrid
from ferryman.model.layers.attention import AttentionLayer
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import Layer, LayerPlace, MixerLayer, load_norm
from ferryman.model.layers.head_placement import placement
from ferryman.model.layers.headed_mamba1 import load_headed_mamba1
from ferryman.model.layers.rotation import load_rotary
from ferryman.model.readers.config_readers import check_activation, read_trunk
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.ranks import share_of, slice_of
from ferryman.model.shapes.recurrent_shapes import HeadedMamba1Shape
from ferryman.model.weights.matrix import join_linear, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.token_table import Embedding

ZambaLayerStates = tuple[AttentionShape, HeadedMamba1Shape] | tuple[HeadedMamba1Shape]

FIRST_HYBRID, PERIOD, OFFSET = 2, 6, 4
"""The layers with the block where a config does not list them."""


@dataclass(frozen=True, slots=True)
class ZambaConfig:
    """`is_hybrid` says, for each layer, whether the block goes before its mixer."""

    trunk: TrunkShape
    mamba: HeadedMamba1Shape
    attention: AttentionShape
    inner_dim: int
    is_hybrid: tuple[bool, ...]

    @property
    def states(self) -> tuple[ZambaLayerStates, ...]:
        both: ZambaLayerStates = (self.attention, self.mamba)
        return tuple(both if has_block else (self.mamba,) for has_block in self.is_hybrid)


def read_zamba(fields: ConfigFields) -> ZambaConfig:
    """Zamba: Mamba-1 layers of several heads; one transformer block is shared by some of them."""
    check_activation(fields, known_as=("gelu",))
    check_activation(fields, "hidden_mamba_act")
    if not fields.flag("tie_word_embeddings", True):
        raise fields.refusal("tie_word_embeddings", "true; without it the block is not shared")
    trunk = read_trunk(fields.with_defaults(tie_word_embeddings=True))
    return ZambaConfig(
        trunk=trunk,
        mamba=_mamba(fields, trunk.hidden_dim),
        attention=_attention(fields, trunk.hidden_dim),
        inner_dim=fields.whole("intermediate_size"),
        is_hybrid=is_layer_hybrid(_with_types(fields)),
    )


def _with_types(fields: ConfigFields) -> ConfigFields:
    if {"layer_types", "layers_block_type"} & fields.raw.keys():
        return fields
    period = fields.whole("attn_layer_period", PERIOD)
    offset = fields.whole("attn_layer_offset", OFFSET, least=0)
    words = [
        "hybrid" if layer == FIRST_HYBRID or (layer - 3 >= 0 and (layer - 3) % period == offset)
        else "mamba"
        for layer in range(fields.whole("num_hidden_layers"))
    ]  # fmt: skip
    return fields.with_defaults(layers_block_type=words)


def _mamba(fields: ConfigFields, hidden_dim: int) -> HeadedMamba1Shape:
    heads, inner_dim = (
        fields.whole("n_mamba_heads", 2),
        fields.whole("mamba_expand", 2) * hidden_dim,
    )
    if inner_dim % heads:
        raise fields.refusal("n_mamba_heads", f"a divisor of {inner_dim}")
    return HeadedMamba1Shape(
        heads=heads,
        head_dim=inner_dim // heads,
        ssm_state=fields.whole("mamba_d_state", 16),
        dt_rank=read_dt_rank(fields, "mamba_dt_rank"),
        conv_width=fields.whole("mamba_d_conv", 4, least=2),
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        has_bias=fields.flag("mamba_proj_bias", False),
    )


def _attention(fields: ConfigFields, hidden_dim: int) -> AttentionShape:
    """Attention over twice the channels: those of hidden and of the embedding."""
    if fields.whole("attention_hidden_size", 2 * hidden_dim) != 2 * hidden_dim:
        raise fields.refusal("attention_hidden_size", f"2 · hidden_size, {2 * hidden_dim}")
    q_heads = fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of {q_heads}")
    former = fields.with_former(attention_head_dim="head_dim")
    head_dim = former.whole("attention_head_dim", 2 * hidden_dim // q_heads)
    return AttentionShape(
        q_heads, kv_heads, head_dim, (head_dim / 2) ** -0.5, has_bias=False, positions=NoPositions()
    )


def load_zamba(config: ZambaConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    ends = load_embedding_and_head(
        weights, config.trunk, "model.final_layernorm.weight", EndScales()
    )
    layers = weights.under("model.layers")
    load_layer = partial(_layer, config, _load_block(layers, config), ends.embedding)
    return load_decoder(config, manifest, ends, layers, load_layer)


def _load_block(layers: Weights, config: ZambaConfig) -> SharedBlock | None:
    """The block, from the first layer that has it; None for a model without such a layer."""
    if not any(config.is_hybrid):
        return None
    weights = layers.under(str(config.is_hybrid.index(True))).under("shared_transf")
    shape, dim, group = config.attention, config.trunk.hidden_dim, weights.group
    norm = partial(load_norm, weights, eps=config.trunk.norm_eps)
    attention, mlp = weights.under("self_attn"), weights.under("feed_forward")
    qkv = [
        share_of(
            attention.matrix(f"{name}_proj.weight", heads * shape.head_dim, 2 * dim), heads, group
        )
        for name, heads in (("q", shape.q_heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
    ]
    out = attention.matrix("o_proj.weight", dim, shape.q_heads * shape.head_dim)
    rows = [mlp.matrix(f"{name}_proj.weight", config.inner_dim, dim) for name in ("gate", "up")]
    down = mlp.matrix("down_proj.weight", dim, config.inner_dim)
    return SharedBlock(
        norm=norm("input_layernorm", 2 * dim),
        qkv=join_linear(qkv),
        out=summed_linear(share_of(out, shape.q_heads, group, axis=1), None, group),
        feed_forward_norm=norm("pre_ff_layernorm", dim),
        gate_up=join_linear([slice_of(part, group) for part in rows]),
        down=summed_linear(slice_of(down, group, axis=1), None, group),
    )


def _layer(
    config: ZambaConfig,
    block: SharedBlock | None,
    embedding: Embedding,
    weights: Weights,
    place: LayerPlace,
) -> Layer:
    dim, eps = place.hidden_dim, place.norm_eps
    if block is None or not config.is_hybrid[place.layer]:
        mixer = load_headed_mamba1(weights.under("mamba"), config.mamba, place)
        return MixerLayer(load_norm(weights, "input_layernorm", dim, eps), mixer)
    inside, shape = weights.under("mamba_decoder"), config.attention
    return HybridLayer(
        embedding=embedding,
        block=block,
        attention=AttentionLayer(
            layer=place.layer,
            shape=shape.shard(weights.group.num_ranks),
            qkv=block.qkv,
            placement=placement(load_rotary(weights, shape.positions)),
            sinks=None,
            out=block.out,
        ),
        gate_up=block.gate_up,
        linear=weights.matrix("linear.weight", dim, dim).linear(None),
        mixer_norm=load_norm(inside, "input_layernorm", dim, eps),
        mixer=load_headed_mamba1(inside.under("mamba"), config.mamba, place),
    )
