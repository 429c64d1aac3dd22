from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import (
    LAYER_TYPES,
    grouped_heads,
    nested_rope,
    pattern,
    rope,
    trunk,
    window_len,
)
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    PretrainedConfig,
    VaultGemmaConfig,
)


def gemma(rng: random.Random) -> PretrainedConfig:
    heads = grouped_heads(rng)
    return GemmaConfig(
        **trunk(rng, rng.randint(1, 4)),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.3,
        hidden_act=rng.choice(["gelu", "gelu_pytorch_tanh"]),
        rope_parameters=rope(rng),
    )


def gemma2(rng: random.Random) -> PretrainedConfig:
    return Gemma2Config(**_gemma2(rng))


def vaultgemma(rng: random.Random) -> PretrainedConfig:
    return VaultGemmaConfig(**_gemma2(rng))


def _gemma2(rng: random.Random) -> dict[str, Any]:
    num_layers, heads = rng.randint(1, 5), grouped_heads(rng)
    return dict(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.3,
        query_pre_attn_scalar=rng.choice([4, 17, 256]),
        attn_logit_softcapping=rng.choice([None, 0.5, 3.0, 50.0]),
        final_logit_softcapping=rng.choice([None, 2.0, 30.0]),
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters=rope(rng),
    )


def gemma3(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 7), grouped_heads(rng)
    return Gemma3TextConfig(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.3,
        query_pre_attn_scalar=rng.choice([4, 17, 256]),
        final_logit_softcapping=rng.choice([None, 2.0, 30.0]),
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters={word: nested_rope(rng) for word in LAYER_TYPES},
    )
