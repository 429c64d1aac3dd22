from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, rope, trunk
from transformers import Glm4MoeConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, num_groups, per_group = rng.randint(1, 4), rng.choice([1, 2]), rng.choice([2, 3])
    groups_per_token = rng.randint(1, num_groups)
    waves = {**rope(rng), "partial_rotary_factor": rng.choice([0.5, 1.0])}
    return Glm4MoeConfig(
        **trunk(rng, num_layers),
        **{**grouped_heads(rng), "head_dim": rng.choice([4, 8, 16])},
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([32, 56]),
        moe_intermediate_size=rng.choice([8, 20]),
        attention_bias=rng.random() < 0.5,
        use_qk_norm=rng.random() < 0.5,
        n_routed_experts=num_groups * per_group,
        n_shared_experts=rng.choice([1, 2]),
        n_group=num_groups,
        topk_group=groups_per_token,
        num_experts_per_tok=rng.randint(1, groups_per_token * per_group),
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.uniform(0.5, 2.5),
        first_k_dense_replace=rng.randint(0, num_layers),
        rope_parameters=waves,
    )
