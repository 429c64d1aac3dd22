from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import MLP_TYPES, VOCAB_SIZE, pattern, trunk, window_len
from transformers import InklingTextConfig, PretrainedConfig

LAYER_TYPES = ["hybrid_sliding", "hybrid"]


def inkling(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(2, 4)
    num_experts, padding = rng.choice([3, 5]), rng.choice([0, 6])
    return InklingTextConfig(
        **trunk(rng, num_layers)
        | {"tie_word_embeddings": False, "vocab_size": VOCAB_SIZE + padding},
        unpadded_vocab_size=VOCAB_SIZE if padding else rng.choice([None, VOCAB_SIZE]),
        hidden_size=rng.choice([24, 40]),
        **_heads(rng, ""),
        **_heads(rng, "swa_"),
        sliding_window_size=window_len(rng),
        layer_types=rng.choice([None, pattern(rng, num_layers, LAYER_TYPES)]),
        mlp_layer_types=pattern(rng, num_layers, MLP_TYPES),
        d_rel=rng.choice([2, 5]),
        rel_extent=rng.choice([1, 17, 60]),
        log_scaling_n_floor=rng.choice([None, 1, 9]),
        log_scaling_alpha=rng.uniform(0.1, 2.0),
        conv_kernel_size=rng.choice([2, 4]),
        intermediate_size=rng.choice([16, 25]),
        moe_intermediate_size=rng.choice([8, 20]),
        n_routed_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        n_shared_experts=rng.choice([1, 2]),
        route_scale=rng.uniform(0.5, 8.0),
        logits_mup_width_multiplier=rng.uniform(0.5, 4.0),
    )


def _heads(rng: random.Random, prefix: str) -> dict[str, Any]:
    kv_heads = rng.choice([1, 2, 3])
    return {
        f"{prefix}num_attention_heads": kv_heads * rng.choice([1, 2]),
        f"{prefix}num_key_value_heads": kv_heads,
        f"{prefix}head_dim": rng.choice([4, 8, 16]),
    }
