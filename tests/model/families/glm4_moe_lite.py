from __future__ import annotations

import random

from tests.model.families.deepseek_shapes import deepseek
from tests.model.families.shapes import pattern
from transformers import Glm4MoeLiteConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    fields = deepseek(rng)
    del fields["first_k_dense_replace"]
    types = pattern(rng, fields["num_hidden_layers"], ["sparse", "dense"])
    return Glm4MoeLiteConfig(
        **fields,
        q_lora_rank=rng.choice([None, 6, 20]),
        rope_interleave=rng.random() < 0.5,
        mlp_layer_types=rng.choice([None, types]),
    )
