from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    experts,
    grouped_heads,
    pattern,
    rope,
    sizes,
    trunk,
    window_len,
)
from transformers import AfmoeConfig, ArceeConfig, PretrainedConfig


def arcee(rng: random.Random) -> PretrainedConfig:
    heads = grouped_heads(rng)
    return ArceeConfig(
        **trunk(rng, rng.randint(1, 4)),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        rope_parameters=rope(rng),
    )


def afmoe(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(1, 5)
    return AfmoeConfig(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **sizes(rng),
        **experts(rng),
        num_dense_layers=rng.randint(0, num_layers),
        num_shared_experts=rng.choice([1, 2]),
        route_scale=rng.choice([1.0, 2.4]),
        mup_enabled=rng.random() < 0.5,
        attention_bias=rng.random() < 0.5,
        global_attn_every_n_layers=rng.choice([2, 4]),
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters=rope(rng),
    )
