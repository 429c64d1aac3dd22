from __future__ import annotations

import random

from tests.model.families.deepseek_shapes import deepseek
from transformers import GlmMoeDsaConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    """The index chooses few, most or all of a prompt's positions."""
    fields = deepseek(rng)
    index_dim = rng.choice([6, 12])
    return GlmMoeDsaConfig(
        **fields,
        q_lora_rank=rng.choice([6, 20]),
        index_n_heads=rng.choice([1, 3, 8]),
        index_head_dim=max(index_dim, fields["qk_rope_head_dim"]),
        index_topk=rng.choice([1, 5, 16, 40, 200]),
    )
