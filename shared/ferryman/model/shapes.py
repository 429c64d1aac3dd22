"""The shapes that model families share, as values; those with state say what it is.

A family's config names, for each layer, the shapes that keep state there. The state manifest, the
pools, the tiers and the hand-off follow from that alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, runtime_checkable

from ferryman.cache.manifest import Kind, SectionSpec
from ferryman.model.ranks import divided, kept
from ferryman.model.rotary import Stretch, Unstretched


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where a shape keeps its state: in which layer, in pages of what size, in which dtype."""

    layer: int
    page_size: int
    dtype: str

    @property
    def accumulation_dtype(self) -> str:
        """In which scans accumulate, and recurrent states are kept."""
        return "float64" if self.dtype == "float64" else "float32"


class StateShape(Protocol):
    """A shape that keeps state."""

    @property
    def kind(self) -> Kind: ...

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        """What one slot of the kind holds for this layer."""
        ...


@runtime_checkable
class Cuttable(Protocol):
    """A state shape of which each rank can keep a share; any other is kept whole by all of them."""

    def shard(self, num_ranks: int) -> StateShape:
        """What one of `num_ranks` ranks keeps. Raises ConfigError, by name, for what is not even.

        Axis by axis it is 1 / pieces of the whole: `cache/shards.py` says who keeps which piece.
        """
        ...


def share_of_rank(shape: StateShape, num_ranks: int) -> StateShape:
    return shape.shard(num_ranks) if isinstance(shape, Cuttable) else shape


@dataclass(frozen=True, slots=True)
class NoPositions:
    """Attention that sees no positions ("nope"): order comes from the recurrent layers."""


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Rotary positions over the first `rotary_dim` of each head."""

    theta: float
    rotary_dim: int
    stretch: Stretch = field(default_factory=Unstretched)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Grouped-query attention; query head h reads key head h // (q_heads / kv_heads).

    A query sees the last `window_len` positions, its own included; 0: all of them. `norms_heads`:
    each head of q and k goes through a norm of its own. `has_sinks`: each query head has a score
    that no value follows. `gates_output`: behind each head of q stands one that gates its output.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    has_bias: bool
    positions: RotaryPositions | NoPositions
    window_len: int = 0
    norms_heads: bool = False
    has_sinks: bool = False
    gates_output: bool = False

    @property
    def projected_heads(self) -> int:
        """Heads that q_proj yields."""
        return self.q_heads * (2 if self.gates_output else 1)

    @property
    def kind(self) -> Kind:
        return Kind.WINDOW if self.window_len else Kind.FULL

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        shape = (self.kv_heads, place.page_size, self.head_dim)
        return tuple(
            SectionSpec(name, place.layer, shape, place.dtype, shard_axis=0)
            for name in ("key", "value")
        )

    def shard(self, num_ranks: int) -> AttentionShape:
        return replace(
            self,
            q_heads=divided("q_heads", self.q_heads, num_ranks),
            kv_heads=kept("kv_heads", self.kv_heads, num_ranks),
        )


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2): a token keeps one row, which all heads read.

    A head's query and key have `plain_dim` channels without positions and `rope_dim` that turn;
    its value has `value_dim`. Plain keys and values come out of the row's `latent_dim` channels,
    queries out of a latent of `query_rank` channels (0: straight from hidden). `is_interleaved`:
    neighbouring channels turn together, not those half a rotation apart.
    """

    q_heads: int
    query_rank: int
    latent_dim: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    has_bias: bool
    positions: RotaryPositions
    is_interleaved: bool

    @property
    def row_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def kind(self) -> Kind:
        return Kind.FULL

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        shape = (place.page_size, self.row_dim)
        return (SectionSpec("latent", place.layer, shape, place.dtype, shard_axis=None),)

    def shard(self, num_ranks: int) -> LatentShape:
        """A share of the heads; every rank keeps all rows, which they all read."""
        return replace(self, q_heads=divided("q_heads", self.q_heads, num_ranks))


@dataclass(frozen=True, slots=True)
class IndexShape:
    """The lightning indexer of sparse attention (DeepSeek-V3.2): what a token attends to.

    `heads` queries choose `count` positions. Of their `head_dim` channels the first ones turn, as
    many as in the attention.
    """

    heads: int
    head_dim: int
    count: int

    @property
    def kind(self) -> Kind:
        return Kind.FULL

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        shape = (place.page_size, self.head_dim)
        return (SectionSpec("index", place.layer, shape, place.dtype, shard_axis=None),)


class Gating(StrEnum):
    """How the gate of a Mamba-2 mixer meets what the scan yields."""

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
            ssm_heads=divided("ssm_heads", self.ssm_heads, num_ranks),
            ssm_groups=kept("ssm_groups", self.ssm_groups, num_ranks),
        )


class DeltaLayout(StrEnum):
    """How a checkpoint arranges the in-projections of a gated delta net."""

    BY_ROLE = "in_proj_qkv, in_proj_z, in_proj_b, in_proj_a"
    BY_KEY_HEAD = "in_proj_qkvz and in_proj_ba, the rows of each key head together"


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """A gated delta net; value head h reads key head h // (v_heads / k_heads)."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    layout: DeltaLayout

    @property
    def key_dim(self) -> int:
        """Channels of q, and of k."""
        return self.k_heads * self.k_dim

    @property
    def value_dim(self) -> int:
        """Channels of v, and of the gate."""
        return self.v_heads * self.v_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        conv = (self.conv_dim, self.conv_width - 1)
        ssm = (self.v_heads, self.k_dim, self.v_dim)
        parts = (("q", self.key_dim), ("k", self.key_dim), ("v", self.value_dim))
        return (
            SectionSpec("conv", place.layer, conv, place.dtype, shard_axis=0, parts=parts),
            SectionSpec("ssm", place.layer, ssm, place.accumulation_dtype, shard_axis=0),
        )

    def shard(self, num_ranks: int) -> DeltaShape:
        return replace(
            self,
            k_heads=kept("k_heads", self.k_heads, num_ranks),
            v_heads=divided("v_heads", self.v_heads, num_ranks),
        )


@dataclass(frozen=True, slots=True)
class MlpShape:
    """A gated MLP."""

    inner_dim: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Experts, each a gated MLP of `inner_dim`; every token goes to `experts_per_token` of them."""

    num_experts: int
    experts_per_token: int
    inner_dim: int


BEST_OF_GROUP = 2
"""How many of its experts a group is judged by."""


@dataclass(frozen=True, slots=True)
class GroupedRouting:
    """How a token finds its experts (DeepSeek-V3): in the best `groups_per_token` of `num_groups`.

    `norms_shares`: shares are brought to a sum of 1 before they are multiplied by `scaling`.
    """

    num_groups: int
    groups_per_token: int
    norms_shares: bool
    scaling: float


@dataclass(frozen=True, slots=True)
class TrunkShape:
    """What every decoder has."""

    vocab_size: int
    hidden_dim: int
    num_layers: int
    norm_eps: float
    ties_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]


class ModelConfig(Protocol):
    """A family's config: a frozen dataclass, every field of which the fingerprint covers."""

    @property
    def trunk(self) -> TrunkShape: ...

    @property
    def states(self) -> tuple[tuple[StateShape, ...], ...]:
        """For each layer the shapes that keep state there, if any."""
        ...
