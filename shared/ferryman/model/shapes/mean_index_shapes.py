"""The shape of Qwen 4's indexer, which chooses blocks of tokens by the mean of their index keys."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.cache.manifest import Kind, SectionSpec
from ferryman.model.shapes.model_shapes import StatePlace


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
        shape = (place.page_size, self.head_dim)
        return (SectionSpec("index", place.layer, shape, place.dtype, shard_axis=None),)
