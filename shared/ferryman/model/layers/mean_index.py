"""The indexer of Qwen 4: it chooses blocks of keys by the mean of each block's index keys.

index q   = norm(x · Wq), by head, rotated by position;    index key = x · Wk: written to its page
block key = norm(mean of the block's index keys), rotated by the block's first position: written in
            the place of its last token's index key, when that token is computed
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.model.layers.decoder_layers import LayerPlace, load_norm
from ferryman.model.layers.head_norms import NormOfHeads
from ferryman.model.layers.rotation import RowTurn, load_row_turn
from ferryman.model.shapes.attention_shapes import AttentionShape, RotaryPositions
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.row_shapes import MeanIndexShape
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.attention.blocks.block_means import block_means
from ferryman_kernels.attention.blocks.mean_index import choose_mean_blocks
from ferryman_kernels.attention.latent_pages import write_latents


@dataclass(frozen=True, slots=True)
class MeanIndexer:
    """`projected` yields the queries of all heads, then the key. `weights` [heads], in the
    accumulation dtype, are the scale of scores; `kv_heads` those of a rank's attention."""

    shape: MeanIndexShape
    kv_heads: int
    projected: Linear
    q_norm: NormOfHeads
    k_norm: NormOfHeads
    turn: RowTurn
    weights: Tensor

    def write(self, hidden: Tensor, batch: StepBatch, pages: Tensor) -> Tensor:
        """Writes the tokens' index keys, and the keys of blocks that end with them; returns the
        queries [tokens, heads, head_dim]."""
        heads = self.projected(hidden).view(len(hidden), -1, self.shape.head_dim)
        q, key = heads.split_with_sizes((self.shape.heads, 1), dim=1)
        table, rows = batch.page_tables[Kind.FULL], batch.rows
        write_latents(pages, key[:, 0], table, rows, batch.positions)
        ends = self._ends(batch.positions)
        # All tokens' own keys are in their pages by now, those of one step's other tokens, too.
        means = block_means(pages, table, rows, ends, self.shape.block_len)
        starts = (ends - self.shape.block_len + 1).clamp_min(0)
        keys = self.turn(self.k_norm(means[:, None]), starts)
        write_latents(pages, keys[:, 0], table, rows, ends)
        return self.turn(self.q_norm(q.contiguous()), batch.positions)

    def _ends(self, positions: Tensor) -> Tensor:
        """The positions at which a block ends; -1 for all others."""
        ends_here = (positions + 1) % self.shape.block_len == 0
        return torch.where(ends_here, positions, -1)

    def choose(self, q: Tensor, batch: StepBatch, pages: Tensor) -> Tensor:
        """The blocks [tokens, kv_heads, at most count + 1] that each token attends to."""
        shape = self.shape
        named = batch.page_tables[Kind.FULL], batch.rows, batch.positions
        blocks = choose_mean_blocks(q, self.weights, pages, named, shape.block_len, shape.count)
        return blocks[:, None].expand(-1, self.kv_heads, -1)


def load_mean_indexer(
    weights: Weights, shape: MeanIndexShape, attention: AttentionShape, place: LayerPlace
) -> MeanIndexer:
    """The indexer under `weights`, beside `attention`, which is undivided. Every rank computes all
    of it."""
    assert isinstance(attention.positions, RotaryPositions), attention
    rows = (shape.heads + 1) * shape.head_dim
    q_norm, k_norm = (
        NormOfHeads(load_norm(weights, name, shape.head_dim, place.norm_eps, place.norm_origin))
        for name in ("q_layernorm", "k_layernorm")
    )
    wide = accumulation_dtype(weights.dtype)
    return MeanIndexer(
        shape=shape,
        kv_heads=attention.shard(weights.group.num_ranks).kv_heads,
        projected=weights.matrix("index_qk_proj.weight", rows, place.hidden_dim).linear(None),
        q_norm=q_norm,
        k_norm=k_norm,
        turn=load_row_turn(weights, attention.positions),
        weights=torch.full((shape.heads,), shape.head_dim**-0.5, dtype=wide, device=weights.device),
    )
