from __future__ import annotations

import random

from tests.model.families.shapes import (
    LAYER_TYPES,
    grouped_heads,
    pattern,
    rope,
    sizes,
    trunk,
    window_len,
)
from transformers import (
    CwmConfig,
    Llama4TextConfig,
    LlamaConfig,
    PretrainedConfig,
    SeedOssConfig,
    SmolLM3Config,
)


def llama(rng: random.Random) -> PretrainedConfig:
    heads = grouped_heads(rng)
    return LlamaConfig(
        **trunk(rng, rng.randint(1, 4)),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        rope_parameters=rope(rng),
    )


def cwm(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 6), grouped_heads(rng)
    return CwmConfig(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        mlp_bias=rng.random() < 0.5,
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters=rope(rng),
    )


def smollm3(rng: random.Random) -> PretrainedConfig:
    num_layers, heads, slides = rng.randint(1, 5), grouped_heads(rng), rng.random() < 0.4
    return SmolLM3Config(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        no_rope_layers=rng.choice([None, [rng.randint(0, 1) for _ in range(num_layers)]]),
        no_rope_layer_interval=rng.choice([2, 4]),
        use_sliding_window=slides,
        sliding_window=window_len(rng) if slides else None,
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]) if slides else None,
        rope_parameters=rope(rng),
    )


def seed_oss(rng: random.Random) -> PretrainedConfig:
    return SeedOssConfig(
        **trunk(rng, rng.randint(1, 4)),
        **grouped_heads(rng),
        **sizes(rng),
        attention_bias=rng.random() < 0.7,
        attention_out_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        rope_parameters=rope(rng),
    )


def llama4(rng: random.Random) -> PretrainedConfig:
    """Chunks are as long as the longest page: a page lies within one."""
    num_layers, num_experts = rng.randint(1, 5), rng.choice([3, 5])
    positions = rope(rng)
    if positions["rope_type"] == "llama3" and rng.random() < 0.5:
        positions["high_freq_factor"] = positions["low_freq_factor"]
    words = ["chunked_attention", "full_attention"]
    return Llama4TextConfig(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([12, 20]),
        intermediate_size_mlp=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        attention_chunk_size=64,
        num_local_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        interleave_moe_layer_step=rng.choice([1, 2]),
        moe_layers=rng.choice([None, sorted(rng.sample(range(num_layers), num_layers // 2))]),
        use_qk_norm=rng.random() < 0.6,
        no_rope_layers=rng.choice([None, [rng.randint(0, 1) for _ in range(num_layers)]]),
        layer_types=rng.choice([None, pattern(rng, num_layers, words)]),
        rope_parameters=positions,
        attn_temperature_tuning=rng.random() < 0.7,
        attn_scale=rng.choice([0.1, 0.7]),
        floor_scale=rng.choice([16, 50]),
    )
