"""Attention of queries alone, to keys and values of an earlier layer (Gemma 3n and 4).

q = rotated(norm(x · Wq));   y = softmax(scale · q kᵀ + causal mask) v · Wo

The earlier layer has written its keys and values of all tokens of a step before this one runs, so a
prompt may be cut anywhere, and this layer keeps no state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ferryman.model.layers.attention import attend
from ferryman.model.layers.decoder_layers import LayerPlace, load_norm
from ferryman.model.layers.head_norms import NormOfHeads
from ferryman.model.layers.rotation import RotaryEmbedding, load_rotary
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import summed_linear
from ferryman.model.weights.named_weights import Weights


@dataclass(frozen=True, slots=True)
class EarlierPagesAttention:
    """The mixer that reads the pages of layer `source`. `queries` yields all query heads."""

    source: int
    shape: AttentionShape
    queries: Linear
    norm: NormOfHeads
    turn: RotaryEmbedding
    out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        q = self._queries(hidden, batch.positions)
        pages = state.attention[self.source]
        mixed = attend(q, batch, pages, state.kernels, self.shape)
        return self.out(mixed.flatten(1))

    def _queries(self, hidden: Tensor, positions: Tensor) -> Tensor:
        heads = self.queries(hidden).view(len(hidden), -1, self.shape.head_dim)
        q = self.norm(heads)
        # A rotation takes queries and keys together. The keys were rotated by the earlier layer;
        # one head of q stands in their place.
        turned, _ = self.turn(q, q[:, :1], positions)
        return turned


def load_earlier_pages_attention(
    weights: Weights, shape: AttentionShape, place: LayerPlace, source: int
) -> EarlierPagesAttention:
    """The attention under `weights` to the pages of layer `source`, which has the same `shape`.

    Projections of keys and values, which a checkpoint may hold all the same, are not read. A rank
    holds its heads.
    """
    group, rows = weights.group, shape.q_heads * shape.head_dim
    queries = weights.matrix("q_proj.weight", rows, place.hidden_dim)
    out = weights.matrix("o_proj.weight", place.hidden_dim, rows)
    rank_heads = partial(share_of, heads=shape.q_heads, group=group)
    bias = weights.tensor("q_proj.bias", rows, part=rank_heads) if shape.has_bias else None
    out_bias = weights.tensor("o_proj.bias", place.hidden_dim) if shape.has_out_bias else None
    return EarlierPagesAttention(
        source=source,
        shape=shape.shard(group.num_ranks),
        queries=share_of(queries, shape.q_heads, group).linear(bias),
        norm=NormOfHeads(load_norm(weights, "q_norm", shape.head_dim, place.norm_eps)),
        turn=load_rotary(weights, shape.positions),
        out=summed_linear(share_of(out, shape.q_heads, group, axis=1), out_bias, group),
    )
