"""The numbers of each token: the first weight of a model, and with tied ends the last one too.

A table in blocks stays in the panels of its product, and so does one in floats that a head is tied
to, on a processor that multiplies by panels. Head and embedding are one copy then, and a token's
row is taken from the panel of 64 rows that it lies in (docs/decisions/0213).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.weights.linear import (
    Linear,
    PanelLinear,
    PlainLinear,
    is_processor,
    make_joined,
    make_linear,
    padded_rows,
)
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman.model.weights.quantisation.gguf_matrix import BlockLinear, GgufMatrix
from ferryman_kernels.products.blocks.block_product import BlockPanels, block_rows
from ferryman_kernels.products.packed_product import panel_rows, reads_panels


class Embedding(Protocol):
    """Makes the hidden states [tokens, hidden_dim] of token ids [tokens], a tensor of its own."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, token_ids: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainEmbedding:
    """`weight` [vocab, hidden_dim] in the model's dtype."""

    weight: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


@dataclass(frozen=True, slots=True)
class BlockEmbedding:
    """A table [vocab, hidden_dim] in codes."""

    panels: BlockPanels

    @property
    def dtype(self) -> torch.dtype:
        return self.panels.dtype

    @property
    def device(self) -> torch.device:
        return self.panels.content.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        return block_rows(self.panels, token_ids)


@dataclass(frozen=True, slots=True)
class TiedEmbedding:
    """The table [vocab, hidden_dim] of a tied head, whose `product` has it in panels; only where
    weights are counted has it the plain table."""

    product: PanelLinear | PlainLinear

    @property
    def dtype(self) -> torch.dtype:
        return self._numbers.dtype

    @property
    def device(self) -> torch.device:
        return self._numbers.device

    @property
    def _numbers(self) -> Tensor:
        product = self.product
        return product.weight if isinstance(product, PlainLinear) else product.panels.panels

    def __call__(self, token_ids: Tensor) -> Tensor:
        assert isinstance(self.product, PanelLinear), "tokens are not counted"
        return panel_rows(self.product.panels, token_ids)


def load_embedding(weights: Weights, name: str, trunk: TrunkShape) -> Embedding:
    """The table `name`, in codes if the file has it in blocks and there is one rank."""
    coded = _in_blocks(weights, name, (trunk.vocab_size, trunk.hidden_dim))
    if coded is not None:
        return BlockEmbedding(coded.panels())
    table = weights.tensor(name, trunk.vocab_size, trunk.hidden_dim)
    return _tied(weights, table, trunk) or PlainEmbedding(table)


def _tied(weights: Weights, table: Tensor, trunk: TrunkShape) -> TiedEmbedding | None:
    """The table in the panels of the head that is tied to it, if it has such. Ranks have a part of
    these each, but look up whole rows."""
    if not trunk.ties_embeddings or trunk.has_head_bias or weights.group.num_ranks > 1:
        return None
    # Elsewhere the head packs the table in a layout of its own, or reads it as it is.
    if not (is_processor(weights.device) and reads_panels(table.dtype)):
        return None
    product = PlainLinear(table, None) if table.is_meta else make_linear(table)
    return TiedEmbedding(product) if isinstance(product, PanelLinear | PlainLinear) else None


def load_columns(weights: Weights, name: str, size: tuple[int, int], columns: range) -> Embedding:
    """Some neighbouring columns of the table `name` of `size`, in codes if they are whole blocks
    of the file and there is one rank."""
    start, length = columns.start, len(columns)
    coded = _in_blocks(weights, name, size)
    if coded is not None and not any(edge % coded.type.block_len for edge in (start, length)):
        return BlockEmbedding(coded.narrow(1, start, length).panels())
    part = partial(torch.narrow, dim=1, start=start, length=length)
    return PlainEmbedding(weights.tensor(name, *size, part=part))


@dataclass(frozen=True, slots=True)
class WideHead:
    """A head whose weight is in `dtype`, the accumulation dtype, for hidden states of any dtype."""

    product: Linear
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x.to(self.dtype))


def load_wide_head(weights: Weights, embedding: Embedding, trunk: TrunkShape) -> Linear:
    """`load_head` with a weight of its own in the accumulation dtype. A tied one is the embedding,
    in whose dtype it stays."""
    if trunk.ties_embeddings:
        return load_head(weights, embedding, trunk)
    wide = accumulation_dtype(weights.dtype)
    return WideHead(load_head(replace(weights, dtype=wide), embedding, trunk), wide)


def load_head(weights: Weights, embedding: Embedding, trunk: TrunkShape) -> Linear:
    """The product that makes logits; a tied one multiplies by the embedding."""
    name, size = "lm_head.weight", (trunk.vocab_size, trunk.hidden_dim)
    bias = weights.tensor("lm_head.bias", trunk.vocab_size) if trunk.has_head_bias else None
    rank_rows = partial(padded_rows, group=weights.group)
    if not trunk.ties_embeddings:
        coded = _in_blocks(weights, name, size)
        if coded is not None:
            return coded.linear(bias)
        rows = weights.tensor(name, *size, part=rank_rows)
        return make_joined(rows, trunk.vocab_size, weights.group, bias)
    match embedding:
        case BlockEmbedding(panels):
            none = torch.empty(0, dtype=weights.dtype, device=weights.device)
            return BlockLinear(panels, none if bias is None else bias)
        case TiedEmbedding(product):
            return product
        case PlainEmbedding(weight):
            return make_joined(rank_rows(weight), trunk.vocab_size, weights.group, bias)
    raise TypeError(f"{type(embedding).__name__} is no table that a head can be tied to")


def _in_blocks(weights: Weights, name: str, size: tuple[int, int]) -> GgufMatrix | None:
    # Ranks share a head by rows that fill no panels, so they read it in floats.
    if weights.group.num_ranks > 1:
        return None
    coded = weights.coded(name, *size)
    return coded if isinstance(coded, GgufMatrix) else None
