from __future__ import annotations

import random

from tests.model.families.shapes import grouped_heads, rope, trunk
from transformers import GraniteConfig, GraniteMoeConfig, GraniteMoeSharedConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    heads, num_experts = grouped_heads(rng), rng.choice([0, 3, 5])
    del heads["head_dim"]
    fields = {
        **trunk(rng, rng.randint(1, 4)),
        **heads,
        "hidden_size": heads["num_attention_heads"] * rng.choice([8, 12]),
        "intermediate_size": rng.choice([16, 40]),
        "attention_bias": rng.random() < 0.5,
        "embedding_multiplier": rng.uniform(0.5, 4.0),
        "attention_multiplier": rng.uniform(0.1, 0.5),
        "residual_multiplier": rng.uniform(0.3, 1.0),
        "logits_scaling": rng.uniform(0.5, 3.0),
        "rope_parameters": rope(rng),
    }
    if not num_experts:
        return GraniteConfig(**fields, mlp_bias=rng.random() < 0.5)
    chosen = rng.randint(1, num_experts)
    fields |= {"num_local_experts": num_experts, "num_experts_per_tok": chosen}
    if rng.random() < 0.5:
        return GraniteMoeConfig(**fields)
    return GraniteMoeSharedConfig(**fields, shared_intermediate_size=rng.choice([0, 24]))
