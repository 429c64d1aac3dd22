from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, pattern, rope, trunk, window_len
from transformers import Dots1Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, num_groups = rng.randint(1, 4), rng.choice([1, 2])
    words = ["sliding_attention", "full_attention"]
    return Dots1Config(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        moe_intermediate_size=rng.choice([8, 20]),
        n_routed_experts=num_groups * rng.choice([2, 3]),
        n_shared_experts=rng.choice([1, 2]),
        num_experts_per_tok=rng.choice([1, 2]),
        n_group=num_groups,
        topk_group=rng.randint(1, num_groups),
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
        first_k_dense_replace=rng.randint(0, 2),
        sliding_window=window_len(rng),
        max_window_layers=rng.randint(0, num_layers),
        layer_types=rng.choice([None, pattern(rng, num_layers, words)]),
        rope_parameters=rope(rng),
    )
