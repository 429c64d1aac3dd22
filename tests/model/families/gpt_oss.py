from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    grouped_heads,
    pattern,
    rope,
    trunk,
    window_len,
)
from transformers import GptOssConfig, PretrainedConfig


def gpt_oss(rng: random.Random) -> PretrainedConfig:
    num_layers, num_experts = rng.randint(1, 4), rng.choice([1, 3, 5])
    return GptOssConfig(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40, 64]),
        intermediate_size=rng.choice([16, 40]),
        attention_bias=rng.random() < 0.7,
        num_local_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        swiglu_limit=rng.choice([0.3, 1.0, 7.0]),
        sliding_window=window_len(rng),
        layer_types=pattern(rng, num_layers, LAYER_TYPES),
        rope_parameters=rope(rng),
    )
