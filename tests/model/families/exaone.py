from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    MLP_TYPES,
    experts_in_groups,
    grouped_heads,
    pattern,
    rope,
    sizes,
    trunk,
    window_len,
)
from transformers import Exaone4Config, ExaoneMoeConfig, PretrainedConfig


def exaone4(rng: random.Random) -> PretrainedConfig:
    num_layers, has_windows = rng.randint(1, 5), rng.random() < 0.7
    types = (
        pattern(rng, num_layers, LAYER_TYPES) if has_windows else ["full_attention"] * num_layers
    )
    return Exaone4Config(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **sizes(rng),
        sliding_window=window_len(rng) if has_windows else None,
        sliding_window_pattern=rng.choice([2, 4]),
        layer_types=rng.choice([None, types]) if has_windows else types,
        rope_parameters=rope(rng),
    )


def exaone_moe(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(1, 5)
    return ExaoneMoeConfig(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **sizes(rng),
        **experts_in_groups(rng, count="num_experts"),
        num_shared_experts=rng.choice([1, 2]),
        first_k_dense_replace=rng.randint(0, num_layers),
        mlp_layer_types=rng.choice([None, pattern(rng, num_layers, MLP_TYPES)]),
        sliding_window=window_len(rng),
        sliding_window_pattern=rng.choice([2, 4]),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters=rope(rng),
    )
