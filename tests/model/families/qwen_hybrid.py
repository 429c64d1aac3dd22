from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import experts, grouped_heads, pattern, trunk
from transformers import PretrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig


def qwen3_next(rng: random.Random) -> PretrainedConfig:
    fields = _hybrid(rng)
    num_layers = fields["num_hidden_layers"]
    return Qwen3NextConfig(
        **fields,
        **_experts(rng),
        intermediate_size=rng.choice([32, 56]),
        norm_topk_prob=rng.random() < 0.5,
        decoder_sparse_step=rng.choice([1, 1, 2]),
        mlp_only_layers=rng.sample(range(num_layers), rng.randint(0, 1)),
    )


def qwen3_5(rng: random.Random) -> PretrainedConfig:
    fields = _hybrid(rng)
    fields["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    if rng.random() < 0.5:
        return Qwen3_5MoeTextConfig(**fields, **_experts(rng))
    return Qwen3_5TextConfig(**fields, intermediate_size=rng.choice([32, 56]))


def _hybrid(rng: random.Random) -> dict[str, Any]:
    """Odd numbers of key heads, in groups of one to three value heads; partly rotary heads."""
    num_layers = rng.randint(1, 4)
    k_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    rotary = {"rope_type": "default", "rope_theta": rng.choice([1e2, 1e4])}
    return {
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        "head_dim": rng.choice([8, 16]),
        "hidden_size": rng.choice([24, 40]),
        "attention_bias": rng.random() < 0.5,
        "layer_types": pattern(rng, num_layers, ["linear_attention", "full_attention"]),
        "rope_parameters": {**rotary, "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0])},
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": k_heads * group,
        "linear_key_head_dim": rng.choice([4, 7, 16]),
        "linear_value_head_dim": rng.choice([4, 9, 16]),
        "linear_conv_kernel_dim": rng.choice([2, 3, 4]),
    }


def _experts(rng: random.Random) -> dict[str, Any]:
    return {**experts(rng), "shared_expert_intermediate_size": rng.choice([8, 24])}
