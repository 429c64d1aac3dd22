from __future__ import annotations

import random

from tests.model.families.mamba_shapes import mamba
from tests.model.families.shapes import pattern, trunk
from transformers import GraniteMoeHybridConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers, state = rng.randint(2, 5), mamba(rng)
    q_heads = 2 if state["hidden_size"] % 4 == 0 else 1
    return GraniteMoeHybridConfig(
        **trunk(rng, num_layers),
        **state,
        num_attention_heads=q_heads,
        num_key_value_heads=rng.choice([1, q_heads]),
        layer_types=pattern(rng, num_layers, ["linear_attention", "full_attention"]),
        num_local_experts=rng.choice([0, 3, 5]),
        num_experts_per_tok=rng.choice([1, 2, 3]),
        intermediate_size=rng.choice([16, 40]),
        shared_intermediate_size=rng.choice([32, 56]),
        position_embedding_type=rng.choice(["rope", "nope"]),
        attention_bias=rng.random() < 0.5,
        embedding_multiplier=rng.uniform(0.5, 4.0),
        attention_multiplier=rng.uniform(0.1, 0.5),
        residual_multiplier=rng.uniform(0.3, 1.0),
        logits_scaling=rng.uniform(0.5, 3.0),
    )
