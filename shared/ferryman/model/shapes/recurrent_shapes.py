"""The shapes of mixers with a recurrent state, which every token overwrites: Mamba and others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ferryman.cache.manifest import Kind, SectionSpec
from ferryman.model.shapes.attention_shapes import RotaryPositions
from ferryman.model.shapes.model_shapes import StatePlace
from ferryman.model.shapes.ranks import per_rank, per_rank_replicated


class Gating(StrEnum):
    """The order of gate and norm on the output of a Mamba-2 scan."""

    GATE_THEN_NORM = "norm(y · silu(gate))"
    NORM_THEN_GATE = "norm(y) · silu(gate)"
    GATE_ALONE = "y · silu(gate)"


@dataclass(frozen=True, slots=True)
class MambaShape:
    """A Mamba-2 mixer. `dt_limit` bounds the time step after its softplus."""

    ssm_heads: int
    ssm_head_dim: int
    ssm_groups: int
    ssm_state: int
    conv_width: int
    has_conv_bias: bool
    has_in_bias: bool
    has_out_bias: bool
    dt_limit: tuple[float, float]
    gating: Gating = Gating.GATE_THEN_NORM

    @property
    def inner_dim(self) -> int:
        return self.ssm_heads * self.ssm_head_dim

    @property
    def group_dim(self) -> int:
        """Channels of B, and of C."""
        return self.ssm_groups * self.ssm_state

    @property
    def conv_dim(self) -> int:
        return self.inner_dim + 2 * self.group_dim

    @property
    def proj_dim(self) -> int:
        """Outputs of the in-projection: gate, x B C, dt."""
        return self.inner_dim + self.conv_dim + self.ssm_heads

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        conv = (self.conv_dim, self.conv_width - 1)
        ssm = (self.ssm_heads, self.ssm_head_dim, self.ssm_state)
        parts = (("x", self.inner_dim), ("B", self.group_dim), ("C", self.group_dim))
        return (
            SectionSpec("conv", place.layer, conv, place.dtype, shard_axis=0, parts=parts),
            SectionSpec("ssm", place.layer, ssm, place.accumulation_dtype, shard_axis=0),
        )

    def shard(self, num_ranks: int) -> MambaShape:
        return replace(
            self,
            ssm_heads=per_rank("ssm_heads", self.ssm_heads, num_ranks),
            ssm_groups=per_rank_replicated("ssm_groups", self.ssm_groups, num_ranks),
        )


class InnerNorms(StrEnum):
    """The norms of dt, B and C of a Mamba-1 mixer before they are used."""

    NONE = "none"
    WITHOUT_WEIGHTS = "norms whose weights are one (FalconMamba)"
    WITH_WEIGHTS = "norms with weights (Jamba)"


@dataclass(frozen=True, slots=True)
class Mamba1Shape:
    """A Mamba-1 mixer: each of `inner_dim` channels has `ssm_state` states and a step of its own.

    Steps are made from `dt_rank` numbers. `norm_eps` is that of the inner norms.
    """

    inner_dim: int
    ssm_state: int
    dt_rank: int
    conv_width: int
    has_conv_bias: bool
    has_bias: bool
    norms: InnerNorms = InnerNorms.NONE
    norm_eps: float = 0.0

    @property
    def selected_dim(self) -> int:
        """Outputs of the projection that selects: dt, B, C."""
        return self.dt_rank + 2 * self.ssm_state

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        conv, parts = (self.inner_dim, self.conv_width - 1), (("x", self.inner_dim),)
        ssm, wide = (self.inner_dim, self.ssm_state), place.accumulation_dtype
        return (
            SectionSpec("conv", place.layer, conv, place.dtype, shard_axis=0, parts=parts),
            SectionSpec("ssm", place.layer, ssm, wide, shard_axis=0),
        )

    def shard(self, num_ranks: int) -> Mamba1Shape:
        return replace(self, inner_dim=per_rank("inner_dim", self.inner_dim, num_ranks))


@dataclass(frozen=True, slots=True)
class HeadedMamba1Shape:
    """Mamba-1 mixers side by side behind one convolution (Zamba): each of `heads` has `head_dim`
    channels, and dt, B and C of its own. Every rank keeps all of them.

    `has_bias` is about the projections in and out.
    """

    heads: int
    head_dim: int
    ssm_state: int
    dt_rank: int
    conv_width: int
    has_conv_bias: bool
    has_bias: bool

    @property
    def inner_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def one_head(self) -> Mamba1Shape:
        """The mixer of one head, without what is joint."""
        return Mamba1Shape(
            self.head_dim, self.ssm_state, self.dt_rank, self.conv_width, False, False
        )

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        conv, ssm = (self.inner_dim, self.conv_width - 1), (self.inner_dim, self.ssm_state)
        parts = (("x", self.inner_dim),)
        return (
            SectionSpec("conv", place.layer, conv, place.dtype, shard_axis=None, parts=parts),
            SectionSpec("ssm", place.layer, ssm, place.accumulation_dtype, shard_axis=None),
        )


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """A short convolution between two gates (LFM2), over `dim` channels: no state matrix.

    `has_bias`: both projections and the convolution have one.
    """

    dim: int
    conv_width: int
    has_bias: bool

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        conv, parts = (self.dim, self.conv_width - 1), (("x", self.dim),)
        return (SectionSpec("conv", place.layer, conv, place.dtype, shard_axis=0, parts=parts),)

    def shard(self, num_ranks: int) -> ShortConvShape:
        return replace(self, dim=per_rank("channels of the convolution", self.dim, num_ranks))


@dataclass(frozen=True, slots=True)
class LightningShape:
    """Lightning attention: a state matrix for each head, without a convolution."""

    heads: int
    head_dim: int

    @property
    def inner_dim(self) -> int:
        """Channels of q, of k, of v, and of the gate."""
        return self.heads * self.head_dim

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        ssm, wide = (self.heads, self.head_dim, self.head_dim), place.accumulation_dtype
        return (SectionSpec("ssm", place.layer, ssm, wide, shard_axis=0),)

    def shard(self, num_ranks: int) -> LightningShape:
        return replace(self, heads=per_rank("heads of lightning attention", self.heads, num_ranks))


@dataclass(frozen=True, slots=True)
class TurningLightningShape(LightningShape):
    """Lightning attention whose q and k have norms and turn (Ling 2.5). The norm before its gate is
    over each of `norm_groups` equal parts of the channels of all heads."""

    positions: RotaryPositions
    norm_groups: int

    def shard(self, num_ranks: int) -> TurningLightningShape:
        """A share of the heads, and of the groups; fewer groups than ranks extend over several."""
        return replace(
            self,
            heads=per_rank("heads of lightning attention", self.heads, num_ranks),
            norm_groups=per_rank_replicated("group_norm_size", self.norm_groups, num_ranks),
        )


@dataclass(frozen=True, slots=True)
class RgLruShape:
    """A gated linear recurrence (RG-LRU) behind a convolution: one state a channel.

    The gates of a channel are made from the channels of its block, of which there are `blocks`.
    """

    dim: int
    blocks: int
    conv_width: int

    @property
    def block_dim(self) -> int:
        return self.dim // self.blocks

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        conv, parts = (self.dim, self.conv_width - 1), (("x", self.dim),)
        return (
            SectionSpec("conv", place.layer, conv, place.dtype, shard_axis=0, parts=parts),
            SectionSpec("ssm", place.layer, (self.dim,), place.accumulation_dtype, shard_axis=0),
        )

    def shard(self, num_ranks: int) -> RgLruShape:
        blocks = per_rank("blocks of the RG-LRU", self.blocks, num_ranks)
        return replace(self, dim=blocks * self.block_dim, blocks=blocks)


@dataclass(frozen=True, slots=True)
class HeadConvShape:
    """The convolutions between the projections of q, k and v and attention (ZAYA).

    Channels of q and k go through one of each channel, over `channel_width` tokens, and then
    through one of each head, over `head_width`; half the channels of v are of the token before.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    channel_width: int
    head_width: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """The channels of q, of k and of v."""
        kv_dim = self.kv_heads * self.head_dim
        return self.q_heads * self.head_dim, kv_dim, kv_dim

    @property
    def conv_width(self) -> int:
        """Tokens that the longest convolution reads; half of v reads two."""
        return max(self.channel_width, self.head_width, 2)

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        """Inputs of the convolution of channels, then those of the one of heads: as many copies of
        q and k as it reads earlier tokens."""
        q, k, v = self.widths
        parts = [("q", q), ("k", k), ("v", v)]
        for age in range(self.head_width - 1, 0, -1):
            parts += [(f"q{age}", q), (f"k{age}", k)]
        conv = (sum(dim for _, dim in parts), self.conv_width - 1)
        spec = SectionSpec("conv", place.layer, conv, place.dtype, shard_axis=0, parts=tuple(parts))
        return (spec,)

    def shard(self, num_ranks: int) -> HeadConvShape:
        return replace(
            self,
            q_heads=per_rank("q_heads", self.q_heads, num_ranks),
            kv_heads=per_rank_replicated("kv_heads", self.kv_heads, num_ranks),
        )


@dataclass(frozen=True, slots=True)
class LayerConvShape:
    """Four convolutions of a layer of attention and a feed-forward (Inkling): of its keys, of its
    values, and of the outputs of both parts, over `conv_width` tokens each."""

    kv_heads: int
    head_dim: int
    hidden_dim: int
    conv_width: int

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        kv_dim, dim = self.kv_dim, self.hidden_dim
        parts = (("k", kv_dim), ("v", kv_dim), ("mixed", dim), ("fed", dim))
        conv = (2 * kv_dim + 2 * dim, self.conv_width - 1)
        return (SectionSpec("conv", place.layer, conv, place.dtype, shard_axis=0, parts=parts),)

    def shard(self, num_ranks: int) -> LayerConvShape:
        """A share of keys and values; every rank convolves the outputs, which are sums."""
        kv_heads = per_rank_replicated("kv_heads", self.kv_heads, num_ranks)
        return replace(self, kv_heads=kv_heads)
