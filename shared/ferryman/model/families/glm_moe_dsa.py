"""GLM-5: DeepSeek-V3.2 whose indexers rotate neighbouring channels together.

In GLM-5.2 most layers attend to the places that the indexer of an earlier layer chose.
"""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.families.deepseek_v32 import (
    SparseDeepseekConfig,
    load_sparse_deepseek,
    read_sparse_deepseek,
)
from ferryman.model.family import Family
from ferryman.model.readers.config_readers import read_layers
from ferryman.model.shapes.config_fields import ConfigFields

DEFAULTS = {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
"""The meaning of fields that a published config leaves out."""


def _read(given: ConfigFields) -> SparseDeepseekConfig:
    fields = ConfigFields(given.source, {**DEFAULTS, **given.raw})
    if not fields.flag("indexer_rope_interleave", True):
        raise fields.refusal("indexer_rope_interleave", "true")
    sparse, has_indexer = read_sparse_deepseek(fields), _read_indexers(fields)
    index = replace(sparse.index, is_interleaved=True)
    return replace(sparse, index=index, has_indexer=has_indexer)


def _read_indexers(fields: ConfigFields) -> tuple[bool, ...]:
    """True for layers with an indexer: by a list, by a pattern of "F" and "S", or else by a period
    behind the first layers, which all have one."""
    num_layers, pattern = fields.whole("num_hidden_layers"), fields.raw.get("index_topk_pattern")
    name = "index_topk_freq"
    if fields.raw.get("indexer_types") is not None:
        name = "indexer_types"
        found = read_layers(fields, name, {"full": True, "shared": False})
    elif pattern is not None:
        name, text = "index_topk_pattern", pattern if isinstance(pattern, str) else ""
        if len(text) != num_layers or set(text) - {"F", "S"}:
            raise fields.refusal(name, f"{num_layers} letters F and S")
        found = tuple(letter == "F" for letter in text)
    else:
        period, offset = fields.whole(name, 1), fields.whole("index_skip_topk_offset", 2, least=0)
        found = tuple(max(layer - offset + 1, 0) % period == 0 for layer in range(num_layers))
    if not found[0]:
        raise fields.refusal(name, "such that the first layer has an indexer")
    return found


FAMILY = Family(("GlmMoeDsaForCausalLM",), _read, load_sparse_deepseek)
