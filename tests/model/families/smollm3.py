from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, pattern, rope, trunk, window_len
from transformers import PretrainedConfig, SmolLM3Config


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, heads, slides = rng.randint(1, 5), grouped_heads(rng), rng.random() < 0.4
    words = ["sliding_attention", "full_attention"]
    return SmolLM3Config(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        no_rope_layers=rng.choice([None, [rng.randint(0, 1) for _ in range(num_layers)]]),
        no_rope_layer_interval=rng.choice([2, 4]),
        use_sliding_window=slides,
        sliding_window=window_len(rng) if slides else None,
        layer_types=rng.choice([None, pattern(rng, num_layers, words)]) if slides else None,
        rope_parameters=rope(rng),
    )
