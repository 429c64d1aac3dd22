"""The shapes of delta rules: recurrent mixers that replace what a key stood for, not only add."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ferryman.cache.manifest import Kind, SectionSpec
from ferryman.model.shapes.model_shapes import StatePlace
from ferryman.model.shapes.ranks import per_rank, per_rank_replicated


class DeltaLayout(StrEnum):
    """The arrangement of the in-projections of a gated delta net in a checkpoint."""

    BY_ROLE = "in_proj_qkv, in_proj_z, in_proj_b, in_proj_a"
    BY_KEY_HEAD = "in_proj_qkvz and in_proj_ba, the rows of each key head together"
    SEPARATE = "q_proj, k_proj, v_proj, g_proj for z, b_proj, a_proj"


class DeltaGate(StrEnum):
    """The gate on the normed output of a gated delta net."""

    SILU = "norm(y) · silu(z)"
    SIGMOID = "norm(y) · sigmoid(z)"


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """A gated delta net; value head h reads key head h // (v_heads / k_heads).

    β is below `max_rate`: beyond 1 a token may turn the sign of what its key stood for.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    layout: DeltaLayout
    max_rate: float = 1.0
    gate: DeltaGate = DeltaGate.SILU

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
            k_heads=per_rank_replicated("k_heads", self.k_heads, num_ranks),
            v_heads=per_rank("v_heads", self.v_heads, num_ranks),
        )


@dataclass(frozen=True, slots=True)
class KimiDeltaShape:
    """Kimi Delta Attention: a delta rule whose decay differs by channel of the key.

    `has_wide_gates`: decay and gate are computed from hidden, not by way of `head_dim` channels.
    The log of a decay is at least `least_decay` by a sigmoid, or has no bound (0.0). Ling 3 has
    both.
    """

    heads: int
    head_dim: int
    conv_width: int
    has_wide_gates: bool = False
    least_decay: float = 0.0

    @property
    def inner_dim(self) -> int:
        """Channels of q, of k, of v, and of the gate."""
        return self.heads * self.head_dim

    @property
    def gate_dim(self) -> int:
        """Channels of the in-projection for the decay, and for the gate."""
        return self.inner_dim if self.has_wide_gates else self.head_dim

    @property
    def conv_dim(self) -> int:
        return 3 * self.inner_dim

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        conv, wide = (self.conv_dim, self.conv_width - 1), place.accumulation_dtype
        parts = tuple((name, self.inner_dim) for name in ("q", "k", "v"))
        ssm = (self.heads, self.head_dim, self.head_dim)
        return (
            SectionSpec("conv", place.layer, conv, place.dtype, shard_axis=0, parts=parts),
            SectionSpec("ssm", place.layer, ssm, wide, shard_axis=0),
        )

    def shard(self, num_ranks: int) -> KimiDeltaShape:
        return replace(self, heads=per_rank("heads of the delta rule", self.heads, num_ranks))
