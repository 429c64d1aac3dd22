"""Attention to rows that are key and value (DeepSeek-V4), and what a layer keeps of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ferryman.cache.manifest import Kind, SectionSpec
from ferryman.model.shapes.attention_shapes import RotaryPositions
from ferryman.model.shapes.model_shapes import StatePlace
from ferryman.model.shapes.ranks import per_rank


@dataclass(frozen=True, slots=True)
class RowAttentionShape:
    """Attention in which a token keeps one row of `head_dim` channels, the key and the value of all
    heads. A query sees the rows of the last `window_len` positions, its own included, and its
    head's sink.

    Queries are computed from a latent of `query_rank` channels. `positions` turn the last channels
    of a head, two neighbours together. The heads of each of `out_groups` go to `out_rank` channels
    by a product of their own. All norms have `norm_eps`.
    """

    q_heads: int
    head_dim: int
    query_rank: int
    window_len: int
    positions: RotaryPositions
    out_groups: int
    out_rank: int
    norm_eps: float

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def reach(self) -> int:
        """The last positions whose rows a query sees, its own included."""
        return self.window_len

    @property
    def kind(self) -> Kind:
        return Kind.WINDOW

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        shape = (place.page_size, self.head_dim)
        return (SectionSpec("latent", place.layer, shape, place.dtype, shard_axis=None),)

    def shard(self, num_ranks: int) -> RowAttentionShape:
        """A share of the groups of heads; every rank keeps all rows, because all heads read
        them."""
        return replace(
            self,
            q_heads=per_rank("num_attention_heads", self.q_heads, num_ranks),
            out_groups=per_rank("o_groups", self.out_groups, num_ranks),
        )
