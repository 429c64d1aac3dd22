from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, rope, trunk, window_len
from transformers import MixtralConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_experts = rng.choice([2, 5])
    return MixtralConfig(
        **trunk(rng, rng.randint(1, 4)),
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([16, 24]),
        num_local_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        sliding_window=rng.choice([None, None, window_len(rng)]),
        rope_parameters=rope(rng),
    )
