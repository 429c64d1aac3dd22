"""Multi-head latent attention over pages, in its absorbed form (DeepSeek-V2).

    residual       = norm(x · Wqa)                        (or x itself, without a query latent)
    q_plain, q_rope = residual · Wqb, by head;            q_rope rotated by position
    row            = norm(latent of x · Wkva), the rest of it rotated: written to its page
                     (dots3 note: the rest has a norm, too, before it is rotated)
    q              = (q_plain · Wk, q_rope)               the keys' up-projection goes into q
    y              = (softmax(scale · q·rows)·latents) · Wv · Wo      (the heads of Wv may be gated)

All heads read one row a token, which is never expanded to keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ferryman.model.layers.attention import OutputGate, load_output_gate, load_sinks
from ferryman.model.layers.decoder_layers import LayerPlace, RmsNorm, load_norm
from ferryman.model.layers.rotation import RotaryEmbedding, grown, load_rotary
from ferryman.model.shapes.attention_shapes import LatentShape
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear, PanelLinear, make_linear
from ferryman.model.weights.matrix import summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.attention.latent_pages import write_latents
from ferryman_kernels.products.packed_product import (
    PanelStack,
    packed_grouped_product,
    stack_panels,
)


@dataclass(frozen=True, slots=True)
class QueryLatent:
    """norm(x · down): the latent from which queries, and those of a sparse index, are computed."""

    down: Linear
    norm: RmsNorm

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(self.down(x))


def no_latent(x: Tensor) -> Tensor:
    """x itself: queries are computed directly from hidden."""
    return x


class HeadProducts(Protocol):
    """rows[:, head] · weight[head] for each head: from [tokens, heads, in_dim] to [tokens, heads,
    out_dim]."""

    def __call__(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PanelHeads:
    """The products of a CPU that reads panels: a head is an expert that every token goes to, so a
    token has the same bits in every batch."""

    stack: PanelStack

    def __call__(self, rows: Tensor) -> Tensor:
        tokens, heads, in_dim = rows.shape
        every_head = torch.arange(heads).repeat(tokens)[:, None]
        products = packed_grouped_product(rows.reshape(-1, in_dim), self.stack, every_head)
        return products.view(tokens, heads, -1)


@dataclass(frozen=True, slots=True)
class BatchedHeads:
    """torch's product of batches, on a card; `weights` [heads, in_dim, out_dim]."""

    weights: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.bmm(rows.transpose(0, 1), self.weights).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class SeparateHeads:
    """A product for each head, where weights are not in panels."""

    parts: tuple[Linear, ...]

    def __call__(self, rows: Tensor) -> Tensor:
        products = [part(row) for part, row in zip(self.parts, rows.unbind(1), strict=True)]
        return torch.stack(products, dim=1)


def head_products(weights: Tensor) -> HeadProducts:
    """The products with `weights` [heads, out_dim, in_dim]."""
    if weights.is_cuda:
        return BatchedHeads(weights.transpose(1, 2).contiguous())
    parts = tuple(make_linear(weight) for weight in weights.unbind(0))
    panels = [part.panels for part in parts if isinstance(part, PanelLinear)]
    if len(panels) < len(parts):
        return SeparateHeads(parts)
    return PanelHeads(stack_panels(panels, weights.new_empty(1, 0)))


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """Projections into rows and absorbed queries, and out of attended latents.

    By head, `keys_up` goes from plain_dim to latent_dim, and `values_up` from there to value_dim.
    `rope_norm` is the norm of the rotating part of a row, or returns it as it is. `sinks` [heads]
    are in the accumulation dtype, or None; `gate` yields factors of the heads' outputs, or is None.
    """

    shape: LatentShape
    residual: Linear
    query_up: Linear
    row_down: Linear
    row_norm: RmsNorm
    rope_norm: Callable[[Tensor], Tensor]
    turn: RotaryEmbedding
    keys_up: HeadProducts
    values_up: HeadProducts
    out: Linear
    sinks: Tensor | None
    gate: OutputGate | None

    def write(self, hidden: Tensor, residual: Tensor, batch: StepBatch, pages: Tensor) -> Tensor:
        """Writes the tokens' rows; returns their queries [tokens, heads, latent_dim + rope_dim]."""
        shape = self.shape
        latents, ropes = self.row_down(hidden).split_with_sizes(
            (shape.latent_dim, shape.rope_dim), dim=1
        )
        heads = self.query_up(residual).view(len(hidden), shape.q_heads, -1)
        plain, turning = heads.split_with_sizes((shape.plain_dim, shape.rope_dim), dim=2)
        turned, row_ropes = self.turn(turning, self.rope_norm(ropes)[:, None], batch.positions)
        rows = torch.cat((self.row_norm(latents), row_ropes[:, 0]), dim=1)
        table = batch.page_tables[shape.kind]
        write_latents(pages, rows, table, batch.rows, batch.positions)
        q = torch.cat((self.keys_up(plain), turned), dim=2)
        return q if shape.growth is None else grown(q, shape.growth, batch.positions)

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """The output [tokens, hidden_dim] from attended latents [tokens, heads, latent_dim] and
        the attention's input."""
        heads = self.values_up(attended)
        return self.out((heads if self.gate is None else heads * self.gate(hidden)).flatten(1))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The mixer of layer `layer`; a token attends to all earlier positions."""

    layer: int
    projections: LatentProjections

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        pages, shape = state.latent[self.layer], self.projections.shape
        q = self.projections.write(hidden, self.projections.residual(hidden), batch, pages)
        table, sinks = batch.page_tables[shape.kind], self.projections.sinks
        sizes = (shape.latent_dim, shape.scale, sinks, shape.window_len)
        if isinstance(batch, PrefillBatch):
            attended = state.kernels.latent_prefill(q, pages, table, batch.spans, *sizes)
        else:
            attended = state.kernels.latent_decode(q, pages, table, batch.positions, *sizes)
        return self.projections.finish(attended, hidden)


def load_latent_attention(
    weights: Weights, shape: LatentShape, place: LayerPlace
) -> LatentAttention:
    """Dense latent attention with projections under `weights`."""
    return LatentAttention(place.layer, load_projections(weights, shape, place))


def load_projections(weights: Weights, shape: LatentShape, place: LayerPlace) -> LatentProjections:
    """The projections of any latent attention. A rank holds its heads, and all of the latents."""
    group, heads, latent_dim = weights.group, shape.q_heads, shape.latent_dim
    rank_heads = partial(share_of, heads=heads, group=group)
    up_dims = heads * (shape.plain_dim + shape.value_dim), latent_dim
    up = weights.tensor("kv_b_proj.weight", *up_dims, part=rank_heads)
    up = up.view(-1, shape.plain_dim + shape.value_dim, latent_dim)
    out = weights.matrix("o_proj.weight", place.hidden_dim, heads * shape.value_dim)
    out_bias = weights.tensor("o_proj.bias", place.hidden_dim) if shape.has_bias else None
    keys_up, values_up = up.split_with_sizes((shape.plain_dim, shape.value_dim), dim=1)
    return LatentProjections(
        shape=shape.shard(group.num_ranks),
        residual=_residual(weights, shape, place),
        query_up=_query_up(weights, shape, place),
        row_down=_row_down(weights, shape, place),
        row_norm=_latent_norm(
            weights, "kv_a_layernorm", latent_dim, shape.norm_eps, shape.latent_scale
        ),
        rope_norm=_rope_norm(weights, shape) if shape.norms_rope else no_latent,
        turn=load_rotary(weights, shape.positions),
        keys_up=head_products(keys_up.transpose(1, 2)),
        values_up=head_products(values_up),
        out=summed_linear(share_of(out, heads, group, axis=1), out_bias, group),
        sinks=load_sinks(weights, heads) if shape.has_sinks else None,
        gate=_load_gate(weights, shape, place),
    )


def _load_gate(weights: Weights, shape: LatentShape, place: LayerPlace) -> OutputGate | None:
    if shape.gate is None:
        return None
    heads = (shape.q_heads, shape.value_dim)
    return load_output_gate(weights, shape.gate, heads, place.hidden_dim)


def _residual(weights: Weights, shape: LatentShape, place: LayerPlace) -> Linear:
    if not shape.query_rank:
        return no_latent
    weight = weights.matrix("q_a_proj.weight", shape.query_rank, place.hidden_dim)
    bias = weights.tensor("q_a_proj.bias", shape.query_rank) if shape.has_bias else None
    down = weight.linear(bias)
    sizes = shape.query_rank, shape.norm_eps, shape.query_scale
    return QueryLatent(down, _latent_norm(weights, "q_a_layernorm", *sizes))


def _latent_norm(weights: Weights, name: str, dim: int, eps: float, scale: float) -> RmsNorm:
    norm = load_norm(weights, name, dim, eps)
    return norm if scale == 1.0 else replace(norm, weight=norm.weight * scale)


def _rope_norm(weights: Weights, shape: LatentShape) -> RmsNorm:
    norm = load_norm(weights, "k_rope_only_layernorm", shape.rope_dim, shape.norm_eps)
    order = _halves_apart(shape, 0).to(norm.weight.device)
    return replace(norm, weight=norm.weight[order])


def _query_up(weights: Weights, shape: LatentShape, place: LayerPlace) -> Linear:
    name, in_dim = "q_b_proj", shape.query_rank
    if not shape.query_rank:
        name, in_dim = "q_proj", place.hidden_dim
    head_dim = shape.plain_dim + shape.rope_dim
    weight = weights.matrix(f"{name}.weight", shape.q_heads * head_dim, in_dim)
    rank_weight = share_of(weight, shape.q_heads, weights.group)
    by_head = torch.arange(rank_weight.shape[0]).view(-1, head_dim)
    order = by_head[:, _halves_apart(shape, shape.plain_dim)]
    return rank_weight.with_rows(order.flatten()).linear(None)


def _row_down(weights: Weights, shape: LatentShape, place: LayerPlace) -> Linear:
    name, order = "kv_a_proj_with_mqa", _halves_apart(shape, shape.latent_dim)
    weight = weights.matrix(f"{name}.weight", shape.row_dim, place.hidden_dim)
    bias = weights.tensor(f"{name}.bias", shape.row_dim)[order] if shape.has_bias else None
    return weight.with_rows(order).linear(bias)


def _halves_apart(shape: LatentShape, num_before: int) -> Tensor:
    """The order of channels in which the two of a rotated pair are rope_dim / 2 apart.

    Scores are the same in any order that q and rows share. So interleaved pairs are reordered in
    the weights, once, and not at every token.
    """
    turning = torch.arange(shape.rope_dim)
    if shape.is_interleaved:
        turning = torch.cat((turning[0::2], turning[1::2]))
    return torch.cat((torch.arange(num_before), num_before + turning))
