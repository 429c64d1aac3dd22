"""Rows of pages: those that are key and value (DeepSeek-V4) and what a layer keeps of them, and
the keys of blocks that an index chooses by (Qwen 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ferryman.cache.manifest import Kind, SectionSpec
from ferryman.errors import ConfigError
from ferryman.model.shapes.attention_shapes import RotaryPositions, row_of_token
from ferryman.model.shapes.model_shapes import StatePlace
from ferryman.model.shapes.ranks import per_rank
from ferryman_kernels.attention.blocks.block_rows import rows_of_page


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
        return row_of_token("latent", self.head_dim, place)

    def shard(self, num_ranks: int) -> RowAttentionShape:
        """A share of the groups of heads; every rank keeps all rows, because all heads read
        them."""
        return replace(
            self,
            q_heads=per_rank("num_attention_heads", self.q_heads, num_ranks),
            out_groups=per_rank("o_groups", self.out_groups, num_ranks),
        )


@dataclass(frozen=True, slots=True)
class RowIndexShape:
    """The index of rows of blocks: `heads` queries choose the `count` blocks that a token attends
    to, by rows of `head_dim` channels, of which as many turn as in the attention."""

    heads: int
    head_dim: int
    count: int


@dataclass(frozen=True, slots=True)
class BlockRowsShape:
    """Rows of `head_dim` channels that each stand for `block_len` tokens, and are attended to
    beside the window's: all that a token sees, or those that an `index` chooses. If blocks overlap,
    a row stands for the tokens of the block before, too."""

    block_len: int
    head_dim: int
    overlaps: bool
    index: RowIndexShape | None

    @property
    def kind(self) -> Kind:
        return Kind.FULL

    @property
    def means(self) -> BlockMeansShape:
        """The means that become rows, those of the index among them."""
        index_dim = 0 if self.index is None else self.index.head_dim
        return BlockMeansShape(self.head_dim + index_dim, self.overlaps)

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        """Raises ConfigError for pages in which a block's row has no place of its own."""
        size, length = place.page_size, self.block_len
        if max(size, length) % min(size, length):
            # Pages are powers of two, and all of them suit a block that is one.
            raise ConfigError(
                f"page_size={size}: layer {place.layer} keeps a row for each {length} tokens;"
                f" choose a power of two that divides {length}, {length & -length} at most"
            )
        rows, dims = rows_of_page(size, length), {"blocks": self.head_dim}
        if self.index is not None:
            dims["index"] = self.index.head_dim
        stored = place.dtype, None
        return tuple(
            SectionSpec(name, place.layer, (rows, dim), *stored, positions_a_row=length)
            for name, dim in dims.items()
        )


@dataclass(frozen=True, slots=True)
class BlockMeansShape:
    """The means of the tokens of a block so far, in `channels` channels: each has a weighted sum, a
    sum of weights and a maximum. If blocks overlap, a second such series is for the block after."""

    channels: int
    overlaps: bool

    @property
    def series(self) -> int:
        return 2 if self.overlaps else 1

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        sums, wide = (3 * self.series, self.channels), place.accumulation_dtype
        return (SectionSpec("ssm", place.layer, sums, wide, shard_axis=None),)


@dataclass(frozen=True, slots=True)
class MeanIndexShape:
    """`heads` queries choose `count` blocks of `block_len` positions, for all heads of keys; what a
    token sees of its own block is attended to beside them. As many of the `head_dim` channels turn
    as in the attention.

    A page has one row a token: its index key as it was projected, before norm and rotation. Behind
    the last position of a block stands the key of the block instead: nothing reads that token's own
    any more. Every rank keeps all rows and all heads, because all heads of keys read one choice.
    """

    heads: int
    head_dim: int
    block_len: int
    count: int

    @property
    def kind(self) -> Kind:
        return Kind.FULL

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        return row_of_token("index", self.head_dim, place)
