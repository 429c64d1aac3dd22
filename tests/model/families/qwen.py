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
from transformers import PretrainedConfig, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig


def qwen2(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 4), grouped_heads(rng)
    del heads["head_dim"]
    slides = rng.random() < 0.5
    return Qwen2Config(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([8, 12]),
        intermediate_size=rng.choice([32, 56]),
        use_sliding_window=slides,
        sliding_window=window_len(rng),
        max_window_layers=rng.randint(0, num_layers),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]) if slides else None,
        rope_parameters=rope(rng),
    )


def qwen2_moe(rng: random.Random) -> PretrainedConfig:
    num_layers, slides = rng.randint(1, 5), rng.random() < 0.5
    return Qwen2MoeConfig(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **experts(rng),
        **sizes(rng),
        shared_expert_intermediate_size=rng.choice([8, 24]),
        norm_topk_prob=rng.random() < 0.5,
        decoder_sparse_step=rng.choice([1, 1, 2]),
        mlp_only_layers=rng.sample(range(num_layers), rng.randint(0, 1)),
        qkv_bias=rng.random() < 0.7,
        use_sliding_window=slides,
        sliding_window=window_len(rng),
        max_window_layers=rng.randint(0, num_layers),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]) if slides else None,
        rope_parameters=rope(rng),
    )


def qwen3(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(1, 4)
    slides = rng.random() < 0.5
    words = LAYER_TYPES if slides else ["full_attention"]
    return Qwen3Config(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40, 64]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        use_sliding_window=slides,
        sliding_window=window_len(rng) if slides else None,
        layer_types=pattern(rng, num_layers, words),
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([1e2, 1e4])},
    )


def qwen3_moe(rng: random.Random) -> PretrainedConfig:
    num_layers, slides = rng.randint(1, 4), rng.random() < 0.3
    return Qwen3MoeConfig(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **experts(rng),
        **sizes(rng),
        attention_bias=rng.random() < 0.5,
        use_sliding_window=slides,
        sliding_window=window_len(rng) if slides else None,
        norm_topk_prob=rng.random() < 0.5,
        decoder_sparse_step=rng.choice([1, 1, 2]),
        mlp_only_layers=rng.sample(range(num_layers), rng.randint(0, 1)),
        rope_parameters=rope(rng),
    )
