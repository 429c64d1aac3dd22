"""Zamba2: Mamba-2 layers; before some of them goes one of a few transformer blocks that are shared.

hybrid:   t = block([hidden, embedding]) · Wlinear           a block's weights serve several layers
          hidden += mamba(norm(hidden + t))
others:   hidden += mamba(norm(hidden))

block:    x = norm([hidden, embedding]);   mlp(norm(attention(x)))               no residual paths

A layer adds products of low rank to the shared projections: "adapters" of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.attention import AttentionLayer
from ferryman.model.layers.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.layers.decoder_layers import (
    Layer,
    LayerPlace,
    Mixer,
    MixerLayer,
    RmsNorm,
    load_norm,
)
from ferryman.model.layers.head_placement import placement
from ferryman.model.layers.mamba import load_mamba
from ferryman.model.layers.mlp import gate_and_up
from ferryman.model.layers.rotation import load_rotary
from ferryman.model.readers.config_readers import (
    check_activation,
    read_dt_limit,
    read_layers,
    read_rotary,
    read_trunk,
)
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.ranks import share_of, slice_of
from ferryman.model.shapes.recurrent_shapes import MambaShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.matrix import join_linear, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.token_table import Embedding
from ferryman_kernels.elementwise.activations import gelu

SharedLayer = tuple[AttentionShape, MambaShape] | tuple[MambaShape]

_GATE_EPS = 1e-5  # of the norm behind the scan, whatever the other norms have


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shared transformer blocks. `adapter_rank` is 0 if projections of q, k and v have none."""

    num_blocks: int
    attention: AttentionShape
    inner_dim: int
    has_bias: bool
    attention_adapter_rank: int
    mlp_adapter_rank: int


@dataclass(frozen=True, slots=True)
class Zamba2Config:
    """`is_hybrid` says, for each layer, whether a block goes before its mixer."""

    trunk: TrunkShape
    mamba: MambaShape
    block: BlockShape
    is_hybrid: tuple[bool, ...]

    @property
    def states(self) -> tuple[SharedLayer, ...]:
        both: SharedLayer = (self.block.attention, self.mamba)
        return tuple(both if has_block else (self.mamba,) for has_block in self.is_hybrid)

    @property
    def hybrid_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, has_block in enumerate(self.is_hybrid) if has_block)


def read_zamba2(fields: ConfigFields) -> Zamba2Config:
    check_activation(fields, known_as=("gelu",))
    if fields.flag("use_long_context", False):
        raise fields.refusal("use_long_context", "false; positions are not rescaled")
    if not fields.flag("tie_word_embeddings", True):
        raise fields.refusal("tie_word_embeddings", "true; without it no block is shared")
    trunk = read_trunk(fields.with_defaults(tie_word_embeddings=True))
    return Zamba2Config(
        trunk=trunk,
        mamba=_mamba(fields, trunk.hidden_dim),
        block=_block(fields, trunk.hidden_dim),
        is_hybrid=is_layer_hybrid(fields),
    )


def is_layer_hybrid(fields: ConfigFields) -> tuple[bool, ...]:
    """True for each layer with a block before its mixer."""
    meanings = {"mamba": False, "linear_attention": False, "hybrid": True}
    name = "layer_types" if "layer_types" in fields.raw else "layers_block_type"
    return read_layers(fields, name, meanings)


def _mamba(fields: ConfigFields, hidden_dim: int) -> MambaShape:
    heads, groups = fields.whole("n_mamba_heads", 8), fields.whole("mamba_ngroups", 1)
    inner_dim = fields.whole("mamba_expand", 2) * hidden_dim
    if inner_dim % heads:
        raise fields.refusal("n_mamba_heads", f"a divisor of {inner_dim}")
    if fields.whole("mamba_headdim", inner_dim // heads) != inner_dim // heads:
        raise fields.refusal("mamba_headdim", f"{inner_dim} / n_mamba_heads {heads}")
    if heads % groups:
        raise fields.refusal("mamba_ngroups", f"a divisor of n_mamba_heads {heads}")
    has_bias = fields.flag("add_bias_linear", False)
    return MambaShape(
        ssm_heads=heads,
        ssm_head_dim=inner_dim // heads,
        ssm_groups=groups,
        ssm_state=fields.whole("mamba_d_state", 64),
        conv_width=fields.whole("mamba_d_conv", 4, least=2),
        has_conv_bias=True,
        has_in_bias=has_bias,
        has_out_bias=has_bias,
        dt_limit=read_dt_limit(fields),
    )


def _block(fields: ConfigFields, hidden_dim: int) -> BlockShape:
    rank = fields.whole("adapter_rank", 128)
    return BlockShape(
        num_blocks=fields.whole("num_mem_blocks", 1),
        attention=_attention(fields, hidden_dim),
        inner_dim=fields.whole("intermediate_size", 4 * hidden_dim),
        has_bias=fields.flag("add_bias_linear", False),
        attention_adapter_rank=rank if fields.flag("use_shared_attention_adapter", False) else 0,
        mlp_adapter_rank=rank,
    )


def _attention(fields: ConfigFields, hidden_dim: int) -> AttentionShape:
    """Attention over twice the channels: those of hidden and of the embedding."""
    q_heads = fields.whole("num_attention_heads")
    if 2 * hidden_dim % q_heads:
        raise fields.refusal("num_attention_heads", f"a divisor of {2 * hidden_dim}")
    if fields.whole("num_key_value_heads", q_heads) != q_heads:
        raise fields.refusal("num_key_value_heads", f"num_attention_heads, {q_heads}")
    head_dim = 2 * hidden_dim // q_heads
    whole = replace(fields, raw={**fields.raw, "head_dim": head_dim})
    turns = fields.flag("use_mem_rope", False)
    return AttentionShape(
        q_heads=q_heads,
        kv_heads=q_heads,
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        has_bias=False,
        positions=read_rotary(whole, default_factor=1.0) if turns else NoPositions(),
    )


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A shared product with a layer's own of low rank: base(x) + up(down(x))."""

    base: Linear
    down: Linear
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """The tensors of a transformer block that several layers share."""

    norm: RmsNorm
    qkv: Linear
    out: Linear
    feed_forward_norm: RmsNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """A shared block, by a layer's own projections and pages, before the layer's Mamba-2 mixer.

    `embedding` is that of the decoder.
    """

    embedding: Embedding
    block: SharedBlock
    attention: AttentionLayer
    gate_up: Linear
    linear: Linear
    mixer_norm: RmsNorm
    mixer: Mixer

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        mixed = self.attention.forward(self._seen(hidden, batch.token_ids), batch, state)
        return hidden + self.mixer.forward(self._fed(hidden, mixed), batch, state)

    def _seen(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The input of the attention [tokens, 2 · hidden_dim]."""
        return self.block.norm(torch.cat((hidden, self.embedding(token_ids)), dim=1))

    def _fed(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The input of the mixer, to which the block's output is added."""
        gate, up = self.gate_up(self.block.feed_forward_norm(mixed)).chunk(2, dim=1)
        return self.mixer_norm(hidden + self.linear(self.block.down(gelu(gate) * up)))


def load_zamba2(config: Zamba2Config, manifest: StateManifest, weights: Weights) -> Decoder:
    ends = load_embedding_and_head(
        weights, config.trunk, "model.final_layernorm.weight", EndScales()
    )
    layers = weights.under("model.layers")
    sources = config.hybrid_layers[: config.block.num_blocks]
    blocks = tuple(_load_block(_shared(layers, source), config) for source in sources)
    load_layer = partial(_layer, config, blocks, layers, ends.embedding)
    return load_decoder(config, manifest, ends, layers, load_layer)


def _shared(layers: Weights, source: int) -> Weights:
    """The weights of a block; the first layer that uses it has them."""
    return layers.under(str(source)).under("shared_transformer")


def _load_block(weights: Weights, config: Zamba2Config) -> SharedBlock:
    shape, dim, eps = config.block.attention, config.trunk.hidden_dim, config.trunk.norm_eps
    inner_dim, group = config.block.inner_dim, weights.group
    own = partial(share_of, heads=shape.q_heads, group=group)
    attention, mlp = weights.under("self_attn"), weights.under("feed_forward")
    qkv = [
        own(attention.matrix(f"{name}_proj.weight", 2 * dim, 2 * dim)) for name in ("q", "k", "v")
    ]
    bias, down_bias = None, None
    if config.block.has_bias:
        bias = mlp.tensor("gate_up_proj.bias", 2 * inner_dim)
        bias = torch.cat(gate_and_up(bias, group))
        down_bias = mlp.tensor("down_proj.bias", dim)
    gate_up = mlp.matrix("gate_up_proj.weight", 2 * inner_dim, dim)
    down = mlp.matrix("down_proj.weight", dim, inner_dim)
    out = attention.matrix("o_proj.weight", dim, 2 * dim)
    return SharedBlock(
        norm=load_norm(weights, "input_layernorm", 2 * dim, eps),
        qkv=join_linear(qkv),
        out=summed_linear(own(out, axis=1), None, group),
        feed_forward_norm=load_norm(weights, "pre_ff_layernorm", dim, eps),
        gate_up=join_linear(gate_and_up(gate_up, group), bias),
        down=summed_linear(slice_of(down, group, axis=1), down_bias, group),
    )


def _layer(
    config: Zamba2Config,
    blocks: tuple[SharedBlock, ...],
    layers: Weights,
    embedding: Embedding,
    weights: Weights,
    place: LayerPlace,
) -> Layer:
    # The norm behind the scan has an epsilon of its own.
    inside = replace(place, norm_eps=_GATE_EPS)
    dim, eps = place.hidden_dim, place.norm_eps
    if not config.is_hybrid[place.layer]:
        norm = load_norm(weights, "input_layernorm", dim, eps)
        return MixerLayer(norm, load_mamba(weights.under("mamba"), config.mamba, inside))
    use, own = config.hybrid_layers.index(place.layer), weights.under("mamba_decoder")
    number = use % config.block.num_blocks
    adapters = _Adapters(_shared(layers, config.hybrid_layers[number]), config, use)
    block, attention = blocks[number], config.block.attention
    return HybridLayer(
        embedding=embedding,
        block=block,
        attention=AttentionLayer(
            layer=place.layer,
            shape=attention.shard(weights.group.num_ranks),
            qkv=adapters.of_attention(block.qkv),
            placement=placement(load_rotary(weights, attention.positions)),
            sinks=None,
            out=block.out,
        ),
        gate_up=adapters.of_mlp(block.gate_up),
        linear=weights.matrix("linear.weight", dim, dim).linear(None),
        mixer_norm=load_norm(own, "input_layernorm", dim, eps),
        mixer=load_mamba(own.under("mamba"), config.mamba, inside),
    )


@dataclass(frozen=True, slots=True)
class _Adapters:
    """The adapters of the `use`-th layer that has a block, among the tensors of its block."""

    weights: Weights
    config: Zamba2Config
    use: int

    def of_attention(self, base: Linear) -> Linear:
        rank, dim = self.config.block.attention_adapter_rank, 2 * self.config.trunk.hidden_dim
        if not rank:
            return base
        heads, group = self.config.block.attention.q_heads, self.weights.group
        own = partial(share_of, heads=heads, group=group)
        downs, ups = [], []
        for name in ("q", "k", "v"):
            pair = self.weights.under(f"self_attn.linear_{name}_adapter_list.{self.use}")
            downs.append(pair.tensor("0.weight", rank, dim))
            ups.append(pair.tensor("1.weight", dim, rank, part=own))
        return AdaptedLinear(base, make_linear(torch.cat(downs)), make_linear(_diagonal(ups)))

    def of_mlp(self, base: Linear) -> Linear:
        rank, block = self.config.block.mlp_adapter_rank, self.config.block
        pair = self.weights.under(f"feed_forward.gate_up_proj_adapter_list.{self.use}")
        down = pair.tensor("0.weight", rank, self.config.trunk.hidden_dim)
        up = pair.matrix("1.weight", 2 * block.inner_dim, rank)
        own = gate_and_up(up, self.weights.group)
        return AdaptedLinear(base, make_linear(down), join_linear(own))


def _diagonal(blocks: list[Tensor]) -> Tensor:
    """One matrix with the blocks on its diagonal."""
    joined: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return joined
