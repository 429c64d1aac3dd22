from __future__ import annotations

import random

from tests.model.families.shapes import rope, sizes, trunk
from transformers import JetMoeConfig, PretrainedConfig


def jetmoe(rng: random.Random) -> PretrainedConfig:
    num_experts = rng.choice([2, 3, 5])
    return JetMoeConfig(
        **trunk(rng, rng.randint(1, 4)),
        **sizes(rng),
        num_key_value_heads=rng.choice([1, 2, 3, 4]),
        kv_channels=rng.choice([4, 6, 16]),
        num_local_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        rope_parameters=rope(rng),
    )
