from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, rope, trunk
from transformers import Ernie4_5Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    return Ernie4_5Config(
        **trunk(rng, rng.randint(1, 4)),
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([32, 56]),
        use_bias=rng.random() < 0.5,
        rope_parameters=rope(rng),
    )
