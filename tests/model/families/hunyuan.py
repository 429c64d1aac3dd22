from __future__ import annotations

import random

from tests.model.families.shapes import (
    MLP_TYPES,
    experts,
    grouped_heads,
    pattern,
    rope,
    sizes,
    trunk,
)
from transformers import HunYuanDenseV1Config, HunYuanMoEV1Config, HYV3Config, PretrainedConfig


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


def hy_v3(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(1, 4)
    return HYV3Config(
        **trunk(rng, num_layers),
        **grouped_heads(rng),
        **sizes(rng),
        **experts(rng),
        num_shared_experts=rng.choice([1, 2]),
        router_scaling_factor=rng.choice([1.0, 2.826]),
        attention_bias=rng.random() < 0.5,
        mlp_layer_types=rng.choice([None, pattern(rng, num_layers, MLP_TYPES)]),
        rope_parameters=rope(rng),
    )
