from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, trunk
from transformers import JambaConfig, PretrainedConfig


def jamba(rng: random.Random) -> PretrainedConfig:
    heads, num_experts = grouped_heads(rng), rng.choice([1, 3, 5])
    heads.pop("head_dim")
    period, experts_period = rng.choice([1, 2, 3]), rng.choice([1, 2])
    return JambaConfig(
        **trunk(rng, rng.randint(2, 5)),
        **heads,
        hidden_size=heads["num_attention_heads"] * rng.choice([4, 6, 16]),
        intermediate_size=rng.choice([24, 41]),
        attn_layer_period=period,
        attn_layer_offset=rng.randrange(period),
        num_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        expert_layer_period=experts_period,
        expert_layer_offset=rng.randrange(experts_period),
        mamba_d_state=rng.choice([3, 8, 16]),
        mamba_d_conv=rng.choice([2, 3, 4]),
        mamba_expand=rng.choice([1, 2]),
        mamba_dt_rank=rng.choice(["auto", 3, 5]),
        mamba_conv_bias=rng.random() < 0.5,
        mamba_proj_bias=rng.random() < 0.5,
    )
