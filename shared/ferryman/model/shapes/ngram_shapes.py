"""The shape of the n-grams that a layer looks up by the last tokens (Qwen 4)."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.cache.manifest import Kind, SectionSpec
from ferryman.model.shapes.model_shapes import StatePlace

ID_BYTES = 3
"""The bytes of a token's id in a slot: a number of one byte is exact in every dtype of models."""


@dataclass(frozen=True, slots=True)
class NgramShape:
    """N-grams of 2 to `order` tokens, each looked up by `heads` hashes in tables of their own.

    `number` counts the layers that look up n-grams, from 0. Tables have prime numbers of rows above
    `least_rows`, together padded to a multiple of `row_multiple`, in `table_parts` tensors.
    `seed` is that of the hashes. An n-gram does not reach behind the last `separator`, an id, which
    also stands in for all before a sequence. A token's rows have `embed_dim` channels. The
    `streams`, of `hidden_dim` channels, take a part of them, which goes through a convolution over
    `conv_taps` tokens: every `order`-th of the last ones.
    """

    number: int
    order: int
    heads: int
    least_rows: int
    row_multiple: int
    table_parts: int
    seed: int
    vocab_size: int
    separator: int
    embed_dim: int
    conv_taps: int
    streams: int
    hidden_dim: int

    @property
    def all_heads(self) -> int:
        """Hashes of a token's n-grams."""
        return (self.order - 1) * self.heads

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.all_heads

    @property
    def row_dim(self) -> int:
        """Channels of all streams."""
        return self.streams * self.hidden_dim

    @property
    def id_dim(self) -> int:
        """Channels of the ids of earlier tokens: each has its bytes at every distance."""
        return ID_BYTES * (self.order - 1)

    @property
    def depth(self) -> int:
        """Earlier tokens whose inputs a slot has; they hold those whose ids an n-gram needs."""
        return (self.conv_taps - 1) * self.order

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        """The inputs of the convolution, then the bytes of ids. Every rank has all streams."""
        parts = (("rows", self.row_dim), ("ids", self.id_dim))
        shape = (self.row_dim + self.id_dim, self.depth)
        return (
            SectionSpec("ngram", place.layer, shape, place.dtype, shard_axis=None, parts=parts),
        )
