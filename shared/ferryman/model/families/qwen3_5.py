"""Qwen3.5, its text part: Qwen3-Next with other in-projections, dense or with experts throughout.

Published as a model that also sees: the text config lies in "text_config", the tensors under
"model.language_model", and the vision tower is not read. Text has one position where pictures have
three, so the interleaved rotary positions of three axes are plain ones.
"""

from __future__ import annotations

from dataclasses import replace

from ferryman.cache.manifest import StateManifest
from ferryman.model.decoder import Decoder
from ferryman.model.families.qwen3_next import (
    QwenHybridConfig,
    load_qwen_hybrid,
    read_mixers,
    read_shared_moe,
)
from ferryman.model.family import Family
from ferryman.model.fields import Fields
from ferryman.model.reading import check_activation, read_mlp, read_trunk
from ferryman.model.shapes import DeltaLayout
from ferryman.model.weights import Weights

NESTED_ROOT = "model.language_model"


def _read(fields: Fields) -> QwenHybridConfig:
    fields = fields.beneath("text_config")
    check_activation(fields)
    trunk = read_trunk(fields)
    has_experts = "num_experts" in fields.raw
    feed_forward = (
        replace(read_shared_moe(fields), shares_sum_to_one=True)
        if has_experts
        else read_mlp(fields)
    )
    return QwenHybridConfig(
        trunk, read_mixers(fields, DeltaLayout.BY_ROLE), (feed_forward,) * trunk.num_layers
    )


def _load(config: QwenHybridConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    is_nested = f"{NESTED_ROOT}.embed_tokens.weight" in weights.checkpoint.tensors
    return load_qwen_hybrid(config, manifest, weights, NESTED_ROOT if is_nested else "model")


FAMILY = Family(
    (
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    _read,
    _load,
)
