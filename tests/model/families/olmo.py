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
    FlexOlmoConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OlmoHybridConfig,
    PretrainedConfig,
)


def olmo(rng: random.Random) -> PretrainedConfig:
    fields = _llama_fields(rng)
    del fields["rms_norm_eps"]
    return OlmoConfig(**fields, clip_qkv=rng.choice([None, 0.8, 8.0]))


def olmoe(rng: random.Random) -> PretrainedConfig:
    clip = rng.choice([None, 0.8, 8.0])
    return OlmoeConfig(**_llama_fields(rng), **_experts(rng), clip_qkv=clip)


def flex_olmo(rng: random.Random) -> PretrainedConfig:
    return FlexOlmoConfig(**_llama_fields(rng), **_experts(rng))


def _llama_fields(rng: random.Random) -> dict[str, Any]:
    heads = grouped_heads(rng)
    del heads["head_dim"]
    return {
        **trunk(rng, rng.randint(1, 4)),
        **heads,
        "hidden_size": heads["num_attention_heads"] * rng.choice([4, 6]),
        "intermediate_size": rng.choice([16, 28]),
        "attention_bias": rng.random() < 0.5,
        "rope_parameters": rope(rng),
    }


def _experts(rng: random.Random) -> dict[str, Any]:
    num_experts = rng.choice([3, 5])
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, num_experts),
        "norm_topk_prob": rng.random() < 0.5,
    }


def olmo2(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 5), grouped_heads(rng)
    fields = {
        **trunk(rng, num_layers),
        **heads,
        "hidden_size": heads["num_attention_heads"] * rng.choice([4, 6]),
        "intermediate_size": rng.choice([32, 56]),
        "attention_bias": rng.random() < 0.5,
    }
    if rng.random() < 0.4:
        return Olmo2Config(**fields, rope_parameters=rope(rng))
    far = nested_rope(rng)
    near = {"rope_type": "default", "rope_theta": far["rope_theta"]}
    return Olmo3Config(
        **fields,
        sliding_window=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        rope_parameters={"full_attention": far, "sliding_attention": near},
    )


def olmo_hybrid(rng: random.Random) -> PretrainedConfig:
    """transformers wants both sorts of layers; a config without positions has no base of them."""
    num_layers, heads = rng.randint(2, 5), grouped_heads(rng)
    del heads["head_dim"]
    k_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    return OlmoHybridConfig(
        **trunk(rng, num_layers),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6]),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        layer_types=pattern(rng, num_layers, ["linear_attention", "full_attention"]),
        rope_parameters=rope(rng) if rng.random() < 0.5 else None,
        linear_num_key_heads=k_heads,
        linear_num_value_heads=k_heads * group,
        linear_key_head_dim=rng.choice([4, 7, 16]),
        linear_value_head_dim=rng.choice([4, 9, 16]),
        linear_conv_kernel_dim=rng.choice([2, 3, 4]),
        linear_allow_neg_eigval=rng.random() < 0.7,
    )
