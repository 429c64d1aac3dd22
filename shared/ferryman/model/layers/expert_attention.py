"""Attention whose queries and outputs are made by experts (JetMoe; Shen et al. 2024).

q_e    = x · Wq_e for each chosen expert e;   k, v = x · Wkv of all, written to their pages
y      = Σ_e share_e · (softmax(scale · q_e kᵀ + causal mask) v) · Wo_e + bias

Each chosen expert yields one query head for each key head. To the kernels these are grouped
queries: those that read one key head stand side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ferryman.model.layers.attention import attend
from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.expert_products import load_expert_product
from ferryman.model.layers.expert_router import ExpertRouter, shares_of_chosen
from ferryman.model.layers.experts import ExpertProduct
from ferryman.model.layers.head_placement import HeadPlacement, load_placement
from ferryman.model.shapes.attention_shapes import ExpertHeadsShape
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.ranks import Group, share_of
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear, make_linear
from ferryman.model.weights.matrix import join_linear, split_rows
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.heads_into_pages import ProjectedHeads, TokenPlaces
from ferryman_kernels.products.weighted_sum import weighted_sum


@dataclass(frozen=True, slots=True)
class ExpertAttention:
    """The attention mixer of layer `layer`. `queries` goes from hidden_dim to a rank's heads of one
    expert, `outs` back; `bias` is [hidden_dim]."""

    layer: int
    shape: ExpertHeadsShape
    router: ExpertRouter
    queries: ExpertProduct
    keys_and_values: Linear
    placement: HeadPlacement
    outs: ExpertProduct
    bias: Tensor
    group: Group

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        shape, pages, tokens = self.shape, state.attention[self.layer], len(hidden)
        by_expert = tokens, -1, shape.kv_heads, shape.head_dim
        by_key_head = tokens, shape.kv_heads, -1, shape.head_dim
        shares, chosen = self.router(hidden)
        q = self.queries(hidden, chosen).view(by_expert).transpose(1, 2).flatten(1, 2)
        kv = self.keys_and_values(hidden).view(tokens, 2, shape.kv_heads, shape.head_dim)
        places = TokenPlaces(batch.page_tables[shape.kind], batch.rows, batch.positions)
        turned = self.placement(ProjectedHeads(q, kv[:, 0], kv[:, 1]), pages, places)
        mixed = attend(turned, batch, pages, state.kernels, shape).view(by_key_head)
        rows = mixed.transpose(1, 2).reshape(chosen.numel(), -1)
        outputs = self.outs(rows, chosen.view(-1, 1)).view(*chosen.shape, -1)
        return self.group.summed(weighted_sum(outputs, shares)).add_(self.bias)


def load_expert_attention(
    weights: Weights, shape: ExpertHeadsShape, place: LayerPlace
) -> ExpertAttention:
    """The attention under `weights`. A rank holds its key heads, and of every expert the query
    heads that read them."""
    group, hidden_dim, heads = weights.group, place.hidden_dim, shape.kv_heads
    kv_dim, inside = heads * shape.head_dim, weights.under("experts")
    count, chosen = shape.num_experts, shape.experts_per_token
    queries = inside.matrices("input_linear.weight", count, kv_dim, hidden_dim)
    outs = inside.matrices("output_linear.weight", count, hidden_dim, kv_dim)
    kv = weights.matrix("kv_proj.weight", 2 * kv_dim, hidden_dim)
    halves = [share_of(part, heads, group) for part in split_rows(kv, (kv_dim, kv_dim))]
    score = make_linear(inside.tensor("router.layer.weight", count, hidden_dim))
    device = weights.device
    return ExpertAttention(
        layer=place.layer,
        shape=shape.shard(group.num_ranks),
        router=shares_of_chosen(score, chosen),
        queries=load_expert_product(device, [share_of(part, heads, group) for part in queries]),
        keys_and_values=join_linear(halves, None),
        placement=load_placement(weights, shape, place),
        outs=load_expert_product(device, [share_of(part, heads, group, axis=1) for part in outs]),
        bias=inside.tensor("bias", hidden_dim),
        group=group,
    )
