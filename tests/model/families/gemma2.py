from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, pattern, rope, trunk, window_len
from transformers import Gemma2Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 5), grouped_heads(rng)
    words = ["sliding_attention", "full_attention"]
    return Gemma2Config(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.3,
        query_pre_attn_scalar=rng.choice([4, 17, 256]),
        attn_logit_softcapping=rng.choice([None, 0.5, 3.0, 50.0]),
        final_logit_softcapping=rng.choice([None, 2.0, 30.0]),
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, words)]),
        rope_parameters=rope(rng),
    )
