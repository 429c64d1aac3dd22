from __future__ import annotations

import random

from tests.model.families.shapes import experts, grouped_heads, rope, trunk, window_len
from transformers import PretrainedConfig, Qwen3MoeConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, slides = rng.randint(1, 4), rng.random() < 0.3
    return Qwen3MoeConfig(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **experts(rng),
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        use_sliding_window=slides,
        sliding_window=window_len(rng) if slides else None,
        norm_topk_prob=rng.random() < 0.5,
        decoder_sparse_step=rng.choice([1, 1, 2]),
        mlp_only_layers=rng.sample(range(num_layers), rng.randint(0, 1)),
        rope_parameters=rope(rng),
    )
