"""Attention to the rows of a window and of blocks of tokens (DeepSeek-V4).

    value, score = x · Wv, x · Ws
    row of a block = turn(norm(Σ softmax(score + bias)·value over its tokens, by channel))
    y              = turn_back(softmax(scale · q·rows of both, sink)·rows of both)

A row of a block turns by the block's first position. With 128 tokens a block, a token attends to
all blocks that are closed. With 4 tokens, blocks overlap, and an index chooses the blocks
(`block_choice.py`): it has rows of its own, made like the others and beside them, so one scan makes
both. Half a block is a recurrence (decision 0202).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.layers.block_choice import BlockChoice, EveryBlock, load_block_index
from ferryman.model.layers.decoder_layers import LayerPlace, RmsNorm
from ferryman.model.layers.rotation import RowTurn
from ferryman.model.layers.row_attention import (
    RowProjections,
    load_row_norm,
    load_row_projections,
    turning_first,
)
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.row_shapes import BlockRowsShape, RowAttentionShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import Matrix, join_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.attention.blocks.block_rows import (
    ClosedBlocks,
    closed_blocks,
)
from ferryman_kernels.attention.blocks.joined_rows import PlacedRows, joined_rows
from ferryman_kernels.recurrence.cells.block_mean import block_mean_decode, block_mean_scan
from ferryman_kernels.recurrence.cells.block_mean_rows import BlockedRows

PLACES = 1 << 22
"""The number of rows of all tokens whose places are in memory at once."""


@dataclass(frozen=True, slots=True)
class Compressor:
    """The rows of blocks, of `norms` parts: those that are attended to, then those of the index.

    `product` yields values, then scores: [tokens, 2 · series · channels]. `bias` [block_len,
    series · channels] of the scores is in the accumulation dtype.
    """

    layer: int
    shape: BlockRowsShape
    product: Linear
    bias: Tensor
    norms: tuple[RmsNorm, ...]
    turn: RowTurn

    def write(
        self, hidden: Tensor, batch: StepBatch, closed: ClosedBlocks, state: ModelState
    ) -> None:
        """Advances the means by the step's tokens; writes the rows of blocks that close."""
        means = self._means(hidden, batch, state.ssm[self.layer])
        first = batch.positions - batch.positions % self.shape.block_len
        pools = [
            by_layer[self.layer] for by_layer in (state.blocks, state.index)[: len(self.norms)]
        ]
        parts = means.split_with_sizes([pages.shape[2] for pages in pools], dim=1)
        for part, norm, pages in zip(parts, self.norms, pools, strict=True):
            rows = norm(part).to(hidden.dtype)
            closed.write(pages, self.turn(rows[:, None], first)[:, 0])

    def _means(self, hidden: Tensor, batch: StepBatch, states: Tensor) -> Tensor:
        """The mean of each token's block so far [tokens, channels], in the states' dtype."""
        values, scores = self.product(hidden).chunk(2, dim=1)
        if isinstance(batch, PrefillBatch):
            rows = BlockedRows(values, scores, batch.positions, self.bias)
            return block_mean_scan(rows, states, *batch.scans)

        def advance(values: Tensor, scores: Tensor, positions: Tensor, *slots: Tensor) -> Tensor:
            return block_mean_decode(
                BlockedRows(values, scores, positions, self.bias), states, *slots
            )

        return batch.wave_by_wave(advance, values, scores, batch.positions)


@dataclass(frozen=True, slots=True)
class BlockRowAttention:
    """The mixer of layer `layer`; a token attends to its window and to blocks before it."""

    layer: int
    projections: RowProjections
    compressor: Compressor
    choice: BlockChoice

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        near, far, inner = state.latent[self.layer], state.blocks[self.layer], self.projections
        blocks = self.compressor.shape
        table = batch.page_tables[blocks.kind]
        at = batch.rows, batch.positions, near.shape[1], blocks.block_len
        closed = closed_blocks(table, *at)
        inner.write(hidden, batch, near)
        self.compressor.write(hidden, batch, closed, state)
        residual = inner.residual(hidden)
        chosen = self.choice.of_step(hidden, residual, batch.positions, closed, state)
        q, attended = inner.queries(residual, batch.positions), list[Tensor]()
        for tokens in self._pieces(len(hidden), closed):
            window = PlacedRows(near, inner.window_places(batch, tokens, near.shape[1]))
            places = closed.places(chosen(tokens), tokens, far.shape[1])
            rows = joined_rows(window, PlacedRows(far, places))
            dims = inner.shape.head_dim, inner.shape.scale, inner.sinks
            attended.append(state.kernels.latent_places(q[tokens], *rows, *dims))
        joined = attended[0] if len(attended) == 1 else torch.cat(attended)
        return inner.finish(joined, batch.positions)

    def _pieces(self, tokens: int, closed: ClosedBlocks) -> list[slice]:
        """The tokens of a step, so many at a time that their places have room."""
        index = self.compressor.shape.index
        most = closed.reach if index is None else min(index.count, closed.reach)
        at_once = max(1, PLACES // (self.projections.shape.window_len + most))
        return [slice(low, low + at_once) for low in range(0, tokens, at_once)]


def load_block_row_attention(
    weights: Weights, place: LayerPlace, shape: RowAttentionShape, blocks: BlockRowsShape
) -> BlockRowAttention:
    """The attention with tensors under `weights`. Every rank has the whole compressor and index."""
    projections, under = load_row_projections(weights, place, shape), weights.under("compressor")
    positions, turn = shape.positions, projections.turn
    sources = [(under, blocks.head_dim)]
    choice: BlockChoice = EveryBlock()
    if blocks.index is not None:
        inner = under.under("indexer")
        sources.append((inner, blocks.index.head_dim))
        choice = load_block_index(inner, place, shape, blocks.index, turn)
    orders = [turning_first(positions, dim) for _, dim in sources]
    norms = [
        load_row_norm(part, "kv_norm", order, shape.norm_eps)
        for (part, _), order in zip(sources, orders, strict=True)
    ]
    product, bias = _load_means(sources, orders, place.hidden_dim, blocks)
    compressor = Compressor(place.layer, blocks, product, bias, tuple(norms), turn)
    return BlockRowAttention(place.layer, projections, compressor, choice)


def _load_means(
    sources: list[tuple[Weights, int]],
    orders: list[Tensor],
    hidden_dim: int,
    blocks: BlockRowsShape,
) -> tuple[Linear, Tensor]:
    """The product of values and scores, and the scores' bias: of each series all channels, those of
    the attended rows first."""
    series = blocks.means.series
    values, scores = (
        [weights.matrix(f"{name}.weight", series * dim, hidden_dim) for weights, dim in sources]
        for name in ("kv_proj", "gate_proj")
    )
    stored = [
        weights.precise("position_bias", blocks.block_len, series * dim) for weights, dim in sources
    ]
    lines = [
        (source, number * dim + order)
        for number in range(series)
        for source, ((_, dim), order) in enumerate(zip(sources, orders, strict=True))
    ]
    parts: list[Matrix] = [
        stored_matrices[source].with_rows(rows)
        for stored_matrices in (values, scores)
        for source, rows in lines
    ]
    bias = [stored[source][:, rows.to(stored[source].device)] for source, rows in lines]
    return join_linear(parts), torch.cat(bias, dim=1)
