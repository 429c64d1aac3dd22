"""GLM-5: DeepSeek-V3.2 whose indexers rotate neighbouring channels together.

Each layer has an indexer of its own. Layers that share one (GLM-5.2) are refused.
"""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.config_fields import ConfigFields
from ferryman.model.families.deepseek_v32 import (
    SparseDeepseekConfig,
    load_sparse_deepseek,
    read_sparse_deepseek,
)
from ferryman.model.family import Family

DEFAULTS = {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
"""The meaning of fields that a published config leaves out."""


def _read(given: ConfigFields) -> SparseDeepseekConfig:
    fields = ConfigFields(given.source, {**DEFAULTS, **given.raw})
    if not fields.flag("indexer_rope_interleave", True):
        raise fields.refusal("indexer_rope_interleave", "true")
    if fields.raw.get("index_topk_pattern") is not None:
        raise fields.refusal("index_topk_pattern", "null: indexers are not shared")
    if fields.whole("index_topk_freq", 1) != 1:
        raise fields.refusal("index_topk_freq", "1: indexers are not shared")
    if set(fields.raw.get("indexer_types") or ()) - {"full"}:
        raise fields.refusal("indexer_types", "'full' in every layer: indexers are not shared")
    sparse = read_sparse_deepseek(fields)
    return replace(sparse, index=replace(sparse.index, is_interleaved=True))


FAMILY = Family(("GlmMoeDsaForCausalLM",), _read, load_sparse_deepseek)
