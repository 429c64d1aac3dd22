from __future__ import annotations

import random

from tests.model.families.shapes import pattern, trunk
from transformers import KimiLinearConfig, PretrainedConfig


def kimi_linear(rng: random.Random) -> PretrainedConfig:
    num_layers, heads = rng.randint(1, 4), rng.choice([1, 2, 3, 6])
    groups = rng.choice([1, 2, 3])
    return KimiLinearConfig(
        # transformers does not tie the head of this family, even if the config asks for it.
        **trunk(rng, num_layers) | {"tie_word_embeddings": False},
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([32, 57]),
        moe_intermediate_size=rng.choice([8, 20]),
        layer_types=pattern(rng, num_layers, ["linear_attention", "full_attention"]),
        mlp_layer_types=pattern(rng, num_layers, ["sparse", "dense"]),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=rng.choice([None, 12]),
        kv_lora_rank=rng.choice([8, 20]),
        qk_rope_head_dim=rng.choice([2, 6]),
        qk_nope_head_dim=rng.choice([5, 8]),
        v_head_dim=rng.choice([4, 7]),
        attention_bias=rng.random() < 0.5,
        linear_num_heads=rng.choice([1, 2, 3, 6]),
        linear_head_dim=rng.choice([4, 7, 16]),
        linear_conv_kernel_dim=rng.choice([2, 3, 4]),
        num_local_experts=6,
        num_experts_per_tok=rng.choice([1, 2]),
        n_shared_experts=rng.choice([1, 2]),
        n_group=groups,
        topk_group=rng.randint(1, groups),
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.choice([1.0, 2.446]),
    )
