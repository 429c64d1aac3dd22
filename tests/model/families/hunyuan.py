from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, rope, trunk
from transformers import HunYuanDenseV1Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    alpha = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": rng.choice([50.0, 1000.0])}
    return HunYuanDenseV1Config(
        **trunk(rng, rng.randint(1, 4)),
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        rope_parameters=rng.choice([rope(rng), {**alpha, "factor": 1.0}]),
    )
