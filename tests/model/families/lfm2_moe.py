from __future__ import annotations

import random

from tests.model.families.lfm_shapes import short_convolutions
from transformers import Lfm2MoeConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, num_experts = rng.randint(2, 5), rng.choice([3, 5])
    return Lfm2MoeConfig(
        **short_convolutions(rng, num_layers),
        intermediate_size=rng.choice([32, 57]),
        moe_intermediate_size=rng.choice([8, 20]),
        num_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        num_dense_layers=rng.randint(0, num_layers - 1),
        use_expert_bias=rng.random() < 0.7,
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
    )
