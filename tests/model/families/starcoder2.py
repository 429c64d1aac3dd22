from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, rope, trunk, window_len
from transformers import PretrainedConfig, Starcoder2Config


def random_config(rng: random.Random) -> PretrainedConfig:
    heads, fields = grouped_heads(rng), trunk(rng, rng.randint(1, 4))
    head_dim, fields["norm_epsilon"] = heads.pop("head_dim"), fields.pop("rms_norm_eps")
    return Starcoder2Config(
        **fields,
        **heads,
        hidden_size=heads["num_attention_heads"] * head_dim,
        intermediate_size=rng.choice([32, 56]),
        use_bias=rng.random() < 0.7,
        sliding_window=rng.choice([None, window_len(rng)]),
        rope_parameters=rope(rng),
    )
