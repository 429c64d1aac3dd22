"""Grouped-query attention over pages.

q, k, v = x · Wqkv;   q, k rotated by position;   k, v written to their pages
y = softmax(scale · q kᵀ + causal mask) v · Wo             (with sinks: one more score a head;
                                                            scores may be capped by a tanh;
                                                            with a gate: · sigmoid(gate) before Wo)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.head_placement import HeadPlacement, load_placement
from ferryman.model.layers.rotation import halves_apart
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    GateActivation,
    GateShape,
    ValueSource,
)
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.chunks import ChunkOfPages, chunks_of_positions, chunks_of_spans
from ferryman.model.shapes.ranks import Group, share_of
from ferryman.model.shapes.state import ModelState, PagedState
from ferryman.model.shapes.state_kernels import StateKernels
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import Matrix, join_linear, split_rows, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import sigmoid, softplus
from ferryman_kernels.elementwise.heads_into_pages import ProjectedHeads, TokenPlaces
from ferryman_kernels.ragged import Spans, on_host

BY_GROUP = "query_key_value"
"""The tensor of q, k and v in which these are divided by key heads (GPT-NeoX)."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The attention mixer of layer `layer`. `qkv` yields all query heads, then key, then value
    heads.

    `sinks` [q_heads] in the accumulation dtype, or None. `gate` yields the factors of the heads'
    outputs, or is None.
    """

    layer: int
    shape: AttentionShape
    qkv: Linear
    placement: HeadPlacement
    sinks: Tensor | None
    out: Linear
    gate: OutputGate | None = None

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        pages = state.attention[self.layer]
        q, gate = self.write(hidden, batch, pages)
        mixed = attend(q, batch, pages, state.kernels, self.shape, self.sinks)
        return self.finish(mixed, gate, hidden)

    def finish(self, mixed: Tensor, gate: Tensor | None, hidden: Tensor) -> Tensor:
        """The layer's output, from the heads' outputs [tokens, q_heads, head_dim], the gate that
        `write` returned, and the layer's input."""
        if self.shape.value_dim:
            mixed = mixed[:, :, : self.shape.value_dim]
        if gate is not None:
            mixed = mixed * sigmoid(gate)
        if self.gate is not None:
            mixed = mixed * self.gate(hidden)
        return self.out(mixed.flatten(1))

    def write(
        self, hidden: Tensor, batch: StepBatch, pages: PagedState
    ) -> tuple[Tensor, Tensor | None]:
        """Writes the tokens' keys and values to their pages; returns q, rotated, and the gate
        between the heads' outputs and the product that joins them, if there is one."""
        shape = self.shape
        sizes = tuple(_out_dims(shape).values())
        dims = (shape.head_dim, shape.head_dim, shape.value_head_dim)
        parts = self.qkv(hidden).split_with_sizes(sizes, dim=1)
        q, k, v = (part.view(len(hidden), -1, dim) for part, dim in zip(parts, dims, strict=True))
        gate = None
        if shape.gates_output:
            # Each head of q is followed by a head of gate (Qwen3-Next).
            q, gate = q.reshape(len(q), -1, 2, shape.head_dim).unbind(2)
        places = TokenPlaces(batch.page_tables[shape.kind], batch.rows, batch.positions)
        return self.placement(ProjectedHeads(q, k, v), pages, places), gate


@dataclass(frozen=True, slots=True)
class OutputGate:
    """The factors of a rank's heads: an activation of a product of the hidden state.

    Hidden [tokens, hidden_dim] in, [tokens, q_heads, value_head_dim] or [tokens, q_heads, 1] out.
    """

    product: Linear
    activation: Callable[[Tensor], Tensor]
    q_heads: int

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.activation(self.product(hidden)).view(len(hidden), self.q_heads, -1)


def attend(
    q: Tensor,
    batch: StepBatch,
    pages: PagedState,
    kernels: StateKernels,
    shape: AttentionShape,
    sinks: Tensor | None = None,
) -> Tensor:
    """The values [tokens, q_heads, head_dim] that the queries `q` see in `pages`, which hold the
    batch's own already."""
    opened, table = pages.opened(batch.page_tables[shape.kind], q.dtype)
    seen = shape.scale, shape.window_len, sinks, shape.score_cap, opened.scales
    keys, values = opened.key_pages, opened.value_pages
    chunk = ChunkOfPages(shape.chunk_len, keys.shape[2]) if shape.chunk_len else None
    if isinstance(batch, PrefillBatch):
        spans: Spans = batch.spans
        if chunk:
            table, spans = chunks_of_spans(table, on_host(spans), chunk)
        return kernels.paged_prefill(q, keys, values, table, spans, *seen)
    positions = batch.positions
    if chunk:
        table, positions = chunks_of_positions(table, positions, chunk)
    return kernels.paged_decode(q, keys, values, table, positions, *seen)


def load_attention(weights: Weights, shape: AttentionShape, place: LayerPlace) -> AttentionLayer:
    """The attention with projections under `weights`; q, k and v are joined into one product.

    A rank holds its heads of q, and the heads of k and v that those read.
    """
    hidden_dim, group = place.hidden_dim, weights.group
    if shape.value_scale != 1.0:
        scale = shape.value_scale
        weights = weights.scaled({"v_proj.weight": scale, "v_proj.bias": scale})
    bias = torch.cat(_projected_bias(weights, shape)) if shape.has_bias else None
    out = weights.matrix("o_proj.weight", hidden_dim, shape.q_heads * shape.value_head_dim)
    out_bias = weights.tensor("o_proj.bias", hidden_dim) if shape.has_out_bias else None
    return AttentionLayer(
        layer=place.layer,
        shape=shape.shard(group.num_ranks),
        qkv=join_linear(_projected(weights, shape, hidden_dim), bias),
        placement=load_placement(weights, shape, place),
        sinks=load_sinks(weights, shape.q_heads) if shape.has_sinks else None,
        out=summed_linear(share_of(out, shape.q_heads, group, axis=1), out_bias, group),
        gate=_load_gate(weights, shape, hidden_dim),
    )


_ACTIVATIONS = {GateActivation.SIGMOID: sigmoid, GateActivation.SOFTPLUS: softplus}


def _load_gate(weights: Weights, shape: AttentionShape, hidden_dim: int) -> OutputGate | None:
    if shape.gate is None:
        return None
    heads = (shape.q_heads, shape.value_head_dim)
    return load_output_gate(weights, shape.gate, heads, hidden_dim)


def load_output_gate(
    weights: Weights, gate: GateShape, heads: tuple[int, int], hidden_dim: int
) -> OutputGate:
    """The gate under `weights` on the outputs of `heads`: their number, and the channels of each. A
    rank has those of its heads."""
    q_heads, value_dim = heads
    channels = 1 if gate.is_by_head else value_dim
    rows = weights.matrix(f"{gate.name}.weight", q_heads * channels, hidden_dim)
    rank_rows = share_of(rows, q_heads, weights.group)
    rank_heads = rank_rows.shape[0] // channels
    return OutputGate(rank_rows.linear(None), _ACTIVATIONS[gate.activation], rank_heads)


def _projected(weights: Weights, shape: AttentionShape, hidden_dim: int) -> list[Matrix]:
    """A rank's rows of q, k and v, which are stored as three weights or as one, of which q, k and v
    are thirds (Phi 3) or which is divided by key heads (GPT-NeoX)."""
    out_dims = _out_dims(shape)
    if weights.has_module("qkv_proj"):
        whole = weights.matrix("qkv_proj.weight", sum(out_dims.values()), hidden_dim)
        parts = split_rows(whole, out_dims.values())
    elif weights.has_module(BY_GROUP):
        whole = weights.matrix(f"{BY_GROUP}.weight", sum(out_dims.values()), hidden_dim)
        parts = [whole.with_rows(rows) for rows in _rows_by_group(shape)]
    else:
        parts = [
            weights.matrix(f"{_stored_name(shape, name)}.weight", out_dim, hidden_dim)
            for name, out_dim in out_dims.items()
        ]
    orders = _own_rows(shape, weights.group)
    return [part.with_rows(rows) for part, rows in zip(parts, orders, strict=True)]


def _projected_bias(weights: Weights, shape: AttentionShape) -> list[Tensor]:
    out_dims = _out_dims(shape)
    if weights.has("qkv_proj.bias"):
        whole = weights.tensor("qkv_proj.bias", sum(out_dims.values()))
        parts = split_rows(whole, out_dims.values())
    elif weights.has(f"{BY_GROUP}.bias"):
        whole = weights.tensor(f"{BY_GROUP}.bias", sum(out_dims.values()))
        parts = [whole[rows] for rows in _rows_by_group(shape)]
    else:
        parts = [
            weights.tensor(f"{_stored_name(shape, name)}.bias", out_dim)
            for name, out_dim in out_dims.items()
        ]
    orders = _own_rows(shape, weights.group)
    return [part[rows] for part, rows in zip(parts, orders, strict=True)]


def _rows_by_group(shape: AttentionShape) -> list[Tensor]:
    """The rows of q, k and v in a tensor that has, for each key head, the query heads that read it,
    the key head itself and its value head."""
    queries = shape.projected_heads // shape.kv_heads
    heads = torch.arange(shape.kv_heads * (queries + 2)).view(shape.kv_heads, -1)
    channels = torch.arange(shape.head_dim)
    return [
        (part.flatten()[:, None] * shape.head_dim + channels).flatten()
        for part in heads.split_with_sizes((queries, 1, 1), dim=1)
    ]


def _stored_name(shape: AttentionShape, name: str) -> str:
    """The projection of keys is loaded twice if values come from it, so that all layers write
    keys and values alike; each reads the product's own part."""
    return "k_proj" if name == "v_proj" and shape.values is ValueSource.NORMED_KEYS else name


def _out_dims(shape: AttentionShape) -> dict[str, int]:
    return {
        "q_proj": shape.projected_heads * shape.head_dim,
        "k_proj": shape.kv_heads * shape.head_dim,
        "v_proj": shape.kv_heads * shape.value_head_dim,
    }


def _own_rows(shape: AttentionShape, group: Group) -> list[Tensor]:
    """The rows of q, k and v that are of this rank's heads, in the order in which they turn."""
    parts = []
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
    for (name, out_dim), count in zip(_out_dims(shape).items(), heads, strict=True):
        rows = torch.arange(out_dim)
        turned = rows if name == "v_proj" else _turned(rows, shape)
        parts.append(share_of(turned, count, group))
    return parts


def _turned(rows: Tensor, shape: AttentionShape) -> Tensor:
    """The rows of q or k, those of each head in the order in which they turn."""
    by_head = rows.reshape(-1, shape.head_dim, *rows.shape[1:])
    return by_head[:, halves_apart(shape.positions, shape.head_dim)].flatten(0, 1)


SINKS = ("sinks", "attention_sink_bias", "softmax_offset", "learnable_sink_param")
"""The names of sinks, of which the first is read that a checkpoint has."""


def load_sinks(weights: Weights, q_heads: int) -> Tensor:
    """A rank's sinks of `q_heads` heads, in the accumulation dtype."""
    rank_heads = partial(share_of, heads=q_heads, group=weights.group)
    return weights.precise(weights.first_of(*SINKS), q_heads, part=rank_heads)
