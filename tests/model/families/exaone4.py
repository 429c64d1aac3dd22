from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, pattern, rope, trunk, window_len
from transformers import Exaone4Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, has_windows = rng.randint(1, 5), rng.random() < 0.7
    words = ["sliding_attention", "full_attention"]
    types = pattern(rng, num_layers, words) if has_windows else ["full_attention"] * num_layers
    return Exaone4Config(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([32, 56]),
        sliding_window=window_len(rng) if has_windows else None,
        sliding_window_pattern=rng.choice([2, 4]),
        layer_types=rng.choice([None, types]) if has_windows else types,
        rope_parameters=rope(rng),
    )
