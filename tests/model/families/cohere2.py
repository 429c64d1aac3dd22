from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, pattern, rope, trunk, window_len
from transformers import Cohere2Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 5), grouped_heads(rng)
    head_dim, words = heads.pop("head_dim"), ["sliding_attention", "full_attention"]
    fields = trunk(rng, num_layers)
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    return Cohere2Config(
        **fields,
        **heads,
        hidden_size=heads["num_attention_heads"] * head_dim * 2,
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        logit_scale=rng.uniform(0.05, 1.0),
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, words)]),
        rope_parameters=rope(rng),
    )
