"""The parts that the shapes of all model families have in common; those with state describe it.

A family's config names, for each layer, the shapes that keep state there. The state manifest, the
pools, the tiers and the hand-off are derived from that alone. The shapes themselves are in
`attention_shapes.py`, `recurrent_shapes.py`, `delta_shapes.py`, `cell_shapes.py` and
`feed_forward_shapes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from ferryman.cache.manifest import Kind, SectionSpec

AS_COMPUTED = "auto"
"""Keys and values are kept in the dtype in which they are computed."""

FP8 = "fp8"
"""Keys and values are kept as e4m3 codes with a scale for each token and head."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The place of a shape's state: its layer, the page size, the dtype; and how keys and values
    are kept, AS_COMPUTED or FP8."""

    layer: int
    page_size: int
    dtype: str
    kv_dtype: str = AS_COMPUTED

    @property
    def accumulation_dtype(self) -> str:
        """The dtype in which scans accumulate and recurrent states are kept."""
        return "float64" if self.dtype == "float64" else "float32"


class StateShape(Protocol):
    """A shape that keeps state."""

    @property
    def kind(self) -> Kind: ...

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        """The sections of this layer in one slot of the kind."""
        ...


@runtime_checkable
class Shardable(Protocol):
    """A state shape that ranks can share. Every rank keeps all of any other shape."""

    def shard(self, num_ranks: int) -> StateShape:
        """The share of one of `num_ranks` ranks. Raises ConfigError, by name, for an uneven
        division.

        Axis by axis it is 1 / pieces of the whole: `cache/shards.py` maps pieces to ranks.
        """
        ...


def share_of_rank(shape: StateShape, num_ranks: int) -> StateShape:
    return shape.shard(num_ranks) if isinstance(shape, Shardable) else shape


class NormPlaces(StrEnum):
    """The places of a layer's norms: around its mixer, and likewise around its feed-forward."""

    BEFORE = "hidden + f(norm(hidden))"
    AFTER = "hidden + norm(f(hidden))"
    AROUND = "hidden + norm(f(norm(hidden)))"
    SHARED = "hidden + mixer(norm(hidden)) + feed_forward(norm(hidden)), by one norm"
    SIDE_BY_SIDE = "hidden + mixer(norm(hidden)) + feed_forward(norm(hidden)), each by its own norm"


@dataclass(frozen=True, slots=True)
class TrunkShape:
    """The sizes that every decoder has."""

    vocab_size: int
    hidden_dim: int
    num_layers: int
    norm_eps: float
    ties_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    has_head_bias: bool = False


class ModelConfig(Protocol):
    """A family's config: a frozen dataclass, every field of which the fingerprint covers."""

    @property
    def trunk(self) -> TrunkShape: ...

    @property
    def states(self) -> tuple[tuple[StateShape, ...], ...]:
        """For each layer the shapes that keep state there, if any."""
        ...
