from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    MLP_TYPES,
    experts_in_groups,
    nested_rope,
    pattern,
    sizes,
    trunk,
    window_len,
)
from transformers import MiMoV2FlashConfig, PretrainedConfig


def mimo_v2_flash(rng: random.Random) -> PretrainedConfig:
    """Values are narrower than keys, or as wide; layers with a window have twice the key heads."""
    num_layers, kv_heads = rng.randint(1, 5), rng.choice([1, 2, 3])
    return MiMoV2FlashConfig(
        **trunk(rng, num_layers),
        **sizes(rng),
        **experts_in_groups(rng, count="n_routed_experts"),
        num_attention_heads=2 * kv_heads * rng.choice([1, 2]),
        num_key_value_heads=kv_heads,
        head_dim=rng.choice([8, 16]),
        v_head_dim=rng.choice([4, 6, 8]),
        attention_bias=rng.random() < 0.5,
        attention_value_scale=rng.choice([None, 0.707, 1.3]),
        mlp_layer_types=rng.choice([None, pattern(rng, num_layers, MLP_TYPES)]),
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters={
            word: {**nested_rope(rng), "partial_rotary_factor": rng.choice([0.5, 1.0])}
            for word in LAYER_TYPES
        },
    )
