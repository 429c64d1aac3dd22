"""Block-sparse attention: an indexer chooses blocks of keys for each head of keys.

That of MiniMax M3, for each head alone (Qwen 4's is in `mean_index.py`):

index q   = norm(x · Wq), by head;   index key = norm(x · Wk): written to its page
            both rotated by position, as q and k of the attention
y         = attention of the queries of a head of keys over its chosen blocks alone
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.model.layers.attention import AttentionLayer, attend
from ferryman.model.layers.decoder_layers import LayerPlace, load_norm
from ferryman.model.layers.head_norms import NormedHeads, NormOfHeads
from ferryman.model.layers.rotation import load_rotary
from ferryman.model.shapes.attention_shapes import AttentionShape, BlockIndexShape
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.row_shapes import MeanIndexShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import join_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.attention.blocks.block_attention import attend_to_blocks
from ferryman_kernels.attention.blocks.block_index import BlockRule, choose_blocks
from ferryman_kernels.attention.latent_pages import write_latents


class BlockChooser(Protocol):
    """An indexer of blocks."""

    @property
    def shape(self) -> BlockIndexShape | MeanIndexShape: ...

    def write(self, hidden: Tensor, batch: StepBatch, pages: Tensor) -> Tensor:
        """Writes what later tokens need of these; returns their queries."""
        ...

    def choose(self, q: Tensor, batch: StepBatch, pages: Tensor) -> Tensor:
        """The blocks [tokens, kv_heads, number] that each token attends to, in rising order, then
        -1: all that it sees, if they are no more than `shape.count`."""
        ...


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """Queries of a rank's heads, and the key that all heads share; `projected` yields the queries,
    then the key."""

    shape: BlockIndexShape
    projected: Linear
    turn: NormedHeads

    def write(self, hidden: Tensor, batch: StepBatch, pages: Tensor) -> Tensor:
        """Writes the tokens' index keys; returns their queries [tokens, heads, head_dim]."""
        heads = self.projected(hidden).view(len(hidden), -1, self.shape.head_dim)
        q, key = heads.split_with_sizes((self.shape.heads, 1), dim=1)
        q, key = self.turn(q.contiguous(), key.contiguous(), batch.positions)
        table = batch.page_tables[Kind.FULL]
        write_latents(pages, key[:, 0], table, batch.rows, batch.positions)
        return q

    def choose(self, q: Tensor, batch: StepBatch, pages: Tensor) -> Tensor:
        """The blocks [tokens, heads, count] that each token attends to."""
        shape = self.shape
        rule = BlockRule(shape.block_len, shape.count, shape.num_local)
        table = batch.page_tables[Kind.FULL]
        return choose_blocks(q, pages, table, batch.rows, batch.positions, rule)


@dataclass(frozen=True, slots=True)
class BlockSparseAttention:
    """The mixer of a layer with an indexer."""

    attention: AttentionLayer
    indexer: BlockChooser

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        layer = self.attention.layer
        q, gate = self.attention.write(hidden, batch, state.attention[layer])
        asking = self.indexer.write(hidden, batch, state.index[layer])
        return self.attention.finish(self._attended(q, asking, batch, state), gate, hidden)

    def _attended(self, q: Tensor, asking: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        layer, shape = self.attention.layer, self.indexer.shape
        pages, index_pages = state.attention[layer], state.index[layer]
        table = batch.page_tables[Kind.FULL]
        if table.shape[1] * index_pages.shape[1] <= shape.count * shape.block_len:
            # All blocks are chosen, whatever their scores are.
            return attend(q, batch, pages, state.kernels, self.attention.shape)
        blocks = self.indexer.choose(asking, batch, index_pages)
        opened, table = pages.opened(table, q.dtype)
        return attend_to_blocks(
            state.kernels.paged_decode,
            q,
            (opened.key_pages, opened.value_pages),
            (table, batch.rows, batch.positions),
            blocks,
            shape.block_len,
            self.attention.shape.scale,
        )


def load_block_indexer(
    weights: Weights, shape: BlockIndexShape, attention: AttentionShape, place: LayerPlace
) -> BlockIndexer:
    """The indexer beside `attention`, whose projections are under `weights`: by the names of
    published tensors or those of transformers."""
    prefix = "index_" if weights.has_module("index_k_proj") else "indexer."
    queries = shape.heads * shape.head_dim
    rows = weights.matrix(f"{prefix}q_proj.weight", queries, place.hidden_dim)
    key = weights.matrix(f"{prefix}k_proj.weight", shape.head_dim, place.hidden_dim)
    q_norm, k_norm = (
        NormOfHeads(
            load_norm(weights, f"{prefix}{name}", shape.head_dim, place.norm_eps, place.norm_origin)
        )
        for name in ("q_norm", "k_norm")
    )
    return BlockIndexer(
        shape.shard(weights.group.num_ranks),
        join_linear([share_of(rows, shape.heads, weights.group), key], None),
        NormedHeads(q_norm, k_norm, load_rotary(weights, attention.positions)),
    )
