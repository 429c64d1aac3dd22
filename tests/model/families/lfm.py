from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import grouped_heads, pattern, rope, trunk
from transformers import Lfm2Config, Lfm2MoeConfig, PretrainedConfig


def lfm2(rng: random.Random) -> PretrainedConfig:
    return Lfm2Config(
        **_short_convolutions(rng, rng.randint(1, 5)),
        intermediate_size=rng.choice([32, 57]),
        block_auto_adjust_ff_dim=rng.random() < 0.7,
        block_ffn_dim_multiplier=rng.choice([1.0, 1.3]),
        block_multiple_of=rng.choice([5, 16]),
    )


def lfm2_moe(rng: random.Random) -> PretrainedConfig:
    num_layers, num_experts = rng.randint(2, 5), rng.choice([3, 5])
    return Lfm2MoeConfig(
        **_short_convolutions(rng, num_layers),
        intermediate_size=rng.choice([32, 57]),
        moe_intermediate_size=rng.choice([8, 20]),
        num_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        num_dense_layers=rng.randint(0, num_layers - 1),
        use_expert_bias=rng.random() < 0.7,
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
    )


def _short_convolutions(rng: random.Random, num_layers: int) -> dict[str, Any]:
    common, heads = trunk(rng, num_layers), grouped_heads(rng)
    common["norm_eps"] = common.pop("rms_norm_eps")
    heads.pop("head_dim")
    return {
        **common,
        **heads,
        "hidden_size": heads["num_attention_heads"] * rng.choice([4, 6, 16]),
        "layer_types": pattern(rng, num_layers, ["conv", "full_attention"]),
        "rope_parameters": rope(rng),
        "conv_L_cache": rng.choice([2, 3, 4]),
        "conv_bias": rng.random() < 0.5,
    }
