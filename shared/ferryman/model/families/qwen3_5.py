"""Qwen3.5, its text part: Qwen3-Next with other in-projections, dense or with experts throughout.

It is published as a model that also reads images: the text config is in "text_config", the tensors
are under "model.language_model", and the vision tower is not read. A text token has one position
where an image has three, so the interleaved rotary positions of three axes become plain ones.
"""

from __future__ import annotations

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.qwen3_next import (
    QwenHybridConfig,
    load_qwen_hybrid,
    load_qwen_mtp,
    qwen_attention,
    read_mixers,
    read_shared_moe,
)
from ferryman.model.family import Family, MtpSource
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.mtp import check_one_layer
from ferryman.model.readers.config_readers import check_activation, read_mlp, read_trunk
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.delta_shapes import DeltaLayout
from ferryman.model.weights.named_weights import Weights

NESTED_ROOT = "model.language_model"


def _read(fields: ConfigFields) -> QwenHybridConfig:
    fields = fields.merged_with("text_config")
    check_activation(fields)
    trunk = read_trunk(fields)
    has_experts = "num_experts" in fields.raw
    feed_forward = (
        read_shared_moe(fields, shares_sum_to_one=True) if has_experts else read_mlp(fields)
    )
    return QwenHybridConfig(
        trunk, read_mixers(fields, DeltaLayout.BY_ROLE), (feed_forward,) * trunk.num_layers
    )


def _load(config: QwenHybridConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    is_nested = f"{NESTED_ROOT}.embed_tokens.weight" in weights.checkpoint.tensors
    return load_qwen_hybrid(config, manifest, weights, NESTED_ROOT if is_nested else "model")


def _check_mtp(fields: ConfigFields) -> None:
    fields = fields.merged_with("text_config")
    check_one_layer(fields, "mtp_num_hidden_layers")
    if fields.flag("mtp_use_dedicated_embeddings", False):
        raise fields.refusal("mtp_use_dedicated_embeddings", "false for --draft mtp")


FAMILY = Family(
    (
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    _read,
    _load,
    mtp=MtpSource(_check_mtp, qwen_attention, load_qwen_mtp),
)
