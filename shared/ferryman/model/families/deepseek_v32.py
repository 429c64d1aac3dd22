"""DeepSeek-V3.2: DeepSeek-V3 whose tokens attend to what an indexer of their own chooses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.decoder import Decoder, EndScales, load_decoder, load_ends
from ferryman.model.families.deepseek_v3 import DeepseekConfig, load_layer, read_deepseek
from ferryman.model.family import Family
from ferryman.model.fields import Fields
from ferryman.model.fp8 import METHOD
from ferryman.model.layers import Mixing, Place
from ferryman.model.reading import read_layers
from ferryman.model.shapes import IndexShape, StateShape, TrunkShape
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


def _read(fields: Fields) -> SparseDeepseekConfig:
    fields.whole("q_lora_rank")  # the indexer's queries come out of that latent
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


def _load(config: SparseDeepseekConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    def load_mixer(under: Weights, place: Place) -> Mixing:
        return load_sparse_latent_attention(under, config.dense.attention, config.index, place)

    ends = load_ends(weights, config.trunk, "model.norm.weight", EndScales())
    layer = partial(load_layer, config.dense, load_mixer)
    return load_decoder(config, manifest, ends, weights.under("model.layers"), layer)


FAMILY = Family(("DeepseekV32ForCausalLM",), _read, _load, quantisations=(METHOD,))
