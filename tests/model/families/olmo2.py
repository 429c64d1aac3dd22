from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, pattern, rope, trunk, window_len
from transformers import Olmo2Config, Olmo3Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 5), grouped_heads(rng)
    fields = {
        **trunk(rng, num_layers),
        **heads,
        "hidden_size": heads["num_attention_heads"] * rng.choice([4, 6]),
        "intermediate_size": rng.choice([32, 56]),
        "attention_bias": rng.random() < 0.5,
    }
    if rng.random() < 0.4:
        return Olmo2Config(**fields, rope_parameters=rope(rng))
    words = ["sliding_attention", "full_attention"]
    far = rope(rng)
    far.pop("truncate", None)  # transformers looks for it in the wrong place
    near = {"rope_type": "default", "rope_theta": far["rope_theta"]}
    return Olmo3Config(
        **fields,
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, words)]),
        rope_parameters={"full_attention": far, "sliding_attention": near},
    )
