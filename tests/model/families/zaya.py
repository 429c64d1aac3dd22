from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import nested_rope, pattern, trunk, window_len
from transformers import PretrainedConfig, ZayaConfig

LAYER_TYPES = ["hybrid_sliding", "hybrid"]


def zaya(rng: random.Random) -> PretrainedConfig:
    num_layers, kv_heads = rng.randint(2, 4), rng.choice([1, 2, 3])
    head_dim = rng.choice([4, 8, 16])
    return ZayaConfig(
        **trunk(rng, num_layers),
        hidden_size=rng.choice([24, 40]),
        num_attention_heads=kv_heads * rng.choice([1, 2, 3]),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=rng.random() < 0.5,
        lm_head_bias=rng.random() < 0.5,
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters={word: _rope(rng) for word in LAYER_TYPES},
        moe_intermediate_size=rng.choice([8, 20]),
        num_experts=rng.choice([2, 5]),
        router_hidden_size=rng.choice([12, 16]),
        cca_time0=rng.choice([2, 2, 3]),
        cca_time1=rng.choice([1, 2, 2, 3]),
    )


def _rope(rng: random.Random) -> dict[str, Any]:
    """Half of a head turns, or all of it."""
    parameters = nested_rope(rng)
    if parameters["rope_type"] == "default":
        parameters["partial_rotary_factor"] = rng.choice([0.5, 1.0])
    return parameters
