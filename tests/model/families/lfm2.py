from __future__ import annotations

import random

from tests.model.families.lfm_shapes import short_convolutions
from transformers import Lfm2Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    return Lfm2Config(
        **short_convolutions(rng, rng.randint(1, 5)),
        intermediate_size=rng.choice([32, 57]),
        block_auto_adjust_ff_dim=rng.random() < 0.7,
        block_ffn_dim_multiplier=rng.choice([1.0, 1.3]),
        block_multiple_of=rng.choice([5, 16]),
    )
