from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, pattern, rope, trunk
from transformers import MiniMaxConfig, MiniMaxM2Config, PretrainedConfig


def minimax(rng: random.Random) -> PretrainedConfig:
    num_layers, num_experts = rng.randint(2, 4), rng.choice([3, 5])
    factors = {"alpha": (1.0, 3.6), "beta": (0.5, 1.5)}  # 3.56 and 1 are published
    return MiniMaxConfig(
        **trunk(rng, num_layers),
        # One norm covers all heads: of one head alone, it magnifies whatever q · k cancels.
        num_attention_heads=(q_heads := rng.choice([3, 5, 6])),
        num_key_value_heads=rng.choice([1, q_heads]),
        head_dim=rng.choice([4, 6, 16]),
        **{
            f"{part}_{name}_factor": rng.choice([1, rng.uniform(*span)])
            for part in ("full_attn", "linear_attn", "mlp")
            for name, span in factors.items()
        },
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([16, 25]),
        num_local_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        layer_types=pattern(rng, num_layers, ["linear_attention", "full_attention"]),
        rope_parameters=rope(rng),
        block_size=rng.choice([8, 256]),
    )


def minimax_m2(rng: random.Random) -> PretrainedConfig:
    heads, num_experts = grouped_heads(rng), rng.choice([3, 5])
    heads["head_dim"] = rng.choice([4, 8, 16])
    return MiniMaxM2Config(
        **trunk(rng, rng.randint(1, 4)),
        **heads,
        hidden_size=rng.choice([24, 40]),
        intermediate_size=rng.choice([16, 25]),
        num_local_experts=num_experts,
        num_experts_per_tok=rng.randint(1, num_experts),
        rope_parameters={**rope(rng), "partial_rotary_factor": rng.choice([0.5, 1.0])},
    )
