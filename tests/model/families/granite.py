from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import (
    LAYER_TYPES,
    grouped_heads,
    pattern,
    rope,
    trunk,
    window_len,
)
from transformers import (
    BambaConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    PretrainedConfig,
)


def granite3(rng: random.Random) -> PretrainedConfig:
    fields, num_experts = _granite3_fields(rng, rng.randint(1, 4)), rng.choice([0, 3, 5])
    if not num_experts:
        return GraniteConfig(**fields, mlp_bias=rng.random() < 0.5)
    fields |= _experts(rng, num_experts)
    if rng.random() < 0.5:
        return GraniteMoeConfig(**fields)
    return GraniteMoeSharedConfig(**fields, shared_intermediate_size=rng.choice([0, 24]))


def granite_swa(rng: random.Random) -> PretrainedConfig:
    num_layers, num_experts = rng.randint(1, 5), rng.choice([0, 3, 5])
    bases = [rng.choice([0, 1e2, 1e4]) for _ in range(num_layers)]
    fields = {
        **_granite3_fields(rng, num_layers),
        "sliding_window": window_len(rng),
        "layer_types": rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        "layer_rope_theta": rng.choice([None, bases]),
    }
    if not num_experts:
        return GraniteSWAConfig(**fields, mlp_bias=rng.random() < 0.5)
    fields |= {**_experts(rng, num_experts), "shared_intermediate_size": rng.choice([0, 24])}
    return GraniteMoeSWAConfig(**fields)


def _experts(rng: random.Random, num_experts: int) -> dict[str, Any]:
    chosen = rng.randint(1, num_experts)
    return {"num_local_experts": num_experts, "num_experts_per_tok": chosen}


def _granite3_fields(rng: random.Random, num_layers: int) -> dict[str, Any]:
    heads = grouped_heads(rng)
    del heads["head_dim"]
    return {
        **trunk(rng, num_layers),
        **heads,
        "hidden_size": heads["num_attention_heads"] * rng.choice([8, 12]),
        "intermediate_size": rng.choice([16, 40]),
        "attention_bias": rng.random() < 0.5,
        "embedding_multiplier": rng.uniform(0.5, 4.0),
        "attention_multiplier": rng.uniform(0.1, 0.5),
        "residual_multiplier": rng.uniform(0.3, 1.0),
        "logits_scaling": rng.uniform(0.5, 3.0),
        "rope_parameters": rope(rng),
    }


def granite(rng: random.Random) -> PretrainedConfig:
    num_layers, state = rng.randint(2, 5), _mamba(rng)
    q_heads = 2 if state["hidden_size"] % 4 == 0 else 1
    return GraniteMoeHybridConfig(
        **trunk(rng, num_layers),
        **state,
        num_attention_heads=q_heads,
        num_key_value_heads=rng.choice([1, q_heads]),
        layer_types=pattern(rng, num_layers, ["linear_attention", "full_attention"]),
        num_local_experts=rng.choice([0, 3, 5]),
        num_experts_per_tok=rng.choice([1, 2, 3]),
        intermediate_size=rng.choice([16, 40]),
        shared_intermediate_size=rng.choice([32, 56]),
        position_embedding_type=rng.choice(["rope", "nope"]),
        attention_bias=rng.random() < 0.5,
        embedding_multiplier=rng.uniform(0.5, 4.0),
        attention_multiplier=rng.uniform(0.1, 0.5),
        residual_multiplier=rng.uniform(0.3, 1.0),
        logits_scaling=rng.uniform(0.5, 3.0),
    )


def bamba(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(2, 5)
    attended = rng.sample(range(num_layers), rng.randint(1, num_layers - 1))
    return BambaConfig(
        **trunk(rng, num_layers),
        **{**grouped_heads(rng), "head_dim": 8},
        **_mamba(rng),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        attn_layer_indices=sorted(attended),
    )


def _mamba(rng: random.Random) -> dict[str, Any]:
    """An odd number of state heads in one group or in as many groups as heads."""
    heads, head_dim = rng.choice([(3, 16), (5, 8), (6, 8), (8, 16)])
    return {
        "hidden_size": heads * head_dim // 2,
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": rng.choice([1, heads]),
        "mamba_d_state": rng.choice([4, 12, 16]),
        "mamba_d_conv": rng.choice([2, 3, 4]),
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
        "mamba_conv_bias": rng.random() < 0.5,
        "mamba_proj_bias": rng.random() < 0.5,
    }
