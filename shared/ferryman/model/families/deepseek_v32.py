"""DeepSeek-V3.2: DeepSeek-V3 with an indexer in each layer that chooses what a token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.deepseek_v3 import (
    DeepseekConfig,
    load_deepseek_feed_forward,
    read_deepseek,
)
from ferryman.model.family import Family
from ferryman.model.layers.decoder import Decoder, EndScales, load_embedding_and_head, load_layers
from ferryman.model.layers.decoder_layers import LayerPlace, load_norm
from ferryman.model.layers.shared_index import PlacedLayer, SparsePart, joined_by_index
from ferryman.model.layers.sparse_latent import load_indexer, load_placed_attention
from ferryman.model.readers.config_readers import read_layers
from ferryman.model.shapes.attention_shapes import IndexShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import StateShape, TrunkShape
from ferryman.model.weights.named_weights import Weights


@dataclass(frozen=True, slots=True)
class SparseDeepseekConfig:
    """`dense` is the model without its indexers.

    `has_indexer` is True for layers with an indexer; each other layer attends to the places that
    the last one before it chose.
    """

    dense: DeepseekConfig
    index: IndexShape
    has_indexer: tuple[bool, ...]

    @property
    def trunk(self) -> TrunkShape:
        return self.dense.trunk

    @property
    def states(self) -> tuple[tuple[StateShape, ...], ...]:
        latent = self.dense.attention
        return tuple((latent, self.index) if own else (latent,) for own in self.has_indexer)


def read_sparse_deepseek(fields: ConfigFields) -> SparseDeepseekConfig:
    """The config that DeepSeek-V3.2 and GLM-5 share."""
    fields.whole("q_lora_rank")  # the indexer computes its queries from that latent
    if fields.raw.get("layer_types") is not None:
        read_layers(fields, "layer_types", {"indexed_attention": None})
    if not fields.flag("rope_interleave", True):
        raise fields.refusal("rope_interleave", "true")
    dense = read_deepseek(fields)
    index = IndexShape(
        fields.whole("index_n_heads"), fields.whole("index_head_dim"), fields.whole("index_topk")
    )
    if index.head_dim < dense.attention.rope_dim:
        raise fields.refusal("index_head_dim", f"at least {dense.attention.rope_dim}, which turn")
    return SparseDeepseekConfig(dense, index, (True,) * dense.trunk.num_layers)


def load_sparse_deepseek(
    config: SparseDeepseekConfig, manifest: StateManifest, weights: Weights
) -> Decoder:
    ends = load_embedding_and_head(weights, config.trunk, "model.norm.weight", EndScales())
    load_part = partial(_load_part, config)
    parts = load_layers(config, manifest, weights.under("model.layers"), load_part)
    return Decoder(config, manifest, ends, joined_by_index(parts))


def _load_part(config: SparseDeepseekConfig, weights: Weights, place: LayerPlace) -> SparsePart:
    dense, norm = config.dense, partial(load_norm, dim=place.hidden_dim, eps=place.norm_eps)
    under = weights.under("self_attn")
    attention = load_placed_attention(under, dense.attention, place)
    layer = PlacedLayer(
        mixer_norm=norm(weights, "input_layernorm"),
        attention=attention,
        feed_forward_norm=norm(weights, "post_attention_layernorm"),
        feed_forward=load_deepseek_feed_forward(dense, weights.under("mlp"), place),
    )
    if not config.has_indexer[place.layer]:
        return layer, None
    indexer = under.under("indexer")
    return layer, load_indexer(indexer, attention, dense.attention, config.index, place)


FAMILY = Family(("DeepseekV32ForCausalLM",), read_sparse_deepseek, load_sparse_deepseek)
