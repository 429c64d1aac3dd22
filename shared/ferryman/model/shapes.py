"""The shapes that model families share, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mixer(StrEnum):
    """What mixes the positions in a layer."""

    ATTENTION = "attention"
    MAMBA = "mamba"


@dataclass(frozen=True, slots=True)
class NoPositions:
    """Attention that sees no positions ("nope"): order comes from the recurrent layers."""


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Rotary positions over the first `rotary_dim` of each head."""

    theta: float
    rotary_dim: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Grouped-query attention; query head h reads key head h // (q_heads / kv_heads)."""

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    has_bias: bool
    positions: RotaryPositions | NoPositions


@dataclass(frozen=True, slots=True)
class MambaShape:
    """A Mamba-2 mixer. `dt_limit` bounds the time step after its softplus."""

    ssm_heads: int
    ssm_head_dim: int
    ssm_groups: int
    ssm_state: int
    conv_width: int
    has_conv_bias: bool
    has_proj_bias: bool
    dt_limit: tuple[float, float]

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


@dataclass(frozen=True, slots=True)
class TrunkShape:
    """What every decoder has. `mixers` names the mixer of each layer, in order."""

    vocab_size: int
    hidden_dim: int
    mixers: tuple[Mixer, ...]
    norm_eps: float
    ties_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
