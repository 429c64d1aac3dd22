"""The shapes of cells whose gates are exponentials: beside their state they keep what divides it,
and a running maximum."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ferryman.cache.manifest import Kind, SectionSpec
from ferryman.model.shapes.model_shapes import StatePlace
from ferryman.model.shapes.ranks import per_rank


@dataclass(frozen=True, slots=True)
class MlstmShape:
    """An mLSTM cell: each head has a matrix of `v_dim` rows and `k_dim` columns, a norm as long as
    a key, and a running maximum.

    `gate_cap` is that of both gates before their exponential, `eps` is added to the divisor.
    """

    heads: int
    k_dim: int
    v_dim: int
    gate_cap: float
    eps: float

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        """The maximum of a head stands behind its norm."""
        matrix, norm = (self.heads, self.v_dim, self.k_dim), (self.heads, self.k_dim + 1)
        wide = place.accumulation_dtype
        return (
            SectionSpec("ssm", place.layer, matrix, wide, shard_axis=0),
            SectionSpec("norm", place.layer, norm, wide, shard_axis=0),
        )

    def shard(self, num_ranks: int) -> MlstmShape:
        return replace(self, heads=per_rank("heads of the mLSTM", self.heads, num_ranks))


@dataclass(frozen=True, slots=True)
class RwkvShape:
    """A layer of RWKV-4: each of `dim` channels has a numerator, a denominator and a running
    maximum. Both of its parts read the input of the token before, of `hidden_dim` channels, which
    every rank keeps."""

    dim: int
    hidden_dim: int

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        before, parts = (2 * self.hidden_dim, 1), ("mixed", "fed")
        named = tuple((part, self.hidden_dim) for part in parts)
        mean = (3, self.dim)
        return (
            SectionSpec("conv", place.layer, before, place.dtype, shard_axis=None, parts=named),
            SectionSpec("ssm", place.layer, mean, place.accumulation_dtype, shard_axis=1),
        )

    def shard(self, num_ranks: int) -> RwkvShape:
        return replace(self, dim=per_rank("attention_hidden_size", self.dim, num_ranks))
