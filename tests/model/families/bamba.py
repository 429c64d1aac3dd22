from __future__ import annotations

import random

from tests.model.families.mamba_shapes import mamba
from tests.model.families.shapes import grouped_heads, trunk
from transformers import BambaConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(2, 5)
    attended = rng.sample(range(num_layers), rng.randint(1, num_layers - 1))
    return BambaConfig(
        **trunk(rng, num_layers),
        **{**grouped_heads(rng), "head_dim": 8},
        **mamba(rng),
        intermediate_size=rng.choice([32, 56]),
        attention_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        attn_layer_indices=sorted(attended),
    )
