"""Attention to rows that are key and value of all heads (DeepSeek-V4).

    residual = norm(x · Wqa)
    q        = turn(unit(residual · Wqb), by head)        unit: a norm without weights
    row      = turn(norm(x · Wkv))                        written to its page
    y        = turn_back(softmax(scale · q·rows, sink)·rows)
    out      = (y of a group of heads · Woa of the group) · Wob

A row is turned by its position, as a key must be; turning the sum of rows back by the query's own
position leaves the distance between the two. The last channels of a head turn: here they are the
first, in all weights that make or read a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.attention import load_sinks
from ferryman.model.layers.decoder_layers import LayerPlace, RmsNorm, load_norm
from ferryman.model.layers.latent import HeadProducts, QueryLatent, head_products
from ferryman.model.layers.rotation import RowTurn, load_row_turn
from ferryman.model.shapes.attention_shapes import RotaryPositions
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.row_shapes import RowAttentionShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import summed_linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.attention.latent_pages import all_positions, places_of, write_latents


@dataclass(frozen=True, slots=True)
class RowProjections:
    """Projections into queries and rows, and out of attended rows; a rank's groups of heads.

    `unit` is the norm of each query head, whose weights are ones. `groups_out` goes by group from
    its heads' channels to `out_rank`. `sinks` [q_heads] are in the accumulation dtype.
    """

    shape: RowAttentionShape
    residual: QueryLatent
    query_up: Linear
    unit: RmsNorm
    row: Linear
    row_norm: RmsNorm
    turn: RowTurn
    sinks: Tensor
    groups_out: HeadProducts
    out: Linear

    def queries(self, residual: Tensor, positions: Tensor) -> Tensor:
        """Queries [tokens, q_heads, head_dim] of the latents `residual` [tokens, query_rank]."""
        heads = self.query_up(residual).view(-1, self.shape.head_dim)
        return self.turn(self.unit(heads).view(len(residual), -1, self.shape.head_dim), positions)

    def write(self, hidden: Tensor, batch: StepBatch, pages: Tensor) -> None:
        """Writes the tokens' rows to their `pages`."""
        rows = self.turn(self.row_norm(self.row(hidden))[:, None], batch.positions)
        table = batch.page_tables[self.shape.kind]
        write_latents(pages, rows[:, 0], table, batch.rows, batch.positions)

    def window_places(self, batch: StepBatch, tokens: slice, page_size: int) -> Tensor:
        """The places of the rows in the window of each of some tokens, rising, then -1."""
        table = batch.page_tables[self.shape.kind]
        reach = table.shape[1] * page_size
        seen = all_positions(batch.positions[tokens], reach, self.shape.window_len)
        return places_of(seen, table, batch.rows[tokens], page_size)

    def finish(self, attended: Tensor, positions: Tensor) -> Tensor:
        """The output [tokens, hidden_dim] from attended rows [tokens, q_heads, head_dim]."""
        turned = self.turn.back(attended, positions)
        groups = self.groups_out(turned.view(len(turned), self.shape.out_groups, -1))
        return self.out(groups.flatten(1))


@dataclass(frozen=True, slots=True)
class RowAttention:
    """The mixer of layer `layer`; a token attends to its window."""

    layer: int
    projections: RowProjections

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        pages, inner, shape = state.latent[self.layer], self.projections, self.projections.shape
        inner.write(hidden, batch, pages)
        q = inner.queries(inner.residual(hidden), batch.positions)
        places = inner.window_places(batch, slice(None), pages.shape[1])
        attend = state.kernels.latent_places
        attended = attend(q, pages, places, shape.head_dim, shape.scale, inner.sinks)
        return inner.finish(attended, batch.positions)


def load_row_attention(
    weights: Weights, place: LayerPlace, shape: RowAttentionShape
) -> RowAttention:
    """The attention to windows with tensors under `weights`."""
    return RowAttention(place.layer, load_row_projections(weights, place, shape))


def load_row_projections(
    weights: Weights, place: LayerPlace, shape: RowAttentionShape
) -> RowProjections:
    """A rank's projections of any attention to rows."""
    group, dim, hidden_dim = weights.group, shape.head_dim, place.hidden_dim
    order = turning_first(shape.positions, dim)
    by_head = (torch.arange(shape.q_heads)[:, None] * dim + order).flatten()
    queries = weights.matrix("q_b_proj.weight", shape.q_heads * dim, shape.query_rank)
    ones = torch.ones(dim, dtype=accumulation_dtype(weights.dtype), device=weights.device)
    rows = weights.matrix("kv_proj.weight", dim, hidden_dim).with_rows(order)
    out_dim = shape.out_groups * shape.out_rank
    out = weights.matrix("o_b_proj.weight", hidden_dim, out_dim)
    return RowProjections(
        shape=shape.shard(group.num_ranks),
        residual=QueryLatent(
            weights.matrix("q_a_proj.weight", shape.query_rank, hidden_dim).linear(None),
            load_norm(weights, "q_a_norm", shape.query_rank, shape.norm_eps),
        ),
        query_up=share_of(queries.with_rows(by_head), shape.q_heads, group).linear(None),
        unit=RmsNorm(ones, shape.norm_eps),
        row=rows.linear(None),
        row_norm=load_row_norm(weights, "kv_norm", order, shape.norm_eps),
        turn=load_row_turn(weights, shape.positions),
        sinks=load_sinks(weights, shape.q_heads),
        groups_out=_load_groups(weights, shape, order),
        out=summed_linear(share_of(out, shape.out_groups, group, axis=1), None, group),
    )


def load_row_norm(weights: Weights, name: str, order: Tensor, eps: float) -> RmsNorm:
    """The norm called `name`, of rows whose channels are in `order`."""
    norm = load_norm(weights, name, len(order), eps)
    return RmsNorm(norm.weight[order.to(norm.weight.device)], eps)


def _load_groups(weights: Weights, shape: RowAttentionShape, order: Tensor) -> HeadProducts:
    rows = shape.out_groups * shape.out_rank
    columns = shape.q_heads // shape.out_groups * shape.head_dim
    rank_groups = partial(share_of, heads=shape.out_groups, group=weights.group)
    stored = weights.tensor("o_a_proj.weight", rows, columns, part=rank_groups)
    by_channel = stored.view(-1, columns // shape.head_dim, shape.head_dim)
    ordered = by_channel[..., order.to(stored.device)]
    return head_products(ordered.reshape(-1, shape.out_rank, columns))


def turning_first(positions: RotaryPositions, head_dim: int) -> Tensor:
    """The order of a head's channels in which the last ones, which turn, come first, and the two of
    a rotated pair are rotary_dim / 2 apart."""
    plain = head_dim - positions.rotary_dim
    turning = torch.arange(plain, head_dim)
    return torch.cat((turning[0::2], turning[1::2], torch.arange(plain)))
