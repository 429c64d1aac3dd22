from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    MLP_TYPES,
    experts,
    grouped_heads,
    nested_rope,
    pattern,
    rope,
    sizes,
    trunk,
    window_len,
)
from transformers import FlintConfig, MellumConfig, PretrainedConfig


def mellum(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(1, 5)
    return MellumConfig(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **sizes(rng),
        **experts(rng),
        norm_topk_prob=rng.random() < 0.5,
        attention_bias=rng.random() < 0.5,
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        mlp_layer_types=rng.choice([None, pattern(rng, num_layers, MLP_TYPES)]),
        rope_parameters={word: nested_rope(rng) for word in LAYER_TYPES},
    )


def flint(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(1, 6)
    return FlintConfig(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **sizes(rng),
        **experts(rng),
        shared_expert_intermediate_size=rng.choice([8, 20]),
        norm_topk_prob=rng.random() < 0.5,
        attention_bias=rng.random() < 0.5,
        sliding_window=window_len(rng),
        mlp_only_layers=rng.choice([None, [], [rng.randrange(num_layers)]]),
        decoder_sparse_step=rng.choice([1, 2]),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters=rope(rng),
    )
