from __future__ import annotations

import random

from tests.model.families.shapes import pattern, trunk
from transformers import PretrainedConfig
from transformers.models.bailing_hybrid import BailingHybridConfig


def bailing_hybrid(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 4), rng.choice([1, 2, 3, 6])
    groups = rng.choice([1, 2, 3])
    return BailingHybridConfig(
        **trunk(rng, num_layers) | {"tie_word_embeddings": False},
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([32, 57]),
        moe_intermediate_size=rng.choice([8, 20]),
        layer_types=rng.choice(
            [None, pattern(rng, num_layers, ["linear_attention", "full_attention"])]
        ),
        layer_group_size=rng.choice([2, 3]),
        mlp_layer_types=rng.choice([None, pattern(rng, num_layers, ["sparse", "dense"])]),
        first_k_dense_replace=rng.randint(0, num_layers),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=rng.choice([4, 7, 16]),
        kv_lora_rank=rng.choice([8, 20]),
        qk_rope_head_dim=rng.choice([2, 6]),
        qk_nope_head_dim=rng.choice([5, 8]),
        v_head_dim=rng.choice([4, 7]),
        attention_bias=rng.random() < 0.5,
        short_conv_kernel_size=rng.choice([2, 3, 4]),
        kda_safe_gate=rng.random() < 0.7,
        kda_lower_bound=rng.choice([-5.0, -1.5]),
        num_local_experts=6,
        num_experts_per_tok=rng.choice([1, 2]),
        n_shared_experts=rng.choice([1, 2]),
        n_group=groups,
        topk_group=rng.randint(1, groups),
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
    )
