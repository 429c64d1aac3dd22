from __future__ import annotations

import random

from tests.model.families.delta_shapes import experts, hybrid
from transformers import PretrainedConfig, Qwen3NextConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    fields = hybrid(rng)
    num_layers = fields["num_hidden_layers"]
    return Qwen3NextConfig(
        **fields,
        **experts(rng),
        intermediate_size=rng.choice([32, 56]),
        norm_topk_prob=rng.random() < 0.5,
        decoder_sparse_step=rng.choice([1, 1, 2]),
        mlp_only_layers=rng.sample(range(num_layers), rng.randint(0, 1)),
    )
