from __future__ import annotations

import random

from tests.model.families.deepseek_shapes import deepseek
from transformers import DeepseekV3Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    return DeepseekV3Config(
        **deepseek(rng),
        q_lora_rank=rng.choice([None, 6, 20]),
        rope_interleave=rng.random() < 0.5,
    )
