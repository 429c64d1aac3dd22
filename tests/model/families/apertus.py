from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, rope, trunk
from transformers import ApertusConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    heads = grouped_heads(rng)
    return ApertusConfig(
        **trunk(rng, rng.randint(1, 4)),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        rope_parameters=rope(rng),
    )
