from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import MAX_POSITIONS, grouped_heads, trunk, window_len
from transformers import PhimoeConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    heads, head_dim = grouped_heads(rng), rng.choice([4, 8])
    del heads["head_dim"]
    return PhimoeConfig(
        **trunk(rng, rng.randint(1, 4)),
        **heads,
        hidden_size=heads["num_attention_heads"] * head_dim,
        intermediate_size=rng.choice([16, 24]),
        num_local_experts=rng.choice([2, 5]),
        num_experts_per_tok=2,
        router_jitter_noise=rng.choice([0.01, 0.1]),
        attention_bias=rng.random() < 0.7,
        lm_head_bias=rng.random() < 0.7,
        sliding_window=rng.choice([None, window_len(rng)]),
        rope_parameters=_waves(rng, head_dim // 2),
    )


def _waves(rng: random.Random, num_waves: int) -> dict[str, Any]:
    """All prompts are within the trained length: beyond it transformers keeps the short factors,
    unlike the code that came with the model."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": rng.choice([1e2, 1e4])}
    if rng.random() < 0.5:
        return found
    factors = [[rng.uniform(1.0, 8.0) for _ in range(num_waves)] for _ in range(2)]
    found |= {"rope_type": "longrope", "short_factor": factors[0], "long_factor": factors[1]}
    found |= {"short_mscale": rng.uniform(0.8, 1.3), "long_mscale": 1.2}
    return {**found, "original_max_position_embeddings": MAX_POSITIONS}
