from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    MLP_TYPES,
    experts,
    grouped_heads,
    nested_rope,
    pattern,
    sizes,
    trunk,
    window_len,
)
from transformers import LagunaConfig, PretrainedConfig


def laguna(rng: random.Random) -> PretrainedConfig:
    """Layers have different numbers of heads; a part of each head turns."""
    num_layers, heads = rng.randint(1, 5), grouped_heads(rng)
    heads["head_dim"] = rng.choice([4, 8, 16])
    kv_heads = heads["num_key_value_heads"]
    by_layer = [kv_heads * rng.choice([1, 2, 3]) for _ in range(num_layers)]
    return LagunaConfig(
        **trunk(rng, num_layers),
        **heads,
        **sizes(rng),
        **experts(rng),
        shared_expert_intermediate_size=rng.choice([8, 20]),
        moe_routed_scaling_factor=rng.choice([1.0, 2.5]),
        attention_bias=rng.random() < 0.5,
        gating=rng.choice([True, "per-head", "per-element"]),
        num_attention_heads_per_layer=rng.choice([None, by_layer]),
        mlp_layer_types=rng.choice([None, pattern(rng, num_layers, MLP_TYPES)]),
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters={
            word: {**nested_rope(rng), "partial_rotary_factor": rng.choice([0.5, 1.0])}
            for word in LAYER_TYPES
        },
    )
