from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, rope, sizes, trunk
from transformers import Ernie4_5_MoeConfig, Ernie4_5Config, PretrainedConfig


def ernie4_5(rng: random.Random) -> PretrainedConfig:
    return Ernie4_5Config(
        **trunk(rng, rng.randint(1, 4)),
        **grouped_heads(rng),
        **sizes(rng),
        use_bias=rng.random() < 0.5,
        rope_parameters=rope(rng),
    )


def ernie4_5_moe(rng: random.Random) -> PretrainedConfig:
    """Layers with experts from anywhere to anywhere, every one or every other."""
    heads, num_layers, num_experts = grouped_heads(rng), rng.randint(1, 4), rng.choice([3, 5])
    last = rng.randint(-1, num_layers - 1)
    return Ernie4_5_MoeConfig(
        **trunk(rng, num_layers),
        **heads,
        **sizes(rng),
        moe_intermediate_size=rng.choice([8, 20]),
        moe_num_experts=num_experts,
        moe_k=rng.randint(1, num_experts),
        moe_num_shared_experts=rng.choice([0, 1, 2]),
        moe_layer_start_index=rng.choice([0, 0, 1]),
        moe_layer_end_index=last,
        moe_layer_interval=rng.choice([1, 1, 2]),
        moe_norm_min=rng.choice([1e-12, 0.3]),
        use_bias=rng.random() < 0.4,
        rope_parameters=rope(rng),
    )
