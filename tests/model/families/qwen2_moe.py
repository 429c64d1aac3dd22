from __future__ import annotations

import random

from tests.model.families.shapes import experts, grouped_heads, pattern, rope, trunk, window_len
from transformers import PretrainedConfig, Qwen2MoeConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, slides = rng.randint(1, 5), rng.random() < 0.5
    words = ["sliding_attention", "full_attention"]
    return Qwen2MoeConfig(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **experts(rng),
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([32, 56]),
        shared_expert_intermediate_size=rng.choice([8, 24]),
        norm_topk_prob=rng.random() < 0.5,
        decoder_sparse_step=rng.choice([1, 1, 2]),
        mlp_only_layers=rng.sample(range(num_layers), rng.randint(0, 1)),
        qkv_bias=rng.random() < 0.7,
        use_sliding_window=slides,
        sliding_window=window_len(rng),
        max_window_layers=rng.randint(0, num_layers),
        layer_types=rng.choice([None, pattern(rng, num_layers, words)]) if slides else None,
        rope_parameters=rope(rng),
    )
