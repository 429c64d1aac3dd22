from __future__ import annotations

import random

from tests.model.families.deepseek_shapes import deepseek
from transformers import DeepseekV32Config, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    """The index chooses few, most or all of a prompt's positions."""
    return DeepseekV32Config(
        **deepseek(rng),
        q_lora_rank=rng.choice([6, 20]),
        index_n_heads=rng.choice([1, 3, 8]),
        index_head_dim=rng.choice([6, 12]),
        index_topk=rng.choice([1, 5, 16, 40, 200]),
    )
