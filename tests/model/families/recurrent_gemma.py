from __future__ import annotations

import random

from tests.model.families.shapes import trunk, window_len
from transformers import PretrainedConfig, RecurrentGemmaConfig


def recurrent_gemma(rng: random.Random) -> PretrainedConfig:
    num_layers, kv_heads, group = rng.randint(2, 5), rng.choice([1, 2]), rng.choice([1, 2, 3])
    heads, block_dim = kv_heads * group, rng.choice([3, 4, 7])
    fields = trunk(rng, num_layers)
    del fields["max_position_embeddings"]
    blocks = ["recurrent"] * rng.randint(1, 2) + ["attention"]
    return RecurrentGemmaConfig(
        **fields,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=heads * rng.choice([4, 8, 12]),
        intermediate_size=2 * rng.choice([16, 25]),
        lru_width=heads * block_dim,
        conv1d_width=rng.choice([2, 3, 4]),
        attention_window_size=window_len(rng),
        attention_bias=rng.random() < 0.5,
        block_types=rng.sample(blocks, len(blocks)),
        logits_soft_cap=rng.choice([3.0, 30.0]),
        rope_parameters={"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
    )
