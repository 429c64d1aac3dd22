from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, pattern, trunk, window_len
from transformers import PretrainedConfig, Qwen3Config


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(1, 4)
    slides = rng.random() < 0.5
    words = ["sliding_attention", "full_attention"] if slides else ["full_attention"]
    return Qwen3Config(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40, 64]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        use_sliding_window=slides,
        sliding_window=window_len(rng) if slides else None,
        layer_types=pattern(rng, num_layers, words),
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([1e2, 1e4])},
    )
