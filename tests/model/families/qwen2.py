from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, pattern, rope, trunk, window_len
from transformers import PretrainedConfig, Qwen2Config


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 4), grouped_heads(rng)
    del heads["head_dim"]
    slides = rng.random() < 0.5
    words = ["sliding_attention", "full_attention"]
    return Qwen2Config(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([8, 12]),
        intermediate_size=rng.choice([32, 56]),
        use_sliding_window=slides,
        sliding_window=window_len(rng),
        max_window_layers=rng.randint(0, num_layers),
        layer_types=rng.choice([None, pattern(rng, num_layers, words)]) if slides else None,
        rope_parameters=rope(rng),
    )
