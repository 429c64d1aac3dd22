"""The choice of the rows of blocks that a token attends to (DeepSeek-V4).

    index q      = turn(residual · Wiq), by head;    weights = x · Ww / √(heads · head_dim)
    score[block] = Σ_heads weight · relu(q·row)          for blocks that are closed with the token

`block_row_attention.py` makes the rows of the index with those that are attended to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.rotation import RowTurn
from ferryman.model.layers.row_attention import turning_first
from ferryman.model.shapes.row_shapes import RowAttentionShape, RowIndexShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.attention.blocks.block_rows import ClosedBlocks, choose_block_rows
from ferryman_kernels.attention.latent_pages import all_positions

BlocksOf = Callable[[slice], Tensor]
"""The blocks [tokens, chosen] that some tokens of a step attend to, rising, then -1."""


class BlockChoice(Protocol):
    """The choice of blocks that tokens attend to."""

    def of_step(
        self,
        hidden: Tensor,
        residual: Tensor,
        positions: Tensor,
        closed: ClosedBlocks,
        state: ModelState,
    ) -> BlocksOf:
        """The choice for a step's tokens, whose queries' latents are `residual`."""
        ...


@dataclass(frozen=True, slots=True)
class EveryBlock:
    """All blocks that a token sees."""

    def of_step(
        self,
        hidden: Tensor,
        residual: Tensor,
        positions: Tensor,
        closed: ClosedBlocks,
        state: ModelState,
    ) -> BlocksOf:
        return lambda tokens: all_positions(closed.last[tokens], closed.reach)


@dataclass(frozen=True, slots=True)
class IndexedBlocks:
    """The best blocks by an index; `head_weights` are in the accumulation dtype, and include the
    scale of the scores."""

    layer: int
    shape: RowIndexShape
    query_up: Linear
    head_weights: Linear
    turn: RowTurn

    def of_step(
        self,
        hidden: Tensor,
        residual: Tensor,
        positions: Tensor,
        closed: ClosedBlocks,
        state: ModelState,
    ) -> BlocksOf:
        pages, heads = state.index[self.layer], self.query_up(residual)
        q = self.turn(heads.view(len(hidden), self.shape.heads, -1), positions)
        weights = self.head_weights(hidden.to(accumulation_dtype(hidden.dtype)))
        count = self.shape.count
        return lambda tokens: choose_block_rows(q, weights, pages, closed, tokens, count)


def load_block_index(
    weights: Weights,
    place: LayerPlace,
    shape: RowAttentionShape,
    index: RowIndexShape,
    turn: RowTurn,
) -> IndexedBlocks:
    """The index with tensors under `weights`, whose queries turn like those of `shape`."""
    order, dims = turning_first(shape.positions, index.head_dim), index.heads * index.head_dim
    by_head = (torch.arange(index.heads)[:, None] * index.head_dim + order).flatten()
    queries = weights.matrix("q_b_proj.weight", dims, shape.query_rank)
    factors = weights.precise("scorer.weights_proj.weight", index.heads, place.hidden_dim)
    return IndexedBlocks(
        layer=place.layer,
        shape=index,
        query_up=queries.with_rows(by_head).linear(None),
        head_weights=make_linear(factors * dims**-0.5),
        turn=turn,
    )
