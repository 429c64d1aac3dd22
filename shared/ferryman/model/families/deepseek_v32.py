"""DeepSeek-V3.2: DeepSeek-V3 with an indexer in each layer that chooses what a token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.attention_shapes import IndexShape
from ferryman.model.config_fields import ConfigFields
from ferryman.model.config_readers import read_layers
from ferryman.model.decoder import Decoder, EndScales, load_decoder, load_embedding_and_head
from ferryman.model.families.deepseek_v3 import DeepseekConfig, load_layer, read_deepseek
from ferryman.model.family import Family
from ferryman.model.layers import LayerPlace, Mixer
from ferryman.model.shapes import StateShape, TrunkShape
from ferryman.model.sparse_latent import load_sparse_latent_attention
from ferryman.model.weights import Weights


@dataclass(frozen=True, slots=True)
class SparseDeepseekConfig:
    """`dense` is the model without its indexers."""

    dense: DeepseekConfig
    index: IndexShape

    @property
    def trunk(self) -> TrunkShape:
        return self.dense.trunk

    @property
    def states(self) -> tuple[tuple[StateShape, ...], ...]:
        return ((self.dense.attention, self.index),) * self.trunk.num_layers


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
    return SparseDeepseekConfig(dense, index)


def load_sparse_deepseek(
    config: SparseDeepseekConfig, manifest: StateManifest, weights: Weights
) -> Decoder:
    def load_mixer(under: Weights, place: LayerPlace) -> Mixer:
        return load_sparse_latent_attention(under, config.dense.attention, config.index, place)

    ends = load_embedding_and_head(weights, config.trunk, "model.norm.weight", EndScales())
    layer = partial(load_layer, config.dense, load_mixer)
    return load_decoder(config, manifest, ends, weights.under("model.layers"), layer)


FAMILY = Family(("DeepseekV32ForCausalLM",), read_sparse_deepseek, load_sparse_deepseek)
