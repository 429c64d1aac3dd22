from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import (
    LAYER_TYPES,
    VOCAB_SIZE,
    grouped_heads,
    nested_rope,
    pattern,
    sizes,
    trunk,
    window_len,
)
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig, PretrainedConfig


def gemma4(rng: random.Random) -> PretrainedConfig:
    """Heads of two sizes; layers that share pages, experts, inputs of layers, each in some."""
    num_layers, heads = rng.randint(2, 6), grouped_heads(rng)
    types = pattern(rng, num_layers - 1, LAYER_TYPES)
    types.append("full_attention")
    num_own = rng.randint(1, num_layers)
    # transformers shares no pages without inputs of layers: its code then fails.
    is_shared = set(types[:num_own]) == set(types) and rng.random() < 0.8
    input_dim = 6 if is_shared else rng.choice([0, 6])
    ends, mixture = trunk(rng, num_layers), rng.choice([{}, _experts(rng)])
    fields = dict(
        **ends,
        **heads,
        **sizes(rng),
        attention_bias=rng.random() < 0.3,
        attention_k_eq_v=rng.random() < 0.5,
        global_head_dim=rng.choice([4, 12]),
        num_global_key_value_heads=rng.choice([None, 1]),
        num_kv_shared_layers=num_layers - num_own if is_shared else 0,
        use_double_wide_mlp=rng.random() < 0.5,
        final_logit_softcapping=rng.choice([None, 2.0, 30.0]),
        sliding_window=window_len(rng),
        layer_types=types,
        rope_parameters={"sliding_attention": nested_rope(rng), "full_attention": _full_rope(rng)},
    )
    if not mixture and not input_dim and rng.random() < 0.5:
        return Gemma4UnifiedTextConfig(**fields)
    inputs = {
        "hidden_size_per_layer_input": input_dim,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    }
    return Gemma4TextConfig(**fields, **mixture, **inputs)


def _full_rope(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.2:
        return nested_rope(rng)
    share = rng.choice([0.25, 0.5, 1.0])
    return {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": share}


def _experts(rng: random.Random) -> dict[str, Any]:
    num_experts = rng.choice([3, 5])
    return {
        "enable_moe_block": True,
        "num_experts": num_experts,
        "top_k_experts": rng.randint(1, num_experts),
        "moe_intermediate_size": rng.choice([8, 20]),
    }
