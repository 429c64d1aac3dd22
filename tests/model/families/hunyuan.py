from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, rope, sizes, trunk
from transformers import HunYuanDenseV1Config, HunYuanMoEV1Config, PretrainedConfig


def hunyuan(rng: random.Random) -> PretrainedConfig:
    alpha = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": rng.choice([50.0, 1000.0])}
    return HunYuanDenseV1Config(
        **trunk(rng, rng.randint(1, 4)),
        **grouped_heads(rng),
        **sizes(rng),
        attention_bias=rng.random() < 0.5,
        rope_parameters=rng.choice([rope(rng), {**alpha, "factor": 1.0}]),
    )


def hunyuan_moe(rng: random.Random) -> PretrainedConfig:
    num_layers, num_experts = rng.randint(1, 4), rng.choice([3, 5])
    chosen = rng.randint(1, num_experts)
    return HunYuanMoEV1Config(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **sizes(rng),
        attention_bias=rng.random() < 0.5,
        num_experts=num_experts,
        moe_topk=rng.choice([chosen, [chosen] * num_layers]),
        rope_parameters=rope(rng),
    )
