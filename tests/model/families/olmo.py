from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    grouped_heads,
    nested_rope,
    pattern,
    rope,
    trunk,
    window_len,
)
from transformers import Olmo2Config, Olmo3Config, OlmoHybridConfig, PretrainedConfig


def olmo2(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 5), grouped_heads(rng)
    fields = {
        **trunk(rng, num_layers),
        **heads,
        "hidden_size": heads["num_attention_heads"] * rng.choice([4, 6]),
        "intermediate_size": rng.choice([32, 56]),
        "attention_bias": rng.random() < 0.5,
    }
    if rng.random() < 0.4:
        return Olmo2Config(**fields, rope_parameters=rope(rng))
    far = nested_rope(rng)
    near = {"rope_type": "default", "rope_theta": far["rope_theta"]}
    return Olmo3Config(
        **fields,
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters={"full_attention": far, "sliding_attention": near},
    )


def olmo_hybrid(rng: random.Random) -> PretrainedConfig:
    """transformers wants both sorts of layers; a config without positions has no base of them."""
    num_layers, heads = rng.randint(2, 5), grouped_heads(rng)
    del heads["head_dim"]
    k_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    return OlmoHybridConfig(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        layer_types=pattern(rng, num_layers, ["linear_attention", "full_attention"]),
        rope_parameters=rope(rng) if rng.random() < 0.5 else None,
        linear_num_key_heads=k_heads,
        linear_num_value_heads=k_heads * group,
        linear_key_head_dim=rng.choice([4, 7, 16]),
        linear_value_head_dim=rng.choice([4, 9, 16]),
        linear_conv_kernel_dim=rng.choice([2, 3, 4]),
        linear_allow_neg_eigval=rng.random() < 0.7,
    )
